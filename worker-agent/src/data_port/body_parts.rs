//! A request body for the engine that is sent in parts.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};

pub(super) struct BodyParts<H> {
    parts: std::collections::VecDeque<Bytes>,
    unsent_bytes: u64,
    /// Must live until the body is sent, as the body's share of a memory budget must.
    _kept_alive: Option<H>,
}

impl<H> BodyParts<H> {
    pub(super) fn new(parts: Vec<Bytes>, kept_alive: Option<H>) -> Self {
        let unsent_bytes = parts.iter().map(|part| part.len() as u64).sum();
        Self { parts: parts.into(), unsent_bytes, _kept_alive: kept_alive }
    }
}

impl<H: Unpin> http_body::Body for BodyParts<H> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let part = self.parts.pop_front();
        self.unsent_bytes -= part.as_ref().map_or(0, |part| part.len() as u64);
        Poll::Ready(part.map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.parts.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.unsent_bytes)
    }
}

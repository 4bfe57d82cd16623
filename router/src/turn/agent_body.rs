//! The body of an agent's answer: as it comes, or with its first bytes read before.

pub(super) mod logprobs;

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::Body as LocalBody;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use service::http_client::AnswerBody;

use self::logprobs::LogprobMerger;

/// An agent's answer as it comes.
#[derive(Debug)]
pub(crate) enum Incoming {
    Remote(AnswerBody<Full<Bytes>>),
    /// The agent is part of this process.
    Local(LocalBody),
}

/// Why the rest of an answer doesn't come.
pub(crate) type BodyError = axum::Error;

impl Body for Incoming {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Remote(body) => {
                let polled = Pin::new(body).poll_frame(context);
                polled.map(|frame| frame.map(|frame| frame.map_err(BodyError::new)))
            }
            Self::Local(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Remote(body) => body.is_end_stream(),
            Self::Local(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Remote(body) => body.size_hint(),
            Self::Local(body) => body.size_hint(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct AgentBody {
    /// Bytes that were read already.
    first: Option<Bytes>,
    /// `None` after its end.
    rest: Option<Incoming>,
    merger: Option<LogprobMerger>,
}

impl AgentBody {
    pub(super) fn plain(body: Incoming) -> Self {
        Self { first: None, rest: Some(body), merger: None }
    }

    pub(super) fn whole(bytes: Bytes) -> Self {
        Self { first: Some(bytes).filter(|bytes| !bytes.is_empty()), rest: None, merger: None }
    }

    pub(super) fn begun(
        first: Option<Bytes>,
        rest: Incoming,
        merger: Option<LogprobMerger>,
    ) -> Self {
        Self { first, rest: Some(rest), merger }
    }

    fn poll_raw(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(rest).poll_frame(context));
        if frame.is_none() {
            self.rest = None;
        }
        Poll::Ready(frame)
    }
}

impl Body for AgentBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            let frame = ready!(self.poll_raw(context));
            let Some(merger) = &mut self.merger else { return Poll::Ready(frame) };
            let merged = match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => merger.push(&data),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => match self.merger.take() {
                    Some(merger) => merger.finish(),
                    None => return Poll::Ready(None),
                },
            };
            // The bytes of an event that isn't complete are held back.
            if !merged.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(merged))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none()
            && self.merger.is_none()
            && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.first, &self.rest, &self.merger) {
            (None, Some(rest), None) => rest.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(b"text/event-stream"))
}

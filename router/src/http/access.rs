//! Gives each request its entry in the access log, and the answer's head and length to the entry.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{body::Body, extract::Request, response::Response};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use service::{refusal::Refusal, server::PeerAddress};

use crate::turn::{access_log::AccessEntry, shared::Shared};

/// The entry lives as long as the body.
struct LoggedBody {
    body: Body,
    entry: Arc<AccessEntry>,
}

/// The entry is among the request's extensions, too. `path` has no id of a session. `None` without
/// a log.
pub(super) fn begin(
    shared: &Shared,
    request: &mut Request,
    path: &str,
) -> Option<Arc<AccessEntry>> {
    let access_log = shared.access_log.as_ref()?;
    let peer = request.extensions().get::<PeerAddress>().map(|peer| peer.0);
    let entry = Arc::new(access_log.entry(peer, request.method(), path));
    request.extensions_mut().insert(Arc::clone(&entry));
    Some(entry)
}

pub(super) fn end(entry: Option<Arc<AccessEntry>>, response: Response) -> Response {
    let Some(entry) = entry else { return response };
    let refusal = response.extensions().get::<Refusal>().map(|refusal| refusal.code.as_str());
    entry.set_answer(response.status().as_u16(), refusal);
    response.map(|body| Body::new(LoggedBody { body, entry }))
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            self.entry.add_bytes(data.len());
        }
        polled
    }

    // The answer keeps its `content-length`.
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

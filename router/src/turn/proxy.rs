//! Carries the bytes of a turn: the request to an agent, and the answer back to the client.
//!
//! The answer's body holds the turn's lease until it ends. Answers are not buffered, and no byte of
//! a body is changed here.
//!
//! A turn is cancelled by dropping it: when the client is gone, hyper drops the answer's body,
//! which drops the connection to the agent, and the agent notices.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Instant,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use proto::claim::{self, Claim};
use service::{budget::HeldBody, clock::now, headers::remove_hop_by_hop};
use tokio::{sync::OwnedSemaphorePermit, time::Sleep};

use super::{
    decide::{BindingHold, PlacedTurn},
    error::NoAnswer,
    shared::Shared,
};
use crate::{
    fleet::{connect, lease::Lease},
    metrics::Outcome,
};

/// Header of an answer: the worker that answered, as `agent/rank`.
pub(crate) const WORKER: HeaderName = HeaderName::from_static("x-berth-worker");
/// Header of an answer: why that worker was chosen.
pub(crate) const PLACEMENT: HeaderName = HeaderName::from_static("x-berth-placement");

/// A client's request, which can be sent more than once.
#[derive(Debug)]
pub(crate) struct OutboundTurn {
    pub(crate) method: Method,
    pub(crate) path: http::uri::PathAndQuery,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) turn_id: u64,
    /// Whether the time to the answer's first byte is counted as a wait for a token.
    pub(crate) counts_first_byte: bool,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Instant,
}

/// Converts a body to `Bytes` that give their share of the budget back when their last slice is
/// dropped. That happens when the answer begins; until then the turn may have to be sent to another
/// worker.
pub(crate) fn held_bytes(body: HeldBody) -> Bytes {
    struct Owner(HeldBody);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0.bytes
        }
    }
    Bytes::from_owner(Owner(body))
}

impl OutboundTurn {
    fn request(&self, placed: &PlacedTurn) -> http::Request<Full<Bytes>> {
        let uri = Uri::builder()
            .scheme("http")
            .authority(&*placed.authority)
            .path_and_query(self.path.clone())
            .build()
            .expect("authority and path were parsed before");
        let mut request = http::Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = uri;
        let headers = request.headers_mut();
        headers.clone_from(&self.headers);
        headers.insert(claim::TURN, turn_header(self.turn_id));
        headers.insert(claim::RANK, HeaderValue::from(placed.worker.dp_rank));
        if let Some(tokens) = placed.resident_tokens {
            headers.insert(claim::RESIDENT, HeaderValue::from(tokens));
        }
        if let Some(claim) = &placed.claim {
            headers.insert(claim::CLAIM, claim.to_header());
        }
        request
    }

    /// Sends the turn and waits for the head of its answer.
    pub(crate) async fn send(
        &self,
        shared: &Shared,
        placed: &PlacedTurn,
    ) -> Result<Response<Incoming>, NoAnswer> {
        let answer = shared.client.request(self.request(placed));
        let name = || placed.name.clone();
        match tokio::time::timeout_at(self.deadline.into(), answer).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(source)) if source.is_connect() => {
                shared.report_unreachable(placed.worker, connect::describe_error(&source));
                Err(NoAnswer::Connect { worker: name(), source })
            }
            Ok(Err(source)) => Err(NoAnswer::BrokenOff { worker: name(), source }),
            Err(_) => Err(NoAnswer::TimedOut),
        }
    }
}

pub(crate) fn turn_header(turn_id: u64) -> HeaderValue {
    HeaderValue::from_str(&format!("{turn_id:016x}")).expect("hex digits are legal")
}

/// Whether the answer is a refusal by the agent itself (429 or 503), given before anything ran.
pub(crate) fn is_refused_for_now(response: &Response<Incoming>) -> bool {
    response.headers().contains_key(claim::REFUSAL)
        && matches!(
            response.status(),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        )
}

/// Builds the client's answer: the agent's answer, with headers for the worker and the placement.
pub(crate) fn answer(
    shared: &Arc<Shared>,
    outbound: &OutboundTurn,
    mut placed: PlacedTurn,
    running: StreamCount,
    permit: OwnedSemaphorePermit,
    response: Response<Incoming>,
) -> axum::response::Response {
    if let Some(hold) = &mut placed.hold {
        hold.record_answer(response.status().is_success());
        let closes = matches!(placed.claim, Some(Claim { close: true, .. }));
        if closes && !response.headers().contains_key(claim::REFUSAL) {
            hold.close_at_end();
        }
    }
    if let Some(blocks) = placed.blocks.take().filter(|_| response.status().is_success()) {
        shared.block_locator.record_sent(&blocks, placed.worker, &shared.view.load());
    }
    let (mut parts, inner) = response.into_parts();
    remove_hop_by_hop(&mut parts.headers);
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.insert(claim::TURN, turn_header(outbound.turn_id));
    parts.headers.insert(PLACEMENT, HeaderValue::from_static(placed.reason.as_str()));
    if let Ok(name) = HeaderValue::from_str(&placed.name) {
        parts.headers.insert(WORKER, name);
    }
    // Version and extensions belong to a single hop, so they are not passed on.
    parts.version = http::Version::HTTP_11;
    parts.extensions.clear();
    let is_success = parts.status.is_success();
    let body = AnswerBody {
        inner,
        deadline: Box::pin(tokio::time::sleep_until(outbound.deadline.into())),
        arrived: Some(outbound.arrived),
        in_flight: Some(InFlightTurn {
            running,
            outcome: Outcome::ClientGone,
            lease: placed.lease,
            _hold: placed.hold,
            _permit: permit,
        }),
        counts_first_byte: outbound.counts_first_byte && is_success,
        is_success,
    };
    Response::from_parts(parts, axum::body::Body::new(body))
}

/// Counts a turn as in flight until it is dropped.
#[derive(Debug)]
pub(crate) struct StreamCount(Arc<Shared>);

impl StreamCount {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        shared.metrics.streams.inc();
        Self(Arc::clone(shared))
    }
}

impl Drop for StreamCount {
    fn drop(&mut self) {
        self.0.metrics.streams.dec();
    }
}

/// What a turn holds until its answer has ended.
#[derive(Debug)]
struct InFlightTurn {
    running: StreamCount,
    outcome: Outcome,
    lease: Lease,
    _hold: Option<BindingHold>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for InFlightTurn {
    fn drop(&mut self) {
        self.running.0.metrics.ended(self.outcome);
    }
}

/// The body of an answer.
#[derive(Debug)]
struct AnswerBody {
    inner: Incoming,
    deadline: Pin<Box<Sleep>>,
    /// When the turn arrived; None after the answer's first byte.
    arrived: Option<Instant>,
    /// Released with the last frame at the latest: a client that has the whole answer may send its
    /// next turn at once, and must find the session free.
    in_flight: Option<InFlightTurn>,
    counts_first_byte: bool,
    is_success: bool,
}

impl AnswerBody {
    fn end(&mut self, outcome: Outcome) {
        if let Some(mut in_flight) = self.in_flight.take() {
            in_flight.outcome = outcome;
        }
    }
}

/// Why an answer was cut off.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("the turn took longer than turn_ms_max")]
    TimedOut,
    #[error("the worker broke off its answer")]
    BrokenOff(#[source] hyper::Error),
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        if polled.is_pending() {
            ready!(self.deadline.as_mut().poll(context));
            self.end(Outcome::TimedOut);
            return Poll::Ready(Some(Err(StreamError::TimedOut.into())));
        }
        let done = if self.is_success { Outcome::Ok } else { Outcome::ErrorAnswer };
        match ready!(polled) {
            None => {
                self.end(done);
                Poll::Ready(None)
            }
            Some(Err(error)) => {
                self.end(Outcome::WorkerFailed);
                Poll::Ready(Some(Err(StreamError::BrokenOff(error).into())))
            }
            Some(Ok(frame)) => {
                let (arrived, counts_first_byte) = (self.arrived, self.counts_first_byte);
                if let (Some(in_flight), Some(data)) = (&mut self.in_flight, frame.data_ref()) {
                    let metrics = &in_flight.running.0.metrics;
                    metrics.response_bytes.inc_by(data.len() as u64);
                    if let Some(arrived) = arrived {
                        if counts_first_byte {
                            metrics.first_byte(now().saturating_duration_since(arrived));
                        }
                        in_flight.lease.record_answer();
                    }
                    self.arrived = None;
                }
                if self.inner.is_end_stream() {
                    self.end(done);
                }
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        // An answer without a body is never polled: hyper drops it, which also ends the turn.
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        if self.inner.is_end_stream() {
            let done = if self.is_success { Outcome::Ok } else { Outcome::ErrorAnswer };
            self.end(done);
        }
    }
}

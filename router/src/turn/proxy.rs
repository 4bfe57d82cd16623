//! Sends a turn to an agent, and streams the answer back to the client.
//!
//! A turn's lease, hold and capacity live in the answer's body until the answer ends. No answer is
//! buffered and no byte changed. A stream that waits for its first event gets comments before it.
//! If the client leaves, hyper drops the body and with it the connection to the agent, which
//! cancels the turn.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use contract::{
    bootstrap::{BOOTSTRAP, Bootstrap},
    claim::{self, Claim},
    hints::{HINTS, TurnHints},
    route::Kind,
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, header,
    uri::{PathAndQuery, Scheme},
};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use service::{
    auth::credential, clock::now, headers::strip_answer, proof::connection::is_busy,
    tls::client::is_certificate_refused, traces::record::SpanKind,
};
use tokio::time::Sleep;

use super::{
    agent_body::AgentBody,
    body::RetryBody,
    directory::BindingHold,
    error::NoAnswer,
    placer::{ConversationHold, PlacedTurn},
    pulses::{CHECK_INTERVAL, Pulses},
    recorder::{Observers, TurnRecorder},
    shared::Shared,
    spans,
    target::{Target, is_on_this_host},
    upstream::{SendError, UpstreamClient, is_refused_as_stranger},
    usage::TurnTokens,
};
use crate::{
    fleet::{lease::Lease, worker::WorkerRef},
    metrics::TurnOutcome,
    shares::{Share, Sharer},
};

/// The worker that answered, as `agent/rank`.
pub(crate) const WORKER_HEADER: HeaderName = HeaderName::from_static("x-berth-worker");
/// The worker that computed the prompt, as `agent/rank`, if it was another one.
pub(crate) const PREFILL_WORKER_HEADER: HeaderName =
    HeaderName::from_static("x-berth-prefill-worker");
pub(crate) const PLACEMENT_HEADER: HeaderName = HeaderName::from_static("x-berth-placement");

/// Clients skip such lines of server-sent events. No empty line follows: some decoders take it for
/// the end of an event without data (openai-go before 3.43, fetch-event-source, sseclient), and
/// their users parse that.
pub(crate) const WAITING_COMMENT: Bytes = Bytes::from_static(b": waiting\n");

/// The request can be sent more than once.
#[derive(Debug)]
pub(crate) struct OutboundTurn {
    pub(crate) method: Method,
    pub(crate) path_and_query: PathAndQuery,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Arc<RetryBody>,
    pub(crate) turn_id: u64,
    pub(super) hints: TurnHints,
    pub(super) principal: Arc<str>,
    /// The client in whose share of memory the prompt is tokenized.
    pub(crate) sharer: Sharer,
    /// The time to the first byte counts in its metric only for kinds that generate tokens.
    pub(crate) kind: Kind,
    pub(crate) arrived_at: Instant,
    pub(crate) deadline: Instant,
    pub(super) observers: Observers,
}

impl OutboundTurn {
    /// The request's headers say for which turn it is.
    pub(super) fn request_to_agent(
        &self,
        target: &Target<'_>,
        path_and_query: PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
    ) -> Request<Full<Bytes>> {
        let uri = Uri::builder()
            .scheme(if target.data_tls { Scheme::HTTPS } else { Scheme::HTTP })
            .authority(target.data_authority)
            .path_and_query(path_and_query)
            .build()
            .expect("authority and path were parsed before");
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        let headers = request.headers_mut();
        if !is_on_this_host(target.data_authority) {
            credential::remove(headers);
        }
        headers.insert(claim::TURN, turn_id_header(self.turn_id));
        headers.insert(claim::RANK, HeaderValue::from(target.worker.dp_rank));
        // A principal that no header can carry shares the engine with anonymous clients.
        if let Ok(principal) = HeaderValue::from_bytes(self.principal.as_bytes()) {
            headers.insert(claim::PRINCIPAL, principal);
        }
        if let Some(tokens) = target.resident_tokens {
            headers.insert(claim::RESIDENT, HeaderValue::from(tokens));
        }
        request
    }

    /// The request runs the whole turn, or a half of it.
    pub(super) fn turn_request(&self, target: &Target<'_>, body: Bytes) -> Request<Full<Bytes>> {
        let (path_and_query, headers) = (self.path_and_query.clone(), self.headers.clone());
        let mut request = self.request_to_agent(target, path_and_query, headers, body);
        if let Some(hints) = self.hints.to_header() {
            request.headers_mut().insert(HINTS, hints);
        }
        // Without the header the engine refuses its half, with the reason.
        if let Some(bootstrap) = target.bootstrap.and_then(Bootstrap::to_header) {
            request.headers_mut().insert(BOOTSTRAP, bootstrap);
        }
        request
    }

    pub(super) async fn send(
        &self,
        upstream: &UpstreamClient,
        placed: &PlacedTurn,
        body: Bytes,
    ) -> Result<Response<Incoming>, NoAnswer> {
        let mut span = self.observers.trace.child("send", SpanKind::Client);
        span.set(spans::WORKER, &*placed.worker_name);
        let mut request = self.turn_request(&placed.target(), body);
        span.inject(request.headers_mut());
        if let Some(claim) = &placed.claim {
            claim.write_to(request.headers_mut());
        }
        let (worker, worker_name) = (placed.worker, &placed.worker_name);
        let answer = send_request(upstream, worker, worker_name, request, self.deadline).await;
        spans::record_head(&mut span, &answer);
        answer
    }
}

pub(super) async fn send_request(
    upstream: &UpstreamClient,
    worker: WorkerRef,
    worker_name: &str,
    request: Request<Full<Bytes>>,
    deadline: Instant,
) -> Result<Response<Incoming>, NoAnswer> {
    let worker_name = || worker_name.to_owned();
    let answer = upstream.send(worker.agent, request, deadline).await;
    if answer.as_ref().is_ok_and(is_refused_as_stranger) {
        let reason =
            "the agent takes this router for a stranger: it has another token, or is called \
                      by a name that it doesn't know (its advertise.host)"
                .to_owned();
        upstream.report_unreachable(worker, reason);
        return Err(NoAnswer::NotARouter { worker: worker_name() });
    }
    answer.map_err(|error| match error {
        SendError::Http(source) if source.is_connect() || is_certificate_refused(&source) => {
            if !is_busy(&source) {
                upstream.report_unreachable(worker, service::log::describe_error(&source));
            }
            NoAnswer::Connect { worker: worker_name(), source }
        }
        SendError::Http(source) => NoAnswer::BrokenOff { worker: worker_name(), source },
        SendError::NoDescriptors(source) => {
            NoAnswer::NoDescriptors { worker: worker_name(), source }
        }
        SendError::Silent { was_sent } => NoAnswer::Silent { worker: worker_name(), was_sent },
        SendError::Late => NoAnswer::TimedOut,
    })
}

fn turn_id_header(turn_id: u64) -> HeaderValue {
    HeaderValue::from_str(&format!("{turn_id:016x}")).expect("hex digits are legal")
}

pub(crate) fn build_answer(
    shared: &Shared,
    outbound: &OutboundTurn,
    mut placed: PlacedTurn,
    mut recorder: TurnRecorder,
    capacity: TurnCapacity,
    response: Response<AgentBody>,
) -> axum::response::Response {
    if let Some(hold) = &mut placed.hold {
        if let Some((key, old_worker)) = hold.record_answer(response.status().is_success()) {
            shared.sessions.close_detached(key, old_worker);
        }
        let wants_close = matches!(placed.claim, Some(Claim { close: true, .. }));
        if wants_close && !response.headers().contains_key(claim::REFUSAL) {
            hold.close_at_end();
        }
    }
    if let Some(blocks) = placed.blocks.take().filter(|_| response.status().is_success()) {
        for worker in placed.workers_with_kv() {
            shared.block_locator.record_sent(&blocks, worker, &shared.directory.view());
        }
    }
    if let Some(conversation) =
        placed.conversation.as_mut().filter(|_| response.status().is_success())
    {
        conversation.record_answer(placed.worker, &shared.directory.view());
    }
    let (mut parts, agent_body) = response.into_parts();
    strip_answer(&mut parts.headers);
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.insert(claim::TURN, turn_id_header(outbound.turn_id));
    parts.headers.insert(PLACEMENT_HEADER, HeaderValue::from_static(placed.reason.as_str()));
    if let Ok(name) = HeaderValue::from_str(&placed.worker_name) {
        parts.headers.insert(WORKER_HEADER, name);
    }
    let prefill_name = placed.prefill.as_ref().map(|prefill| &prefill.worker_name);
    if let Some(Ok(name)) = prefill_name.map(|name| HeaderValue::from_str(name)) {
        parts.headers.insert(PREFILL_WORKER_HEADER, name);
    }
    // The HTTP version and the extensions concern only the connection to the agent.
    parts.version = http::Version::HTTP_11;
    parts.extensions.clear();
    let is_success = parts.status.is_success();
    let is_stream = is_event_stream(&parts.headers);
    recorder.begin_answer(parts.status.as_u16(), is_success, is_stream);
    let comments = shared.waiting_comment.filter(|_| is_stream && is_success).map(|interval| {
        let due_at = outbound.arrived_at + interval;
        // If that is past, the client has had comments already.
        (if due_at > now() { due_at } else { now() + interval }, interval)
    });
    let (deadline, pulses) = (outbound.deadline, shared.upstream.pulses());
    let body = AnswerBody {
        agent_body,
        timer: AnswerTimer::new(deadline, comments, placed.worker.agent, pulses),
        in_flight: Some(InFlightTurn {
            recorder,
            lease: placed.lease,
            _hold: placed.hold,
            _conversation: placed.conversation,
            _capacity: capacity,
        }),
        is_success,
    };
    Response::from_parts(parts, axum::body::Body::new(body))
}

pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(b"text/event-stream"))
}

/// The capacity returns on drop.
#[derive(Debug)]
pub(crate) struct TurnCapacity {
    /// One share for each of the turn's sequences.
    pub(super) _turn: Share,
    /// Set if the turn's key has a limit of tokens, until the turn has a recorder.
    pub(super) tokens: Option<TurnTokens>,
}

#[derive(Debug)]
struct InFlightTurn {
    recorder: TurnRecorder,
    lease: Lease,
    _hold: Option<BindingHold>,
    _conversation: Option<ConversationHold>,
    _capacity: TurnCapacity,
}

/// Ends an answer at the turn's deadline, or when the agent has stopped answering.
#[derive(Debug)]
struct AnswerTimer {
    deadline: Instant,
    next_check: Instant,
    /// When the next comment is due, and the interval after it. `None` if no more come.
    comments: Option<(Instant, Duration)>,
    /// Ends at the first of the times above.
    sleep: Pin<Box<Sleep>>,
    /// Whether a part of the answer has come since the last check.
    has_come: bool,
    agent: usize,
    pulses: Arc<Pulses>,
}

enum Wake {
    Comment,
    End(TurnOutcome, StreamError),
}

impl AnswerTimer {
    fn new(
        deadline: Instant,
        comments: Option<(Instant, Duration)>,
        agent: usize,
        pulses: &Arc<Pulses>,
    ) -> Self {
        let next_check = now() + CHECK_INTERVAL;
        let mut timer = Self {
            deadline,
            next_check,
            comments,
            sleep: Box::pin(tokio::time::sleep_until(next_check.into())),
            has_come: true,
            agent,
            pulses: Arc::clone(pulses),
        };
        timer.reset_sleep();
        timer
    }

    fn reset_sleep(&mut self) {
        let next_comment = self.comments.map_or(self.deadline, |(due_at, _)| due_at);
        let wake_at = self.deadline.min(self.next_check).min(next_comment);
        self.sleep.as_mut().reset(wake_at.into());
    }

    fn poll_wake(&mut self, context: &mut Context<'_>) -> Poll<Wake> {
        loop {
            ready!(self.sleep.as_mut().poll(context));
            let now = now();
            if now >= self.deadline {
                return Poll::Ready(Wake::End(TurnOutcome::TimedOut, StreamError::TimedOut));
            }
            if now >= self.next_check {
                // The agent may have been found silent a moment before it answered again.
                if !std::mem::take(&mut self.has_come) && self.pulses.is_silent(self.agent) {
                    return Poll::Ready(Wake::End(TurnOutcome::WorkerFailed, StreamError::Silent));
                }
                self.next_check = now + CHECK_INTERVAL;
            }
            let is_comment_due = match &mut self.comments {
                Some((due_at, interval)) if now >= *due_at => {
                    *due_at = now + *interval;
                    true
                }
                _ => false,
            };
            self.reset_sleep();
            if is_comment_due {
                return Poll::Ready(Wake::Comment);
            }
        }
    }
}

#[derive(Debug)]
struct AnswerBody {
    agent_body: AgentBody,
    timer: AnswerTimer,
    /// `None` after the last frame, or that of the closing event. The client may then leave, or
    /// send the session's next turn at once, and the session must not seem busy.
    in_flight: Option<InFlightTurn>,
    is_success: bool,
}

impl AnswerBody {
    fn end_turn(&mut self, outcome: TurnOutcome) {
        if let Some(mut in_flight) = self.in_flight.take() {
            in_flight.recorder.set_outcome(outcome);
        }
    }

    fn complete_outcome(&self) -> TurnOutcome {
        if self.is_success { TurnOutcome::Ok } else { TurnOutcome::ErrorAnswer }
    }
}

#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("the turn took longer than turn_ms_max")]
    TimedOut,
    #[error("the worker has stopped answering")]
    Silent,
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
        let polled = Pin::new(&mut self.agent_body).poll_frame(context);
        if polled.is_pending() {
            return Poll::Ready(Some(match ready!(self.timer.poll_wake(context)) {
                Wake::Comment => Ok(Frame::data(WAITING_COMMENT)),
                Wake::End(outcome, error) => {
                    self.end_turn(outcome);
                    Err(error.into())
                }
            }));
        }
        self.timer.has_come = true;
        let complete_outcome = self.complete_outcome();
        match ready!(polled) {
            None => {
                self.end_turn(complete_outcome);
                Poll::Ready(None)
            }
            Some(Err(error)) => {
                self.end_turn(TurnOutcome::WorkerFailed);
                Poll::Ready(Some(Err(StreamError::BrokenOff(error).into())))
            }
            Some(Ok(frame)) => {
                let mut is_whole = self.agent_body.is_end_stream();
                if let (Some(in_flight), Some(data)) = (&mut self.in_flight, frame.data_ref()) {
                    if in_flight.recorder.record_data(data) {
                        in_flight.lease.record_answer();
                    }
                    is_whole |= in_flight.recorder.is_closed();
                    self.timer.comments = None;
                }
                if is_whole {
                    self.end_turn(complete_outcome);
                }
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        // If this is true at once, hyper drops the body without polling it. The drop ends the turn.
        self.agent_body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.agent_body.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        if self.agent_body.is_end_stream() {
            let complete_outcome = self.complete_outcome();
            self.end_turn(complete_outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_gets_comments_until_its_first_event_and_ends_at_its_deadline() {
        let interval = Duration::from_secs(10);
        let started_at = now();
        let comments = Some((started_at + interval, interval));
        let pulses = Arc::new(Pulses::new());
        let deadline = started_at + Duration::from_secs(3600);
        let mut timer = AnswerTimer::new(deadline, comments, 0, &pulses);
        for comments in 1..4 {
            let wake = poll_fn(|context| timer.poll_wake(context)).await;
            assert!(matches!(wake, Wake::Comment));
            assert!(now() >= started_at + interval * comments);
        }
        timer.comments = None;
        timer.deadline = now();
        timer.reset_sleep();
        let wake = poll_fn(|context| timer.poll_wake(context)).await;
        assert!(matches!(wake, Wake::End(TurnOutcome::TimedOut, _)));
    }
}

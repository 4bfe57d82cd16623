//! The last stage: streams a worker's answer back to the client.
//!
//! No answer is buffered and no byte changed. A stream that waits for its first event gets comments
//! before it. If the client leaves, hyper drops the body and with it the connection to the agent,
//! which cancels the turn.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use contract::claim::{self, Claim};
use http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use http_body::{Body, Frame, SizeHint};
use service::{clock::now, headers::strip_answer};
use tokio::time::Sleep;

use super::{
    agent_body::{AgentBody, BodyError, is_event_stream},
    holdings::Holdings,
    placer::assignment::Assignment,
    send::{Answered, Sent, turn_id_header},
    shared::Shared,
    upstream::{CHECK_INTERVAL, Pulses},
};
use crate::{fleet::worker::AgentKey, metrics::TurnOutcome};

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

/// Everything that the turn holds goes with the body of its answer.
pub(super) fn build(shared: &Shared, sent: Sent) -> axum::response::Response {
    let answered = match sent {
        Sent::Answered(answered) => *answered,
        Sent::AbortedHere(response) => return response,
    };
    let Answered { outbound, mut assignment, mut holdings, response } = answered;
    let (mut head, agent_body) = response.into_parts();
    let is_success = head.status.is_success();
    record_begin(shared, &mut assignment, &mut holdings, &head);
    strip_answer(&mut head.headers);
    head.headers.remove(header::CONTENT_LENGTH);
    add_headers(&mut head.headers, outbound.turn_id, &assignment);
    // The HTTP version and the extensions concern only the connection to the agent.
    head.version = http::Version::HTTP_11;
    head.extensions.clear();
    let is_stream = is_event_stream(&head.headers);
    holdings.recorder.begin_answer(head.status.as_u16(), is_success, is_stream);
    let arrival = &outbound.arrival;
    let comments = shared.waiting_comment.filter(|_| is_stream && is_success).map(|interval| {
        let due_at = arrival.arrived_at + interval;
        // If that is past, the client has had comments already.
        (if due_at > now() { due_at } else { now() + interval }, interval)
    });
    let (agent, pulses) = (assignment.to.worker.agent, shared.upstream.pulses());
    let timer = AnswerTimer::new(arrival.deadline, comments, agent, pulses);
    let body = AnswerBody { agent_body, timer, holdings: Some(holdings), is_success };
    Response::from_parts(head, axum::body::Body::new(body))
}

/// Tells the router's tables that the answer has begun.
fn record_begin(
    shared: &Shared,
    assignment: &mut Assignment,
    holdings: &mut Holdings,
    head: &http::response::Parts,
) {
    let is_success = head.status.is_success();
    if let Some(hold) = &mut holdings.hold {
        if let Some((key, old_worker)) = hold.record_answer(is_success) {
            shared.sessions.close_detached(key, old_worker);
        }
        if let Some(Claim { close: true, key, .. }) = &assignment.claim
            && !head.headers.contains_key(claim::REFUSAL)
        {
            hold.close_at_end();
            shared.sessions.close_elsewhere(key, assignment.to.worker);
        }
    }
    if !is_success {
        return;
    }
    if let Some(blocks) = assignment.blocks.take() {
        for worker in assignment.workers_with_kv() {
            shared.block_locator.record_sent(&blocks, worker, &shared.directory.view());
        }
    }
    if let Some(conversation) = &mut holdings.conversation {
        conversation.record_answer(assignment.to.worker, &shared.directory.view());
    }
}

fn add_headers(headers: &mut HeaderMap, turn_id: u64, assignment: &Assignment) {
    headers.insert(claim::TURN, turn_id_header(turn_id));
    headers.insert(PLACEMENT_HEADER, HeaderValue::from_static(assignment.reason.as_str()));
    if let Ok(name) = HeaderValue::from_str(&assignment.to.name) {
        headers.insert(WORKER_HEADER, name);
    }
    let prefill_name = assignment.prefill.as_ref().map(|prefill| &prefill.to.name);
    if let Some(Ok(name)) = prefill_name.map(|name| HeaderValue::from_str(name)) {
        headers.insert(PREFILL_WORKER_HEADER, name);
    }
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
    agent: AgentKey,
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
        agent: AgentKey,
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
    holdings: Option<Holdings>,
    is_success: bool,
}

impl AnswerBody {
    fn end_turn(&mut self, outcome: TurnOutcome) {
        if let Some(mut holdings) = self.holdings.take() {
            holdings.recorder.set_outcome(outcome);
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
    BrokenOff(#[source] BodyError),
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
                if let (Some(holdings), Some(data)) = (&mut self.holdings, frame.data_ref()) {
                    if holdings.recorder.record_data(data) {
                        holdings.lease.record_first_part();
                    }
                    is_whole |= holdings.recorder.is_closed();
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
        let mut timer = AnswerTimer::new(deadline, comments, AgentKey::first(0), &pulses);
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

//! One turn while it is inside the engine.
//!
//! An exchange reads the engine's answer, and ends the turn's lease when the engine ends the turn.
//! It continues in a task if the client disconnects.

use std::{
    collections::VecDeque,
    future::Future as _,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::ResponseFuture;
use service::refusal::Refusal;
use tokio::{sync::oneshot, time::Sleep};
use tracing::debug;

use super::{
    TurnContext,
    refusals::{timeout_refusal, unreachable_refusal},
    response_scanner::Scanner,
};
use crate::{
    owner::{Lease, RunModeResult},
    session::Outcome,
};

/// The interval between aborts while the end of a turn is awaited. The engine forgets an abort that
/// arrives before it has registered the turn.
const ABORT_AGAIN: Duration = Duration::from_millis(500);
/// The longest time the engine takes to notice a closed connection. For an answer that isn't
/// streamed, it checks every 4 s.
const HANGUP_SEEN_WITHIN: Duration = Duration::from_secs(5);
/// The time limit for the shim's plan once the answer has begun. Some routes send their first event
/// before they tokenize the prompt. The shim reports its plan after tokenization, or up to two
/// seconds later if it asks the agent a question first.
const PLAN_WITHIN: Duration = Duration::from_millis(2_500);
/// The time limit for the shim's plan of a turn that must continue its session. The shim may need
/// to tokenize a long prompt and then wait two seconds for the agent's answer.
const MUST_CONTINUE_PLAN_WITHIN: Duration = Duration::from_secs(10);
/// The same limit if the engine has already answered with an error. The shim reports a refusal
/// before the engine's error, so either the report arrives at once or the error has another cause.
const PLAN_AFTER_ERROR_WITHIN: Duration = Duration::from_millis(500);
/// The time limit for the engine's own answer to a turn that its shim has refused.
const ENGINE_ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// The maximum number of frames of the answer to hold back until the shim's plan is known. A route
/// that answers before tokenization sends only a few events.
const EARLY_FRAMES_MAX: usize = 16;

/// One turn inside the engine: reads its answer, and owns the lease.
///
/// If an exchange is dropped before the turn's end (the client disconnected or the time limit
/// passed), a task takes over and waits for the turn's end.
pub(super) struct Exchange {
    rid: String,
    lease: Option<Lease>,
    upstream: Option<Upstream>,
    /// Frames of the answer that were read before it was known how the turn runs.
    early_frames: VecDeque<BodyFrame>,
    scanner: Scanner,
    status: StatusCode,
    deadline: Pin<Box<Sleep>>,
    started: tokio::time::Instant,
    /// Whether an abort by `rid` ends this turn, so that its answer confirms the end.
    abort_confirms_end: bool,
    /// Whether the client has disconnected, so that a task reads the rest of the answer.
    abandoned: bool,
    /// Whether the engine's shim refuses the turn, so that the engine ran nothing of it.
    refused: bool,
    context: TurnContext,
}

/// An item of an answer's body: a frame, an error, or `None` at the end.
type BodyFrame = Option<Result<Frame<Bytes>, hyper::Error>>;

enum Upstream {
    Head(ResponseFuture),
    Body(Incoming),
}

impl Exchange {
    /// Creates the exchange of a turn that is being sent. `abort_confirms_end`: whether an abort by
    /// `rid` ends the turn and its answer shows that.
    pub(super) fn new(
        context: TurnContext,
        rid: String,
        lease: Lease,
        answer: ResponseFuture,
        abort_confirms_end: bool,
    ) -> Self {
        Self {
            rid,
            lease: Some(lease),
            upstream: Some(Upstream::Head(answer)),
            early_frames: VecDeque::new(),
            scanner: Scanner::new(None),
            status: StatusCode::OK,
            deadline: Box::pin(tokio::time::sleep(context.turn_max)),
            started: tokio::time::Instant::now(),
            abort_confirms_end,
            abandoned: false,
            refused: false,
            context,
        }
    }

    /// Returns the turn's id inside the engine.
    pub(super) fn rid(&self) -> &str {
        &self.rid
    }

    /// Waits for the head of the answer.
    pub(super) async fn wait_for_head(&mut self) -> Result<http::response::Parts, Refusal> {
        let Some(Upstream::Head(response)) = &mut self.upstream else {
            unreachable!("a new exchange waits for its head")
        };
        let response = tokio::select! {
            biased;
            response = response => response,
            () = &mut self.deadline => return Err(timeout_refusal()),
        };
        match response {
            Ok(response) => Ok(self.begin_response(response)),
            Err(error) => {
                self.upstream = None;
                self.finish(if error.is_connect() { Outcome::Refused } else { Outcome::Lost });
                self.context.engine_failed(&error).await;
                Err(unreachable_refusal(&error))
            }
        }
    }

    /// Returns how the turn runs or why the shim refuses it; `None` if that is unknown.
    ///
    /// The engine answers some routes before the shim has decided. So this holds back the beginning
    /// of the answer until the shim reports its plan, within limits. If the engine answers with an
    /// error, this waits only for a turn that `must_continue` its session's history: when the shim
    /// refuses a turn, the engine answers with an error of its own.
    pub(super) async fn wait_for_run_mode(
        &mut self,
        receiver: Option<oneshot::Receiver<RunModeResult>>,
        status: StatusCode,
        must_continue: bool,
    ) -> Option<RunModeResult> {
        let mut receiver = receiver?;
        let Some(Upstream::Body(body)) = &mut self.upstream else {
            return receiver.try_recv().ok();
        };
        let mut reads_on = status.is_success();
        if !reads_on && !must_continue {
            return receiver.try_recv().ok();
        }
        let plan_is_late = tokio::time::sleep(match (reads_on, must_continue) {
            (false, _) => PLAN_AFTER_ERROR_WITHIN,
            (true, true) => MUST_CONTINUE_PLAN_WITHIN,
            (true, false) => PLAN_WITHIN,
        });
        tokio::pin!(plan_is_late);
        loop {
            tokio::select! {
                biased;
                result = &mut receiver => return result.ok(),
                frame = body.frame(), if reads_on => {
                    reads_on = frame.is_some();
                    self.early_frames.push_back(frame);
                    reads_on &= self.early_frames.len() < EARLY_FRAMES_MAX;
                    if !reads_on && !must_continue {
                        return receiver.try_recv().ok();
                    }
                }
                () = &mut plan_is_late, if !reads_on || !self.early_frames.is_empty() => return None,
                () = &mut self.deadline => return None,
            }
        }
    }

    /// Reads the engine's own answer to a turn that the shim refuses. When the client then learns
    /// of the refusal, the session is free for its next turn. If the engine doesn't end the turn in
    /// time, the turn is aborted like that of a disconnected client.
    pub(super) async fn finish_refused(mut self) {
        self.refused = true;
        let drained = async {
            while self.upstream.is_some() {
                self.read_next().await;
            }
        };
        // On timeout, dropping `self` starts the task that aborts the turn.
        let _ = tokio::time::timeout(ENGINE_ANSWERS_WITHIN, drained).await;
    }

    fn begin_response(&mut self, response: http::Response<Incoming>) -> http::response::Parts {
        let (head, body) = response.into_parts();
        self.context.metrics.record_first_byte(self.started.elapsed());
        self.status = head.status;
        let kind = head.headers.get(header::CONTENT_TYPE);
        self.scanner = Scanner::new(kind.map(HeaderValue::as_bytes));
        self.upstream = Some(Upstream::Body(body));
        head
    }

    fn finish(&mut self, outcome: Outcome) {
        let outcome = match outcome {
            // A stream reports the refusal as an event, after a head with status 200.
            Outcome::Lost if self.refused => Outcome::Refused,
            Outcome::Finished(usage) if self.abandoned => Outcome::Unheard(usage),
            outcome => outcome,
        };
        if let Some(lease) = self.lease.take() {
            self.context.metrics.record_turn_end(outcome.as_str(), self.started.elapsed());
            lease.finish(outcome);
            if outcome == Outcome::Lost && self.abort_confirms_end && !self.abandoned {
                self.abort_unseen();
            }
        }
    }

    /// Aborts a turn whose answer broke off: it may still run, though its client can't get the
    /// answer.
    fn abort_unseen(&self) {
        let (engine, rid) = (self.context.engine.clone(), self.rid.clone());
        self.context.tasks.spawn(async move {
            if let Err(error) = engine.abort(&rid).await {
                debug!(rid, %error, "can't abort a turn at the engine");
            }
        });
    }

    /// Handles the next frame of the answer. The lease ends *before* the last bytes are sent, so
    /// that a client that has them can send its next turn.
    fn scan_frame(&mut self, frame: Option<Result<&Frame<Bytes>, &hyper::Error>>) {
        match frame {
            Some(Ok(frame)) => {
                let terminal = frame.data_ref().is_some_and(|data| self.scanner.push(data));
                if terminal {
                    self.finish(self.scanner.outcome(self.status));
                }
            }
            Some(Err(error)) => {
                debug!(rid = self.rid, %error, "the engine's answer broke off");
                self.upstream = None;
                self.finish(Outcome::Lost);
            }
            None => {
                self.upstream = None;
                // A stream that ends without its final event was cut off, even if the connection
                // closed cleanly.
                let whole = self.scanner.is_complete() || !self.status.is_success();
                let outcome = self.scanner.outcome(self.status);
                self.finish(if whole { outcome } else { Outcome::Lost });
            }
        }
    }

    /// Aborts a turn whose client disconnected, and waits for the engine to end it, without a time
    /// limit. The session table reports a turn that the engine doesn't end.
    async fn wind_down(mut self) {
        if let Some(lease) = &self.lease {
            lease.report_abandoned().await;
        }
        if self.abort_confirms_end {
            self.abort_and_drain().await;
        } else {
            // The engine knows no id by which this turn could be aborted. Closing the connection
            // aborts it; the engine checks for that periodically.
            self.upstream = None;
            tokio::time::sleep(HANGUP_SEEN_WITHIN).await;
        }
        self.finish(Outcome::Lost);
    }

    async fn abort_and_drain(&mut self) {
        let (engine, rid) = (self.context.engine.clone(), self.rid.clone());
        let mut again = tokio::time::interval(ABORT_AGAIN);
        while self.upstream.is_some() {
            tokio::select! {
                biased;
                () = self.read_next() => {}
                _ = again.tick() => {
                    if let Err(error) = engine.abort(&rid).await {
                        debug!(rid, %error, "can't abort a turn at the engine");
                    }
                }
            }
        }
    }

    async fn read_next(&mut self) {
        match &mut self.upstream {
            None => {}
            Some(Upstream::Head(response)) => match response.await {
                Ok(response) => drop(self.begin_response(response)),
                Err(_) => {
                    self.upstream = None;
                    self.finish(Outcome::Lost);
                }
            },
            Some(Upstream::Body(body)) => {
                let frame = match self.early_frames.pop_front() {
                    Some(frame) => frame,
                    None => body.frame().await,
                };
                self.scan_frame(frame.as_ref().map(Result::as_ref));
            }
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // If `abandoned` is set, the runtime is shutting down and drops its tasks; a new task would
        // not run.
        if self.lease.is_none() || self.upstream.is_none() || self.abandoned {
            return;
        }
        let abandoned = Exchange {
            rid: std::mem::take(&mut self.rid),
            lease: self.lease.take(),
            upstream: self.upstream.take(),
            early_frames: std::mem::take(&mut self.early_frames),
            scanner: std::mem::replace(&mut self.scanner, Scanner::new(None)),
            status: self.status,
            deadline: Box::pin(tokio::time::sleep(Duration::ZERO)),
            started: self.started,
            abort_confirms_end: self.abort_confirms_end,
            abandoned: true,
            refused: self.refused,
            context: self.context.clone(),
        };
        debug!(rid = abandoned.rid, "the client of a turn has disconnected");
        self.context.tasks.spawn(abandoned.wind_down());
    }
}

impl http_body::Body for Exchange {
    type Data = Bytes;
    type Error = AnswerBroken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerBroken>>> {
        let this = &mut *self;
        if this.lease.is_some() && this.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err(AnswerBroken("the turn took longer than turn_ms_max"))));
        }
        let Some(Upstream::Body(body)) = &mut this.upstream else { return Poll::Ready(None) };
        let frame = match this.early_frames.pop_front() {
            Some(frame) => frame,
            None => ready!(Pin::new(body).poll_frame(context)),
        };
        this.scan_frame(frame.as_ref().map(Result::as_ref));
        let broken = |_| AnswerBroken("the engine broke the answer off");
        Poll::Ready(frame.map(|frame| frame.map_err(broken)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.upstream {
            Some(Upstream::Body(body)) => self.early_frames.is_empty() && body.is_end_stream(),
            _ => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.upstream {
            // The body's own hint doesn't include frames that were already taken out of it.
            Some(Upstream::Body(body)) if self.early_frames.is_empty() => body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// The error of an answer that ends early. The client's connection is closed without a proper end,
/// so that the client notices.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct AnswerBroken(&'static str);

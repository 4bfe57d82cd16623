//! Follows one turn while it is inside the engine.
//!
//! The exchange is the body of the client's response: it passes the frames of the engine's answer
//! on unchanged, and ends the turn's lease when the engine ends the turn. It waits for the shim's
//! plan of a turn with a full history, and decides nothing about sessions.

mod plan;

use std::{
    collections::VecDeque,
    future::Future as _,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use service::{
    http_client::Broken,
    refusal::{Code, Refusal},
    traces::{
        record::SpanKind,
        span::{Span, Trace},
    },
};
use tokio::{sync::oneshot, time::Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tracing::debug;

use super::{
    TurnContext,
    aborts::{ABORT_INTERVAL, AgentTurn},
    refusals::connection_refusal,
    request::AbortReach,
    response_scanner::Scanner,
    spans,
};
use crate::{
    engine::{TurnAnswer, TurnAnswerBody, answer_signs::TurnSigns},
    owner::{RunModeResult, TurnLease},
    session::Outcome,
};

/// While the engine makes an answer that isn't streamed, it checks the connection every 4 s.
const DISCONNECT_NOTICE_TIME_MAX: Duration = Duration::from_secs(5);
const REFUSED_ANSWER_MAX: Duration = Duration::from_secs(1);

/// If an exchange is dropped before the turn's end (the client disconnected or the time limit
/// passed), a task takes over the whole state and waits for the turn's end.
pub(super) struct Exchange {
    engine_rid: String,
    /// `None` once the turn has ended.
    lease: Option<TurnLease>,
    /// `None` once the answer was read to its end or has failed.
    engine_answer: Option<EngineAnswer>,
    /// The frames that came before it was known how the turn runs.
    early_frames: VecDeque<BodyFrame>,
    scanner: Scanner,
    status: StatusCode,
    deadline: Pin<Box<Sleep>>,
    sent_at: tokio::time::Instant,
    abort_confirms_end: bool,
    /// `None` once the turn has ended.
    running: Option<AgentTurn>,
    /// Is ready when the client has aborted a turn that the engine can't abort by an id.
    cut_off: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    /// A task then reads the rest of the answer.
    is_abandoned: bool,
    /// The engine ran nothing of such a turn.
    is_refused: bool,
    /// The weights epoch at the admission of a turn that runs in its pinned session; `None` from
    /// the answer's first bytes.
    awaited_epoch: Option<u64>,
    signs: TurnSigns,
    /// The span of the answer's body. Empty before the head, and after the end.
    stream: Span,
    trace: Trace,
    context: Arc<TurnContext>,
}

/// `None` is the end of the body.
type BodyFrame<E = Broken> = Option<Result<Frame<Bytes>, E>>;

enum EngineAnswer {
    Head(TurnAnswer),
    Body(TurnAnswerBody),
}

impl Exchange {
    /// `abort_confirms_end`: after an abort by `engine_rid`, the turn's answer shows its end.
    pub(super) fn new(
        context: Arc<TurnContext>,
        (engine_rid, dp_rank): (String, u32),
        lease: TurnLease,
        answer: TurnAnswer,
        abort_confirms_end: bool,
        running: AgentTurn,
        trace: Trace,
    ) -> Self {
        let signs = TurnSigns::new(context.agent.answer_signs.clone(), dp_rank);
        let token = running.aborted_token();
        let cut_off = (running.facts().reach == AbortReach::Connection)
            .then(|| Box::pin(token.clone().cancelled_owned()));
        Self {
            engine_rid,
            lease: Some(lease),
            engine_answer: Some(EngineAnswer::Head(answer)),
            early_frames: VecDeque::new(),
            scanner: Scanner::new(None),
            status: StatusCode::OK,
            deadline: Box::pin(tokio::time::sleep(context.turn_time_max)),
            sent_at: tokio::time::Instant::now(),
            abort_confirms_end,
            running: Some(running),
            cut_off,
            is_abandoned: false,
            is_refused: false,
            awaited_epoch: None,
            signs,
            stream: Span::default(),
            trace,
            context,
        }
    }

    pub(super) fn engine_rid(&self) -> &str {
        &self.engine_rid
    }

    /// Breaks the answer off if the engine's weights change before its first bytes arrive: the
    /// engine sends the head of a stream before it runs the turn, and may run it on the KV of older
    /// weights.
    pub(super) fn watch_weights(&mut self, admitted_epoch: u64) {
        self.awaited_epoch = Some(admitted_epoch);
    }

    pub(super) async fn wait_for_head(&mut self) -> Result<http::response::Parts, Refusal> {
        let head = async {
            match &mut self.engine_answer {
                Some(EngineAnswer::Head(response)) => response.await,
                Some(EngineAnswer::Body(_)) | None => std::future::pending().await,
            }
        };
        let head_result = tokio::select! {
            biased;
            head_result = head => head_result,
            () = &mut self.deadline => return Err(Refusal::turn_timeout()),
            () = wait_for_cut_off(&mut self.cut_off) => {
                return Err(Refusal::new(Code::TurnAborted, "the turn was aborted"));
            }
        };
        match head_result {
            Ok(response) => Ok(self.begin_response(response)),
            Err(error) => {
                self.engine_answer = None;
                let process = self.lease.as_ref().map_or(0, |lease| lease.engine_process);
                self.finish(if error.is_connect() { Outcome::Refused } else { Outcome::Lost });
                self.context.report_engine_failure(process, &error).await;
                Err(connection_refusal(&error))
            }
        }
    }

    /// `None` if the mode is not known in time.
    pub(super) async fn wait_for_run_mode(
        &mut self,
        receiver: Option<oneshot::Receiver<RunModeResult>>,
        status: StatusCode,
        must_continue: bool,
    ) -> Option<RunModeResult> {
        let mut receiver = receiver?;
        let Some(EngineAnswer::Body(body)) = &mut self.engine_answer else {
            return receiver.try_recv().ok();
        };
        let plan = plan::wait(receiver, body, &mut self.early_frames, status, must_continue);
        tokio::select! {
            biased;
            result = plan => result,
            () = &mut self.deadline => None,
        }
    }

    /// Reads the engine's own answer to a turn that is refused, so that the session is free for the
    /// client's next turn before the client has the refusal. If the engine doesn't end the turn in
    /// time, the turn is aborted.
    pub(super) async fn finish_refused(mut self) {
        self.is_refused = true;
        let read_to_end = async {
            while self.engine_answer.is_some() {
                self.read_next().await;
            }
        };
        // On timeout, dropping `self` starts the task that aborts the turn.
        let _ = tokio::time::timeout(REFUSED_ANSWER_MAX, read_to_end).await;
    }

    fn begin_response(
        &mut self,
        response: http::Response<TurnAnswerBody>,
    ) -> http::response::Parts {
        let (head, body) = response.into_parts();
        self.context.metrics.record_first_byte(self.sent_at.elapsed());
        self.status = head.status;
        self.trace.change(|span| spans::set_status(span, head.status.as_u16()));
        self.stream = self.trace.child("stream", SpanKind::Internal);
        let content_type = head.headers.get(header::CONTENT_TYPE);
        self.scanner = Scanner::new(content_type.map(HeaderValue::as_bytes));
        self.engine_answer = Some(EngineAnswer::Body(body));
        head
    }

    fn finish(&mut self, outcome: Outcome) {
        let outcome = match outcome {
            // In a stream, the engine reports its error as an event after a head with status 200.
            // This looks like a lost turn, but the shim has refused it.
            Outcome::Lost if self.is_refused => Outcome::Refused,
            Outcome::Finished(usage) if self.is_abandoned => Outcome::Unheard(usage),
            outcome => outcome,
        };
        self.running = None;
        if matches!(outcome, Outcome::Finished(_) | Outcome::Unheard(_) | Outcome::Aborted) {
            self.signs.note_end();
        }
        if let Some(lease) = self.lease.take() {
            self.context.metrics.record_turn_end(outcome.as_str(), self.sent_at.elapsed());
            self.stream = Span::default();
            spans::end(&std::mem::take(&mut self.trace), outcome);
            lease.finish(outcome);
            if outcome == Outcome::Lost && self.abort_confirms_end && !self.is_abandoned {
                self.abort_in_background();
            }
        }
    }

    /// The turn may still run in the engine, although its client can't get the answer.
    fn abort_in_background(&self) {
        let (engine, rid) = (self.context.engine.clone(), self.engine_rid.clone());
        self.context.tasks.spawn(async move {
            if let Err(error) = engine.abort(&rid).await {
                debug!(rid, %error, "can't abort a turn at the engine");
            }
        });
    }

    /// The last frame ends the lease here, before the client has the whole answer and may send
    /// more.
    fn scan_frame(&mut self, frame: Option<Result<&Frame<Bytes>, &Broken>>) {
        match frame {
            Some(Ok(frame)) => {
                self.signs.note_frame();
                let is_last = frame.data_ref().is_some_and(|data| self.scanner.push(data));
                if is_last {
                    self.finish(self.scanner.outcome(self.status));
                }
            }
            Some(Err(error)) => {
                debug!(rid = self.engine_rid, %error, "the engine's answer broke off");
                self.engine_answer = None;
                self.finish(Outcome::Lost);
            }
            None => {
                self.engine_answer = None;
                // A stream without its final event was cut off, even if the connection closed
                // cleanly.
                let is_complete = self.scanner.is_complete() || !self.status.is_success();
                let outcome = self.scanner.outcome(self.status);
                self.finish(if is_complete { outcome } else { Outcome::Lost });
            }
        }
    }

    /// There is no time limit: the session table notices turns that the engine doesn't end.
    async fn abort_abandoned_turn(mut self) {
        if let Some(lease) = &self.lease {
            lease.report_abandoned().await;
        }
        if self.abort_confirms_end {
            self.abort_and_read_to_end().await;
        } else {
            // The engine knows no id by which this turn could be aborted. Dropping the answer
            // closes the connection, and the engine then aborts the turn. No answer confirms that,
            // so wait.
            self.engine_answer = None;
            tokio::time::sleep(DISCONNECT_NOTICE_TIME_MAX).await;
        }
        self.finish(Outcome::Lost);
    }

    async fn abort_and_read_to_end(&mut self) {
        let (engine, rid) = (self.context.engine.clone(), self.engine_rid.clone());
        let mut abort_ticks = tokio::time::interval(ABORT_INTERVAL);
        while self.engine_answer.is_some() {
            tokio::select! {
                biased;
                () = self.read_next() => {}
                _ = abort_ticks.tick() => {
                    if let Err(error) = engine.abort(&rid).await {
                        debug!(rid, %error, "can't abort a turn at the engine");
                    }
                }
            }
        }
    }

    async fn read_next(&mut self) {
        match &mut self.engine_answer {
            None => {}
            Some(EngineAnswer::Head(response)) => match response.await {
                Ok(response) => drop(self.begin_response(response)),
                Err(_) => {
                    self.engine_answer = None;
                    self.finish(Outcome::Lost);
                }
            },
            Some(EngineAnswer::Body(body)) => {
                let frame = match self.early_frames.pop_front() {
                    Some(frame) => frame,
                    None => body.frame().await,
                };
                self.scan_frame(frame.as_ref().map(Result::as_ref));
            }
        }
    }
}

/// Waits forever if the engine can abort the turn.
async fn wait_for_cut_off(cut_off: &mut Option<Pin<Box<WaitForCancellationFutureOwned>>>) {
    match cut_off {
        Some(cut_off) => cut_off.as_mut().await,
        None => std::future::pending().await,
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // If `is_abandoned` is set, the runtime is shutting down and drops its tasks; a new task
        // would not run.
        if self.lease.is_none() || self.engine_answer.is_none() || self.is_abandoned {
            return;
        }
        let abandoned_exchange = Exchange {
            engine_rid: std::mem::take(&mut self.engine_rid),
            lease: self.lease.take(),
            engine_answer: self.engine_answer.take(),
            early_frames: std::mem::take(&mut self.early_frames),
            scanner: std::mem::replace(&mut self.scanner, Scanner::new(None)),
            status: self.status,
            deadline: Box::pin(tokio::time::sleep(Duration::ZERO)),
            sent_at: self.sent_at,
            abort_confirms_end: self.abort_confirms_end,
            running: self.running.take(),
            cut_off: None,
            is_abandoned: true,
            is_refused: self.is_refused,
            awaited_epoch: None,
            signs: self.signs.clone(),
            stream: std::mem::take(&mut self.stream),
            trace: std::mem::take(&mut self.trace),
            context: self.context.clone(),
        };
        debug!(rid = abandoned_exchange.engine_rid, "the client of a turn has disconnected");
        self.context.tasks.spawn(abandoned_exchange.abort_abandoned_turn());
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
        if let Some(cut_off) = &mut this.cut_off
            && this.lease.is_some()
            && cut_off.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Some(Err(AnswerBroken("the turn was aborted"))));
        }
        let Some(EngineAnswer::Body(body)) = &mut this.engine_answer else {
            return Poll::Ready(None);
        };
        let frame = match this.early_frames.pop_front() {
            Some(frame) => frame,
            None => ready!(Pin::new(body).poll_frame(context)),
        };
        if let Some(epoch) = this.awaited_epoch.take()
            && this.context.agent.weights.borrow().epoch() != epoch
        {
            this.early_frames.push_front(frame);
            let reason = "the engine's weights changed before the turn's answer began";
            return Poll::Ready(Some(Err(AnswerBroken(reason))));
        }
        this.scan_frame(frame.as_ref().map(Result::as_ref));
        let broken_off = |_| AnswerBroken("the engine broke the answer off");
        Poll::Ready(frame.map(|frame| frame.map_err(broken_off)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.engine_answer {
            Some(EngineAnswer::Body(body)) => self.early_frames.is_empty() && body.is_end_stream(),
            _ => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.engine_answer {
            // The body's own hint doesn't include frames that were already taken out of it.
            Some(EngineAnswer::Body(body)) if self.early_frames.is_empty() => body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// The client notices, because its connection is closed without a proper end.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct AnswerBroken(&'static str);

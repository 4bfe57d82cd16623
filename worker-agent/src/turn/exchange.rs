//! One turn while it is inside the engine: follows the answer, gives the lease back with the
//! engine's last word, and outlives a client that goes away.

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
use proto::process::refusal::Refusal;
use tokio::{sync::oneshot, time::Sleep};
use tracing::debug;

use super::{Turns, timed_out, unreachable};
use crate::{
    agent::{Lease, Told},
    answer::Scanner,
    session::Outcome,
};

/// While a turn's end is waited for, its abort is sent this often: an abort that comes before the
/// engine has registered the turn is forgotten there.
const ABORT_AGAIN: Duration = Duration::from_millis(500);
/// The engine looks every 4 s whether the client of an answer that doesn't stream is still there.
const HANGUP_SEEN_WITHIN: Duration = Duration::from_secs(5);
/// Some routes say their first words before they make tokens of the prompt. The shim's word comes
/// after that, and after two seconds at the latest where it asks the agent first.
const TOLD_WITHIN: Duration = Duration::from_millis(2_500);
/// The shim's word on a turn that must continue its session is waited for this long: it may ask the
/// agent for room and wait for two seconds, after making tokens of a long prompt.
const REFUSED_WITHIN: Duration = Duration::from_secs(10);
/// The same where the engine has answered with an error already. The shim tells its plan before, so
/// the word is there, or the error is of another kind.
const REFUSAL_TOLD_WITHIN: Duration = Duration::from_millis(500);
/// The engine's own answer to a turn that its shim has refused.
const ENGINE_ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// First words are a few events; what says more has begun to answer.
const EARLY_MAX: usize = 16;

/// One turn inside the engine: its answer on the way back, and the lease that its end gives back.
///
/// Dropped before its end, because the client has gone or the time is up, it lives on in a task
/// that sees the turn to its end.
pub(super) struct Exchange {
    rid: String,
    lease: Option<Lease>,
    upstream: Option<Upstream>,
    /// Pieces of the answer that came before it was known how the turn runs.
    early: VecDeque<Piece>,
    scanner: Scanner,
    status: StatusCode,
    deadline: Pin<Box<Sleep>>,
    started: tokio::time::Instant,
    /// An abort by `rid` ends this turn and its answer says so.
    confirms: bool,
    /// Its client has gone: from now on it is nobody's but its own task's.
    abandoned: bool,
    /// The engine's shim refuses the turn, so nothing of it ran.
    refused: bool,
    turns: Turns,
}

/// What an answer's body yields.
type Piece = Option<Result<Frame<Bytes>, hyper::Error>>;

enum Upstream {
    Head(ResponseFuture),
    Body(Incoming),
}

impl Exchange {
    /// A turn on its way. `confirms`: an abort by `rid` ends it, and its answer says so.
    pub(super) fn new(
        turns: Turns,
        rid: String,
        lease: Lease,
        answer: ResponseFuture,
        confirms: bool,
    ) -> Self {
        Self {
            rid,
            lease: Some(lease),
            upstream: Some(Upstream::Head(answer)),
            early: VecDeque::new(),
            scanner: Scanner::new(None),
            status: StatusCode::OK,
            deadline: Box::pin(tokio::time::sleep(turns.turn_max)),
            started: tokio::time::Instant::now(),
            confirms,
            abandoned: false,
            refused: false,
            turns,
        }
    }

    /// The engine's name for the turn.
    pub(super) fn rid(&self) -> &str {
        &self.rid
    }

    /// Waits for the answer's head.
    pub(super) async fn head(&mut self) -> Result<http::response::Parts, Refusal> {
        let Some(Upstream::Head(response)) = &mut self.upstream else {
            unreachable!("a new exchange waits for its head")
        };
        let response = tokio::select! {
            biased;
            response = response => response,
            () = &mut self.deadline => return Err(timed_out()),
        };
        match response {
            Ok(response) => Ok(self.arrived(response)),
            Err(error) => {
                self.upstream = None;
                self.finish(if error.is_connect() { Outcome::Refused } else { Outcome::Lost });
                self.turns.engine_failed(&error).await;
                Err(unreachable(&error))
            }
        }
    }

    /// How the turn runs, or why the shim refuses it. The engine answers some routes before it
    /// knows, so this waits for the shim's word, until the answer goes on without it. The word on a
    /// turn that `must_continue` its session's history is waited for though the answer goes on: an
    /// engine whose shim refuses a turn answers with an error of its own.
    pub(super) async fn ran(
        &mut self,
        told: Option<oneshot::Receiver<Told>>,
        status: StatusCode,
        must_continue: bool,
    ) -> Option<Told> {
        let mut told = told?;
        let Some(Upstream::Body(body)) = &mut self.upstream else { return told.try_recv().ok() };
        let mut reads = status.is_success();
        if !reads && !must_continue {
            return told.try_recv().ok();
        }
        let late = tokio::time::sleep(match (reads, must_continue) {
            (false, _) => REFUSAL_TOLD_WITHIN,
            (true, true) => REFUSED_WITHIN,
            (true, false) => TOLD_WITHIN,
        });
        tokio::pin!(late);
        loop {
            tokio::select! {
                biased;
                told = &mut told => return told.ok(),
                piece = body.frame(), if reads => {
                    reads = piece.is_some();
                    self.early.push_back(piece);
                    reads &= self.early.len() < EARLY_MAX;
                    if !reads && !must_continue {
                        return told.try_recv().ok();
                    }
                }
                () = &mut late, if !reads || !self.early.is_empty() => return None,
                () = &mut self.deadline => return None,
            }
        }
    }

    /// Reads the engine's own answer to a turn that the shim refuses, so that the session is free
    /// for the next turn when the client hears of it. An engine that doesn't end the turn is dealt
    /// with as after a client that has gone.
    pub(super) async fn refuse(mut self) {
        self.refused = true;
        let drained = async {
            while self.upstream.is_some() {
                self.drain_step().await;
            }
        };
        // What is left is wound down by a task of its own.
        let _ = tokio::time::timeout(ENGINE_ANSWERS_WITHIN, drained).await;
    }

    fn arrived(&mut self, response: http::Response<Incoming>) -> http::response::Parts {
        let (head, body) = response.into_parts();
        self.turns.metrics.first_byte(self.started.elapsed());
        self.status = head.status;
        let kind = head.headers.get(header::CONTENT_TYPE);
        self.scanner = Scanner::new(kind.map(HeaderValue::as_bytes));
        self.upstream = Some(Upstream::Body(body));
        head
    }

    fn finish(&mut self, outcome: Outcome) {
        let outcome = match outcome {
            // A stream tells of it by an event of its own, after a head that says 200.
            Outcome::Lost if self.refused => Outcome::Refused,
            Outcome::Finished(usage) if self.abandoned => Outcome::Unheard(usage),
            outcome => outcome,
        };
        if let Some(lease) = self.lease.take() {
            self.turns.metrics.ended(outcome, self.started.elapsed());
            lease.finish(outcome);
            if outcome == Outcome::Lost && self.confirms && !self.abandoned {
                self.abort_unseen();
            }
        }
    }

    /// A turn whose answer broke off may still run, for nobody.
    fn abort_unseen(&self) {
        let (engine, rid) = (self.turns.engine.clone(), self.rid.clone());
        self.turns.tasks.spawn(async move {
            if let Err(error) = engine.abort(&rid).await {
                debug!(rid, %error, "abort did not get through");
            }
        });
    }

    /// Follows the answer's next piece; the lease goes back *before* the last bytes go out, so that
    /// a client that has them can send its next turn.
    fn follow(&mut self, frame: Option<Result<&Frame<Bytes>, &hyper::Error>>) {
        match frame {
            Some(Ok(frame)) => {
                let terminal = frame.data_ref().is_some_and(|data| self.scanner.push(data));
                if terminal {
                    self.finish(self.scanner.outcome(self.status));
                }
            }
            Some(Err(error)) => {
                debug!(rid = self.rid, %error, "answer broke off");
                self.upstream = None;
                self.finish(Outcome::Lost);
            }
            None => {
                self.upstream = None;
                // A stream that ends without its last event has been cut off, however cleanly.
                let whole = self.scanner.is_whole() || !self.status.is_success();
                let outcome = self.scanner.outcome(self.status);
                self.finish(if whole { outcome } else { Outcome::Lost });
            }
        }
    }

    /// Sees a turn without a client to its end: abort, and wait for the engine's word, however long
    /// it takes. A turn that the engine doesn't end is reported, not forgotten.
    async fn wind_down(mut self) {
        if let Some(lease) = &self.lease {
            lease.abandoned().await;
        }
        if self.confirms {
            self.abort_and_drain().await;
        } else {
            // Without a name to abort it by, hanging up is what ends it; the engine looks for that
            // at a pace of its own.
            self.upstream = None;
            tokio::time::sleep(HANGUP_SEEN_WITHIN).await;
        }
        self.finish(Outcome::Lost);
    }

    async fn abort_and_drain(&mut self) {
        let (engine, rid) = (self.turns.engine.clone(), self.rid.clone());
        let mut again = tokio::time::interval(ABORT_AGAIN);
        while self.upstream.is_some() {
            tokio::select! {
                biased;
                () = self.drain_step() => {}
                _ = again.tick() => {
                    if let Err(error) = engine.abort(&rid).await {
                        debug!(rid, %error, "abort did not get through");
                    }
                }
            }
        }
    }

    async fn drain_step(&mut self) {
        match &mut self.upstream {
            None => {}
            Some(Upstream::Head(response)) => match response.await {
                Ok(response) => drop(self.arrived(response)),
                Err(_) => {
                    self.upstream = None;
                    self.finish(Outcome::Lost);
                }
            },
            Some(Upstream::Body(body)) => {
                let frame = match self.early.pop_front() {
                    Some(piece) => piece,
                    None => body.frame().await,
                };
                self.follow(frame.as_ref().map(Result::as_ref));
            }
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // One that is dropped again is dropped by a runtime that ends: no task would run.
        if self.lease.is_none() || self.upstream.is_none() || self.abandoned {
            return;
        }
        let abandoned = Exchange {
            rid: std::mem::take(&mut self.rid),
            lease: self.lease.take(),
            upstream: self.upstream.take(),
            early: std::mem::take(&mut self.early),
            scanner: std::mem::replace(&mut self.scanner, Scanner::new(None)),
            status: self.status,
            deadline: Box::pin(tokio::time::sleep(Duration::ZERO)),
            started: self.started,
            confirms: self.confirms,
            abandoned: true,
            refused: self.refused,
            turns: self.turns.clone(),
        };
        debug!(rid = abandoned.rid, "turn left by its client");
        self.turns.tasks.spawn(abandoned.wind_down());
    }
}

impl http_body::Body for Exchange {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let this = &mut *self;
        if this.lease.is_some() && this.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err(BrokenOff("the turn took longer than turn_ms_max"))));
        }
        let Some(Upstream::Body(body)) = &mut this.upstream else { return Poll::Ready(None) };
        let frame = match this.early.pop_front() {
            Some(piece) => piece,
            None => ready!(Pin::new(body).poll_frame(context)),
        };
        this.follow(frame.as_ref().map(Result::as_ref));
        let broken = |_| BrokenOff("the engine broke the answer off");
        Poll::Ready(frame.map(|frame| frame.map_err(broken)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.upstream {
            Some(Upstream::Body(body)) => self.early.is_empty() && body.is_end_stream(),
            _ => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.upstream {
            // Its own hint lacks what was taken out already.
            Some(Upstream::Body(body)) if self.early.is_empty() => body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// An answer that ends without its end: the client's connection is cut, so that it can tell.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct BrokenOff(&'static str);

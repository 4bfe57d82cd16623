//! Reads an answer ahead of a client that reads slowly, into a bounded buffer.
//!
//! The body holds what the answer costs, such as a turn's place in the engine. So it must reach its
//! end when its source has ended, and not when the client has read it all. While the client keeps
//! up, hyper polls the body and each frame goes straight through. When hyper stops polling, the
//! connection's task moves frames into a buffer. No other task is involved, and no byte is copied.
//!
//! When the buffer or the budget of the process is full, nothing more is read, so the source feels
//! the client's speed.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;

use super::{
    HeldByAnswer, RequestGuard,
    drain::{DrainDebt, DrainRate},
};
use crate::clock::now;

/// About what a buffered frame's place in the queue, and its reference to memory, take.
const FRAME_OVERHEAD_BYTES: usize = 128;
/// The most that is read ahead at a time, in a fraction of a millisecond. Other tasks run before
/// more is read: many large answers may come at once.
const BYTES_AT_A_TIME_MAX: usize = 256 * 1024;

/// The memory for waiting answers, of all ports of a process.
#[derive(Debug, Clone)]
pub struct AnswerBuffers {
    used_bytes: Arc<AtomicUsize>,
    bytes_max: usize,
    per_answer_bytes_max: usize,
    used_gauge: Gauge,
}

impl AnswerBuffers {
    #[must_use]
    pub fn new(per_answer_bytes_max: usize, bytes_max: usize, used_gauge: Gauge) -> Self {
        Self { used_bytes: Arc::default(), bytes_max, per_answer_bytes_max, used_gauge }
    }

    fn take(&self, bytes: usize) {
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.used_gauge.inc_by(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    fn give_back(&self, bytes: usize) {
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.used_gauge.dec_by(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Whether an answer that has `buffered_bytes` may buffer another frame. A frame has at most
    /// the bytes that were read from a socket at once, by which the limits may be exceeded.
    fn has_room(&self, buffered_bytes: usize) -> bool {
        buffered_bytes < self.per_answer_bytes_max
            && self.used_bytes.load(Ordering::Relaxed) < self.bytes_max
    }

    /// Whether so much is in use that an answer of a slow client takes room from other answers.
    fn is_scarce(&self) -> bool {
        self.used_bytes.load(Ordering::Relaxed) > self.bytes_max / 2
    }
}

type BodyFrame = Result<Frame<Bytes>, axum::Error>;

#[derive(Debug)]
struct State {
    /// `None` once the body has ended.
    body: Option<Body>,
    frames: VecDeque<BodyFrame>,
    /// What `frames` take of the budget.
    buffered_bytes: usize,
    /// Bytes of the answer that hyper has taken to send.
    sent_bytes: u64,
    debt: DrainDebt,
    buffers: AnswerBuffers,
}

/// Shared by hyper's body and the connection's task. That task polls both, so the lock is never
/// contended.
#[derive(Debug)]
pub(super) struct Answer {
    state: Mutex<State>,
    /// Whether hyper waits for the body: its last poll since the flag was cleared returned no
    /// frame. Then the body wakes the connection's task when it has one.
    is_awaited: AtomicBool,
}

/// The answer that a connection sends now. It doesn't keep the answer alive: when hyper drops the
/// body, everything that the body holds is released.
#[derive(Debug, Default)]
pub(super) struct CurrentAnswer(Mutex<Weak<Answer>>);

impl CurrentAnswer {
    pub(super) fn get(&self) -> Option<Arc<Answer>> {
        self.0.lock().upgrade()
    }
}

#[derive(Debug)]
pub(super) struct ReadAheadBody {
    answer: Arc<Answer>,
    /// The connection is idle again when hyper drops the body. `None` if it has no place any more.
    _request: Option<RequestGuard>,
    /// Given back with the body, such as the client's share of the requests that are served.
    _held: Option<HeldByAnswer>,
}

impl ReadAheadBody {
    pub(super) fn new(
        body: Body,
        buffers: AnswerBuffers,
        current: &CurrentAnswer,
        (request, held): (Option<RequestGuard>, Option<HeldByAnswer>),
    ) -> Self {
        let state = State {
            body: Some(body),
            frames: VecDeque::new(),
            buffered_bytes: 0,
            sent_bytes: 0,
            debt: DrainDebt::default(),
            buffers,
        };
        let answer =
            Arc::new(Answer { state: Mutex::new(state), is_awaited: AtomicBool::new(false) });
        *current.0.lock() = Arc::downgrade(&answer);
        Self { answer, _request: request, _held: held }
    }
}

impl Answer {
    /// To call before hyper runs, which may poll the body.
    pub(super) fn clear_awaited(&self) {
        self.is_awaited.store(false, Ordering::Relaxed);
    }

    /// Reads ahead unless hyper waits for the body itself. If it doesn't, its client reads too
    /// slowly, or hyper has paused to let other connections run. Returns whether a part waits for
    /// the client, so that the caller must call [`Self::is_too_slow`] from time to time.
    pub(super) fn read_ahead(&self, context: &mut Context<'_>) -> bool {
        let mut state = self.state.lock();
        if !self.is_awaited.load(Ordering::Relaxed) {
            state.read_ahead(context);
        }
        if state.buffered_bytes == 0 {
            // The client has read everything, so what it owed before no longer counts.
            state.debt = DrainDebt::default();
        }
        state.buffered_bytes > 0
    }

    pub(super) fn is_too_slow(&self, rate: DrainRate) -> bool {
        let mut state = self.state.lock();
        let holds_up = state.holds_up();
        let sent_bytes = state.sent_bytes;
        state.debt.update(now(), sent_bytes, holds_up, rate)
    }
}

impl State {
    fn read_ahead(&mut self, context: &mut Context<'_>) {
        let buffered_before = self.buffered_bytes;
        while self.buffers.has_room(self.buffered_bytes) {
            if self.buffered_bytes - buffered_before >= BYTES_AT_A_TIME_MAX {
                context.waker().wake_by_ref();
                return;
            }
            let Some(body) = &mut self.body else { return };
            let Poll::Ready(polled) = Pin::new(&mut *body).poll_frame(context) else { return };
            // A body may end with its last frame, and is then not polled again.
            if polled.as_ref().is_none_or(Result::is_err) || body.is_end_stream() {
                self.body = None;
            }
            let Some(frame) = polled else { return };
            let bytes = frame_bytes(&frame);
            self.buffered_bytes += bytes;
            self.buffers.take(bytes);
            self.frames.push_back(frame);
        }
    }

    /// Whether the source waits for this client, or other answers need its memory.
    fn holds_up(&self) -> bool {
        let has_source_to_wait = self.body.is_some() && !self.buffers.has_room(self.buffered_bytes);
        self.buffered_bytes > 0 && (has_source_to_wait || self.buffers.is_scarce())
    }

    fn pop(&mut self) -> Option<BodyFrame> {
        let frame = self.frames.pop_front()?;
        let bytes = frame_bytes(&frame);
        self.buffered_bytes -= bytes;
        self.buffers.give_back(bytes);
        Some(frame)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.buffers.give_back(self.buffered_bytes);
    }
}

fn frame_bytes(frame: &BodyFrame) -> usize {
    data_bytes(frame) + FRAME_OVERHEAD_BYTES
}

fn data_bytes(frame: &BodyFrame) -> usize {
    frame.as_ref().ok().and_then(Frame::data_ref).map_or(0, Bytes::len)
}

impl http_body::Body for ReadAheadBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut state = self.answer.state.lock();
        let frame = match state.pop() {
            Some(frame) => Some(frame),
            None => match &mut state.body {
                Some(body) => {
                    let polled = Pin::new(body).poll_frame(context);
                    self.answer.is_awaited.store(polled.is_pending(), Ordering::Relaxed);
                    ready!(polled)
                }
                None => None,
            },
        };
        match &frame {
            Some(frame) => state.sent_bytes += data_bytes(frame) as u64,
            None => state.body = None,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let state = self.answer.state.lock();
        state.frames.is_empty() && state.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let state = self.answer.state.lock();
        match &state.body {
            // Hyper asks before it polls, so no frame was taken out of the body yet.
            Some(body) if state.frames.is_empty() => body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

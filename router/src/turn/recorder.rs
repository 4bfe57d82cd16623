//! Follows a placed turn to its end, and makes the record of it: once for each turn, by `Drop`.
//!
//! A turn is one request and its answer. `turn` creates a [`TurnRecorder`] when it has placed a
//! turn, and the answer's body keeps it. The end of the answer, a failure and a client that leaves
//! all drop the recorder. What counts or shows the ends of turns is fed there and nowhere else: the
//! metrics, the keys' limits of tokens, the access log, the trace, and the list of the last turns.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use http::Extensions;
use parking_lot::Mutex;
use proto::{load::Retention, route::Kind};
use service::{
    clock::now,
    traces::{
        record::SpanKind,
        span::{Span, Trace},
    },
};

use super::{
    access_log::AccessEntry,
    directory::SessionDirectory,
    ended::{RecentTurns, TurnRecord},
    placer::PlacedTurn,
    request::Turn,
    shared::Shared,
    spans,
    usage::{TurnTokens, TurnUsage, UsageMeter},
};
use crate::{
    fleet::worker::WorkerRef,
    metrics::{Metrics, TurnOutcome, TurnTokenCounts},
};

/// What gets the record of a turn for its operator, as the request brings it.
#[derive(Debug, Clone, Default)]
pub(super) struct Observers {
    /// The request's entry in the access log. `None` without a log.
    access_entry: Option<Arc<AccessEntry>>,
    /// The turn's trace.
    pub(super) trace: Trace,
}

impl Observers {
    /// Takes the observers of a request out of its extensions.
    pub(super) fn take_from(extensions: &mut Extensions) -> Self {
        let trace = extensions.remove().unwrap_or_default();
        Self { access_entry: extensions.remove(), trace }
    }
}

/// Counts a turn as in flight, and records its end on drop. Its many fields: each that counts or
/// shows the end has its own.
#[derive(Debug)]
pub(crate) struct TurnRecorder {
    metrics: Arc<Metrics>,
    directory: Arc<SessionDirectory>,
    recent_turns: Arc<Mutex<RecentTurns>>,
    worker: WorkerRef,
    /// What is known of the turn so far. `None` only during the drop.
    record: Option<TurnRecord>,
    /// Reads what the turn used. `None` before the turn has a successful answer: then the engine
    /// has computed nothing.
    meter: Option<UsageMeter>,
    /// The tokens of the turn, if its key has a limit of them.
    tokens: Option<TurnTokens>,
    /// When the turn was placed, and the time to its first byte that placement expected.
    placed_at: Instant,
    ttft_expected: Option<Duration>,
    /// When the last part of the answer's body came. `None` before the first.
    last_part_at: Option<Instant>,
    is_stream: bool,
    /// The span of the answer's body, from its head to its end.
    stream: Span,
    observers: Observers,
}

impl TurnRecorder {
    /// Creates the recorder of a turn that has just been placed. `tokens` is what the turn takes
    /// from its key's limit of them.
    pub(super) fn new(
        shared: &Shared,
        turn: &Turn,
        (turn_id, kind, arrived_at): (u64, Kind, Instant),
        placed: &PlacedTurn,
        tokens: Option<TurnTokens>,
    ) -> Self {
        shared.metrics.turns_in_flight.inc();
        let placed_at = now();
        shared.metrics.turn.observe_decision(placed_at.saturating_duration_since(arrived_at));
        let record = TurnRecord {
            turn: turn_id,
            session: turn.session.as_ref().map(|intent| intent.key.clone()),
            parent: turn.parent.clone(),
            kind,
            worker: placed.worker_name.clone(),
            prefill_worker: placed.prefill.as_ref().map(|prefill| prefill.worker_name.clone()),
            reason: placed.reason,
            is_retried: false,
            retention: None,
            status: None,
            arrived_at,
            ttft: None,
            duration: Duration::ZERO,
            uncached_tokens_expected: placed.uncached_tokens_expected,
            usage: TurnUsage::default(),
            // Until the turn ends in another way.
            outcome: TurnOutcome::ClientGone,
        };
        Self {
            metrics: Arc::clone(&shared.metrics),
            directory: Arc::clone(&shared.directory),
            recent_turns: Arc::clone(&shared.recent_turns),
            worker: placed.worker,
            record: Some(record),
            meter: None,
            tokens,
            placed_at,
            ttft_expected: placed.ttft_expected,
            last_part_at: None,
            is_stream: false,
            stream: Span::default(),
            observers: Observers::default(),
        }
    }

    /// Sets who gets the turn's record.
    pub(super) fn set_observers(&mut self, observers: Observers) {
        self.observers = observers;
    }

    /// Records that the turn goes to a second worker.
    pub(super) fn move_to(&mut self, placed: &PlacedTurn) {
        self.worker = placed.worker;
        (self.placed_at, self.ttft_expected) = (now(), placed.ttft_expected);
        let record = self.record_mut();
        record.worker.clone_from(&placed.worker_name);
        record.prefill_worker = placed.prefill.as_ref().map(|prefill| prefill.worker_name.clone());
        record.reason = placed.reason;
        record.is_retried = true;
        record.uncached_tokens_expected = placed.uncached_tokens_expected;
    }

    /// Records the head of the answer. `is_success`: whether its status is 2xx.
    pub(super) fn begin_answer(&mut self, status: u16, is_success: bool, is_stream: bool) {
        self.record_mut().status = Some(status);
        self.is_stream = is_stream;
        self.stream = self.observers.trace.child("stream", SpanKind::Internal);
        self.meter = is_success.then(|| UsageMeter::new(is_stream));
    }

    /// Takes in a part of the answer's body. Returns whether it is the first part.
    pub(super) fn record_data(&mut self, data: &[u8]) -> bool {
        self.metrics.response_bytes.inc_by(data.len() as u64);
        if let Some(meter) = &mut self.meter {
            meter.feed(data);
        }
        let came_at = now();
        if let Some(last_part_at) = self.last_part_at.replace(came_at) {
            if self.is_stream && self.meter.is_some() {
                self.metrics.turn.observe_gap(came_at.saturating_duration_since(last_part_at));
            }
            return false;
        }
        self.record_first_part(came_at);
        true
    }

    /// Whether the client has the answer's closing event. It may leave then, before the body ends.
    pub(super) fn is_closed(&self) -> bool {
        self.meter.as_ref().is_some_and(UsageMeter::is_closed)
    }

    /// Records when the first part of the answer's body came.
    fn record_first_part(&mut self, came_at: Instant) {
        let is_success = self.meter.is_some();
        let record = self.record_mut();
        if !is_success || !record.kind.is_generation() {
            return;
        }
        let elapsed = came_at.saturating_duration_since(record.arrived_at);
        record.ttft = Some(elapsed);
        self.metrics.turn.observe_first_byte(elapsed);
        if let Some(expected) = self.ttft_expected {
            let observed = came_at.saturating_duration_since(self.placed_at);
            self.metrics.turn.compare_ttft(expected, observed);
        }
    }

    /// Records how the turn ends. It ends with the recorder's drop.
    pub(super) fn set_outcome(&mut self, outcome: TurnOutcome) {
        self.record_mut().outcome = outcome;
    }

    fn record_mut(&mut self) -> &mut TurnRecord {
        self.record.as_mut().expect("only the drop takes the record")
    }

    /// Returns how the session's KV is kept on the turn's worker, as its agent last reported it.
    fn retention(&self, record: &TurnRecord) -> Option<Retention> {
        let view = self.directory.view();
        let entries = view.sessions.locate(record.session.as_ref()?);
        let entry = entries.iter().find(|entry| entry.worker == self.worker)?;
        Some(entry.session.retention)
    }
}

impl Drop for TurnRecorder {
    fn drop(&mut self) {
        let Some(mut record) = self.record.take() else { return };
        record.duration = now().saturating_duration_since(record.arrived_at);
        record.retention = self.retention(&record);
        if let Some(meter) = &self.meter {
            record.usage = meter.usage();
            if let Some(tokens) = &mut self.tokens {
                tokens.settle(meter);
            }
        }
        self.metrics.count_turn_end(record.outcome);
        if record.outcome == TurnOutcome::Ok {
            self.metrics.turn.observe_turn(record.duration);
        }
        self.metrics.turn.count_tokens(TurnTokenCounts {
            prompt: record.usage.prompt_tokens,
            cached: record.usage.cached_tokens,
            output: record.usage.output_tokens,
            uncached_expected: record.uncached_tokens_expected,
        });
        self.metrics.turns_in_flight.dec();
        if let Some(entry) = &self.observers.access_entry {
            entry.set_turn(&record);
        }
        spans::end(&self.observers.trace, &record);
        if record.kind.is_generation() {
            self.recent_turns.lock().add(record);
        }
    }
}

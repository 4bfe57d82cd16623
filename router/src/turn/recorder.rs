//! Follows a placed turn to its end, and makes the record of it: once for each turn, by `Drop`.
//!
//! The end of the answer, a failure and a client that leaves all drop the [`TurnRecorder`]. What
//! counts or shows the ends of turns is fed there and nowhere else.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use contract::load::Retention;
use parking_lot::Mutex;
use service::{
    clock::now,
    traces::{record::SpanKind, span::Span},
};

use super::{
    admit::OutboundTurn,
    arrival::Observers,
    ended::{RecentTurns, TurnRecord},
    placer::assignment::Assignment,
    shared::Shared,
    spans,
    usage::{TurnTokens, TurnUsage, UsageMeter},
};
use crate::{
    fleet::worker::WorkerRef,
    metrics::{Metrics, TurnOutcome, TurnTokenCounts},
    sessions::directory::SessionDirectory,
};

/// Records the turn's end on drop.
#[derive(Debug)]
pub(crate) struct TurnRecorder {
    metrics: Arc<Metrics>,
    directory: Arc<SessionDirectory>,
    recent_turns: Arc<Mutex<RecentTurns>>,
    worker: WorkerRef,
    /// `None` only during the drop.
    record: Option<TurnRecord>,
    /// `None` before a successful answer: until then the engine has computed nothing.
    meter: Option<UsageMeter>,
    /// Set if the turn's key has a limit of tokens.
    tokens: Option<TurnTokens>,
    placed_at: Instant,
    ttft_expected: Option<Duration>,
    /// `None` before the first part of the answer's body.
    last_part_at: Option<Instant>,
    is_stream: bool,
    /// The span from the answer's head to its end.
    stream: Span,
    observers: Observers,
}

impl TurnRecorder {
    pub(super) fn new(
        shared: &Shared,
        outbound: &OutboundTurn,
        assignment: &Assignment,
        tokens: Option<TurnTokens>,
    ) -> Self {
        let OutboundTurn { arrival, turn, turn_id, .. } = outbound;
        let arrived_at = arrival.arrived_at;
        shared.metrics.turns_in_flight.inc();
        let placed_at = now();
        shared.metrics.turn.observe_decision(placed_at.saturating_duration_since(arrived_at));
        let record = TurnRecord {
            turn: *turn_id,
            session: turn.session.as_ref().map(|intent| intent.key.clone()),
            parent: turn.parent.clone(),
            kind: arrival.kind,
            worker: assignment.to.name.clone(),
            prefill_worker: prefill_name(assignment),
            reason: assignment.reason,
            is_retried: false,
            retention: None,
            status: None,
            arrived_at,
            ttft: None,
            duration: Duration::ZERO,
            uncached_tokens_expected: assignment.uncached_tokens_expected,
            usage: TurnUsage::default(),
            // Until the turn ends in another way.
            outcome: TurnOutcome::ClientGone,
        };
        Self {
            metrics: Arc::clone(&shared.metrics),
            directory: Arc::clone(&shared.directory),
            recent_turns: Arc::clone(&shared.recent_turns),
            worker: assignment.to.worker,
            record: Some(record),
            meter: None,
            tokens,
            placed_at,
            ttft_expected: assignment.ttft_expected,
            last_part_at: None,
            is_stream: false,
            stream: Span::default(),
            observers: arrival.observers.clone(),
        }
    }

    pub(super) fn move_to(&mut self, assignment: &Assignment) {
        self.worker = assignment.to.worker;
        (self.placed_at, self.ttft_expected) = (now(), assignment.ttft_expected);
        let record = self.record_mut();
        record.worker.clone_from(&assignment.to.name);
        record.prefill_worker = prefill_name(assignment);
        record.reason = assignment.reason;
        record.is_retried = true;
        record.uncached_tokens_expected = assignment.uncached_tokens_expected;
    }

    /// `is_success`: whether the status is 2xx.
    pub(super) fn begin_answer(&mut self, status: u16, is_success: bool, is_stream: bool) {
        self.record_mut().status = Some(status);
        self.is_stream = is_stream;
        self.stream = self.observers.trace.child("stream", SpanKind::Internal);
        self.meter = is_success.then(|| UsageMeter::new(is_stream));
    }

    /// Returns whether it is the first part of the answer's body.
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

    /// The client may leave after the closing event, before the body ends.
    pub(super) fn is_closed(&self) -> bool {
        self.meter.as_ref().is_some_and(UsageMeter::is_closed)
    }

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

    /// The turn ends with the recorder's drop.
    pub(super) fn set_outcome(&mut self, outcome: TurnOutcome) {
        self.record_mut().outcome = outcome;
    }

    fn record_mut(&mut self) -> &mut TurnRecord {
        self.record.as_mut().expect("only the drop takes the record")
    }

    /// Returns the retention that the agent of the turn's worker last reported.
    fn retention(&self, record: &TurnRecord) -> Option<Retention> {
        let view = self.directory.view();
        let entries = view.sessions.locate(record.session.as_ref()?);
        let entry = entries.iter().find(|entry| entry.worker == self.worker)?;
        Some(entry.session.retention)
    }
}

fn prefill_name(assignment: &Assignment) -> Option<String> {
    assignment.prefill.as_ref().map(|prefill| prefill.to.name.clone())
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

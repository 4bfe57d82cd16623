//! Follows the engine: its load, its silence and its pauses, and its end.

use std::time::Duration;

use crate::session::table::{EngineCapacity, EngineLoad, Error, Queue, Step};

/// Once a rank has been idle for this long, the engine's lagging load figures show that.
const LOAD_LAG_MAX: Duration = Duration::from_millis(500);

impl Queue {
    pub(crate) fn check_engine_speaks(&self) -> Result<(), Error> {
        self.silent_reason.clone().map_or(Ok(()), |reason| Err(Error::EngineSilent(reason)))
    }

    pub(crate) fn handle_load(&mut self, step: &mut Step, dp_rank: u32, load: EngineLoad) {
        let (shims, pins) = (&self.histories.shims, &mut self.histories.pins);
        if !shims.has_rank(dp_rank) {
            return;
        }
        let has_pending_close = pins.closes.on_rank(dp_rank).next().is_some();
        let queue_length = i64::try_from(load.waiting_requests).unwrap_or(i64::MAX);
        let rank = self.tickets.load_mut(dp_rank);
        let idle_since = rank.sample(step.now, queue_length, has_pending_close);
        let is_load_current = idle_since.is_some_and(|since| since + LOAD_LAG_MAX <= step.now);
        if !shims.can_verify(dp_rank) && is_load_current {
            pins.estimate_foreign(dp_rank, load.used_tokens);
        }
        self.admit_waiting(step);
    }

    pub(crate) fn set_silent(&mut self, step: &mut Step, reason: Option<String>) {
        self.silent_reason = reason;
        match self.check_engine_speaks() {
            Ok(()) => self.admit_waiting(step),
            Err(error) => self.refuse_waiting(step, &error),
        }
    }

    pub(crate) fn set_hold(&mut self, step: &mut Step, reason: Option<String>) {
        if self.hold_reason == reason {
            return;
        }
        if self.hold_reason.is_some() {
            // An engine that was held back had no time to end them.
            self.tickets.restart_abandoned(step.now);
        }
        let has_turns_inside = self.turns_inside() > 0;
        self.histories.weights.record_hold(has_turns_inside);
        self.hold_reason = reason;
        self.admit_waiting(step);
    }

    pub(crate) fn lose_engine(&mut self, step: &mut Step, next: EngineCapacity) {
        self.refuse_waiting(step, &Error::EngineLost);
        self.tickets.forget_load_samples();
        // Closing sessions are closed now. Those of ranks that no longer exist can't continue.
        for key in self.histories.lose_engine(step, next.page_tokens) {
            let session = &self.sessions()[&key];
            let must_be_dropped =
                session.state.is_closing() || session.dp_rank as usize >= next.ranks.len();
            if must_be_dropped && session.turns.running == 0 {
                self.drop_session(step, &key, &Error::EngineLost);
            }
        }
        self.set_engine(next);
    }
}

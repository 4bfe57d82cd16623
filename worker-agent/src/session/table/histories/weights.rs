//! Keeps pinned sessions from continuing KV of older weights.
//!
//! The *weights epoch* counts the changes. A pinned session of an older epoch is closed, if one of
//! its turns is inside the engine after that turn, and its next turn must send the full history. An
//! unflushed radix tree may keep KV of older weights too, so no pinned incarnation begins before
//! the next flush. Turns on the tree are left to the engine's own rules.

use crate::session::{
    handover::HandedWeights,
    table::{
        Error, GoneReason, Guard, Histories, Session, State, Step,
        histories::losses::forget_tree_kv,
    },
};

#[derive(Debug, Clone, Default)]
pub(crate) struct Weights {
    epoch: u64,
    is_tree_stale: bool,
    /// Whether turns may have left KV in the engine since its last flush.
    may_hold_kv: bool,
    /// The changes that the shim has counted; `None` before it has said so.
    counted: Option<u64>,
    /// Changes that the agent knows of and the shim's count doesn't show yet.
    uncounted: u64,
    /// Changes that the shim has counted while a call of the agent's own is under way, which may
    /// have caused them. And whether the engine had KV of before them.
    early: u64,
    early_has_old_kv: bool,
    /// The shim's count as the agent process before this one knew it.
    handed_count: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightsReport {
    /// Since the engine's process began.
    pub changes: u64,
    /// Whether the engine has KV of before the last change.
    pub has_old_kv: bool,
}

impl Weights {
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn record_turn(&mut self) {
        self.may_hold_kv = true;
    }

    /// Turns inside a paused engine, which may have been flushed meanwhile, run once it goes on.
    pub(crate) fn record_hold(&mut self, has_turns_inside: bool) {
        self.may_hold_kv |= has_turns_inside;
    }

    /// `runs_turns`: the engine runs turns, which may fill the pool again at once.
    pub(super) fn record_empty_pool(&mut self, runs_turns: bool) {
        self.may_hold_kv = runs_turns;
    }

    pub(super) fn hand_over(&self) -> HandedWeights {
        let Self { epoch, counted, uncounted, is_tree_stale, .. } = *self;
        let counted = counted.map(|counted| counted + uncounted);
        HandedWeights { epoch, counted, is_tree_stale }
    }

    pub(super) fn take_over(&mut self, handed: HandedWeights) {
        self.epoch = self.epoch.max(handed.epoch);
        self.handed_count = handed.counted;
        self.is_tree_stale |= handed.is_tree_stale;
    }

    /// For the next engine.
    pub(super) fn reset(&mut self) {
        // This agent process may have found an engine that others have used.
        *self = Self { epoch: self.epoch + 1, may_hold_kv: true, ..Self::default() };
    }
}

impl Session {
    /// Whether the session is pinned and at rest, and the engine may have KV for its next turn.
    pub(super) fn may_continue_kv(&self) -> bool {
        let may_hold_kv = match &self.state {
            State::Open(row) => self.history.tokens > 0 || row.resident_tokens > 0,
            State::Demoting { .. } | State::Demoted | State::Suspect { .. } => true,
            _ => false,
        };
        may_hold_kv && self.turns.running == 0
    }
}

impl Histories {
    /// A pinned incarnation would find KV of older weights in the radix tree.
    pub(crate) fn check_tree_is_current(&self) -> Result<(), Error> {
        let is_guard_on = self.settings.guards.is_on(Guard::WeightsFence);
        if self.weights.is_tree_stale && is_guard_on { Err(Error::CacheOutdated) } else { Ok(()) }
    }

    /// Begins an epoch if the shim has counted changes that aren't the agent's, and returns whether
    /// it has. `is_changing`: a call of the agent's own changes the weights now.
    pub(super) fn handle_weights_report(
        &mut self,
        step: &mut Step,
        report: WeightsReport,
        is_changing: bool,
    ) -> bool {
        let WeightsReport { changes, has_old_kv } = report;
        let is_first = self.weights.counted.is_none();
        let known = self.weights.counted.or(self.weights.handed_count.take()).unwrap_or(0);
        let new = changes.saturating_sub(known);
        let own = new.min(self.weights.uncounted);
        self.weights.uncounted -= own;
        self.weights.counted = Some(changes.max(known));
        if is_first {
            self.weights.is_tree_stale |= has_old_kv;
        }
        if new > own && is_changing {
            // No turn begins before the call has ended, so there is time.
            self.weights.early += new - own;
            self.weights.early_has_old_kv = has_old_kv;
            return false;
        }
        begin_foreign_epochs(self, step, new - own, has_old_kv)
    }

    /// The agent's own calls have ended, so the changes that none of them explains are of others.
    /// Returns whether there are any.
    pub(super) fn settle_weights(&mut self, step: &mut Step) -> bool {
        let foreign = std::mem::take(&mut self.weights.early);
        begin_foreign_epochs(self, step, foreign, self.weights.early_has_old_kv)
    }

    pub(super) fn handle_weights_changed(
        &mut self,
        step: &mut Step,
        is_counted: bool,
        was_flushed: bool,
        runs_turns: bool,
    ) {
        if is_counted && self.weights.early > 0 {
            self.weights.early -= 1;
        } else {
            self.weights.uncounted += u64::from(is_counted);
        }
        let is_tree_stale = self.weights.may_hold_kv && !was_flushed;
        if was_flushed {
            self.weights.record_empty_pool(runs_turns);
        }
        begin_epoch(self, step, is_tree_stale);
    }

    pub(super) fn handle_flush(&mut self, step: &mut Step, runs_turns: bool) {
        self.weights.is_tree_stale = false;
        self.weights.record_empty_pool(runs_turns);
        self.close_all_with_kv(step, GoneReason::Reclaimed);
        forget_tree_kv(&mut self.pins.sessions, step);
    }
}

fn begin_foreign_epochs(
    histories: &mut Histories,
    step: &mut Step,
    changes: u64,
    has_old_kv: bool,
) -> bool {
    if changes > 0 {
        histories.weights.epoch += changes - 1;
        histories.weights.may_hold_kv = true;
        begin_epoch(histories, step, has_old_kv);
    }
    changes > 0
}

fn begin_epoch(histories: &mut Histories, step: &mut Step, is_tree_stale: bool) {
    histories.weights.epoch += 1;
    histories.weights.is_tree_stale = is_tree_stale;
    if histories.settings.guards.is_on(Guard::WeightsFence) {
        histories.close_all_with_kv(step, GoneReason::WeightsChanged);
    }
    forget_tree_kv(&mut histories.pins.sessions, step);
}

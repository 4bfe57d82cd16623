//! Keeps pinned sessions from continuing KV of older weights, and holds turns back on request.
//!
//! The *weights epoch* counts the changes. A pinned session of an older epoch is closed, if one of
//! its turns is inside the engine after that turn, and its next turn must send the full history. An
//! unflushed radix tree may keep KV of older weights too, so no pinned incarnation begins before
//! the next flush. Turns on the tree are left to the engine's own rules.

use std::time::Instant;

use contract::id::SessionKey;

use super::{Error, GoneReason, Guard, Session, State, Table};
use crate::session::handover::HandedWeights;

#[derive(Debug, Clone, Default)]
pub(super) struct WeightsState {
    epoch: u64,
    pub(super) is_tree_stale: bool,
    /// Whether turns may have left KV in the engine since its last flush.
    may_hold_kv: bool,
    /// `None` if turns go to the engine.
    hold_reason: Option<String>,
    /// The changes that the shim has counted; `None` before it has said so.
    counted: Option<u64>,
    /// Changes that the agent knows of and the shim's count doesn't show yet.
    uncounted: u64,
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

impl WeightsState {
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn record_turn(&mut self) {
        self.may_hold_kv = true;
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

impl Table {
    #[must_use]
    pub fn weights_epoch(&self) -> u64 {
        self.weights.epoch()
    }

    pub(super) fn hand_over_weights(&self) -> HandedWeights {
        let WeightsState { epoch, counted, uncounted, .. } = self.weights;
        HandedWeights { epoch, counted: counted.map(|counted| counted + uncounted) }
    }

    pub(super) fn take_over_weights(&mut self, handed: HandedWeights) {
        self.weights.epoch = self.weights.epoch.max(handed.epoch);
        self.weights.handed_count = handed.counted;
    }

    #[must_use]
    pub fn hold_reason(&self) -> Option<&String> {
        self.weights.hold_reason.as_ref()
    }

    /// Holds back the turns that are not inside the engine, for example because it is paused. They
    /// wait in the queue like turns without room, and are refused with the reason after too long a
    /// wait. `None` lets them go on.
    pub fn set_hold(&mut self, now: Instant, reason: Option<String>) {
        if self.weights.hold_reason == reason {
            return;
        }
        // Turns inside a paused engine, which may have been flushed meanwhile, run once it goes on.
        self.weights.may_hold_kv |= self.turns_inside() > 0;
        self.weights.hold_reason = reason;
        self.process_queue(now);
        self.debug_check();
    }

    /// Handles a change that the agent has caused. `is_counted`: the shim counts it too.
    /// `was_flushed`: the engine freed all its KV with the change.
    pub fn handle_weights_changed(&mut self, now: Instant, is_counted: bool, was_flushed: bool) {
        self.weights.uncounted += u64::from(is_counted);
        let is_tree_stale = self.weights.may_hold_kv && !was_flushed;
        if was_flushed {
            self.note_empty_pool();
        }
        self.begin_epoch(now, is_tree_stale);
    }

    /// Begins an epoch if the shim has counted changes that aren't the agent's.
    pub fn handle_weights_report(&mut self, now: Instant, report: WeightsReport) {
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
        if new > own {
            self.weights.epoch += new - own - 1;
            self.weights.may_hold_kv = true;
            self.begin_epoch(now, has_old_kv);
        }
    }

    fn begin_epoch(&mut self, now: Instant, is_tree_stale: bool) {
        self.weights.epoch += 1;
        self.weights.is_tree_stale = is_tree_stale;
        if self.settings.guards.is_on(Guard::WeightsFence) {
            self.close_all_with_kv(now, GoneReason::WeightsChanged);
        }
        self.forget_tree_kv();
        self.process_queue(now);
        self.debug_check();
    }

    /// The engine has freed all its KV.
    pub fn handle_flush(&mut self, now: Instant) {
        self.weights.is_tree_stale = false;
        self.note_empty_pool();
        self.close_all_with_kv(now, GoneReason::Reclaimed);
        self.forget_tree_kv();
        self.process_queue(now);
        self.debug_check();
    }

    pub(super) fn reset_weights(&mut self) {
        let epoch = self.weights.epoch + 1;
        let hold_reason = self.weights.hold_reason.take();
        // This agent process may have found an engine that others have used.
        let may_hold_kv = true;
        self.weights = WeightsState { epoch, may_hold_kv, hold_reason, ..WeightsState::default() };
    }

    /// Unless turns are inside an engine that runs, which may fill the pool again at once.
    fn note_empty_pool(&mut self) {
        self.weights.may_hold_kv = self.turns_inside() > 0 && self.weights.hold_reason.is_none();
    }

    fn close_all_with_kv(&mut self, now: Instant, reason: GoneReason) {
        let keys = self.sessions.keys(Session::may_continue_kv);
        keys.iter().for_each(|key| self.close_as_gone(now, key, reason));
    }

    fn forget_tree_kv(&mut self) {
        let in_tree =
            |session: &Session| session.state.tree().is_some_and(|tree| tree.resident_tokens > 0);
        for key in self.sessions.keys(in_tree) {
            self.change_session(&key, |session| session.state.forget_tree_kv());
        }
    }

    /// The weights may have changed during the session's last turn.
    pub(super) fn close_outdated(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        let is_outdated = session.kv_epoch < self.weights.epoch && session.may_continue_kv();
        if is_outdated && self.settings.guards.is_on(Guard::WeightsFence) {
            self.close_as_gone(now, key, GoneReason::WeightsChanged);
        }
    }

    /// A pinned incarnation would find KV of older weights in the radix tree.
    pub(super) fn check_tree_is_current(&self) -> Result<(), Error> {
        let is_stale = self.weights.is_tree_stale;
        if is_stale && self.settings.guards.is_on(Guard::WeightsFence) {
            return Err(Error::CacheOutdated);
        }
        Ok(())
    }
}

//! Keeps pinned sessions from continuing KV of older weights, and holds turns back on request.
//!
//! A trainer replaces the weights of a running engine. KV that was computed with the old weights is
//! wrong for the new ones. The *weights epoch* counts the changes. The KV of a pinned session
//! belongs to the epoch in which its incarnation (its life in the engine) began to hold KV. After
//! a change, no turn continues such a session: it is closed at the engine, and its next turn must
//! send the full history. A turn that is inside the engine meanwhile ends first.
//!
//! The radix tree may keep KV of older weights too, if the engine wasn't flushed. A new pinned
//! incarnation would begin with that KV, so none begins before the next flush. Turns on the tree
//! are left to the engine's own rules.
//!
//! The owner task says what was done to the engine. This module does no I/O.

use std::time::Instant;

use proto::id::SessionKey;

use super::{Error, GoneReason, Guard, Session, State, Table};
use crate::session::handover::HandedWeights;

/// What the table knows of the engine's weights.
#[derive(Debug, Clone, Default)]
pub(super) struct WeightsState {
    epoch: u64,
    /// Whether the radix tree may hold KV of older weights.
    is_tree_stale: bool,
    /// Whether turns may have left KV in the engine since its last flush.
    may_hold_kv: bool,
    /// Why no turn goes to the engine; `None` if turns do.
    hold_reason: Option<String>,
    /// The number of changes that the engine's shim has counted; `None` before it has said so. The
    /// shim is Berth's part in the engine's process.
    counted: Option<u64>,
    /// Changes that the agent knows of and the shim's count doesn't show yet.
    uncounted: u64,
    /// What the last agent process handed over of the shim's count.
    handed_count: Option<u64>,
}

/// What the engine's shim says of the engine's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightsReport {
    /// The number of changes since the engine's process began.
    pub changes: u64,
    /// Whether the engine has KV that it computed before the last change.
    pub has_old_kv: bool,
}

impl WeightsState {
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Notes that a turn goes to the engine.
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
    /// Returns the weights epoch: a number that rises with each change of the engine's weights.
    #[must_use]
    pub fn weights_epoch(&self) -> u64 {
        self.weights.epoch()
    }

    /// Whether the engine's radix tree may hold KV of older weights, until the engine is flushed.
    #[must_use]
    pub fn has_stale_tree(&self) -> bool {
        self.weights.is_tree_stale
    }

    /// Returns what the next agent process must know of the weights.
    pub(super) fn hand_over_weights(&self) -> HandedWeights {
        let WeightsState { epoch, counted, uncounted, .. } = self.weights;
        HandedWeights { epoch, counted: counted.map(|counted| counted + uncounted) }
    }

    /// Continues with what the last agent process handed over.
    pub(super) fn take_over_weights(&mut self, handed: HandedWeights) {
        self.weights.epoch = self.weights.epoch.max(handed.epoch);
        self.weights.handed_count = handed.counted;
    }

    /// Returns why turns are held back, as the table was told.
    #[must_use]
    pub fn hold_reason(&self) -> Option<&String> {
        self.weights.hold_reason.as_ref()
    }

    /// Holds back all turns that are not inside the engine, for example because the engine is
    /// paused. They wait as for room, and are refused with the reason when they have waited too
    /// long. `None` lets them go on.
    pub fn set_hold(&mut self, now: Instant, reason: Option<String>) {
        if self.weights.hold_reason == reason {
            return;
        }
        // A paused engine may have been flushed while turns waited in it. They run now.
        self.weights.may_hold_kv |= self.turns_inside() > 0;
        self.weights.hold_reason = reason;
        self.process_queue(now);
        self.debug_check();
    }

    /// Handles a change of the engine's weights that the agent has caused. `is_counted`: the shim
    /// counts it too. `was_flushed`: the engine freed all its KV with the change, so its radix tree
    /// holds no KV of older weights.
    pub fn handle_weights_changed(&mut self, now: Instant, is_counted: bool, was_flushed: bool) {
        self.weights.uncounted += u64::from(is_counted);
        let is_tree_stale = self.weights.may_hold_kv && !was_flushed;
        if was_flushed {
            self.note_empty_pool();
        }
        self.begin_epoch(now, is_tree_stale);
    }

    /// Handles the shim's report of the weights. Others than the agent may have changed them.
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

    /// Begins the next weights epoch. `is_tree_stale`: the radix tree may hold KV of older weights.
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

    /// Handles a flush, by which the engine has freed all its KV.
    pub fn handle_flush(&mut self, now: Instant) {
        self.weights.is_tree_stale = false;
        self.note_empty_pool();
        self.close_all_with_kv(now, GoneReason::Reclaimed);
        self.forget_tree_kv();
        self.process_queue(now);
        self.debug_check();
    }

    /// Forgets what was known of the KV of an engine process that has ended.
    pub(super) fn reset_weights(&mut self) {
        let epoch = self.weights.epoch + 1;
        let hold_reason = self.weights.hold_reason.take();
        // This agent process may have found an engine that others have used.
        let may_hold_kv = true;
        self.weights = WeightsState { epoch, may_hold_kv, hold_reason, ..WeightsState::default() };
    }

    /// Notes that the engine's pool is empty. A turn on its way to an engine that isn't held back
    /// may fill it at once.
    fn note_empty_pool(&mut self) {
        self.weights.may_hold_kv = self.turns_inside() > 0 && self.weights.hold_reason.is_none();
    }

    /// Closes each pinned session at rest that the engine may have KV for.
    fn close_all_with_kv(&mut self, now: Instant, reason: GoneReason) {
        let keys = self.sessions.keys(Session::may_continue_kv);
        keys.iter().for_each(|key| self.close_as_gone(now, key, reason));
    }

    /// Counts the KV of sessions on the radix tree as not resident.
    fn forget_tree_kv(&mut self) {
        let in_tree =
            |session: &Session| session.state.tree().is_some_and(|tree| tree.resident_tokens > 0);
        for key in self.sessions.keys(in_tree) {
            self.change_session(&key, |session| session.state.forget_tree_kv());
        }
    }

    /// Closes a pinned session at the engine if the weights have changed during its last turn.
    pub(super) fn close_outdated(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        let is_outdated = session.kv_epoch < self.weights.epoch && session.may_continue_kv();
        if is_outdated && self.settings.guards.is_on(Guard::WeightsFence) {
            self.close_as_gone(now, key, GoneReason::WeightsChanged);
        }
    }

    /// Refuses to begin a pinned incarnation that would find KV of older weights in the radix tree.
    pub(super) fn check_tree_is_current(&self) -> Result<(), Error> {
        let is_stale = self.weights.is_tree_stale;
        if is_stale && self.settings.guards.is_on(Guard::WeightsFence) {
            return Err(Error::CacheOutdated);
        }
        Ok(())
    }
}

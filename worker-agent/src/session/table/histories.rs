//! Owns what is known of sessions' histories at the engine, and decides which turn continues which.
//!
//! The states of a session, and how events change them, are in [`super::super::lifecycle`]. This
//! owner keeps what decides between them: what the engine offers, what its shims can do and are
//! asked, its weights, and how each turn inside runs.

pub(super) mod asides;
mod demotion;
mod doubt;
mod ends;
pub(super) mod handover;
mod losses;
mod pinning;
mod reopen;
mod retentions;
pub(super) mod running_turns;
mod shim_requests;
mod shims;
pub(super) mod trim;
pub(super) mod trim_turn;
pub(super) mod volatile_prefix;
pub(super) mod weights;

use std::sync::Arc;

use contract::id::SessionKey;

use self::{
    retentions::Retentions, running_turns::RunningTurns, shim_requests::ShimRequests, shims::Shims,
    weights::Weights,
};
use crate::session::table::{EngineCapacity, Guard, Pins, Step, TableSettings};

#[derive(Debug)]
pub(super) struct Histories {
    pub(super) pins: Pins,
    pub(super) retentions: Retentions,
    pub(super) shims: Shims,
    pub(super) shim_requests: ShimRequests,
    pub(super) weights: Weights,
    pub(super) turns: RunningTurns,
    settings: Arc<TableSettings>,
}

impl Histories {
    pub(super) fn new(settings: &Arc<TableSettings>, engine: EngineCapacity) -> Self {
        let mut histories = Self {
            pins: Pins::new(settings, &engine),
            retentions: Retentions::default(),
            shims: Shims::default(),
            shim_requests: ShimRequests::new(settings),
            weights: Weights::default(),
            turns: RunningTurns::default(),
            settings: Arc::clone(settings),
        };
        histories.set_engine(engine);
        histories
    }

    /// Figures of ranks that no longer exist stay, because turns there must still end.
    pub(super) fn set_engine(&mut self, engine: EngineCapacity) {
        self.pins.set_engine(&engine);
        self.shims.add_ranks(engine.ranks.len());
        self.shim_requests.add_ranks(engine.ranks.len());
        self.retentions.set_offered(engine.retentions);
    }

    /// No shim of the lost engine is there any more, and what they were asked doesn't count.
    /// Returns all sessions.
    pub(super) fn lose_engine(
        &mut self,
        step: &mut Step,
        next_page_tokens: u64,
    ) -> Vec<SessionKey> {
        self.pins.lose_engine(next_page_tokens);
        self.weights.reset();
        self.shims.ranks().for_each(|dp_rank| self.forget_shim(dp_rank));
        losses::lose_all(&mut self.pins.sessions, step)
    }

    pub(super) fn forget_shim(&mut self, dp_rank: u32) {
        self.shims.disconnect(dp_rank);
        self.shim_requests.clear(dp_rank);
        self.pins.sessions.set_can_demote(dp_rank, false);
    }

    pub(super) fn check_invariants(&self) {
        self.pins.check_invariants();
        self.shim_requests.check_invariants();
        let guards = self.settings.guards;
        for (_, session) in self.pins.sessions.iter() {
            let is_single = self.turns.pinned_in(&session.incarnation).count() <= 1;
            let is_checked = guards.is_on(Guard::EndAcknowledged) && guards.is_on(Guard::OneTurn);
            assert!(is_single || !is_checked, "two turns run on one history");
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::session::table::{
        Effect, GoneReason, KvChange, SessionEvent, State, WeightsReport,
        tests::{key, owners::Owners},
    };

    #[test]
    fn a_history_that_ends_is_closed_under_its_old_id_and_its_client_is_told() {
        let mut owners = Owners::new();
        owners.insert_open("s", 100);
        let old = owners.sessions()[&key("s")].incarnation.clone();
        owners.step(|queue, step| {
            queue.histories.close_as_gone(step, &key("s"), GoneReason::KvCorrupt);
        });
        let session = &owners.sessions()[&key("s")];
        assert!(matches!(session.state, State::Gone { reason: GoneReason::KvCorrupt, .. }));
        assert_ne!(session.incarnation, old);
        let effects = owners.table.take_effects();
        assert_eq!(effects[0], Effect::SessionEvent(key("s"), SessionEvent::Corrupt));
        assert!(matches!(&effects[1], Effect::Close(close) if close.incarnation == old));
    }

    #[test]
    fn a_change_of_the_weights_that_the_shim_counts_too_is_one_change() {
        let mut owners = Owners::new();
        owners.insert_open("s", 100);
        let mut apply = |change| {
            owners.step(|queue, step| {
                queue.histories.apply_kv_change(step, change, false);
                queue.histories.weights.epoch()
            })
        };
        assert_eq!(apply(KvChange::Weights { is_counted: true, was_flushed: true }), 1);
        let counted = |changes| WeightsReport { changes, has_old_kv: false };
        let counted =
            |changes| KvChange::WeightsCounted { report: counted(changes), is_changing: false };
        assert_eq!(apply(counted(1)), 1, "the agent's own");
        assert_eq!(apply(counted(3)), 3, "and two that others caused");
        assert!(owners.sessions()[&key("s")].is_gone(), "no turn continues KV of older weights");
    }
}

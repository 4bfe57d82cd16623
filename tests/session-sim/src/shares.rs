//! The promises about principals: none takes so much that others get nothing.
//!
//! With several ranks a ticket's rank isn't known here before its admission, so the order of
//! tickets is checked only with one rank.

use std::{collections::BTreeMap, time::Duration};

use service::refusal::Code;
use worker_agent::session::{self, PrincipalView};

use super::{
    turns::{Stage, Turn},
    world::World,
};

/// All principals of the simulation.
const PRINCIPALS: [&str; 4] = ["hostile", "p0", "p1", "p2"];
/// A plain turn that waits for a row gets that of an idle pinned session within this time.
const ROW_TAKEN_WITHIN: Duration = Duration::from_millis(1_500);

pub(super) type PrincipalViews = BTreeMap<&'static str, PrincipalView>;

impl World {
    /// Returns what each principal has on the only rank; empty with several ranks or none.
    pub(super) fn principal_views(&self) -> PrincipalViews {
        let now = self.instant();
        let Some(agent) = self.agent.as_ref().filter(|agent| agent.instance.is_some()) else {
            return BTreeMap::new();
        };
        let principals = PRINCIPALS.iter().filter(|_| self.plan.ranks == 1);
        principals.map(|name| (*name, agent.table.principal_view(now, name, 0))).collect()
    }

    /// Checks who got places in the engine since `before`.
    pub(super) fn check_shares(&self, before: &PrincipalViews) {
        let after = self.principal_views();
        let rows = self.plan.core.max_running_requests as u64;
        let share = (rows * u64::from(self.plan.table_settings.shares.turns_milli) / 1000).max(1);
        for (name, now) in &after {
            let Some(then) = before.get(name) else { continue };
            let (turns, plain) =
                (now.running.saturating_sub(then.running), now.plain.saturating_sub(then.plain));
            if plain == 0 || turns != plain {
                continue;
            }
            for (other, view) in after.iter().filter(|(other, _)| *other != name) {
                let waited = before.get(other).is_some_and(|then| then.queued > 0);
                if !waited || view.queued == 0 {
                    continue;
                }
                assert!(
                    u64::from(now.plain) <= share,
                    "{name} has {} turns inside while {other} waits, its share is {share}",
                    now.plain
                );
                let is_next = self.oldest_queued(other).is_some_and(|turn| self.is_small(turn));
                assert!(
                    !is_next || view.is_at_share || now.running <= view.running + 1,
                    "{name} has {} turns inside and {other} {}, which waits",
                    now.running,
                    view.running
                );
            }
        }
    }

    fn oldest_queued(&self, principal: &str) -> Option<&Turn> {
        let of_principal = |turn: &&Turn| {
            turn.stage == Stage::Queued && self.users[turn.user].principal() == principal
        };
        self.turns.values().filter(of_principal).min_by_key(|turn| turn.queued)
    }

    /// Whether the turn has no session, and never waits for pinned sessions to give up KV.
    fn is_small(&self, turn: &Turn) -> bool {
        let core = &self.plan.core;
        let tokens = 2 * turn.ids.len() + turn.max_new + 4 * core.page_size + 64;
        let beside_pins = core.total_tokens() as u64 - self.plan.pin_tokens_max;
        turn.claim.is_none() && tokens as u64 <= beside_pins
    }

    /// Checks that no principal has more sessions than it may.
    pub(super) fn check_session_shares(&self) {
        let Some(agent) = &self.agent else { return };
        let max = self.plan.table_settings.shares.principal_sessions_max;
        for principal in PRINCIPALS {
            let of_principal =
                agent.table.sessions().iter().filter(|(key, _)| key.principal() == principal);
            let count = of_principal.count();
            assert!(count <= max, "{principal} has {count} sessions, {max} are allowed");
        }
    }

    /// Checks that a refused turn or open couldn't have taken the place of a principal with more.
    pub(super) fn check_share_refusal(&self, rid: &str, error: &session::Error) {
        let session::Error::OutOfRoom { resource, .. } = error else { return };
        let views = self.principal_views();
        let turn = self.turns.values().find(|turn| turn.rid == rid);
        let user = match turn {
            Some(turn) => Some(&self.users[turn.user]),
            None => self.users.iter().find(|user| user.opening.as_deref() == Some(rid)),
        };
        let Some((user, own)) = user.and_then(|user| Some((user, views.get(user.principal())?)))
        else {
            return;
        };
        for (other, view) in views.iter().filter(|(other, _)| **other != user.principal()) {
            match *resource {
                // Other tickets may have left the queue in the same call of the table.
                Code::QueuePlaces => {
                    let before = &self.views_before;
                    let queued_before = |name| before.get(name).map_or(0, |view| view.queued);
                    let others = view.queued.min(queued_before(*other));
                    assert!(
                        others <= own.queued.max(queued_before(user.principal())) + 1,
                        "{rid} found no place in the queue, where {other} has {others}"
                    );
                }
                Code::Rows if view.rows_held > own.rows_held + 1 => {
                    let agent = self.agent.as_ref().expect("it has refused the turn");
                    let mut pins = agent.table.sessions().pins_at_rest(0);
                    let takes = pins.any(|(key, _)| key.principal() == *other);
                    assert!(!takes, "{rid} found no row, and {other} holds {}", view.rows_held);
                }
                _ => {}
            }
        }
    }

    /// Checks that no plain turn waits for a row that an idle pinned session holds.
    pub(super) fn check_plain_turns_get_rows(&self) {
        let now = self.instant();
        let Some(agent) = self.agent.as_ref().filter(|agent| agent.follows()) else { return };
        if agent.table.queue().hold_reason().is_some()
            || self.plan.ranks > 1
            || self.principal_views().is_empty()
        {
            return;
        }
        let totals = agent.table.totals(0);
        let views = self.principal_views();
        let plain: u32 = views.values().map(|view| view.plain).sum();
        let rows = u32::try_from(self.plan.core.max_running_requests).expect("few rows");
        let has_row = plain < rows.saturating_sub(totals.rows_held);
        if has_row || totals.turns_running >= self.plan.turns_max {
            return;
        }
        let waits = |turn: &&Turn| {
            turn.stage == Stage::Queued
                && turn.queued.max(self.held_until) + ROW_TAKEN_WITHIN < self.now
                && !views[self.users[turn.user].principal()].is_at_share
                && self.is_small(turn)
        };
        let Some(turn) = self.turns.values().find(waits) else { return };
        let idle_min = self.plan.table_settings.demote_idle + ROW_TAKEN_WITHIN;
        let idle = agent
            .table
            .sessions()
            .pins_at_rest(0)
            .find(|(_, session)| session.idle(now) > idle_min);
        assert!(
            idle.is_none(),
            "{} waits for a row, and {:?} holds one idly",
            turn.rid,
            idle.map(|(key, _)| key)
        );
    }
}

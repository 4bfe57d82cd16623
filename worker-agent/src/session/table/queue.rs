//! Owns the tickets: who waits and who is inside the engine, in which order, and for how long.
//!
//! It is the highest owner: to decide which ticket goes on, it asks and changes all others.

mod admission;
pub(super) mod backlog;
mod claims;
mod deadlines;
mod engine;
mod history_wait;
mod leaving;
mod pace;
mod plans;
pub(super) mod shares;
mod shim_reports;
mod ticket;
mod tickets;
mod turn_shares;

use std::{sync::Arc, time::Instant};

use self::{
    pace::QueuePace,
    ticket::{Inside, Ticket},
    tickets::Tickets,
};
use crate::session::table::{
    EngineCapacity, Guard, Histories, KvChange, Pins, PromptStart, Sessions, Step, TableSettings,
};

#[derive(Debug)]
pub struct Queue {
    pub(super) histories: Histories,
    tickets: Tickets,
    pace: QueuePace,
    /// When the first turn that waits for its session's history has waited long enough.
    history_awaited_until: Option<Instant>,
    /// Why the engine counts as silent; `None` while it speaks.
    silent_reason: Option<String>,
    /// Why turns don't go to the engine; `None` if they do.
    hold_reason: Option<String>,
    settings: Arc<TableSettings>,
}

impl Queue {
    pub(super) fn new(settings: &Arc<TableSettings>, engine: EngineCapacity) -> Self {
        let mut tickets = Tickets::default();
        tickets.add_ranks(engine.ranks.len());
        Self {
            histories: Histories::new(settings, engine),
            tickets,
            pace: QueuePace::default(),
            history_awaited_until: None,
            silent_reason: None,
            hold_reason: None,
            settings: Arc::clone(settings),
        }
    }

    /// Figures of ranks that no longer exist stay, because turns there must still end.
    fn set_engine(&mut self, engine: EngineCapacity) {
        self.tickets.add_ranks(engine.ranks.len());
        self.histories.set_engine(engine);
    }

    pub(super) fn sessions(&self) -> &Sessions {
        &self.histories.pins.sessions
    }

    fn sessions_mut(&mut self) -> &mut Sessions {
        &mut self.histories.pins.sessions
    }

    pub(super) fn pins(&self) -> &Pins {
        &self.histories.pins
    }

    /// The turns inside the engine.
    pub fn rids_inside(&self) -> impl Iterator<Item = &str> {
        self.tickets.inside().map(|(rid, ..)| rid)
    }

    #[must_use]
    pub fn turns_inside(&self) -> usize {
        self.tickets.turns_inside()
    }

    #[must_use]
    pub fn hold_reason(&self) -> Option<&String> {
        self.hold_reason.as_ref()
    }

    #[must_use]
    pub fn silent_reason(&self) -> Option<&String> {
        self.silent_reason.as_ref()
    }

    pub(super) fn set_prompt_start(&mut self, rid: &str, start: PromptStart) {
        self.tickets.set_prompt_start(rid, start);
    }

    pub(super) fn apply_kv_change(&mut self, step: &mut Step, change: KvChange<'_>) {
        let runs_turns = self.turns_inside() > 0 && self.hold_reason.is_none();
        if self.histories.apply_kv_change(step, change, runs_turns) {
            self.admit_waiting(step);
        }
    }

    /// Aborted turns whose end the engine has not told for `stuck_after`.
    pub(super) fn stuck_turns(&self, now: Instant) -> usize {
        let abandoned = self.tickets.inside().filter_map(|(_, _, inside)| inside.abandoned_since);
        abandoned.filter(|since| *since + self.settings.stuck_after <= now).count()
    }

    pub(super) fn check_invariants(&self) {
        self.histories.check_invariants();
        self.tickets.check_invariants();
        let large = |(_, ticket): (&str, &Ticket)| Some((ticket.dp_rank, ticket.large_tokens()?));
        self.pins().large_turns.check_invariants(self.tickets.iter().filter_map(large));
        let is_known = self.rids_inside().eq(self.histories.turns.rids());
        assert!(is_known, "other turns run than are inside");
        let is_same = |(rid, _, inside): (&str, &Ticket, &Inside)| {
            let turn = self.histories.turns.get(rid);
            turn.is_some_and(|turn| turn.runs_pinned() == inside.runs_pinned())
        };
        assert!(self.tickets.inside().all(is_same), "a turn runs in its session and beside it");
        for dp_rank in self.pins().ranks() {
            let turns_max = self.pins().capacity(dp_rank).map_or(0, |capacity| capacity.turns_max);
            assert!(self.tickets.load(dp_rank).running <= turns_max, "too many turns inside");
        }
        if !self.settings.guards.is_on(Guard::EndAcknowledged) {
            return;
        }
        for (_, session) in self.sessions().iter() {
            let tickets = self.tickets.iter().map(|(_, ticket)| ticket);
            let mine = tickets.filter(|ticket| ticket.is_of(session.generation));
            let (waiting, others): (Vec<&Ticket>, Vec<&Ticket>) =
                mine.partition(|ticket| ticket.is_waiting_turn());
            let running = others.iter().filter(|ticket| ticket.inside().is_some()).count();
            assert_eq!(session.turns.waiting as usize, waiting.len(), "a claim isn't counted");
            assert_eq!(session.turns.running as usize, running, "a turn isn't counted");
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::session::table::{
        ClaimRequest, Effect, Error, Need, Outcome, RouteTurns, tests::owners::Owners,
    };

    /// Lets a turn without a session come, and returns the effects.
    fn come(owners: &mut Owners, rid: &str) -> Vec<Effect> {
        let request = ClaimRequest {
            principal: "p".into(),
            claim: None,
            is_hint: false,
            returns_soon: false,
            requested_rank: None,
            route_turns: RouteTurns::Nothing,
        };
        let need = Need { prompt_tokens: 8, answer_tokens: Some(8), ..Need::default() };
        owners.step(|queue, step| {
            queue.claim(step, rid, &request).unwrap();
            assert!(queue.enqueue(step, rid, need));
        });
        owners.table.take_effects()
    }

    fn admits(effects: &[Effect], rid: &str) -> bool {
        effects.iter().any(|effect| matches!(effect, Effect::Admitted { rid: it, .. } if it == rid))
    }

    #[test]
    fn a_turn_beyond_the_limit_waits_for_the_end_of_another() {
        let mut owners = Owners::new();
        for rid in ["1", "2", "3", "4", "5", "6"] {
            assert!(admits(&come(&mut owners, rid), rid));
        }
        assert_eq!(come(&mut owners, "7"), []);
        let queue = owners.table.queue();
        let overdue_at = owners.now + queue.settings.queue_wait_max;
        assert_eq!(queue.next_deadline(), Some(overdue_at));
        owners.step(|queue, step| queue.end_turn(step, "3", Outcome::Finished(None)));
        assert!(admits(&owners.table.take_effects(), "7"));
        assert_eq!(owners.table.queue().turns_inside(), 6);
    }

    #[test]
    fn turns_that_are_held_back_wait_and_are_told_why_after_too_long() {
        let mut owners = Owners::new();
        owners.step(|queue, step| queue.set_hold(step, Some("paused".to_owned())));
        assert_eq!(come(&mut owners, "1"), []);
        owners.now += owners.table.queue().settings.queue_wait_max;
        owners.step(|queue, step| queue.run_deadlines(step));
        let error = Error::EngineHeld("paused".to_owned());
        let refused = Effect::Refused { rid: "1".to_owned(), error };
        assert_eq!(owners.table.take_effects(), [refused]);
    }
}

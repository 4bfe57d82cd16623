//! Checks that the session table keeps its promises.
//!
//! The promises are listed in the doc of [`super`]. A promise is not checked while its guard is
//! off. Each part of the table counts its own figures again; this module checks what needs several
//! parts. `crate::audit` checks the engine's own KV pages.

use super::{Guard, RankCapacity, State, Table, tickets::Ticket};

impl Table {
    /// Panics if a promise is broken.
    pub fn check_invariants(&self) {
        let shares = self.settings.shares;
        assert!(self.sessions.len() <= shares.sessions_max, "too many sessions");
        let most = self.sessions.principals().largest();
        let is_guard_on = self.settings.guards.is_on(Guard::SessionShare);
        assert!(
            most <= shares.principal_sessions_max || !is_guard_on,
            "a principal has {most} sessions"
        );
        self.sessions.check_invariants();
        self.tickets.check_invariants();
        self.closes.check_invariants();
        for (dp_rank, capacity) in (0..).zip(&self.engine.ranks) {
            self.check_rank(dp_rank, capacity);
        }
        let guards = self.settings.guards;
        for (key, session) in self.sessions.iter() {
            let is_reused = self.closes.contains(&session.incarnation);
            assert!(
                !is_reused || !guards.is_on(Guard::FreshIncarnation),
                "an incarnation is used twice"
            );
            assert!(
                session.idle_max <= shares.idle_cap || !guards.is_on(Guard::IdleCapped),
                "a session may be idle longer than the cap"
            );
            let runs_before_open = session.state == State::Planned && session.turns.running > 0;
            assert!(!runs_before_open, "a turn runs in a session that isn't open");
            let respects_exclusivity = !session.is_exclusive() || session.turns.running <= 1;
            assert!(
                respects_exclusivity || !guards.is_on(Guard::OneTurn),
                "two turns of one exclusive session are inside"
            );
            let is_shared_pin = session.is_pinned() && !session.is_exclusive();
            assert!(
                !is_shared_pin || session.has_auto_retention(),
                "a session that its client pinned is shared"
            );
            let is_open_for_nothing = session.is_open_for_nothing();
            assert!(
                !is_open_for_nothing,
                "{key:?} was opened for a turn that never reached the engine, and is still open"
            );
            let tickets = self.tickets.iter().map(|(_, ticket)| ticket);
            let mine = tickets.filter(|ticket| ticket.is_of(session.generation));
            let (waiting, others): (Vec<&Ticket>, Vec<&Ticket>) =
                mine.partition(|ticket| ticket.is_waiting_turn());
            let running = others.iter().filter(|ticket| ticket.inside().is_some()).count();
            if guards.is_on(Guard::EndAcknowledged) {
                assert_eq!(session.turns.waiting as usize, waiting.len(), "a claim isn't counted");
                assert_eq!(session.turns.running as usize, running, "a turn isn't counted");
                let inside = self.tickets.inside().filter(|(_, _, inside)| {
                    inside.runs_pinned()
                        && inside.incarnation.as_ref() == Some(&session.incarnation)
                });
                let is_single = inside.count() <= 1;
                assert!(is_single || !guards.is_on(Guard::OneTurn), "two turns run on one history");
            }
        }
    }

    fn check_rank(&self, dp_rank: u32, capacity: &RankCapacity) {
        let stored_totals = self.totals(dp_rank);
        // Rows that an earlier agent process left open may include the reserved rows.
        let rows_of_earlier_agent = self.closes.inherited(dp_rank).rows;
        assert!(stored_totals.turns_running <= capacity.turns_max, "too many turns inside");
        let rows_max = capacity.rows.saturating_sub(capacity.rows_reserve);
        let rows_of_this_agent =
            stored_totals.rows_held - stored_totals.foreign_rows - rows_of_earlier_agent;
        let is_guard_on = self.settings.guards.is_on(Guard::RowsReserve);
        assert!(
            rows_of_this_agent <= rows_max || !is_guard_on,
            "pinned sessions took the reserved rows"
        );
        let is_guard_on = self.settings.guards.is_on(Guard::PinRowsRatio);
        assert!(
            rows_of_this_agent <= capacity.pin_rows_max || !is_guard_on,
            "pinned sessions hold more rows than they may"
        );
    }
}

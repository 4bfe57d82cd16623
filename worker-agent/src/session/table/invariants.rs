//! Checks that the session table keeps its promises.
//!
//! Debug builds call [`Table::check_invariants`] after each change, and the simulation after each
//! event. The promises are listed in the doc of [`super`]. The check counts everything again and
//! compares the result with the stored totals. It changes nothing, and panics if a promise is
//! broken. The engine's own KV pages are checked elsewhere, in `crate::audit`.
//!
//! An incarnation is one life of a session in the engine. A foreign session is one that another
//! client of the engine opened. A guard is a rule that the simulation can switch off; the promise
//! that belongs to it is then not checked.

use super::{Guard, State, Table, rank_account::RankAccount, tickets::Ticket};

impl Table {
    /// Checks the table's promises. Panics if one is broken.
    pub fn check_invariants(&self) {
        assert!(self.sessions.len() <= self.sessions_max, "too many sessions");
        self.check_ids();
        self.tickets.check_invariants();
        for dp_rank in (0_u32..).take(self.accounts.len()) {
            self.check_rank(dp_rank);
        }
        let guards = self.settings.guards;
        for (key, session) in &self.sessions {
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

    /// Checks that no incarnation id is used twice, and that `keys_by_incarnation` matches.
    fn check_ids(&self) {
        let mut incarnations: Vec<&String> =
            self.sessions.values().map(|s| &s.incarnation).collect();
        incarnations.extend(self.pending_closes.keys());
        let count = incarnations.len();
        incarnations.sort_unstable();
        incarnations.dedup();
        let must_be_fresh = self.settings.guards.is_on(Guard::FreshIncarnation);
        assert!(incarnations.len() == count || !must_be_fresh, "an incarnation is used twice");
        for (incarnation, key) in &self.keys_by_incarnation {
            assert_eq!(
                &self.sessions[key].incarnation, incarnation,
                "`keys_by_incarnation` names another session"
            );
        }
        assert_eq!(
            self.keys_by_incarnation.len(),
            self.sessions.len(),
            "a session is not in `keys_by_incarnation`"
        );
    }

    /// Checks that a rank's totals match a fresh count and are within their bounds.
    fn check_rank(&self, dp_rank: u32) {
        let mut recounted = RankAccount::default();
        let of_rank = self.sessions.values().filter(|session| session.dp_rank == dp_rank);
        of_rank.for_each(|session| recounted.add_session(session, self.engine.page_tokens));
        let stored_totals = self.totals(dp_rank);
        // Rows that an earlier agent process left open. They may include the reserved rows.
        let mut rows_of_earlier_agent = 0;
        for closing in self.pending_closes.values().filter(|closing| closing.dp_rank == dp_rank) {
            if self.settings.guards.is_on(Guard::CountedUntilClosed) {
                let (rows, tokens) = closing.held(self.engine.page_tokens);
                recounted.totals.rows_held += rows;
                recounted.totals.pinned_tokens += tokens;
            }
            rows_of_earlier_agent += u32::from(closing.is_inherited);
        }
        // Nothing else counts foreign sessions, so their stored figures are taken over.
        recounted.totals.foreign_rows = stored_totals.foreign_rows;
        recounted.totals.foreign_tokens = stored_totals.foreign_tokens;
        recounted.totals.rows_held += stored_totals.foreign_rows;
        recounted.totals.pinned_tokens += stored_totals.foreign_tokens;
        recounted.totals.turns_running = stored_totals.turns_running;
        recounted.totals.turns_queued = stored_totals.turns_queued;
        assert_eq!(recounted.totals, stored_totals, "the totals differ from a fresh count");
        let Some(capacity) = self.engine.ranks.get(dp_rank as usize) else { return };
        assert!(stored_totals.turns_running <= capacity.turns_max, "too many turns inside");
        let rows_max = capacity.rows.saturating_sub(capacity.rows_reserve);
        let rows_of_this_agent =
            stored_totals.rows_held - stored_totals.foreign_rows - rows_of_earlier_agent;
        let is_guard_on = self.settings.guards.is_on(Guard::RowsReserve);
        assert!(
            rows_of_this_agent <= rows_max || !is_guard_on,
            "pinned sessions took the reserved rows"
        );
        let runs_before_open = |session: &&super::Session| {
            session.state == State::Planned && session.turns.running > 0
        };
        assert!(
            !self.sessions.values().any(|session| runs_before_open(&session)),
            "a turn runs in a session that isn't open"
        );
    }
}

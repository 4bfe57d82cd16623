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

use super::{Guard, State, Table, TicketState, rank_account::RankAccount};

impl Table {
    /// Checks the table's promises. Panics if one is broken.
    pub fn check_invariants(&self) {
        assert!(self.sessions.len() <= self.sessions_max, "too many sessions");
        self.check_ids();
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
            let count_in = |state| {
                let tickets = self.tickets.values().filter(move |ticket| ticket.state == state);
                let of_session = tickets.filter(|ticket| ticket.generation == session.generation);
                of_session.filter(|ticket| ticket.key.as_ref() == Some(key)).count()
            };
            if guards.is_on(Guard::EndAcknowledged) {
                let waiting = count_in(TicketState::Claimed) + count_in(TicketState::Queued);
                assert_eq!(session.turns.waiting as usize, waiting, "a claim isn't counted");
                assert_eq!(
                    session.turns.running as usize,
                    count_in(TicketState::Inside),
                    "a turn isn't counted"
                );
                let inside = self.tickets.values().filter(|ticket| {
                    ticket.state == TicketState::Inside
                        && ticket.is_pinned
                        && ticket.incarnation == session.incarnation
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
        let count_in = |state| {
            let of_rank = self.tickets.values().filter(|ticket| ticket.dp_rank == dp_rank);
            let count = of_rank.filter(|ticket| ticket.state == state).count();
            u32::try_from(count).expect("bounded")
        };
        recounted.totals.turns_running = count_in(TicketState::Inside);
        recounted.totals.turns_queued = count_in(TicketState::Queued);
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

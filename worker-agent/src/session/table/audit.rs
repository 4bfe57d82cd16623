//! What the table adds up to, and what must always be true of it.

use proto::load::Retention;

use super::Table;
use crate::session::{Phase, Totals};

impl Table {
    /// Totals of one rank.
    #[must_use]
    pub fn totals(&self, dp_rank: u32) -> Totals {
        let mut totals =
            Totals { turns_running: self.turns[dp_rank as usize], ..Totals::default() };
        for session in self.sessions.values().filter(|session| session.dp_rank == dp_rank) {
            totals.sessions += 1;
            if session.retention == Retention::Pinned {
                totals.rows_held += u32::from(session.phase != Phase::Lost);
                totals.pinned_tokens += self.pages_of(session.resident_tokens);
            } else {
                totals.estimate_tokens += session.resident_tokens;
            }
        }
        for (_, tokens) in self.closing.values().filter(|(rank, _)| *rank == dp_rank) {
            totals.rows_held += 1;
            totals.pinned_tokens += self.pages_of(*tokens);
        }
        totals
    }

    /// Panics when a promise is broken.
    pub fn check_invariants(&self) {
        assert!(self.sessions.len() <= self.sessions_max, "too many sessions");
        let mut ids: Vec<&String> = self.sessions.values().map(|s| &s.incarnation).collect();
        ids.extend(self.closing.keys());
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count, "an incarnation is used twice");
        for (dp_rank, capacity) in (0_u32..).zip(&self.engine.ranks) {
            let running: u32 = self
                .sessions
                .values()
                .filter(|session| session.dp_rank == dp_rank)
                .map(|session| session.running)
                .sum();
            let totals = self.totals(dp_rank);
            assert!(running <= totals.turns_running, "a running turn isn't counted");
            assert!(totals.turns_running <= capacity.turns_max, "too many turns inside");
            let rows_max = capacity.rows.saturating_sub(capacity.rows_reserve);
            assert!(totals.rows_held <= rows_max, "pinned sessions took the reserved rows");
        }
        for session in self.sessions.values() {
            assert!(!session.exclusive || session.running <= 1, "two turns of one are inside");
            assert!(session.retention != Retention::Pinned || session.exclusive, "pinned, shared");
        }
    }
}

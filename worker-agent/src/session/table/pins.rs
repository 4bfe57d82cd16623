//! Owns what is pinned at the engine: rows and KV within their budget, and closes until confirmed.
//!
//! A session holds its row in its state, which [`Sessions`] counts. This owner adds what closes and
//! foreign sessions hold, and decides who may have more and which idle session gives its KV up.

mod budget;
pub(super) mod closes;
mod closing;
mod foreign;
mod large_turns;
pub(super) mod reclaim;

use std::{ops::Range, sync::Arc};

use self::{closes::Closes, foreign::Foreign, large_turns::LargeTurns};
use crate::session::table::{EngineCapacity, Guard, RankCapacity, Sessions, TableSettings};

#[derive(Debug)]
pub(super) struct Pins {
    pub(super) sessions: Sessions,
    pub(super) closes: Closes,
    pub(super) foreign: Foreign,
    pub(super) large_turns: LargeTurns,
    pub(super) page_tokens: u64,
    pub(super) context_tokens: u64,
    /// By rank.
    ranks: Vec<RankCapacity>,
    settings: Arc<TableSettings>,
}

impl Pins {
    pub(super) fn new(settings: &Arc<TableSettings>, engine: &EngineCapacity) -> Self {
        let mut closes = Closes::new(settings.stuck_after);
        closes.reset(engine.page_tokens);
        let mut pins = Self {
            sessions: Sessions::new(settings, engine),
            closes,
            foreign: Foreign::default(),
            large_turns: LargeTurns::default(),
            page_tokens: 1,
            context_tokens: 0,
            ranks: vec![],
            settings: Arc::clone(settings),
        };
        pins.set_engine(engine);
        pins
    }

    /// Figures of ranks that no longer exist stay, because turns there must still end.
    pub(super) fn set_engine(&mut self, engine: &EngineCapacity) {
        self.sessions.set_engine(engine);
        self.ranks.clone_from(&engine.ranks);
        (self.page_tokens, self.context_tokens) = (engine.page_tokens, engine.context_tokens);
        self.foreign.add_ranks(self.ranks.len());
        self.large_turns.add_ranks(self.ranks.len());
    }

    /// The journal keeps the closes until it names a new process: the old one may answer again.
    pub(super) fn lose_engine(&mut self, next_page_tokens: u64) {
        self.closes.reset(next_page_tokens);
        self.foreign.lose_engine();
    }

    pub(super) fn ranks(&self) -> Range<u32> {
        0..u32::try_from(self.ranks.len()).expect("few ranks")
    }

    /// Tokens that can't be evicted and that none of the agent's sessions hold are foreign.
    pub(super) fn estimate_foreign(&mut self, dp_rank: u32, used_tokens: u64) {
        let foreign_tokens = self.foreign_on(dp_rank).tokens;
        let own_tokens = self.held_on(dp_rank).tokens - foreign_tokens;
        let pool_tokens = self.ranks.get(dp_rank as usize).map_or(0, |rank| rank.pool_tokens);
        let tokens = used_tokens.min(pool_tokens).saturating_sub(own_tokens);
        self.foreign.estimate(dp_rank, tokens);
    }

    pub(super) fn check_invariants(&self) {
        self.sessions.check_invariants();
        self.closes.check_invariants();
        let guards = self.settings.guards;
        for (_, session) in self.sessions.iter() {
            let is_reused = self.closes.contains(&session.incarnation);
            assert!(
                !is_reused || !guards.is_on(Guard::FreshIncarnation),
                "an incarnation is used twice"
            );
        }
        for (dp_rank, capacity) in (0..).zip(&self.ranks) {
            // Rows that an earlier agent process left open may include the reserved rows.
            let rows_of_earlier_agent = self.closes.inherited(dp_rank).rows;
            let foreign_rows = self.foreign_on(dp_rank).rows;
            let rows_of_this_agent =
                self.held_on(dp_rank).rows - foreign_rows - rows_of_earlier_agent;
            let rows_max = capacity.rows.saturating_sub(capacity.rows_reserve);
            assert!(
                rows_of_this_agent <= rows_max || !guards.is_on(Guard::RowsReserve),
                "pinned sessions took the reserved rows"
            );
            assert!(
                rows_of_this_agent <= capacity.pin_rows_max || !guards.is_on(Guard::PinRowsRatio),
                "pinned sessions hold more rows than they may"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::reclaim::{Requester, Shortage};
    use crate::session::table::{
        CloseResult, Effect, Record,
        room::Room,
        tests::{key, owners::Owners},
    };

    #[test]
    fn what_a_session_held_stays_counted_until_its_close_is_confirmed() {
        let mut owners = Owners::new();
        owners.insert_open("s", 100);
        let incarnation = owners.sessions()[&key("s")].incarnation.clone();
        owners.step(|queue, step| {
            let pins = &mut queue.histories.pins;
            pins.close_at_engine(step, &key("s"));
            pins.sessions.remove(step, &key("s"));
            assert_eq!(pins.held_on(0), Room { rows: 1, tokens: 112 });
            assert!(!pins.apply_close_result(step, &incarnation, CloseResult::Kept, false));
            assert_eq!(pins.held_on(0).rows, 1);
            assert!(pins.apply_close_result(step, &incarnation, CloseResult::Confirmed, false));
            assert_eq!(pins.held_on(0), Room::default());
        });
        let closed = Effect::Journal(Record::Closed { incarnation });
        assert!(owners.table.take_effects().contains(&closed), "the engine has nothing of it");
    }

    #[test]
    fn the_idle_session_with_the_least_to_lose_gives_way() {
        let mut owners = Owners::new();
        owners.insert_open("long", 300);
        owners.insert_open("short", 100);
        let (pins, now) = (owners.pins(), owners.now);
        let shortage = pins.row_shortage(0).unwrap();
        assert_eq!(shortage, None, "three of four rows may be held");
        let (one_row, requester) = (Shortage::Rows { held: 2, max: 2 }, Requester::Pinned("p"));
        assert_eq!(pins.choose_to_reclaim(now, 0, &one_row, requester), None, "busy");
        let later = now + pins.settings.demote_idle;
        let chosen = pins.choose_to_reclaim(later, 0, &one_row, requester);
        assert_eq!(chosen, Some(vec![key("short")]));
    }
}

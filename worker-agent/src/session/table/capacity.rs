//! What a turn may need of a rank, and what the rank has left for pinned sessions.

use proto::id::SessionKey;

use super::{Error, Guard, Need, Table, reclaim::Shortage};

/// The most tokens of an answer for which the engine reserves room if the answer may end early. The
/// same as a constant of SGLang.
const ANSWER_AHEAD: u64 = 4096;

impl Table {
    /// Returns how many tokens of the pool pinned sessions may hold beside large plain turns.
    pub(super) fn room_to_pin(&self, dp_rank: u32, pool: u64) -> u64 {
        let large = self.accounts[dp_rank as usize].largest_turn_tokens();
        let held = self.rules.guards.hold(Guard::LargeTurnWaits);
        let room = if held { pool.saturating_sub(large) } else { pool };
        // The engine needs free more than one page beyond a turn's need.
        room.min(pool.saturating_sub(self.engine.page_tokens + 1))
    }

    /// Returns the most KV tokens that a pinned session may hold after a turn.
    pub(super) fn kv_target(&self, key: &SessionKey, need: Need, delta: bool) -> u64 {
        let (session, guards) = (&self.sessions[key], self.rules.guards);
        if !guards.hold(Guard::GrowthReserved) {
            return session.resident_tokens;
        }
        if !delta && self.shim_trims {
            return self.full_history_target(key, need).max(session.resident_tokens);
        }
        // A history whose KV is not resident is computed again and needs room.
        let before = if guards.hold(Guard::HistoryReserved) {
            session.history_tokens
        } else {
            session.resident_tokens
        };
        let context = self.engine.context_tokens;
        let answer = need.answer_tokens.unwrap_or(context);
        before.saturating_add(need.prompt_tokens).saturating_add(answer).min(context)
    }

    /// Returns the tokens that the engine needs free before it starts a plain turn: the prompt in
    /// whole pages, the part of the answer that it reserves, and more than one page beyond them.
    pub(super) fn tokens_engine_needs(&self, need: Need) -> u64 {
        let (context, page) = (self.engine.context_tokens, self.engine.page_tokens);
        let prompt = need.prompt_tokens.min(context);
        let ahead = if need.ignores_eos { context } else { ANSWER_AHEAD };
        let answer = need.answer_tokens.unwrap_or(context).min(context - prompt).min(ahead);
        self.round_to_pages(prompt) + answer + page + 1
    }

    /// Returns the shortage of rows if one more pinned session would use a reserved row.
    pub(super) fn row_shortage(&self, dp_rank: u32) -> Result<Option<Shortage>, Error> {
        let capacity = self.capacity(dp_rank)?;
        let reserve =
            if self.rules.guards.hold(Guard::RowsReserve) { capacity.rows_reserve } else { 0 };
        let max = capacity.rows.saturating_sub(reserve);
        let held = self.totals(dp_rank).rows_held;
        Ok((held >= max).then_some(Shortage::Rows { held, max }))
    }

    /// Returns the tokens that pinned sessions hold or have reserved, and the pin budget.
    pub(super) fn pinned_and_budget(&self, dp_rank: u32) -> Result<(u64, u64), Error> {
        Ok((self.totals(dp_rank).pinned_tokens, self.capacity(dp_rank)?.pin_tokens_max))
    }

    /// Rounds tokens up to whole pages, as pinned sessions hold whole pages.
    pub(super) fn round_to_pages(&self, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.engine.page_tokens)
    }
}

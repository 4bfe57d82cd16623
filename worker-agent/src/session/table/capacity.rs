//! Computes how much room a turn may need on a rank, and how much room pinned sessions may take.

use contract::id::SessionKey;

use super::{Error, Guard, Need, Table, reclaim::Shortage};

/// The most that the engine reserves for an answer that may end early, before it starts the turn.
/// SGLang has the same constant.
const ANSWER_TOKENS_AHEAD: u64 = 4096;

impl Table {
    /// Leaves room for the largest plain turn that runs, or waits for room of pinned sessions.
    pub(super) fn pinnable_tokens(&self, dp_rank: u32, pool_tokens: u64) -> u64 {
        let largest_turn = self.tickets.load(dp_rank).largest_turn_tokens();
        let is_guard_on = self.settings.guards.is_on(Guard::LargeTurnWaits);
        let room_beside_turn =
            if is_guard_on { pool_tokens.saturating_sub(largest_turn) } else { pool_tokens };
        // The engine starts a turn only if more than one page is free beyond the turn's need.
        room_beside_turn.min(pool_tokens.saturating_sub(self.engine.page_tokens + 1))
    }

    /// The most that a pinned session may hold after a turn in it.
    pub(super) fn kv_target_tokens(&self, key: &SessionKey, need: Need, is_delta: bool) -> u64 {
        let (session, guards) = (&self.sessions[key], self.settings.guards);
        if !guards.is_on(Guard::GrowthReserved) {
            return session.resident_tokens();
        }
        if !is_delta && self.shims.trims() {
            return self.full_history_target_tokens(key, need).max(session.resident_tokens());
        }
        // A history whose KV is not resident is computed again and needs room.
        let tokens_before = if guards.is_on(Guard::HistoryReserved) {
            session.history.tokens
        } else {
            session.resident_tokens()
        };
        let context_tokens = self.engine.context_tokens;
        let answer_tokens = need.answer_tokens.unwrap_or(context_tokens);
        tokens_before
            .saturating_add(need.prompt_tokens)
            .saturating_add(answer_tokens)
            .min(context_tokens)
    }

    /// What must be free before the engine starts a plain turn: the prompt in whole pages, what it
    /// reserves for the answer, and more than one page beyond.
    pub(super) fn free_tokens_needed(&self, need: Need) -> u64 {
        let (context_tokens, page_tokens) = (self.engine.context_tokens, self.engine.page_tokens);
        let prompt_tokens = need.prompt_tokens.min(context_tokens);
        let answer_tokens_max = if need.ignores_eos { context_tokens } else { ANSWER_TOKENS_AHEAD };
        let answer_tokens = need
            .answer_tokens
            .unwrap_or(context_tokens)
            .min(context_tokens - prompt_tokens)
            .min(answer_tokens_max);
        self.round_to_pages(prompt_tokens) + answer_tokens + page_tokens + 1
    }

    /// `None` if a row is free: one more pinned session would use no reserved row, and pinned ones
    /// would hold no more than they may.
    pub(super) fn row_shortage(&self, dp_rank: u32) -> Result<Option<Shortage>, Error> {
        let capacity = self.capacity(dp_rank)?;
        let guards = self.settings.guards;
        let reserve = if guards.is_on(Guard::RowsReserve) { capacity.rows_reserve } else { 0 };
        let ratio_max =
            if guards.is_on(Guard::PinRowsRatio) { capacity.pin_rows_max } else { u32::MAX };
        let max = capacity.rows.saturating_sub(reserve).min(ratio_max);
        let held = self.totals(dp_rank).rows_held;
        Ok((held >= max).then_some(Shortage::Rows { held, max }))
    }

    pub(super) fn free_rows(&self, dp_rank: u32) -> u64 {
        let rows = self.engine.ranks.get(dp_rank as usize).map_or(0, |rank| rank.rows);
        u64::from(rows.saturating_sub(self.totals(dp_rank).rows_held))
    }

    pub(super) fn pinned_and_budget(&self, dp_rank: u32) -> Result<(u64, u64), Error> {
        Ok((self.totals(dp_rank).pinned_tokens, self.capacity(dp_rank)?.pin_tokens_max))
    }

    pub(super) fn round_to_pages(&self, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.engine.page_tokens)
    }
}

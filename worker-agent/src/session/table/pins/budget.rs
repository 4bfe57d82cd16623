//! Computes how much room a turn may need on a rank, and how much room pinned sessions may take.

use contract::id::SessionKey;

use crate::session::table::{
    Error, Guard, MeasuredHistory, Need, Pins, RankCapacity, pins::reclaim::Shortage, room::Room,
};

/// The most that the engine reserves for an answer that may end early, before it starts the turn.
/// SGLang has the same constant.
const ANSWER_TOKENS_AHEAD: u64 = 4096;

/// At least this many times the session's longest answer is reserved, because a session that
/// reasons at length usually does so again.
const LONGEST_ANSWER_FACTOR: u64 = 2;
/// What a chat template may put around what a turn adds.
const TEMPLATE_TOKENS: u64 = 32;
/// English and code have 3.5 to 4.5 bytes per token. If a text has fewer, its prompt exceeds the
/// estimate, and the shim reports its size instead of running it in the reserved room.
const BYTES_PER_TOKEN: u64 = 3;

impl Pins {
    /// What pinned and foreign sessions hold, and incarnations whose close isn't confirmed.
    pub(crate) fn held_on(&self, dp_rank: u32) -> Room {
        let is_counted = self.settings.guards.is_on(Guard::CountedUntilClosed);
        let closing = if is_counted { self.closes.held(dp_rank) } else { Room::default() };
        self.sessions.rank(dp_rank).held + closing + self.foreign_on(dp_rank)
    }

    pub(crate) fn foreign_on(&self, dp_rank: u32) -> Room {
        let is_counted = self.settings.guards.is_on(Guard::ForeignCounted);
        if is_counted { self.foreign.held(dp_rank) } else { Room::default() }
    }

    pub(crate) fn capacity(&self, dp_rank: u32) -> Result<&RankCapacity, Error> {
        self.ranks.get(dp_rank as usize).ok_or(Error::NoRank(dp_rank))
    }

    pub(crate) fn fits_pinned(&self, key: &SessionKey, target_tokens: u64) -> bool {
        let session = &self.sessions[key];
        let row = session.state.row();
        let session_tokens_now = row.map_or(0, |row| self.round_to_pages(row.tokens_max()));
        let (Ok((pinned_tokens, budget)), Ok(capacity)) =
            (self.pinned_and_budget(session.dp_rank), self.capacity(session.dp_rank))
        else {
            return false;
        };
        let pool_room = self.pinnable_tokens(session.dp_rank, capacity.pool_tokens);
        pinned_tokens - session_tokens_now + self.round_to_pages(target_tokens)
            <= budget.min(pool_room)
    }

    pub(crate) fn excess_tokens(&self, dp_rank: u32, tokens: u64, pool_tokens: u64) -> u64 {
        (self.held_on(dp_rank).tokens + tokens).saturating_sub(pool_tokens)
    }

    /// Whether one more pinned session fits now; `None` if it never can.
    pub(crate) fn has_room_for(&self, dp_rank: u32, tokens: u64) -> Option<bool> {
        let capacity = self.capacity(dp_rank).ok().filter(|rank| tokens <= rank.pool_tokens)?;
        let held = self.held_on(dp_rank);
        let has_row = self.row_shortage(dp_rank).ok()?.is_none();
        let pinned_tokens = held.tokens + self.round_to_pages(tokens);
        Some(has_row && pinned_tokens <= capacity.pin_tokens_max)
    }

    /// Leaves room for the largest plain turn that runs, or waits for room of pinned sessions.
    pub(crate) fn pinnable_tokens(&self, dp_rank: u32, pool_tokens: u64) -> u64 {
        let largest_turn = self.large_turns.largest(dp_rank);
        let is_guard_on = self.settings.guards.is_on(Guard::LargeTurnWaits);
        let room_beside_turn =
            if is_guard_on { pool_tokens.saturating_sub(largest_turn) } else { pool_tokens };
        // The engine starts a turn only if more than one page is free beyond the turn's need.
        room_beside_turn.min(pool_tokens.saturating_sub(self.page_tokens + 1))
    }

    /// What must be free before the engine starts a plain turn: the prompt in whole pages, what it
    /// reserves for the answer, and more than one page beyond.
    pub(crate) fn free_tokens_needed(&self, need: Need) -> u64 {
        let (context_tokens, page_tokens) = (self.context_tokens, self.page_tokens);
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
    pub(crate) fn row_shortage(&self, dp_rank: u32) -> Result<Option<Shortage>, Error> {
        let capacity = self.capacity(dp_rank)?;
        let guards = self.settings.guards;
        let reserve = if guards.is_on(Guard::RowsReserve) { capacity.rows_reserve } else { 0 };
        let ratio_max =
            if guards.is_on(Guard::PinRowsRatio) { capacity.pin_rows_max } else { u32::MAX };
        let max = capacity.rows.saturating_sub(reserve).min(ratio_max);
        let held = self.held_on(dp_rank).rows;
        Ok((held >= max).then_some(Shortage::Rows { held, max }))
    }

    pub(crate) fn free_rows(&self, dp_rank: u32) -> u64 {
        let rows = self.ranks.get(dp_rank as usize).map_or(0, |rank| rank.rows);
        u64::from(rows.saturating_sub(self.held_on(dp_rank).rows))
    }

    pub(crate) fn pinned_and_budget(&self, dp_rank: u32) -> Result<(u64, u64), Error> {
        Ok((self.held_on(dp_rank).tokens, self.capacity(dp_rank)?.pin_tokens_max))
    }

    pub(crate) fn round_to_pages(&self, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.page_tokens)
    }

    pub(crate) fn full_history_target_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let answer_tokens = self.reserved_answer_tokens(key, need);
        let tokens = self.full_history_tokens_max(key, need).saturating_add(answer_tokens);
        tokens.min(self.context_tokens)
    }

    /// Clients set limits far above what they expect, so whole limits would leave most of the pin
    /// budget unused. A session that the agent pinned reserves what the client expects or a likely
    /// length. One that a client pinned, and a turn that ignores its end, reserve the limit.
    pub(crate) fn reserved_answer_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let context_tokens = self.context_tokens;
        let session = &self.sessions[key];
        let limit_tokens = need.answer_tokens.unwrap_or(context_tokens);
        if !session.has_auto_retention() || (need.ignores_eos && need.answer_tokens.is_some()) {
            return limit_tokens;
        }
        let longest_multiple =
            session.client.longest_answer_tokens.saturating_mul(LONGEST_ANSWER_FACTOR);
        let likely_tokens = longest_multiple.max(self.settings.answer_tokens_min);
        let likely_tokens = need.likely_answer_tokens.unwrap_or(likely_tokens);
        likely_tokens.min(context_tokens).min(limit_tokens)
    }

    /// The tokens of an earlier full history are known, those added since are estimated, and the
    /// shim enforces the result.
    pub(crate) fn full_history_tokens_max(&self, key: &SessionKey, need: Need) -> u64 {
        let prompt_tokens_max = need.prompt_tokens;
        let tokens = match self.sessions[key].client.last_measured {
            _ if need.is_exact => prompt_tokens_max,
            Some(MeasuredHistory { prompt_tokens_bound, tokens }) => {
                let added_tokens =
                    prompt_tokens_max.saturating_sub(prompt_tokens_bound).div_ceil(BYTES_PER_TOKEN);
                tokens.saturating_add(added_tokens).saturating_add(TEMPLATE_TOKENS)
            }
            None => prompt_tokens_max.div_ceil(BYTES_PER_TOKEN),
        };
        tokens.min(prompt_tokens_max).min(self.context_tokens)
    }

    /// The most that a pinned session may hold after a turn in it. `is_trimmed`: the shim trims the
    /// turn's full history.
    pub(crate) fn kv_target_tokens(&self, key: &SessionKey, need: Need, is_trimmed: bool) -> u64 {
        let (session, guards) = (&self.sessions[key], self.settings.guards);
        if !guards.is_on(Guard::GrowthReserved) {
            return session.resident_tokens();
        }
        if is_trimmed {
            return self.full_history_target_tokens(key, need).max(session.resident_tokens());
        }
        // A history whose KV is not resident is computed again and needs room.
        let tokens_before = if guards.is_on(Guard::HistoryReserved) {
            session.history.tokens
        } else {
            session.resident_tokens()
        };
        let answer_tokens = need.answer_tokens.unwrap_or(self.context_tokens);
        let tokens = tokens_before.saturating_add(need.prompt_tokens).saturating_add(answer_tokens);
        tokens.min(self.context_tokens)
    }
}

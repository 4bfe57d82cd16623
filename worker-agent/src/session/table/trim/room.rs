//! Decides which sessions the agent pins on its own, and how much KV their full histories reserve.

use std::time::Instant;

use contract::{id::SessionKey, load::Retention};

use super::DIVERGENCE_STREAK_MAX;
use crate::session::table::{MeasuredHistory, Need, State, Table};

/// At least this many times the session's longest answer is reserved, because a session that
/// reasons at length usually does so again.
const LONGEST_ANSWER_FACTOR: u64 = 2;
/// What a chat template may put around what a turn adds.
const TEMPLATE_TOKENS: u64 = 32;
/// The agent pins only while pinned sessions hold fewer rows than all rows divided by this. A
/// pinned session holds its row while it is idle too: with more of them, running turns would lack
/// rows while the pool has room.
const AUTO_PIN_ROWS_DIVISOR: u32 = 2;
/// English and code have 3.5 to 4.5 bytes per token. If a text has fewer, its prompt exceeds the
/// estimate, and the shim reports its size instead of running it in the reserved room.
const BYTES_PER_TOKEN: u64 = 3;

impl Table {
    /// The session must have come back soon, and fit without taking room from others.
    pub(in super::super) fn should_pin(&self, now: Instant, key: &SessionKey, need: Need) -> bool {
        let session = &self.sessions[key];
        let State::InTree(tree) = &session.state else { return false };
        let may_pin = self.settings.auto_pin
            && self.shims.trims()
            && session.has_auto_retention()
            && session.client.sends_full
            && session.client.divergence_streak <= DIVERGENCE_STREAK_MAX
            && tree.no_pin_before.is_none_or(|earliest| earliest <= now)
            && self.shims.can_demote(session.dp_rank)
            && self.engine.retentions.contains(&Retention::Pinned);
        let came_back_soon =
            session.turns.finished > 0 && session.idle(now) <= self.settings.demote_idle;
        let is_only_turn = session.turns.running == 0 && session.turns.waiting == 1;
        let is_blocked = self.closes.has_inherited() || self.check_tree_is_current().is_err();
        if !(may_pin && came_back_soon && is_only_turn) || is_blocked {
            return false;
        }
        let has_free_row = matches!(self.row_shortage(session.dp_rank), Ok(None));
        let rows = self.capacity(session.dp_rank).map_or(0, |capacity| capacity.rows);
        let leaves_rows = self.totals(session.dp_rank).rows_held < rows / AUTO_PIN_ROWS_DIVISOR;
        has_free_row
            && leaves_rows
            && self.fits_pinned(key, self.full_history_target_tokens(key, need))
    }

    pub(super) fn fits_pinned(&self, key: &SessionKey, target_tokens: u64) -> bool {
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

    pub(in super::super) fn full_history_target_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let context_tokens = self.engine.context_tokens;
        let tokens = self.full_history_tokens_max(key, need);
        tokens.saturating_add(self.reserved_answer_tokens(key, need)).min(context_tokens)
    }

    /// Clients set limits far above what they expect, so whole limits would leave most of the pin
    /// budget unused. A session that the agent pinned reserves what the client expects or a likely
    /// length. One that a client pinned, and a turn that ignores its end, reserve the limit.
    pub(super) fn reserved_answer_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let context_tokens = self.engine.context_tokens;
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
    pub(super) fn full_history_tokens_max(&self, key: &SessionKey, need: Need) -> u64 {
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
        tokens.min(prompt_tokens_max).min(self.engine.context_tokens)
    }
}

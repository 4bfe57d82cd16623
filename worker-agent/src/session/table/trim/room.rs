//! Decides which sessions the agent pins on its own, and how much KV their full histories reserve.
//!
//! A full history is a turn that holds the whole conversation. A pinned session keeps its KV and a
//! request row to itself. The shim, Berth's part in the engine's process, trims a full history: it
//! removes the tokens that the session already has.
//!
//! The modules `admission` and `capacity` ask before a turn is admitted, and `reopen` asks while it
//! runs. This module only computes. The parent module pins, and the shim enforces the reserved
//! size.

use std::time::Instant;

use proto::{id::SessionKey, load::Retention};

use super::DIVERGENCE_STREAK_MAX;
use crate::session::table::{MeasuredHistory, Need, State, Table};

/// The tokens reserved for an answer are at least this many times the longest answer that the
/// session had so far. A session that reasons at length usually does so again.
const LONGEST_ANSWER_FACTOR: u64 = 2;
/// Tokens that a chat template may put around what a turn adds.
const TEMPLATE_TOKENS: u64 = 32;
/// The agent pins a session on its own only while pinned sessions hold fewer rows than all rows
/// divided by this number. A pinned session holds its row while it is idle too. If pinned sessions
/// held more rows, running turns would lack rows while the pool has room.
const AUTO_PIN_ROWS_DIVISOR: u32 = 2;
/// Bytes of text that are counted as one token, to estimate prompts. English and code have 3.5 to
/// 4.5. If a text has fewer bytes per token, its prompt exceeds the estimate. The shim then reports
/// the prompt's size, and doesn't run the turn in the reserved room.
const BYTES_PER_TOKEN: u64 = 3;

impl Table {
    /// Whether to pin a session now whose client asked for no retention. The session must have come
    /// back soon, the shim must be able to trim its full histories, and it must fit without taking
    /// room from other sessions.
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

    /// Whether the session fits into the pin budget and the pool if it holds `target_tokens`.
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

    /// Returns the most tokens that a full history and its answer may have.
    pub(in super::super) fn full_history_target_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let context_tokens = self.engine.context_tokens;
        let tokens = self.full_history_tokens_max(key, need);
        tokens.saturating_add(self.reserved_answer_tokens(key, need)).min(context_tokens)
    }

    /// Returns the tokens to reserve for an answer. In a session that the agent pinned on its own,
    /// this is the length that the client expects or else a likely one, and at most the limit.
    /// Clients set limits far above what they expect, so whole limits would leave most of the pin
    /// budget unused. In a session that a client pinned, and for a turn that ignores the end of its
    /// answer, it is the whole limit. Without a limit, the context is one.
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

    /// Returns the most tokens that a full history may have to run in its session. The tokens of an
    /// earlier full history are known, the added tokens are estimated, and the shim enforces the
    /// result.
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

//! Room for full histories: which sessions the agent pins on its own, and what their turns reserve.

use std::time::Instant;

use proto::{id::SessionKey, load::Retention};

use super::DIVERGENCE_STREAK_MAX;
use crate::session::table::{Need, Table};

/// Tokens reserved at least for an answer without a limit, in a session that the agent pinned on
/// its own. SGLang itself reserves no more than this for such an answer. A longer answer grows into
/// the part of the pool that the pin budget leaves free, and is counted when the turn has ended.
const ANSWER_TOKENS: u64 = 4096;
/// The reservation is also at least this many times the session's longest answer so far. A session
/// that reasons at length usually does so again.
const LONGEST_ANSWER_FACTOR: u64 = 2;
/// Tokens that a chat template may put around what a turn adds.
const TEMPLATE_TOKENS: u64 = 32;
/// A session holds its row while it is idle too. Sessions that the agent pins on its own use only
/// rows up to this part of all rows. Else running turns would lack rows while the pool has room.
const ROWS_LEFT_DIVISOR: u32 = 2;
/// Bytes of text that are counted as one token, to estimate prompts: English and code have 3.5 to
/// 4.5. If a text has fewer, the shim refuses a prompt beyond the reserved room and reports its
/// size.
const BYTES_PER_TOKEN: u64 = 3;

impl Table {
    /// Whether to pin a session now whose client asked for no retention. It must come back soon,
    /// its full histories must be trimmable, and it must fit without taking room from other
    /// sessions.
    pub(in super::super) fn should_pin(&self, now: Instant, key: &SessionKey, need: Need) -> bool {
        let session = &self.sessions[key];
        let may_pin = self.rules.auto_pin
            && self.shim_trims
            && session.has_auto_retention()
            && session.retention != Retention::Pinned
            && session.full_history.is_sent
            && session.full_history.divergence_streak <= DIVERGENCE_STREAK_MAX
            && session.full_history.no_pin_before.is_none_or(|after| after <= now)
            && self.accounts[session.dp_rank as usize].can_demote()
            && self.engine.retentions.contains(&Retention::Pinned);
        let comes_back_soon = session.turns > 0 && session.idle(now) <= self.rules.demote_idle;
        let is_only_turn = session.turns_running == 0 && session.turns_waiting == 1;
        if !(may_pin && comes_back_soon && is_only_turn) || self.is_taking_over() {
            return false;
        }
        let row_is_free = matches!(self.row_shortage(session.dp_rank), Ok(None));
        let rows = self.capacity(session.dp_rank).map_or(0, |capacity| capacity.rows);
        let rows_are_left = self.totals(session.dp_rank).rows_held < rows / ROWS_LEFT_DIVISOR;
        row_is_free && rows_are_left && self.fits_pinned(key, self.full_history_target(key, need))
    }

    /// Whether the session fits into the pin budget and the pool if it holds `target` tokens.
    pub(super) fn fits_pinned(&self, key: &SessionKey, target: u64) -> bool {
        let session = &self.sessions[key];
        let held_now = match session.retention {
            Retention::Pinned if session.holds_row => {
                self.round_to_pages(session.resident_tokens.max(session.reserved_tokens))
            }
            _ => 0,
        };
        let (Ok((held, max)), Ok(capacity)) =
            (self.pinned_and_budget(session.dp_rank), self.capacity(session.dp_rank))
        else {
            return false;
        };
        let room = self.room_to_pin(session.dp_rank, capacity.pool_tokens);
        held - held_now + self.round_to_pages(target) <= max.min(room)
    }

    /// Returns the most tokens that a full history and its answer may have.
    pub(in super::super) fn full_history_target(&self, key: &SessionKey, need: Need) -> u64 {
        let context = self.engine.context_tokens;
        let tokens = self.full_history_tokens(key, need);
        tokens.saturating_add(self.reserved_answer_tokens(key, need)).min(context)
    }

    pub(super) fn reserved_answer_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let context = self.engine.context_tokens;
        let session = &self.sessions[key];
        let longest =
            session.full_history.longest_answer_tokens.saturating_mul(LONGEST_ANSWER_FACTOR);
        let likely = longest.max(ANSWER_TOKENS).min(context);
        let unlimited = if session.has_auto_retention() { likely } else { context };
        need.answer_tokens.unwrap_or(unlimited)
    }

    /// Returns the most tokens that a full history may have. The tokens sent before are known, the
    /// added ones are estimated, and the shim enforces the result.
    pub(super) fn full_history_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let bound = need.prompt_tokens;
        let tokens = match self.sessions[key].full_history.last_measured {
            _ if need.exact => bound,
            Some((before, tokens)) => {
                let added = bound.saturating_sub(before).div_ceil(BYTES_PER_TOKEN);
                tokens.saturating_add(added).saturating_add(TEMPLATE_TOKENS)
            }
            None => bound.div_ceil(BYTES_PER_TOKEN),
        };
        tokens.min(bound).min(self.engine.context_tokens)
    }
}

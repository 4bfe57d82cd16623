//! Room for whole histories: which sessions are pinned for them without being asked, and how many
//! tokens a turn of theirs may come to.

use std::time::Instant;

use proto::{id::SessionKey, load::Retention};

use super::ASTRAY_MAX;
use crate::session::table::{Need, Table};

/// What an answer without a limit takes at least in a session that nobody asked to pin: the engine
/// itself keeps room for no more of it. What goes beyond is in the account when the turn has ended,
/// and in what the pin budget leaves of the pool until then.
const ANSWER_TOKENS: u64 = 4096;
/// And so often what its longest answer had: who reasons at length does it again.
const LONGEST_ANSWER_FACTOR: u64 = 2;
/// Templates put some around what is added.
const TEMPLATE_TOKENS: u64 = 32;
/// A session holds its row while it is idle too. Those that nobody asked to pin leave this part of
/// the rows to turns that run, or the batch would starve beside a pool that has room.
const ROWS_LEFT_DIVISOR: u32 = 2;
/// Bytes of text that are taken for a token: English and code have 3.5 to 4.5. A text with fewer is
/// found by the shim, which refuses what room was not kept for and says how much it takes.
const BYTES_PER_TOKEN: u64 = 3;

impl Table {
    /// Is this the moment to pin a session whose client has asked for nothing? It comes back soon,
    /// its histories can be trimmed, and there is room without taking anyone's.
    pub(in super::super) fn pins_now(&self, now: Instant, key: &SessionKey, need: Need) -> bool {
        let session = &self.sessions[key];
        let wants = self.rules.auto_pin
            && self.trims
            && session.is_auto()
            && session.retention != Retention::Pinned
            && session.whole.sends
            && session.whole.astray <= ASTRAY_MAX
            && session.whole.pin_after.is_none_or(|after| after <= now)
            && self.books[session.dp_rank as usize].demotes()
            && self.engine.retentions.contains(&Retention::Pinned);
        let hot = session.turns > 0 && session.idle(now) <= self.rules.demote_idle;
        let alone = session.running == 0 && session.waiting == 1;
        if !(wants && hot && alone) || self.takes_over() {
            return false;
        }
        let free = matches!(self.rows_short(session.dp_rank), Ok(None));
        let rows = self.capacity(session.dp_rank).map_or(0, |capacity| capacity.rows);
        let left = self.totals(session.dp_rank).rows_held < rows / ROWS_LEFT_DIVISOR;
        free && left && self.fits(key, self.whole_target(key, need))
    }

    /// Would the pin budget hold this session at so many tokens?
    pub(super) fn fits(&self, key: &SessionKey, target: u64) -> bool {
        let session = &self.sessions[key];
        let held_now = match session.retention {
            Retention::Pinned if session.row => {
                self.pages_of(session.resident_tokens.max(session.reserved_tokens))
            }
            _ => 0,
        };
        let (Ok((held, max)), Ok(capacity)) =
            (self.pins(session.dp_rank), self.capacity(session.dp_rank))
        else {
            return false;
        };
        let room = self.room_to_pin(session.dp_rank, capacity.pool_tokens);
        held - held_now + self.pages_of(target) <= max.min(room)
    }

    /// Tokens that a whole history may come to, its answer included.
    pub(in super::super) fn whole_target(&self, key: &SessionKey, need: Need) -> u64 {
        let context = self.engine.context_tokens;
        let tokens = self.whole_tokens(key, need);
        tokens.saturating_add(self.answer_tokens(key, need)).min(context)
    }

    pub(super) fn answer_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let context = self.engine.context_tokens;
        let session = &self.sessions[key];
        let longest = session.whole.answer_tokens_max.saturating_mul(LONGEST_ANSWER_FACTOR);
        let likely = longest.max(ANSWER_TOKENS).min(context);
        let unlimited = if session.is_auto() { likely } else { context };
        need.answer_tokens.unwrap_or(unlimited)
    }

    /// Tokens that a whole history may have: what was sent before is known, what was added is
    /// estimated, and the shim holds it to that.
    pub(super) fn whole_tokens(&self, key: &SessionKey, need: Need) -> u64 {
        let bound = need.prompt_tokens;
        let tokens = match self.sessions[key].whole.measured {
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

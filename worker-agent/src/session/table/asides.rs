//! Decides whether a turn runs in its session's conversation, waits for it, or runs beside it.
//!
//! An *aside* is a full history of another conversation: a coding agent asks for a title in its
//! main session, say. An aside runs on the radix tree, takes no place in its session, and changes
//! nothing that the agent knows of the session's history. A client that shortens its conversation
//! begins another too: its first turn runs as an aside, and the next, which continues it, is the
//! session's. If only asides come, one runs as a turn of the session, and the shim compares it: the
//! session's conversation may be over.
//!
//! The KV that a session computed since its pin is not in the radix tree, so a turn beside a
//! running one of the same conversation computes it again. So the turn first waits about as long as
//! that takes: the wait at most doubles what the turn costs.

use std::time::{Duration, Instant};

use contract::id::SessionKey;

use super::{
    Need, Session, State, Table,
    tickets::{Stage, Ticket},
};

/// A prompt with fewer tokens than the history's divided by this can't continue the history.
const ASIDE_DIVISOR: u64 = 4;
/// Titles before, during and after a turn, and suggestions of the user's next message, are fewer.
const ASIDES_IN_A_ROW_MAX: u32 = 8;
/// Few engines exceed this with long prompts. A lower rate makes turns wait longer than needed.
const PREFILL_TOKENS_PER_SECOND: u64 = 10_000;
/// For the shim's plan of the turn ahead. The shim tokenizes that turn's prompt, and may ask the
/// agent and wait two seconds for the answer.
const PLAN_WAIT_MAX: Duration = Duration::from_millis(2_500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HistoryUse {
    Free,
    Awaited,
    Beside,
}

impl Table {
    pub(super) fn is_aside(&self, session: &Session, ticket: &Ticket) -> bool {
        let Stage::Queued { need, prompt_start } = &ticket.stage else { return false };
        let may_be_guest = session.has_auto_retention()
            && !session.is_exclusive()
            && !ticket.is_delta()
            && !ticket.opens_session()
            && !ticket.closes_session();
        // While the session opens, the engine doesn't know the tag that the turn would carry.
        let has_place_beside =
            matches!(session.state, State::Open(_) | State::InTree(_) | State::Demoted);
        may_be_guest
            && has_place_beside
            && session.turns.asides_in_a_row < ASIDES_IN_A_ROW_MAX
            && session
                .prefix_tracker
                .is_aside(prompt_start)
                .unwrap_or_else(|| is_far_shorter(session, *need))
    }

    /// Others than asides may have to wait if the agent pinned the session on its own.
    pub(super) fn find_history(&mut self, now: Instant, key: &SessionKey, rid: &str) -> HistoryUse {
        let (session, ticket) = (&self.sessions[key], &self.tickets[rid]);
        if self.is_aside(session, ticket) {
            return HistoryUse::Beside;
        }
        if session.turns.running == 0 || !session.is_pinned_by_agent() || session.is_exclusive() {
            return HistoryUse::Free;
        }
        let generation = session.generation;
        let mut turns = self
            .tickets
            .inside()
            .filter(|(_, ticket, inside)| ticket.is_of(generation) && inside.runs_pinned());
        let Some((_, ahead, _)) = turns.next() else {
            return if self.may_join(session) { HistoryUse::Free } else { HistoryUse::Beside };
        };
        let millis = session.history.tokens.saturating_mul(1_000) / PREFILL_TOKENS_PER_SECOND;
        let compute_time = Duration::from_millis(millis);
        let wait_max =
            if ahead.awaits_plan() { compute_time.max(PLAN_WAIT_MAX) } else { compute_time };
        let until = ticket.since + wait_max.min(self.settings.queue_wait_max);
        if now < until {
            let first = self.history_awaited_until.map_or(until, |earlier| earlier.min(until));
            self.history_awaited_until = Some(first);
            return HistoryUse::Awaited;
        }
        self.sessions.update(key, |session| session.turns.has_forked = true);
        HistoryUse::Beside
    }

    /// What makes a session's KV unfit is acted on when no turn of the session is inside.
    fn may_join(&self, session: &Session) -> bool {
        let has_older_weights =
            session.history.tokens > 0 && session.kv_epoch < self.weights.epoch();
        self.shims.trims()
            && !session.state.is_gone()
            && !session.history.is_corrupt
            && !session.history.is_adapter_gone
            && !has_older_weights
    }
}

/// For a prompt that doesn't show how it begins.
fn is_far_shorter(session: &Session, need: Need) -> bool {
    session.is_pinned() && need.prompt_tokens < session.history.tokens / ASIDE_DIVISOR
}

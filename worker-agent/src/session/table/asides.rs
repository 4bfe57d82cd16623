//! Decides whether a turn runs in its session's conversation, waits for it, or runs beside it.
//!
//! An *aside* is a full history (a turn with a whole conversation) that belongs to another
//! conversation than its session's: a coding agent asks for a title in the session of its main
//! conversation, say. An aside runs on the radix tree and takes no place in its session: no turn
//! waits for it, it pins nothing, and it changes nothing that the agent knows of the session's
//! history. A client that shortens its conversation begins another one too, so the first turn after
//! that runs as an aside. The next one continues it, and is the session's.
//!
//! The KV that a pinned session computed since its pin is not in the radix tree. A turn that runs
//! beside a running turn of the same conversation computes it again. So the turn first waits about
//! as long as that would take: however long the running turn takes, the wait at most doubles what
//! the turn costs.
//!
//! The module `admission` asks, with each pass over the queue.

use std::time::{Duration, Instant};

use proto::id::SessionKey;

use super::{
    Need, Session, Table,
    tickets::{Stage, Ticket},
};

/// A prompt that has at most the history's tokens divided by this number can't continue that
/// history, and shares little with it.
const ASIDE_DIVISOR: u64 = 4;
/// A prefill rate that few engines exceed with long prompts. A lower one makes turns wait longer
/// than computing takes.
const PREFILL_TOKENS_PER_SECOND: u64 = 10_000;
/// The time limit for the shim's plan of the turn ahead. The shim tokenizes its prompt, and may ask
/// the agent and wait two seconds for the answer.
const PLAN_WAIT_MAX: Duration = Duration::from_millis(2_500);

/// Whether a session's pinned history is free for one more turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HistoryUse {
    /// The turn may run in its session.
    Free,
    /// Another turn is inside. The turn waits until then.
    AwaitedUntil(Instant),
    /// Another turn is inside, and the wait has been long enough.
    Taken,
}

impl Table {
    /// Whether a waiting turn is an aside of its session.
    pub(super) fn is_aside(&self, session: &Session, ticket: &Ticket) -> bool {
        let Stage::Queued { need, prompt_start } = &ticket.stage else { return false };
        let is_guest = session.has_auto_retention()
            && !session.is_exclusive()
            && !ticket.is_delta()
            && !ticket.opens_session()
            && !ticket.closes_session()
            && !session.state.is_gone();
        is_guest
            && (session.prefix_tracker.is_aside(prompt_start) || is_far_shorter(session, *need))
    }

    /// Returns whether a waiting full history finds the history of its session free, if the agent
    /// pinned that on its own.
    pub(super) fn history_use(
        &self,
        now: Instant,
        key: &SessionKey,
        ticket: &Ticket,
    ) -> HistoryUse {
        let session = &self.sessions[key];
        if session.turns.running == 0 || !session.is_pinned_by_agent() || session.is_exclusive() {
            return HistoryUse::Free;
        }
        let mut turns = self
            .tickets
            .inside()
            .filter(|(_, ticket, inside)| ticket.is_of(session.generation) && inside.runs_pinned());
        let Some((_, ahead, _)) = turns.next() else { return HistoryUse::Free };
        let millis = session.history.tokens.saturating_mul(1_000) / PREFILL_TOKENS_PER_SECOND;
        let compute_time = Duration::from_millis(millis);
        let wait_max =
            if ahead.awaits_plan() { compute_time.max(PLAN_WAIT_MAX) } else { compute_time };
        let until = ticket.since + wait_max.min(self.settings.queue_wait_max);
        if now < until { HistoryUse::AwaitedUntil(until) } else { HistoryUse::Taken }
    }

    /// Notes until when a turn waits for its session's history.
    pub(super) fn note_wait_for_history(&mut self, until: Instant) {
        let first = self.history_awaited_until.map_or(until, |earlier| earlier.min(until));
        self.history_awaited_until = Some(first);
    }
}

/// Whether a prompt is so much shorter than its session's pinned history that it can't continue it.
fn is_far_shorter(session: &Session, need: Need) -> bool {
    session.is_pinned() && need.prompt_tokens < session.history.tokens / ASIDE_DIVISOR
}

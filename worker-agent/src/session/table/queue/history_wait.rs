//! Decides whether a turn may use its session's history, waits for it, or runs beside it.
//!
//! The KV that a session computed since its pin is not in the radix tree, so a turn beside a
//! running one of the same conversation computes it again. So the turn first waits about as long as
//! that takes: the wait at most doubles what the turn costs.

use std::time::{Duration, Instant};

use contract::id::SessionKey;

use crate::session::table::{
    Histories, Queue, Session,
    queue::ticket::{Inside, Ticket},
};

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

/// Others than asides may have to wait if the agent pinned the session on its own.
pub(super) fn find_history(
    queue: &mut Queue,
    now: Instant,
    key: &SessionKey,
    rid: &str,
) -> HistoryUse {
    let (session, ticket) = (&queue.sessions()[key], &queue.tickets[rid]);
    if ticket.is_aside(session) {
        return HistoryUse::Beside;
    }
    if session.turns.running == 0 || !session.is_pinned_by_agent() || session.is_exclusive() {
        return HistoryUse::Free;
    }
    let is_ahead = |(_, ticket, inside): &(&str, &Ticket, &Inside)| {
        ticket.is_of(session.generation) && inside.runs_pinned()
    };
    let Some((ahead, ..)) = queue.tickets.inside().find(is_ahead) else {
        let may_join = may_join(&queue.histories, session);
        return if may_join { HistoryUse::Free } else { HistoryUse::Beside };
    };
    let millis = session.history.tokens.saturating_mul(1_000) / PREFILL_TOKENS_PER_SECOND;
    let compute_time = Duration::from_millis(millis);
    let awaits_plan = queue.histories.turns.awaits_plan(ahead);
    let wait_max = if awaits_plan { compute_time.max(PLAN_WAIT_MAX) } else { compute_time };
    let until = ticket.since + wait_max.min(queue.settings.queue_wait_max);
    if now < until {
        let first = queue.history_awaited_until.map_or(until, |earlier| earlier.min(until));
        queue.history_awaited_until = Some(first);
        return HistoryUse::Awaited;
    }
    queue.sessions_mut().update(key, |session| session.turns.has_forked = true);
    HistoryUse::Beside
}

/// What makes a session's KV unfit is acted on when no turn of the session is inside.
fn may_join(histories: &Histories, session: &Session) -> bool {
    let has_older_weights =
        session.history.tokens > 0 && session.kv_epoch < histories.weights.epoch();
    histories.shims.trims()
        && !session.state.is_gone()
        && !session.history.is_corrupt
        && !session.history.is_adapter_gone
        && !has_older_weights
}

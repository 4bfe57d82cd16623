//! Estimates the prompt tokens of a rank that the engine's load figures don't show yet.
//!
//! Their turns wait in the agent, or were sent to the engine after its latest load sample.

use std::time::Instant;

use crate::session::table::{
    Histories, Need, Queue,
    histories::{running_turns::RunningTurn, trim_turn::Trim},
    queue::ticket::{Stage, Ticket},
};

/// About four in English, less in code. Where a turn's need was taken from its text,
/// [`Need::prompt_tokens`](super::Need) is the number of bytes, an upper bound on the tokens.
const BYTES_PER_TOKEN: u64 = 4;

/// Which turns the engine's load figures may not show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnseenBy {
    /// Those that wait in the agent, and those sent after a load sample of this time.
    Sample(Instant),
    /// Those inside the engine that were sent at this time or later.
    EngineSince(Instant),
}

/// Leaves out tokens whose KV is resident, as far as that is known.
pub(crate) fn unseen_prompt_tokens(queue: &Queue, dp_rank: u32, unseen_by: UnseenBy) -> u64 {
    // The need of a claimed turn isn't known yet, and an open request is not a turn.
    let is_unseen = |ticket: &Ticket| match (unseen_by, &ticket.stage) {
        (UnseenBy::Sample(at), Stage::Inside(_)) => ticket.since > at,
        (UnseenBy::Sample(_), _) => true,
        (UnseenBy::EngineSince(since), Stage::Inside(_)) => ticket.since >= since,
        (UnseenBy::EngineSince(_), _) => false,
    };
    let tickets = queue.tickets.iter();
    let unseen = tickets.filter(|(_, ticket)| ticket.dp_rank == dp_rank && is_unseen(ticket));
    let tokens = unseen.filter_map(|(rid, ticket)| {
        let need = ticket.need()?;
        Some(tokens_to_compute(&queue.histories, rid, ticket, need))
    });
    tokens.fold(0, u64::saturating_add)
}

fn tokens_to_compute(histories: &Histories, rid: &str, ticket: &Ticket, need: Need) -> u64 {
    let divisor = if need.is_exact { 1 } else { BYTES_PER_TOKEN };
    let sent_tokens = need.prompt_tokens / divisor;
    let sessions = &histories.pins.sessions;
    let session = ticket.claimed_key(sessions).map(|key| &sessions[&key]);
    let trim = histories.turns.get(rid).and_then(RunningTurn::trim);
    let tokens = match (session, trim) {
        (None, _) => sent_tokens.saturating_sub(need.resident_tokens),
        (Some(session), Some(Trim::Planned { prompt_tokens, .. })) => {
            prompt_tokens.saturating_sub(session.resident_tokens())
        }
        // The shim removes the tokens that the session has from a full history.
        (Some(session), Some(Trim::Awaited(_) | Trim::Refused)) => {
            sent_tokens.saturating_sub(session.resident_tokens())
        }
        (Some(session), _) if !session.is_pinned() => {
            sent_tokens.saturating_sub(session.resident_tokens().max(need.resident_tokens))
        }
        (Some(session), _) if !ticket.is_delta() => {
            sent_tokens.saturating_sub(session.resident_tokens())
        }
        // If the session of a delta lost its KV, the engine computes the history again.
        (Some(session), _) => sent_tokens
            .saturating_add(session.history.tokens.saturating_sub(session.resident_tokens())),
    };
    tokens.min(histories.pins.context_tokens)
}

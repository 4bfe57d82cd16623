//! Estimates the prompt tokens of a rank that the engine's load figures don't show yet.
//!
//! Such tokens belong to turns (requests with their answers) that wait in the agent, or that were
//! sent to the engine after its latest load sample. `crate::ledger` adds them to the load that the
//! agent reports to the routers. This module only reads the table.

use std::time::Instant;

use super::{Table, Ticket, TicketState};

/// Bytes of text that are counted as one token: about four in English, less in code. If a turn's
/// need was taken from its text, [`Need::prompt_tokens`](super::Need) is the number of bytes, an
/// upper bound on the tokens. That bound divided by this number is an estimate.
const BYTES_PER_TOKEN: u64 = 4;

impl Table {
    /// Returns the prompt tokens that a rank has yet to compute and that no load sample up to
    /// `sampled_at` shows. Leaves out tokens whose KV is resident, as far as that is known.
    #[must_use]
    pub fn unsampled_prompt_tokens(&self, dp_rank: u32, sampled_at: Instant) -> u64 {
        let is_unsampled = |ticket: &&Ticket| {
            ticket.dp_rank == dp_rank
                && match ticket.state {
                    TicketState::Queued => true,
                    TicketState::Inside => ticket.state_since > sampled_at,
                    // The body of a claimed turn isn't known yet. An open request is not a turn.
                    TicketState::Claimed | TicketState::AwaitsOpen => false,
                }
        };
        let turns = self.tickets.values().filter(is_unsampled);
        turns.map(|ticket| self.tokens_to_compute(ticket)).fold(0, u64::saturating_add)
    }

    /// Estimates how many prompt tokens the engine computes for a turn.
    fn tokens_to_compute(&self, ticket: &Ticket) -> u64 {
        let need = ticket.need;
        let divisor = if need.is_exact { 1 } else { BYTES_PER_TOKEN };
        let sent_tokens = need.prompt_tokens / divisor;
        let session = ticket.key.as_ref().and_then(|key| self.sessions.get(key));
        let session = session.filter(|session| session.generation == ticket.generation);
        let tokens = match session {
            None => sent_tokens.saturating_sub(need.resident_tokens),
            // A trim turn: a full history from which the shim removes the tokens that its session
            // has.
            Some(session) if ticket.is_pinned && ticket.is_trim_turn() => {
                let planned_tokens = ticket.planned_tokens_to_compute(session.resident_tokens());
                planned_tokens.unwrap_or(sent_tokens.saturating_sub(session.resident_tokens()))
            }
            Some(session) if session.is_pinned() && !ticket.is_delta() => {
                sent_tokens.saturating_sub(session.resident_tokens())
            }
            // A delta. If its session lost its KV, the engine computes the history again.
            Some(session) if session.is_pinned() => sent_tokens
                .saturating_add(session.history.tokens.saturating_sub(session.resident_tokens())),
            Some(session) => {
                sent_tokens.saturating_sub(session.resident_tokens().max(need.resident_tokens))
            }
        };
        tokens.min(self.engine.context_tokens)
    }
}

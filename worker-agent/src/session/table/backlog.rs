//! Prompt tokens that the engine's load figures don't show yet.
//!
//! They belong to turns that wait in the agent, and to turns sent after the latest load sample.

use std::time::Instant;

use proto::load::Retention;

use super::{Table, Ticket, TicketState};

/// Bytes of text counted as one token if tokens weren't counted: about four in English, less in
/// code. Needs taken from bodies are upper bounds; this figure is an estimate.
const BYTES_PER_TOKEN: u64 = 4;

impl Table {
    /// Returns the prompt tokens that a rank has yet to compute and that no load sample before
    /// `seen` shows. Leaves out tokens whose KV is resident, as far as that is known.
    #[must_use]
    pub fn unsampled_prompt_tokens(&self, dp_rank: u32, seen: Instant) -> u64 {
        let unseen = |ticket: &&Ticket| {
            ticket.dp_rank == dp_rank
                && match ticket.state {
                    TicketState::Queued => true,
                    TicketState::Inside => ticket.since > seen,
                    // A claimed turn's body isn't known yet, and an open is not a turn.
                    TicketState::Claimed | TicketState::AwaitsOpen => false,
                }
        };
        let turns = self.tickets.values().filter(unseen);
        turns.map(|ticket| self.tokens_to_compute(ticket)).fold(0, u64::saturating_add)
    }

    fn tokens_to_compute(&self, ticket: &Ticket) -> u64 {
        let need = ticket.need;
        let divisor = if need.exact { 1 } else { BYTES_PER_TOKEN };
        let sent = need.prompt_tokens / divisor;
        let session = ticket.key.as_ref().and_then(|key| self.sessions.get(key));
        let session = session.filter(|session| session.generation == ticket.generation);
        let tokens = match session {
            None => sent.saturating_sub(need.resident_tokens),
            // A full history includes the tokens that its session already has.
            Some(session) if ticket.is_pinned && ticket.is_trim_turn() => {
                let planned = ticket.tokens_to_compute(session.resident_tokens);
                planned.unwrap_or(sent.saturating_sub(session.resident_tokens))
            }
            Some(session) if session.retention == Retention::Pinned && !ticket.is_delta() => {
                sent.saturating_sub(session.resident_tokens)
            }
            // The history of a session that lost its KV is computed again.
            Some(session) if session.retention == Retention::Pinned => {
                sent.saturating_add(session.history_tokens.saturating_sub(session.resident_tokens))
            }
            Some(session) => sent.saturating_sub(session.resident_tokens.max(need.resident_tokens)),
        };
        tokens.min(self.engine.context_tokens)
    }
}

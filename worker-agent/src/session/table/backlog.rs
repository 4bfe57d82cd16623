//! Prompts that the engine hasn't shown yet: those of turns that wait in the agent, and of turns
//! that went in after the engine was last looked at.

use std::time::Instant;

use proto::load::Retention;

use super::{Stage, Table, Ticket};

/// Bytes of text that a token stands for, where tokens weren't counted: about four in English, less
/// in code. Bodies are bounds; this is meant to be near.
const BYTES_PER_TOKEN: u64 = 4;

impl Table {
    /// Prompt tokens that a rank will have to compute and that no look at the engine before `seen`
    /// has shown, KV that is there left out as far as it is known.
    #[must_use]
    pub fn unseen_tokens(&self, dp_rank: u32, seen: Instant) -> u64 {
        let unseen = |ticket: &&Ticket| {
            ticket.dp_rank == dp_rank
                && match ticket.stage {
                    Stage::Queued => true,
                    Stage::Inside => ticket.since > seen,
                    // What its body brings isn't known yet, or it is no turn.
                    Stage::Claimed | Stage::Open => false,
                }
        };
        let turns = self.tickets.values().filter(unseen);
        turns.map(|ticket| self.to_compute(ticket)).fold(0, u64::saturating_add)
    }

    fn to_compute(&self, ticket: &Ticket) -> u64 {
        let need = ticket.need;
        let divisor = if need.exact { 1 } else { BYTES_PER_TOKEN };
        let sent = need.prompt_tokens / divisor;
        let session = ticket.key.as_ref().and_then(|key| self.sessions.get(key));
        let session = session.filter(|session| session.born == ticket.born);
        let tokens = match session {
            None => sent.saturating_sub(need.resident_tokens),
            // A whole history brings what its session has.
            Some(session) if ticket.pinned && ticket.is_marked() => {
                let planned = ticket.to_compute(session.resident_tokens);
                planned.unwrap_or(sent.saturating_sub(session.resident_tokens))
            }
            Some(session) if session.retention == Retention::Pinned && !ticket.is_delta() => {
                sent.saturating_sub(session.resident_tokens)
            }
            // A history whose KV was given up is computed again.
            Some(session) if session.retention == Retention::Pinned => {
                sent.saturating_add(session.history_tokens.saturating_sub(session.resident_tokens))
            }
            Some(session) => sent.saturating_sub(session.resident_tokens.max(need.resident_tokens)),
        };
        tokens.min(self.engine.context_tokens)
    }
}

//! Estimates the prompt tokens of a rank that the engine's load figures don't show yet.
//!
//! Their turns wait in the agent, or were sent to the engine after its latest load sample.

use std::time::Instant;

use super::{
    Need, Table,
    tickets::{Inside, Stage, Ticket},
    trim_turn::Trim,
};

/// About four in English, less in code. Where a turn's need was taken from its text,
/// [`Need::prompt_tokens`](super::Need) is the number of bytes, an upper bound on the tokens.
const BYTES_PER_TOKEN: u64 = 4;

impl Table {
    /// Returns what no load sample up to `sampled_at` shows. Leaves out tokens whose KV is
    /// resident, as far as that is known.
    #[must_use]
    pub fn unsampled_prompt_tokens(&self, dp_rank: u32, sampled_at: Instant) -> u64 {
        let of_rank = self.tickets.iter().filter(|(_, ticket)| ticket.dp_rank == dp_rank);
        // The need of a claimed turn isn't known yet, and an open request is not a turn.
        let unsampled = of_rank.filter(|(_, ticket)| match ticket.stage {
            Stage::Inside(_) => ticket.since > sampled_at,
            _ => true,
        });
        let tokens = unsampled
            .filter_map(|(_, ticket)| Some(self.tokens_to_compute(ticket, ticket.need()?)));
        tokens.fold(0, u64::saturating_add)
    }

    #[must_use]
    pub fn sent_prompt_tokens(&self, dp_rank: u32, since: Instant) -> u64 {
        let sent = self.tickets.iter().filter(|(_, ticket)| {
            ticket.dp_rank == dp_rank && ticket.inside().is_some() && ticket.since >= since
        });
        let tokens =
            sent.filter_map(|(_, ticket)| Some(self.tokens_to_compute(ticket, ticket.need()?)));
        tokens.fold(0, u64::saturating_add)
    }

    fn tokens_to_compute(&self, ticket: &Ticket, need: Need) -> u64 {
        let divisor = if need.is_exact { 1 } else { BYTES_PER_TOKEN };
        let sent_tokens = need.prompt_tokens / divisor;
        let session = self.session_of(ticket).map(|key| &self.sessions[&key]);
        let trim = ticket.inside().and_then(Inside::trim);
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
        tokens.min(self.engine.context_tokens)
    }
}

//! Keeps the histories that clients append deltas to: a full history must continue such a history.
//!
//! A delta is a turn that holds only new tokens, which the engine appends to the session's history.
//! A full history holds the whole conversation. If it doesn't continue the session's history, it
//! replaces that history only if the client opens the session with this turn. Otherwise the shim,
//! Berth's part in the engine's process, refuses the turn.
//!
//! The shim compares the two histories. This module marks the turn that the shim refuses, with the
//! reason for its client, and updates whether a session takes deltas. The parent module calls it.

use proto::id::SessionKey;

use super::{Plan, TrimOutcome, TrimPlan};
use crate::session::table::{Deltas, Effect, Error, MeasuredHistory, Table, Ticket};

impl Ticket {
    /// Whether the shim has refused the turn, so that it does not run.
    pub(in super::super) fn is_refused_by_shim(&self) -> bool {
        self.trim_turn.as_ref().is_some_and(|turn| turn.is_refused)
    }

    /// Whether the client opens the session with this turn.
    pub(super) fn opens_session(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.open)
    }
}

impl Table {
    /// Updates whether a session takes deltas, when a turn's full history becomes the session's
    /// history.
    ///
    /// - The client opens the session with this turn: the session takes deltas. But if the full
    ///   history replaced a history that other clients append to, it takes none, so that those
    ///   clients are told.
    /// - The session was opened before this turn, and the full history is its first history: the
    ///   session takes no deltas, because the client that opened it doesn't know that history.
    pub(in super::super) fn update_deltas(&mut self, rid: &str, key: &SessionKey) {
        let ticket = &self.tickets[rid];
        let (opens_session, trim_turn) = (ticket.opens_session(), ticket.trim_turn.as_ref());
        let has_replaced_deltas = trim_turn.is_some_and(|turn| turn.has_replaced_deltas);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let has_no_history = session.history.tokens == 0;
        session.client.deltas = match session.client.deltas {
            Deltas::Refused | Deltas::RefusedAnew if opens_session && !has_replaced_deltas => {
                Deltas::Allowed
            }
            Deltas::Allowed if has_no_history && !opens_session => Deltas::Refused,
            deltas => deltas,
        };
    }

    /// Handles a turn that the shim refuses because the turn doesn't continue its session. The turn
    /// does not run, and the session's history stays as it is. Returns what `handle_plan` returns;
    /// the tokens are 0.
    pub(super) fn refuse_not_continued(
        &mut self,
        key: &SessionKey,
        rid: &str,
        plan: &TrimPlan,
    ) -> (TrimOutcome, u64) {
        let trim_turn = self.trim_turn_mut(rid);
        trim_turn.is_refused = true;
        let exceeds_room =
            plan.decision == Plan::Refused && plan.prompt_tokens > trim_turn.reserved_prompt_tokens;
        let error = if trim_turn.exceeds_reserved || exceeds_room {
            let prompt_tokens_bound = self.tickets[rid].need.prompt_tokens;
            let session = self.sessions.get_mut(key).expect("the caller has seen it");
            // A retry of the turn then reserves this much room, or is refused because the pin
            // budget can never hold it.
            session.client.last_measured =
                Some(MeasuredHistory { prompt_tokens_bound, tokens: plan.prompt_tokens });
            let detail = format!("this full history has {} tokens", plan.prompt_tokens);
            Error::OutOfRoom { resource: "pin_tokens", detail }
        } else {
            let (first_difference, history_tokens) = (plan.shared_tokens, plan.committed_tokens);
            let detail = match plan.decision {
                Plan::Diverged if first_difference < history_tokens => {
                    format!(
                        "differs from the session's {history_tokens} tokens at token \
                         {first_difference}"
                    )
                }
                Plan::Diverged => format!("adds nothing to the session's {history_tokens} tokens"),
                _ => "can't be compared with what the session has".to_owned(),
            };
            Error::NotContinued { detail }
        };
        self.effects.push(Effect::RefusedByShim { rid: rid.to_owned(), error });
        (TrimOutcome::NotContinued, 0)
    }
}

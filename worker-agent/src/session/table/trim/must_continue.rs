//! Full histories on sessions that take deltas.
//!
//! The history of such a session is never replaced unless a client opens the session again.

use proto::id::SessionKey;

use super::{Plan, TrimOutcome, TrimPlan};
use crate::session::table::{Deltas, Effect, Error, Table, Ticket};

impl Ticket {
    /// Whether the shim has refused the turn, so that it does not run.
    pub(in super::super) fn is_refused_by_shim(&self) -> bool {
        self.trim_turn.as_ref().is_some_and(|turn| turn.refused_by_shim)
    }

    /// Whether the client opens the session with this turn.
    pub(super) fn is_opening(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.open)
    }
}

impl Table {
    /// Updates whether a session takes deltas when a turn's full history becomes the session's.
    ///
    /// A client that opens the session with this turn may continue with deltas. It may not if the
    /// history replaced one that other clients append to: they must hear of that. A session that
    /// was opened before takes no deltas if another client's full history becomes its first: the
    /// client that opened it doesn't know that history.
    pub(in super::super) fn update_deltas(&mut self, rid: &str, key: &SessionKey) {
        let ticket = &self.tickets[rid];
        let (opens, trim_turn) = (ticket.is_opening(), ticket.trim_turn.as_ref());
        let replaced_deltas = trim_turn.is_some_and(|turn| turn.replaced_deltas);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let empty = session.history_tokens == 0;
        session.deltas = match session.deltas {
            Deltas::Refused if opens && !replaced_deltas => Deltas::Allowed,
            Deltas::Allowed if empty && !opens => Deltas::Refused,
            deltas => deltas,
        };
    }

    /// Handles a turn that the shim refuses because it doesn't continue its session. The turn does
    /// not run, and the session stays as it is.
    pub(super) fn refuse_not_continued(
        &mut self,
        key: &SessionKey,
        rid: &str,
        plan: &TrimPlan,
    ) -> (TrimOutcome, u64) {
        let trim_turn = self.trim_turn_mut(rid);
        trim_turn.refused_by_shim = true;
        let unasked = plan.decision == Plan::Refused && plan.prompt_tokens > trim_turn.tokens_max;
        let error = if trim_turn.too_large || unasked {
            let sent = self.tickets[rid].need.prompt_tokens;
            let session = self.sessions.get_mut(key).expect("the caller has seen it");
            // A retry then asks for that much room, or is told that the budget can never hold it.
            session.full_history.last_measured = Some((sent, plan.prompt_tokens));
            let detail = format!("this full history has {} tokens", plan.prompt_tokens);
            Error::OutOfRoom { resource: "pin_tokens", detail }
        } else {
            let (at, committed) = (plan.shared_tokens, plan.committed_tokens);
            let detail = match plan.decision {
                Plan::Diverged if at < committed => {
                    format!("differs from the session's {committed} tokens at token {at}")
                }
                Plan::Diverged => format!("adds nothing to the session's {committed} tokens"),
                _ => "can't be compared with what the session has".to_owned(),
            };
            Error::NotContinued { detail }
        };
        self.effects.push(Effect::RefusedByShim { rid: rid.to_owned(), error });
        (TrimOutcome::NotContinued, 0)
    }
}

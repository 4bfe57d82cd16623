//! Keeps the histories that clients append deltas to: a full history must continue such a history.
//!
//! A full history that doesn't continue a session's replaces it only if the client opens the
//! session with this turn. Otherwise the shim refuses the turn.

use contract::id::SessionKey;
use service::refusal::Code;

use super::{Plan, Replaced, Trim, TrimOutcome, TrimPlan, TurnAwaitingPlan};
use crate::session::table::{Deltas, Effect, Error, MeasuredHistory, Table};

impl Table {
    /// Called when a turn's full history becomes the session's.
    pub(in super::super) fn update_deltas(
        &mut self,
        key: &SessionKey,
        opens_session: bool,
        replaced: Option<Replaced>,
    ) {
        let has_replaced_deltas = replaced == Some(Replaced::Deltas);
        self.sessions.update(key, |session| {
            let has_no_history = session.history.tokens == 0;
            session.client.deltas = match session.client.deltas {
                // If the turn replaced a history that clients append to, these must be told.
                Deltas::Refused | Deltas::RefusedAnew if opens_session && !has_replaced_deltas => {
                    Deltas::Allowed
                }
                // The client that opened the session doesn't know this history.
                Deltas::Allowed if has_no_history && !opens_session => Deltas::Refused,
                deltas => deltas,
            };
        });
    }

    /// The turn does not run, and the session's history stays as it is.
    pub(super) fn refuse_not_continued(
        &mut self,
        turn: &TurnAwaitingPlan,
        plan: &TrimPlan,
    ) -> (TrimOutcome, u64) {
        let (rid, awaited) = (&plan.rid, &turn.awaited);
        self.set_trim(rid, Trim::Refused);
        let exceeds_room =
            plan.decision == Plan::Refused && plan.prompt_tokens > awaited.request.tokens_max;
        let has_other_kv = self.sessions[&turn.key].has_other_kv(turn.need.kv);
        let error = if (awaited.exceeds_reserved() || exceeds_room) && !has_other_kv {
            let prompt_tokens_bound = turn.need.prompt_tokens;
            // A retry then reserves this much, or is refused as more than the pin budget can hold.
            let measured = MeasuredHistory { prompt_tokens_bound, tokens: plan.prompt_tokens };
            self.sessions.update(&turn.key, |session| {
                session.client.last_measured = Some(measured);
            });
            let detail = format!("this full history has {} tokens", plan.prompt_tokens);
            Error::OutOfRoom { resource: Code::PinTokens, detail, wait: None }
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
                _ if has_other_kv => {
                    "names another adapter, `cache_salt` or `extra_key` than the session's KV has"
                        .to_owned()
                }
                _ => "can't be compared with what the session has".to_owned(),
            };
            Error::NotContinued { detail }
        };
        self.effects.push(Effect::RefusedByShim { rid: rid.clone(), error });
        (TrimOutcome::NotContinued, 0)
    }
}

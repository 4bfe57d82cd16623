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
use service::refusal::Code;

use super::{Plan, Replaced, Trim, TrimOutcome, TrimPlan, TurnAwaitingPlan};
use crate::session::table::{Deltas, Effect, Error, MeasuredHistory, Table};

impl Table {
    /// Updates whether a session takes deltas, when a turn's full history becomes the session's
    /// history.
    ///
    /// - The client opens the session with this turn: the session takes deltas. But if the full
    ///   history replaced a history that other clients append to, it takes none, so that those
    ///   clients are told.
    /// - The session was opened before this turn, and the full history is its first history: the
    ///   session takes no deltas, because the client that opened it doesn't know that history.
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
                Deltas::Refused | Deltas::RefusedAnew if opens_session && !has_replaced_deltas => {
                    Deltas::Allowed
                }
                Deltas::Allowed if has_no_history && !opens_session => Deltas::Refused,
                deltas => deltas,
            };
        });
    }

    /// Handles a turn that the shim refuses because the turn doesn't continue its session. The turn
    /// does not run, and the session's history stays as it is. Returns what `handle_plan` returns;
    /// the tokens are 0.
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
            // A retry of the turn then reserves this much room, or is refused because the pin
            // budget can never hold it.
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

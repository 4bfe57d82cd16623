//! Runs full histories in pinned sessions, so that clients without deltas can use pinned KV too.
//!
//! The engine appends what a turn sends to a pinned session, so the shim trims a full history.
//! Until the shim's plan comes, such a *trim turn* counts as running in its session. Then it runs
//! there, or beside it on the radix tree.
//!
//! Clients append deltas to some histories. A full history that doesn't continue such a history
//! replaces it only if the client opens the session with this turn. Otherwise the shim refuses it.

use contract::id::SessionKey;
use service::refusal::Code;

use crate::{
    session::table::{
        Deltas, Effect, Error, Guard, Histories, MeasuredHistory, Need, RunMode, Session, Step,
        TrimOutcome, TrimPlan, TrimRequest,
        histories::{
            running_turns::PinnedRun,
            trim_turn::{AwaitedPlan, Question, Replaced, Trim},
        },
    },
    shim::trim::Plan,
};

pub(crate) struct TurnAwaitingPlan {
    pub(crate) key: SessionKey,
    pub(crate) opens_session: bool,
    pub(crate) need: Need,
    pub(crate) had_no_kv: bool,
    pub(crate) awaited: AwaitedPlan,
}

impl TurnAwaitingPlan {
    /// Returns `None` if the turn has a plan, or its session is gone.
    pub(crate) fn find(histories: &Histories, rid: &str) -> Option<Self> {
        let turn = histories.turns.get(rid)?;
        let Some(PinnedRun { had_no_kv, trim: Trim::Awaited(awaited) }) = &turn.pinned else {
            return None;
        };
        Some(Self {
            key: turn.claimed_key(&histories.pins.sessions)?,
            opens_session: turn.opens_session,
            need: turn.need,
            had_no_kv: *had_no_kv,
            awaited: *awaited,
        })
    }
}

impl Session {
    /// Called when a turn's full history becomes the session's.
    pub(crate) fn update_deltas(&mut self, opens_session: bool, replaced: Option<Replaced>) {
        let has_no_history = self.history.tokens == 0;
        self.client.deltas = match self.client.deltas {
            // If the turn replaced a history that clients append to, these must be told.
            Deltas::Refused | Deltas::RefusedAnew
                if opens_session && replaced != Some(Replaced::Deltas) =>
            {
                Deltas::Allowed
            }
            // The client that opened the session doesn't know this history.
            Deltas::Allowed | Deltas::Taken if has_no_history && !opens_session => Deltas::Refused,
            deltas => deltas,
        };
    }
}

impl Histories {
    /// The turn does not run, and the session's history stays as it is.
    pub(crate) fn refuse_not_continued(
        &mut self,
        step: &mut Step,
        turn: &TurnAwaitingPlan,
        plan: &TrimPlan,
    ) -> (TrimOutcome, u64) {
        let (rid, awaited) = (&plan.rid, &turn.awaited);
        self.turns.set_trim(rid, Trim::Refused);
        let exceeds_room =
            plan.decision == Plan::NotTrimmed && plan.prompt_tokens > awaited.request.tokens_max;
        let has_other_kv = self.pins.sessions[&turn.key].has_other_kv(turn.need.kv);
        let error = if (awaited.exceeds_reserved() || exceeds_room) && !has_other_kv {
            let prompt_tokens_bound = turn.need.prompt_tokens;
            // A retry then reserves this much, or is refused as more than the pin budget can hold.
            let measured = MeasuredHistory { prompt_tokens_bound, tokens: plan.prompt_tokens };
            let sessions = &mut self.pins.sessions;
            sessions.update(&turn.key, |session| session.client.last_measured = Some(measured));
            let detail = format!("this full history has {} tokens", plan.prompt_tokens);
            Error::OutOfRoom { resource: Code::PinTokens, detail, wait: None }
        } else {
            let (first_difference, history_tokens) = (plan.shared_tokens, plan.committed_tokens);
            let detail = match plan.decision {
                Plan::Diverged if first_difference < history_tokens => format!(
                    "differs from the session's {history_tokens} tokens at token {first_difference}"
                ),
                Plan::Diverged => format!("adds nothing to the session's {history_tokens} tokens"),
                _ if has_other_kv => {
                    "names another adapter, `cache_salt` or `extra_key` than the session's KV has"
                        .to_owned()
                }
                _ => "can't be compared with what the session has".to_owned(),
            };
            Error::NotContinued { detail }
        };
        step.push(Effect::RefusedByShim { rid: rid.clone(), error });
        (TrimOutcome::NotContinued, 0)
    }

    pub(crate) fn request_trim(
        &mut self,
        key: &SessionKey,
        need: Need,
        opens_session: bool,
    ) -> AwaitedPlan {
        let tokens_max = self.pins.full_history_tokens_max(key, need);
        let is_guard_on = self.settings.guards.is_on(Guard::FullHistoryContinues);
        let session = &self.pins.sessions[key];
        let replaces_incarnation = session.client.deltas == Deltas::RefusedAnew;
        let must_continue = session.client.deltas == Deltas::Taken && !opens_session && is_guard_on;
        if replaces_incarnation {
            self.pins.sessions.update(key, |session| session.client.deltas = Deltas::Refused);
        }
        AwaitedPlan {
            request: TrimRequest { tokens_max, must_continue },
            question: Question::NotAsked,
            replaced: replaces_incarnation.then_some(Replaced::FullHistories),
        }
    }

    pub(crate) fn handle_plan_inside(
        &mut self,
        step: &mut Step,
        turn: &TurnAwaitingPlan,
        plan: &TrimPlan,
    ) -> (TrimOutcome, u64) {
        let TurnAwaitingPlan { key, opens_session, need, had_no_kv, awaited } = turn;
        let rid = &plan.rid;
        let prompt_tokens = plan.committed_tokens.saturating_add(plan.appended_tokens);
        self.turns.set_trim(rid, Trim::Planned { prompt_tokens, committed_tokens: None });
        let (run_mode, outcome) = match plan.decision {
            _ if awaited.replaced.is_some() => (RunMode::Reopened, TrimOutcome::Reopened),
            Plan::Retokenized => (RunMode::Pinned, TrimOutcome::Retokenized),
            _ => (RunMode::Pinned, TrimOutcome::Trimmed),
        };
        let pins = &mut self.pins;
        let target_tokens = prompt_tokens
            .saturating_add(pins.reserved_answer_tokens(key, *need))
            .min(pins.context_tokens);
        pins.sessions.change(step, key, |session| {
            session.record_kv(need.kv);
            // The prompt's exact size is known now, so the rest of the reservation is released.
            if let Some(row) = session.state.row_mut() {
                row.reserved_tokens = row.reserved_tokens.min(target_tokens);
            }
            if plan.committed_tokens > 0 {
                session.client.divergence_streak = 0;
                session.prefix_tracker.record_continuation();
            }
            session.update_deltas(*opens_session, awaited.replaced);
        });
        let reserved_tokens = pins.sessions[key].state.row().map(|row| row.reserved_tokens);
        let growth_tokens_max =
            reserved_tokens.map(|tokens| tokens.saturating_sub(plan.committed_tokens));
        let rid = rid.clone();
        step.push(Effect::RunModeKnown { rid, run_mode, growth_tokens_max });
        (outcome, if *had_no_kv { 0 } else { plan.committed_tokens })
    }
}

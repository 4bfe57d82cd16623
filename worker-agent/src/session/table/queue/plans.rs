//! Applies the shim's plans: a full history runs in its session, beside it, or not at all.

use contract::id::SessionKey;

use crate::{
    session::table::{
        Effect, Histories, Need, Queue, Step, TrimOutcome, TrimPlan,
        histories::{
            trim::TurnAwaitingPlan,
            trim_turn::{AwaitedPlan, Question},
        },
        pins::reclaim::{Requester, Shortage},
    },
    shim::trim::Plan,
};

impl Queue {
    pub(crate) fn handle_plan(
        &mut self,
        step: &mut Step,
        plan: &TrimPlan,
    ) -> Option<(TrimOutcome, u64)> {
        let Some(turn) = TurnAwaitingPlan::find(&self.histories, &plan.rid) else {
            if plan.decision == Plan::NotTrimmed {
                self.histories.turns.note_second_turn(&plan.rid);
            }
            let awaits_plan = self.histories.turns.awaits_plan(&plan.rid);
            let is_gone = !self.tickets.has(&plan.rid) || awaits_plan;
            return is_gone.then_some((TrimOutcome::Gone, 0));
        };
        // The shim has decided by itself what it asked about the turn.
        let awaited = self.histories.turns.awaited_plan_mut(&plan.rid);
        awaited.and_then(AwaitedPlan::close_question);
        let is_current = self.sessions()[&turn.key].incarnation == plan.incarnation;
        let outcome = match plan.decision {
            // The incarnation was closed or lost meanwhile. The turn's end updates the session.
            Plan::Trimmed | Plan::Retokenized if !is_current => (TrimOutcome::Gone, 0),
            Plan::Trimmed | Plan::Retokenized => {
                self.tickets.forget_tag(&plan.rid);
                self.histories.handle_plan_inside(step, &turn, plan)
            }
            Plan::Diverged | Plan::NotTrimmed if turn.awaited.request.must_continue => {
                self.histories.refuse_not_continued(step, &turn, plan)
            }
            Plan::Diverged | Plan::NotTrimmed => {
                handle_plan_beside(self, step, &turn, plan);
                let is_diverged = plan.decision == Plan::Diverged;
                (if is_diverged { TrimOutcome::Diverged } else { TrimOutcome::Refused }, 0)
            }
        };
        self.admit_waiting(step);
        Some(outcome)
    }
}

fn handle_plan_beside(
    queue: &mut Queue,
    step: &mut Step,
    turn: &TurnAwaitingPlan,
    plan: &TrimPlan,
) {
    let (rid, key) = (&plan.rid, &turn.key);
    let need = Need { prompt_tokens: plan.prompt_tokens, is_exact: true, ..turn.need };
    queue.tickets.run_beside(rid);
    queue.histories.turns.run_beside(rid);
    let Histories { retentions, shims, .. } = &queue.histories;
    let planned = retentions.unpinned_run_mode(&queue.sessions()[key]);
    let run_mode = queue.tickets[rid].run_mode(planned, shims.trims());
    let known = Effect::RunModeKnown { rid: rid.clone(), run_mode, growth_tokens_max: None };
    step.push(known);
    if queue.sessions()[key].is_pinned() {
        // `handle_question` has decided this for a turn that the shim asked about.
        let was_asked = turn.awaited.question != Question::NotAsked;
        queue.sessions_mut().change(step, key, |session| {
            session.undo_admission(turn.had_no_kv);
            if !was_asked && !session.has_hidden_end_tokens(plan) {
                session.client.extend_divergence_streak();
            }
        });
    }
    make_room_for_large_turn(queue, step, rid, key, need);
}

/// A plain turn that needs more than pinned sessions leave of the pool would wait in the engine
/// forever. So these give up KV, the turn's own session first.
fn make_room_for_large_turn(
    queue: &mut Queue,
    step: &mut Step,
    rid: &str,
    key: &SessionKey,
    need: Need,
) {
    let pins = &mut queue.histories.pins;
    let dp_rank = pins.sessions[key].dp_rank;
    let Ok(&capacity) = pins.capacity(dp_rank) else { return };
    let tokens = pins.free_tokens_needed(need).min(capacity.pool_tokens);
    if tokens <= capacity.pool_tokens - capacity.pin_tokens_max {
        return;
    }
    queue.tickets.mark_large(rid, tokens);
    pins.large_turns.begin(dp_rank, tokens);
    let mut missing_tokens = pins.excess_tokens(dp_rank, tokens, capacity.pool_tokens);
    let session = &pins.sessions[key];
    if missing_tokens > 0 && session.state.is_open() {
        let freed_tokens = pins.round_to_pages(session.resident_tokens());
        missing_tokens = missing_tokens.saturating_sub(freed_tokens);
        queue.histories.release_kv(step, key);
    }
    if missing_tokens > 0 {
        let held_tokens = queue.pins().held_on(dp_rank).tokens;
        let shortage = Shortage::for_plain(missing_tokens, held_tokens);
        queue.histories.reclaim(step, dp_rank, &shortage, Requester::Plain);
    }
}

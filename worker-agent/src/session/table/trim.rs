//! Runs full histories in pinned sessions, so that clients without deltas can use pinned KV too.
//!
//! The engine appends what a turn sends to a pinned session, so the shim trims a full history.
//! Until the shim's plan comes, such a *trim turn* counts as running in its session. Then it runs
//! there, or beside it on the radix tree.

mod must_continue;
mod reopen;
mod room;
mod trim_plan;

use std::time::{Duration, Instant};

use contract::{id::SessionKey, load::Retention};

pub use self::trim_plan::{TrimOutcome, TrimPlan};
use super::{
    Chooser, Deltas, Effect, ExpectedHistory, Guard, MeasuredHistory, Need, Outcome, RunMode,
    Session, Sharing, State, Table, Tree, TrimRequest, Usage,
    reclaim::{Requester, Shortage},
    tickets::{Inside, Run, Ticket},
    trim_turn::{AwaitedPlan, Question, Replaced, Trim},
};
use crate::shim::trim::Plan;

/// After a longer divergence streak, the agent pins no session on its own: the client seems to edit
/// what it sends, or its prompts can't be trimmed, so pinned turns cost more than those on the
/// radix tree.
const DIVERGENCE_STREAK_MAX: u32 = 2;
/// The agent pins a session again only so long after it lost its pin or found no room. Each pin
/// costs the engine an open and a close.
const PIN_PAUSE: Duration = Duration::from_secs(30);

struct TurnAwaitingPlan {
    key: SessionKey,
    opens_session: bool,
    need: Need,
    had_no_kv: bool,
    awaited: AwaitedPlan,
}

impl Table {
    pub fn set_trimming(&mut self, now: Instant, shim_trims: bool) {
        self.shims.set_trims(shim_trims);
        self.process_queue(now);
        self.debug_check();
    }

    pub(super) fn unpinned_retention(&self, session: &Session) -> Retention {
        match session.retention() {
            Retention::Pinned if self.engine.retentions.contains(&Retention::Tagged) => {
                Retention::Tagged
            }
            Retention::Pinned => Retention::None,
            other => other,
        }
    }

    pub(super) fn unpinned_run_mode(&self, session: &Session) -> RunMode {
        match self.unpinned_retention(session) {
            Retention::Tagged => RunMode::Tagged,
            _ => RunMode::Untagged,
        }
    }

    /// The session's next turn opens it at the engine.
    pub(super) fn pin(&mut self, now: Instant, key: &SessionKey) {
        self.close_at_engine(now, key);
        self.sessions.reincarnate(key);
        self.change_session(key, |session| session.begin_anew(State::Planned));
    }

    /// Only for a session that the agent pinned on its own.
    pub(super) fn unpin(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].state != State::Planned {
            self.close_at_engine(now, key);
        }
        self.unpin_without_close(now, key);
    }

    /// Nothing of the session may be open at the engine, unless its close has begun.
    pub(super) fn unpin_without_close(&mut self, now: Instant, key: &SessionKey) {
        self.sessions.reincarnate(key);
        let is_tagged = self.unpinned_retention(&self.sessions[key]) == Retention::Tagged;
        let no_pin_before = Some(now + PIN_PAUSE);
        self.change_session(key, |session| {
            session.turns.has_forked = false;
            let tree = Tree { is_tagged, no_pin_before, ..Tree::default() };
            session.begin_anew(State::InTree(tree));
        });
    }

    /// Applies the retention that a client asks for, where the agent chose it so far. Does nothing
    /// if that would pin the session, or if it is pinned and not at rest.
    pub(super) fn apply_requested_retention(
        &mut self,
        now: Instant,
        key: &SessionKey,
        wanted: Retention,
    ) {
        let session = &self.sessions[key];
        let is_pinned = session.is_pinned();
        let is_at_rest = matches!(session.state, State::Open(_) | State::Demoted);
        if is_pinned && wanted != Retention::Pinned && is_at_rest {
            self.unpin(now, key);
        } else if is_pinned != (wanted == Retention::Pinned) {
            return;
        }
        self.change_session(key, |session| {
            session.chooser = Chooser::Client;
            if session.is_pinned() {
                session.sharing = Sharing::Exclusive;
            }
        });
    }

    pub(super) fn is_pin_useless(&self, key: &SessionKey) -> bool {
        let session = &self.sessions[key];
        // Turns of the conversation that run at the same time find KV only in the radix tree.
        !self.shims.trims()
            || session.client.divergence_streak > DIVERGENCE_STREAK_MAX
            || session.turns.has_forked
    }

    /// The engine must hold nothing of the session any more.
    pub(super) fn start_over(&mut self, now: Instant, key: &SessionKey) {
        let session = &self.sessions[key];
        // An engine that has restarted may offer less than the one before.
        let offers_pins = self.engine.retentions.contains(&Retention::Pinned);
        if session.has_auto_retention() || !session.is_pinned() || !offers_pins {
            return self.unpin_without_close(now, key);
        }
        self.sessions.reincarnate(key);
        self.change_session(key, |session| {
            let has_run = session.turns.finished > 0;
            session.state = State::Planned;
            session.client.deltas = if has_run { Deltas::RefusedAnew } else { Deltas::Refused };
            session.client.may_be_ahead |= has_run;
        });
    }

    /// Takes the pin from a session that the agent pinned on its own. Returns true if its KV goes
    /// to the radix tree first, so that the turn must wait.
    pub(super) fn yield_pin(&mut self, now: Instant, key: &SessionKey) -> bool {
        let session = &self.sessions[key];
        let can_demote = self.shims.can_demote(session.dp_rank);
        if session.state.row().is_some() && session.history.tokens > 0 && can_demote {
            self.release_kv(now, key);
            return true;
        }
        self.unpin(now, key);
        false
    }

    pub(super) fn request_trim(
        &mut self,
        key: &SessionKey,
        need: Need,
        opens_session: bool,
    ) -> AwaitedPlan {
        let tokens_max = self.full_history_tokens_max(key, need);
        let is_guard_on = self.settings.guards.is_on(Guard::FullHistoryContinues);
        let session = &self.sessions[key];
        let replaces_incarnation = session.client.deltas == Deltas::RefusedAnew;
        let must_continue = session.client.deltas == Deltas::Taken && !opens_session && is_guard_on;
        if replaces_incarnation {
            self.sessions.update(key, |session| session.client.deltas = Deltas::Refused);
        }
        AwaitedPlan {
            request: TrimRequest { tokens_max, must_continue },
            question: Question::NotAsked,
            replaced: replaces_incarnation.then_some(Replaced::FullHistories),
        }
    }

    /// Returns `None` if the turn has a plan, or its session is gone.
    fn turn_awaiting_plan(&self, rid: &str) -> Option<TurnAwaitingPlan> {
        let ticket = self.tickets.get(rid)?;
        let Inside { need, run: Run::Pinned { had_no_kv, trim: Trim::Awaited(awaited) }, .. } =
            ticket.inside()?
        else {
            return None;
        };
        Some(TurnAwaitingPlan {
            key: self.session_of(ticket)?,
            opens_session: ticket.opens_session(),
            need: *need,
            had_no_kv: *had_no_kv,
            awaited: *awaited,
        })
    }

    fn awaited_plan_mut(&mut self, rid: &str) -> Option<&mut AwaitedPlan> {
        match &mut self.tickets.inside_mut(rid)?.run {
            Run::Pinned { trim: Trim::Awaited(awaited), .. } => Some(awaited),
            _ => None,
        }
    }

    fn set_trim(&mut self, rid: &str, to: Trim) {
        if let Some(Inside { run: Run::Pinned { trim, .. }, .. }) = self.tickets.inside_mut(rid) {
            *trim = to;
        }
    }

    /// The shim reports its final plan before the engine gets the turn. Returns how many tokens the
    /// engine need not compute, as the session holds them; `None` if the turn has a plan already.
    pub fn handle_plan(&mut self, now: Instant, plan: &TrimPlan) -> Option<(TrimOutcome, u64)> {
        let Some(turn) = self.turn_awaiting_plan(&plan.rid) else {
            if plan.decision == Plan::Refused {
                self.note_second_turn(&plan.rid);
            }
            let is_gone = self.tickets.get(&plan.rid).is_none_or(Ticket::awaits_plan);
            return is_gone.then_some((TrimOutcome::Gone, 0));
        };
        self.awaited_plan_mut(&plan.rid).and_then(AwaitedPlan::close_question);
        let is_current = self.sessions[&turn.key].incarnation == plan.incarnation;
        let outcome = match plan.decision {
            // The incarnation was closed or lost meanwhile. The turn's end updates the session.
            Plan::Trimmed | Plan::Retokenized if !is_current => (TrimOutcome::Gone, 0),
            Plan::Trimmed => self.handle_plan_inside(&turn, plan, TrimOutcome::Trimmed),
            Plan::Retokenized => self.handle_plan_inside(&turn, plan, TrimOutcome::Retokenized),
            Plan::Diverged | Plan::Refused if turn.awaited.request.must_continue => {
                self.refuse_not_continued(&turn, plan)
            }
            Plan::Diverged => self.handle_plan_beside(now, &turn, plan, TrimOutcome::Diverged),
            Plan::Refused => self.handle_plan_beside(now, &turn, plan, TrimOutcome::Refused),
        };
        self.process_queue(now);
        self.debug_check();
        Some(outcome)
    }

    /// The engine asks its model again for the request of a turn that has its plan. What follows
    /// runs outside the session, so the client's history gets ahead of the session's.
    fn note_second_turn(&mut self, rid: &str) {
        if let Some(inside) = self.tickets.inside_mut(rid)
            && matches!(inside.trim(), Some(Trim::Planned { .. }))
        {
            inside.asks_again = true;
        }
    }

    fn handle_plan_inside(
        &mut self,
        turn: &TurnAwaitingPlan,
        plan: &TrimPlan,
        outcome: TrimOutcome,
    ) -> (TrimOutcome, u64) {
        let TurnAwaitingPlan { key, opens_session, need, had_no_kv, awaited } = turn;
        let rid = &plan.rid;
        let prompt_tokens = plan.committed_tokens.saturating_add(plan.appended_tokens);
        self.set_trim(rid, Trim::Planned { prompt_tokens, committed_tokens: None });
        self.tickets.forget_tag(rid);
        let (run_mode, outcome) = if awaited.replaced.is_some() {
            (RunMode::Reopened, TrimOutcome::Reopened)
        } else {
            (RunMode::Pinned, outcome)
        };
        let answer_tokens = self.reserved_answer_tokens(key, *need);
        let target_tokens =
            prompt_tokens.saturating_add(answer_tokens).min(self.engine.context_tokens);
        self.change_session(key, |session| {
            session.record_kv(need.kv);
            // The prompt's exact size is known now, so the rest of the reservation is released.
            if let Some(row) = session.state.row_mut() {
                row.reserved_tokens = row.reserved_tokens.min(target_tokens);
            }
            if plan.committed_tokens > 0 {
                session.client.divergence_streak = 0;
                session.prefix_tracker.record_continuation();
            }
        });
        self.update_deltas(key, *opens_session, awaited.replaced);
        let reserved_tokens = self.sessions[key].state.row().map(|row| row.reserved_tokens);
        let growth_tokens_max =
            reserved_tokens.map(|tokens| tokens.saturating_sub(plan.committed_tokens));
        let rid = rid.clone();
        self.effects.push(Effect::RunModeKnown { rid, run_mode, growth_tokens_max });
        (outcome, if *had_no_kv { 0 } else { plan.committed_tokens })
    }

    fn handle_plan_beside(
        &mut self,
        now: Instant,
        turn: &TurnAwaitingPlan,
        plan: &TrimPlan,
        outcome: TrimOutcome,
    ) -> (TrimOutcome, u64) {
        let (rid, key) = (&plan.rid, &turn.key);
        let need = Need { prompt_tokens: plan.prompt_tokens, is_exact: true, ..turn.need };
        self.tickets.run_beside(rid);
        let planned = self.unpinned_run_mode(&self.sessions[key]);
        let run_mode = self.tickets[rid].run_mode(planned, self.shims.trims());
        let known = Effect::RunModeKnown { rid: rid.clone(), run_mode, growth_tokens_max: None };
        self.effects.push(known);
        if self.sessions[key].is_pinned() {
            self.undo_admission(key, turn.had_no_kv);
            // `handle_question` has decided this for a turn that the shim asked about.
            let extends_streak = turn.awaited.question == Question::NotAsked
                && !self.has_hidden_end_tokens(key, plan);
            if extends_streak {
                self.change_session(key, |session| session.client.extend_divergence_streak());
            }
        }
        self.make_room_for_large_turn(now, rid, key, need);
        (outcome, 0)
    }

    /// A plain turn that needs more than pinned sessions leave of the pool would wait in the engine
    /// forever. So these give up KV, the turn's own session first.
    fn make_room_for_large_turn(&mut self, now: Instant, rid: &str, key: &SessionKey, need: Need) {
        let dp_rank = self.sessions[key].dp_rank;
        let Ok(&capacity) = self.capacity(dp_rank) else { return };
        let tokens = self.free_tokens_needed(need).min(capacity.pool_tokens);
        if tokens <= capacity.pool_tokens - capacity.pin_tokens_max {
            return;
        }
        self.tickets.mark_large(rid, tokens);
        let mut missing_tokens = self.excess_tokens(dp_rank, tokens, capacity.pool_tokens);
        let session = &self.sessions[key];
        if missing_tokens > 0 && session.state.is_open() {
            missing_tokens =
                missing_tokens.saturating_sub(self.round_to_pages(session.resident_tokens()));
            self.release_kv(now, key);
        }
        if missing_tokens > 0 {
            let pinned_tokens = self.totals(dp_rank).pinned_tokens;
            let shortage = Shortage::Tokens {
                missing: missing_tokens,
                held: pinned_tokens,
                max: pinned_tokens - missing_tokens.min(pinned_tokens),
            };
            self.reclaim(now, dp_rank, &shortage, Requester::Plain);
        }
    }

    fn excess_tokens(&self, dp_rank: u32, tokens: u64, pool_tokens: u64) -> u64 {
        (self.totals(dp_rank).pinned_tokens + tokens).saturating_sub(pool_tokens)
    }

    /// The turn must have changed nothing in its session.
    pub(super) fn undo_admission(&mut self, key: &SessionKey, had_no_kv: bool) {
        self.change_session(key, |session| {
            session.state.release_reserved();
            if had_no_kv && session.history.tokens > 0 {
                // The KV that was in the radix tree before the turn is still there.
                session.state.drop_row();
            }
        });
    }

    /// `was_retracted`: the engine will resume the turn, so `history_tokens` isn't final.
    pub fn handle_commit(
        &mut self,
        rid: &str,
        incarnation: &str,
        history_tokens: u64,
        was_retracted: bool,
    ) {
        let Some(inside) = self.tickets.inside_mut(rid) else { return };
        let ran_in = inside.incarnation.as_deref();
        if let Run::Pinned { trim: Trim::Planned { committed_tokens, .. }, .. } = &mut inside.run
            && ran_in == Some(incarnation)
        {
            *committed_tokens = Some(history_tokens).filter(|_| !was_retracted);
        }
    }

    /// Returns the outcome with the shim's figures if the route reported no usage.
    pub(super) fn measure_full_history(
        &mut self,
        key: &SessionKey,
        ticket: &Ticket,
        inside: &Inside,
        outcome: Outcome,
    ) -> Outcome {
        let usage_from_shim = match inside.trim() {
            Some(&Trim::Planned { prompt_tokens, committed_tokens: Some(committed_tokens) }) => {
                let completion_tokens = committed_tokens.checked_sub(prompt_tokens);
                completion_tokens.map(|completion_tokens| Usage {
                    prompt_tokens,
                    completion_tokens,
                    ..Usage::default()
                })
            }
            _ => None,
        };
        let outcome = match outcome {
            Outcome::Finished(None) => Outcome::Finished(usage_from_shim),
            Outcome::Unheard(None) => Outcome::Unheard(usage_from_shim),
            outcome => outcome,
        };
        // The prompt of a turn beside a pinned session says little about the session's next prompt.
        let ran_beside =
            inside.is_aside || (self.sessions[key].is_pinned() && !inside.runs_pinned());
        let is_full_history = !ticket.is_delta() && !ran_beside;
        if let (true, Outcome::Finished(Some(usage)) | Outcome::Unheard(Some(usage))) =
            (is_full_history, outcome)
        {
            let tokens = usage.prompt_tokens.saturating_add(usage.completion_tokens);
            let prompt_tokens_bound = inside.need.prompt_tokens;
            let measured = Some(MeasuredHistory { prompt_tokens_bound, tokens });
            self.change_session(key, |session| {
                session.client.last_measured = measured;
                let longest_tokens =
                    session.client.longest_answer_tokens.max(usage.completion_tokens);
                session.client.longest_answer_tokens = longest_tokens;
            });
        }
        outcome
    }

    /// Returns false if the end leaves the session's history certain. Otherwise the session becomes
    /// suspect and refuses deltas until a full history has run.
    pub(super) fn settle_uncertain_trim(
        &mut self,
        now: Instant,
        key: &SessionKey,
        (rid, inside): (&str, &Inside),
        outcome: Outcome,
    ) -> bool {
        let has_plan = match inside.trim() {
            Some(Trim::Planned { .. }) => true,
            Some(Trim::Awaited(_)) => false,
            None | Some(Trim::NotNeeded | Trim::Refused) => return false,
        };
        let is_certain = match outcome {
            Outcome::Finished(usage) => has_plan && usage.is_some() && !inside.asks_again,
            // On most routes an abort looks the same for a running turn and for a turn in the
            // engine's queue. In the second case the session keeps its row and KV.
            Outcome::Aborted => false,
            // The engine may have run a planned turn, whatever the route reported.
            Outcome::Refused => !has_plan,
            Outcome::Unheard(_) | Outcome::Partial | Outcome::Lost => false,
        };
        let is_guard_on = has_plan || self.settings.guards.is_on(Guard::PlanReported);
        if is_certain || !is_guard_on {
            return false;
        }
        let is_open = self.sessions[key].state.is_open();
        let may_still_run = matches!(outcome, Outcome::Refused | Outcome::Partial | Outcome::Lost);
        let has_run = matches!(outcome, Outcome::Finished(_) | Outcome::Unheard(_));
        self.change_session(key, |session| {
            session.turns.finished += u64::from(has_run);
            session.client.may_be_ahead = true;
            if may_still_run {
                session.state.note_lost_turn(rid);
            }
        });
        if is_open {
            // Any history is accepted, because the shim compares each later full history with it.
            self.make_suspect(now, key, Some(ExpectedHistory::AtLeast(0)));
        }
        true
    }
}

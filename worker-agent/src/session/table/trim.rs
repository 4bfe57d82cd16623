//! Full histories on pinned sessions.
//!
//! A client that sends its full history with each turn can still use a pinned session's KV: after
//! the engine's tokenizer, the shim removes the tokens that the session already has. This module
//! decides which sessions the agent pins for that on its own, how much room their turns get, and
//! what happens to a turn whose prompt doesn't continue the session's history.
//!
//! A trim turn (see [`super::TurnSession::trim`]) counts as a turn of a pinned session until the
//! shim has reported its plan. The turn then runs in the session, or beside it on the radix tree.
//! If a new incarnation could help, the shim asks and waits for an [`Effect::AnswerQuestion`]. The
//! old incarnation's KV goes to the radix tree first, so that the turn finds there what it still
//! shares.

mod must_continue;
mod reopen;
mod room;
mod trim_plan;

use std::time::{Duration, Instant};

use proto::{id::SessionKey, load::Retention};

pub use self::trim_plan::{TrimOutcome, TrimPlan};
use super::{
    Deltas, Effect, ExpectedHistory, Guard, Need, Outcome, Phase, RunMode, Session, Table, Ticket,
    TicketState, TrimRequest, Usage,
    reclaim::{Requester, Shortage},
};
use crate::shim::trim::Plan;

/// The longest divergence streak after which the agent still pins a session on its own. In a longer
/// streak, the client edits what it sends (drops reasoning, say) or its prompts can't be trimmed,
/// and a pinned turn would cost more than one on the radix tree.
const DIVERGENCE_STREAK_MAX: u32 = 2;
/// The agent does not pin a session again for this long after the session lost its pin or found no
/// room for it. Each pin costs the engine an open and a close.
const PIN_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// The state of a trim turn: a turn inside the engine that holds a full history, which the shim
/// compares with the session's.
#[derive(Debug)]
pub(super) struct TrimTurn {
    /// Prompt tokens for which room is reserved.
    tokens_max: u64,
    /// Whether the turn may run only if its prompt continues the session's history.
    must_continue: bool,
    /// Whether the shim asked for more prompt tokens than are reserved.
    too_large: bool,
    /// Whether the turn replaced a history that clients append to.
    replaced_deltas: bool,
    /// Whether the shim refused the turn. A refused turn does not run and changes no session.
    refused_by_shim: bool,
    /// Number of the shim's question that is not answered yet.
    open_question: Option<u64>,
    /// Whether the shim has asked a question about the turn.
    has_asked: bool,
    /// Set if a new incarnation is to be opened for the turn: the tokens to reserve in it.
    reopen_tokens: Option<u64>,
    /// Whether the turn is the first of an incarnation that replaced another one.
    reopened: bool,
    /// The prompt tokens that the engine must report for the turn. `None` until the shim has
    /// reported a plan that runs in the session.
    pub(super) planned_prompt_tokens: Option<u64>,
    /// Tokens of the session's history after the turn, as the shim reported them.
    committed_tokens: Option<u64>,
}

impl Ticket {
    /// Whether the turn holds a full history, which the shim compares with the session's.
    pub(super) fn is_trim_turn(&self) -> bool {
        self.trim_turn.is_some()
    }

    fn awaits_plan(&self) -> bool {
        self.pinned
            && self.trim_turn.as_ref().is_some_and(|turn| turn.planned_prompt_tokens.is_none())
    }

    /// Returns how many tokens of a planned prompt the engine computes if `resident_tokens` are
    /// resident. `None` if the prompt isn't planned.
    pub(super) fn tokens_to_compute(&self, resident_tokens: u64) -> Option<u64> {
        let prompt_tokens = self.trim_turn.as_ref()?.planned_prompt_tokens?;
        Some(prompt_tokens.saturating_sub(resident_tokens))
    }

    /// Whether the turn holds only new tokens.
    pub(super) fn is_delta(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.delta)
    }
}

impl Table {
    /// Sets whether the shim trims full histories from now on.
    pub fn set_trimming(&mut self, now: Instant, trims: bool) {
        self.shim_trims = trims;
        self.pump(now);
        self.debug_check();
    }

    /// Returns the retention under which the session's turns run while it is not pinned.
    pub(super) fn unpinned_retention(&self, session: &Session) -> Retention {
        match session.retention {
            Retention::Pinned if self.engine.retentions.contains(&Retention::Tagged) => {
                Retention::Tagged
            }
            Retention::Pinned => Retention::None,
            other => other,
        }
    }

    /// Returns how the session's turns run outside its pinned KV.
    pub(super) fn unpinned_run_mode(&self, key: &SessionKey) -> RunMode {
        match self.unpinned_retention(&self.sessions[key]) {
            Retention::Tagged => RunMode::Tagged,
            _ => RunMode::Untagged,
        }
    }

    /// Turns an unpinned session into a pinned one. Its next turn opens it at the engine.
    pub(super) fn pin(&mut self, now: Instant, key: &SessionKey) {
        self.close_at_engine(now, key);
        self.reincarnate(key);
        self.change_session(key, |session| {
            session.retention = Retention::Pinned;
            session.phase = Phase::Planned;
            session.clear_figures();
        });
    }

    /// Takes the pin from a session that the agent pinned on its own, and closes it at the engine.
    pub(super) fn unpin(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].phase != Phase::Planned {
            self.close_at_engine(now, key);
        }
        self.unpin_without_close(now, key);
    }

    /// Takes the pin from a session of which nothing is open at the engine, or whose close has
    /// begun.
    pub(super) fn unpin_without_close(&mut self, now: Instant, key: &SessionKey) {
        self.reincarnate(key);
        let retention = self.unpinned_retention(&self.sessions[key]);
        self.change_session(key, |session| {
            session.retention = retention;
            session.phase = Phase::Open;
            session.clear_figures();
            session.full_history.no_pin_before = Some(now + PIN_AGAIN_AFTER);
        });
        self.schedule_deadline(key);
    }

    /// Applies the retention that a client asks for to a session whose retention the agent chose.
    pub(super) fn apply_requested_retention(
        &mut self,
        now: Instant,
        key: &SessionKey,
        wanted: Retention,
    ) {
        let session = &self.sessions[key];
        let pinned = session.retention == Retention::Pinned;
        let at_rest = matches!(session.phase, Phase::Open | Phase::Demoted);
        if pinned && wanted != Retention::Pinned && at_rest {
            self.unpin(now, key);
        } else if pinned != (wanted == Retention::Pinned) {
            return;
        }
        self.change_session(key, |session| {
            session.requested_retention = Some(wanted);
            session.exclusive |= session.retention == Retention::Pinned;
        });
    }

    /// Whether a pin is useless to the session: the shim doesn't trim, or the divergence streak is
    /// too long.
    pub(super) fn is_pin_useless(&self, key: &SessionKey) -> bool {
        !self.shim_trims
            || self.sessions[key].full_history.divergence_streak > DIVERGENCE_STREAK_MAX
    }

    /// Whether the agent pinned the session on its own, no turn of it runs or waits, and the shim
    /// can demote it.
    pub(super) fn is_idle_auto_pin(&self, session: &Session) -> bool {
        let pinned = session.has_auto_retention()
            && session.retention == Retention::Pinned
            && session.holds_row;
        let rests = pinned && session.phase == Phase::Open && session.can_expire();
        rests && self.accounts[session.dp_rank as usize].can_demote()
    }

    /// Prepares a session that has lost everything at the engine for a turn with its full history.
    pub(super) fn start_over(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].has_auto_retention() {
            return self.unpin_without_close(now, key);
        }
        self.reincarnate(key);
        self.change_session(key, |session| {
            session.phase = Phase::Planned;
            session.deltas = Deltas::Refused;
            session.full_history.reopened = session.turns > 0;
            session.full_history.client_ahead |= session.turns > 0;
        });
    }

    /// Takes the pin from a session that the agent pinned on its own and that has no room for its
    /// turn. Returns true if its KV goes to the radix tree first, so that the turn must wait.
    pub(super) fn yield_pin(&mut self, now: Instant, key: &SessionKey) -> bool {
        let session = &self.sessions[key];
        let demotes = self.accounts[session.dp_rank as usize].can_demote();
        if session.holds_row && session.history_tokens > 0 && demotes {
            self.release_kv(now, key);
            return true;
        }
        self.unpin(now, key);
        false
    }

    /// Marks an admitted turn for trimming. Returns what the shim is told.
    pub(super) fn mark_for_trimming(&mut self, rid: &str, key: &SessionKey) -> TrimRequest {
        let tokens_max = self.full_history_tokens(key, self.tickets[rid].need);
        let opens = self.tickets[rid].is_opening();
        let guarded = self.rules.guards.hold(Guard::FullHistoryContinues);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let reopened = std::mem::take(&mut session.full_history.reopened);
        let must_continue = session.deltas == Deltas::Taken && !opens && guarded;
        let trim_turn = TrimTurn {
            tokens_max,
            must_continue,
            too_large: false,
            replaced_deltas: false,
            refused_by_shim: false,
            open_question: None,
            has_asked: false,
            reopen_tokens: None,
            reopened,
            planned_prompt_tokens: None,
            committed_tokens: None,
        };
        self.tickets.get_mut(rid).expect("the caller has it").trim_turn = Some(trim_turn);
        TrimRequest { tokens_max, must_continue }
    }

    /// Returns the session of a trim turn that is inside the engine and has no plan yet.
    fn session_awaiting_plan(&self, rid: &str) -> Option<SessionKey> {
        let ticket = self.tickets.get(rid)?;
        let inside = ticket.state == TicketState::Inside && ticket.awaits_plan();
        let key = ticket.key.clone().filter(|_| inside)?;
        let same =
            self.sessions.get(&key).is_some_and(|session| session.generation == ticket.generation);
        same.then_some(key)
    }

    fn trim_turn_mut(&mut self, rid: &str) -> &mut TrimTurn {
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.trim_turn.as_mut().expect("the caller has seen it")
    }

    /// Handles the shim's final plan for a trim turn, reported before the engine gets the turn.
    ///
    /// Returns what became of the turn, and how many tokens the engine need not compute again
    /// because of its session. Returns `None` if that was reported before.
    pub fn handle_plan(&mut self, now: Instant, plan: &TrimPlan) -> Option<(TrimOutcome, u64)> {
        let Some(key) = self.session_awaiting_plan(&plan.rid) else {
            let known = self.tickets.get(&plan.rid).is_some_and(|ticket| !ticket.awaits_plan());
            return (!known).then_some((TrimOutcome::Gone, 0));
        };
        let rid = &plan.rid;
        self.trim_turn_mut(rid).open_question = None;
        let is_current = self.sessions[&key].incarnation == plan.incarnation;
        let outcome = match plan.decision {
            // The incarnation was closed or lost meanwhile; the turn's end settles the rest.
            Plan::Trimmed | Plan::Retokenized if !is_current => (TrimOutcome::Gone, 0),
            Plan::Trimmed => self.run_inside(rid, &key, plan, TrimOutcome::Trimmed),
            Plan::Retokenized => self.run_inside(rid, &key, plan, TrimOutcome::Retokenized),
            Plan::Diverged | Plan::Refused if self.trim_turn_mut(rid).must_continue => {
                self.refuse_not_continued(&key, rid, plan)
            }
            Plan::Diverged => self.run_beside(now, &key, plan, TrimOutcome::Diverged),
            Plan::Refused => self.run_beside(now, &key, plan, TrimOutcome::Refused),
        };
        self.pump(now);
        self.debug_check();
        Some(outcome)
    }

    fn run_inside(
        &mut self,
        rid: &str,
        key: &SessionKey,
        plan: &TrimPlan,
        outcome: TrimOutcome,
    ) -> (TrimOutcome, u64) {
        let prompt_tokens = plan.committed_tokens.saturating_add(plan.appended_tokens);
        let trim_turn = self.trim_turn_mut(rid);
        trim_turn.planned_prompt_tokens = Some(prompt_tokens);
        let (run_mode, outcome) = if trim_turn.reopened {
            (RunMode::Reopened, TrimOutcome::Reopened)
        } else {
            (RunMode::Pinned, outcome)
        };
        let ticket = &self.tickets[rid];
        let (need, had_no_kv) = (ticket.need, ticket.had_no_kv);
        let answer = self.reserved_answer_tokens(key, need);
        let target = prompt_tokens.saturating_add(answer).min(self.engine.context_tokens);
        self.change_session(key, |session| {
            // The exact figure is known now, so the rest of the reservation is released.
            session.reserved_tokens = session.reserved_tokens.min(target);
            if plan.committed_tokens > 0 {
                session.full_history.divergence_streak = 0;
                session.prefix_tracker.record_continuation();
            }
        });
        self.update_deltas(rid, key);
        self.effects.push(Effect::RunModeKnown { rid: rid.to_owned(), run_mode });
        (outcome, if had_no_kv { 0 } else { plan.committed_tokens })
    }

    fn run_beside(
        &mut self,
        now: Instant,
        key: &SessionKey,
        plan: &TrimPlan,
        outcome: TrimOutcome,
    ) -> (TrimOutcome, u64) {
        let rid = &plan.rid;
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.pinned = false;
        let has_asked = ticket.trim_turn.as_ref().is_some_and(|turn| turn.has_asked);
        let (dp_rank, had_no_kv) = (ticket.dp_rank, ticket.had_no_kv);
        let need = Need { prompt_tokens: plan.prompt_tokens, exact: true, ..ticket.need };
        self.account(dp_rank).count_as_plain();
        let run_mode = self.unpinned_run_mode(key);
        self.effects.push(Effect::RunModeKnown { rid: rid.clone(), run_mode });
        if self.sessions[key].retention == Retention::Pinned {
            self.undo_admission(key, had_no_kv);
            let counts = !has_asked && !self.has_hidden_end_tokens(key, plan);
            self.change_session(key, |session| {
                session.full_history.divergence_streak += u32::from(counts)
            });
        }
        self.make_room_for_large_turn(now, rid, key, need);
        (outcome, 0)
    }

    /// Handles a turn that runs beside its pinned session and may need more than pinned sessions
    /// leave of the pool. Such a turn would wait in the engine forever, so pinned sessions give up
    /// KV: its own session first, then others.
    fn make_room_for_large_turn(&mut self, now: Instant, rid: &str, key: &SessionKey, need: Need) {
        let dp_rank = self.sessions[key].dp_rank;
        let Ok(&capacity) = self.capacity(dp_rank) else { return };
        let tokens = self.tokens_engine_needs(need).min(capacity.pool_tokens);
        if tokens <= capacity.pool_tokens - capacity.pin_tokens_max {
            return;
        }
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.large_tokens = Some(tokens);
        self.account(dp_rank).count_as_large(tokens);
        let mut excess = self.excess_tokens(dp_rank, tokens, capacity.pool_tokens);
        let session = &self.sessions[key];
        let holds = session.retention == Retention::Pinned && session.holds_row;
        if excess > 0 && holds && session.phase == Phase::Open {
            excess = excess.saturating_sub(self.round_to_pages(session.resident_tokens));
            self.release_kv(now, key);
        }
        if excess > 0 {
            let held = self.totals(dp_rank).pinned_tokens;
            let shortage = Shortage::Tokens { short: excess, held, max: held - excess.min(held) };
            self.reclaim(now, dp_rank, &shortage, Requester::Client);
        }
    }

    fn excess_tokens(&self, dp_rank: u32, tokens: u64, pool_tokens: u64) -> u64 {
        (self.totals(dp_rank).pinned_tokens + tokens).saturating_sub(pool_tokens)
    }

    /// Undoes the admission of a turn that did nothing to its session.
    pub(super) fn undo_admission(&mut self, key: &SessionKey, had_no_kv: bool) {
        self.change_session(key, |session| {
            session.reserved_tokens = 0;
            if had_no_kv && session.history_tokens > 0 {
                // The KV that was in the radix tree before the turn still is.
                session.holds_row = false;
                if session.phase == Phase::Open {
                    session.phase = Phase::Demoted;
                }
            }
        });
    }

    /// Handles the shim's report that a turn became history of `incarnation`, which now has
    /// `history_tokens`. If the turn was `retracted`, the engine will resume it from there and the
    /// figure isn't final.
    pub fn handle_commit(&mut self, incarnation: &str, history_tokens: u64, retracted: bool) {
        let mut tickets = self.tickets.values_mut();
        let found = tickets.find(|ticket| ticket.pinned && ticket.incarnation == incarnation);
        if let Some(trim_turn) = found.and_then(|ticket| ticket.trim_turn.as_mut()) {
            trim_turn.committed_tokens = Some(history_tokens).filter(|_| !retracted);
        }
    }

    /// Records the token counts of a finished full history, and returns the outcome. If the route
    /// reported no usage, the outcome gets the shim's figures.
    pub(super) fn measure_full_history(
        &mut self,
        key: &SessionKey,
        ticket: &Ticket,
        outcome: Outcome,
    ) -> Outcome {
        let reported = ticket.trim_turn.as_ref().and_then(|turn| {
            let prompt_tokens = turn.planned_prompt_tokens?;
            let completion_tokens = turn.committed_tokens?.checked_sub(prompt_tokens)?;
            Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() })
        });
        let outcome = match outcome {
            Outcome::Finished(None) => Outcome::Finished(reported),
            Outcome::Unheard(None) => Outcome::Unheard(reported),
            outcome => outcome,
        };
        // A turn beside a pinned session usually has another prompt than the session's next turn.
        let beside = self.sessions[key].retention == Retention::Pinned && !ticket.pinned;
        let is_full_history = ticket.claim.as_ref().is_some_and(|claim| !claim.delta) && !beside;
        if let (true, Outcome::Finished(Some(usage)) | Outcome::Unheard(Some(usage))) =
            (is_full_history, outcome)
        {
            let tokens = usage.prompt_tokens.saturating_add(usage.completion_tokens);
            let measured = Some((ticket.need.prompt_tokens, tokens));
            self.change_session(key, |session| {
                session.full_history.last_measured = measured;
                let longest =
                    session.full_history.longest_answer_tokens.max(usage.completion_tokens);
                session.full_history.longest_answer_tokens = longest;
            });
        }
        outcome
    }

    /// Settles the end of a trim turn that leaves the session's history uncertain: the plan or
    /// the end is unknown. Returns false if nothing is uncertain, or the turn is no trim turn.
    ///
    /// The session becomes suspect, and any history that the shim's session table reports is
    /// accepted, because the shim compares each later full history with it. Deltas are refused
    /// until a full history has run.
    pub(super) fn settle_uncertain_trim(
        &mut self,
        now: Instant,
        key: &SessionKey,
        (rid, ticket): (&str, &Ticket),
        outcome: Outcome,
    ) -> bool {
        let planned =
            ticket.trim_turn.as_ref().is_some_and(|turn| turn.planned_prompt_tokens.is_some());
        let clear = match outcome {
            Outcome::Finished(usage) => planned && usage.is_some(),
            // On most routes an abort looks the same for a running turn and for a turn in the
            // engine's queue. In the second case the session keeps its row and KV.
            Outcome::Aborted => false,
            // The engine may have run a planned turn, whatever the route reported.
            Outcome::Refused => !planned,
            Outcome::Unheard(_) | Outcome::Partial | Outcome::Lost => false,
        };
        let guarded = planned || self.rules.guards.hold(Guard::PlanReported);
        if ticket.trim_turn.is_none() || clear || !guarded {
            return false;
        }
        let open = self.sessions[key].phase == Phase::Open;
        let may_run = matches!(outcome, Outcome::Refused | Outcome::Partial | Outcome::Lost);
        let ran = matches!(outcome, Outcome::Finished(_) | Outcome::Unheard(_));
        self.change_session(key, |session| {
            session.turns += u64::from(ran);
            session.full_history.client_ahead = true;
            if may_run {
                session.lost_rid = Some(rid.to_owned());
            }
        });
        if open {
            self.make_suspect(now, key, Some(ExpectedHistory::AtLeast(0)));
        }
        true
    }
}

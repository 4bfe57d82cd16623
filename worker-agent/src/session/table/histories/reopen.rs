//! Replaces a session's incarnation when a full history diverges from the session's history.
//!
//! If a turn can't run in its session as planned, the shim first asks where it may run.

use contract::id::SessionKey;

use crate::{
    session::table::{
        Deltas, Effect, GoneReason, Histories, Need, Record, Session, Sessions, State, Step,
        TrimPlan, TrimRequest,
        histories::{
            pinning::DIVERGENCE_STREAK_MAX,
            running_turns::{PinnedRun, RunningTurn, RunningTurns},
            trim::TurnAwaitingPlan,
            trim_turn::{AwaitedPlan, Question, Replaced, Trim},
            volatile_prefix,
        },
    },
    shim::trim::Plan,
};

/// A diverging prompt that shares less than the history's tokens divided by this counts as an aside
/// (a request for a title, say), and runs beside its session. Only the first of several diverging
/// turns does: if the next diverges too, the client has shortened its history. Where the beginnings
/// of prompts tell, `asides` has decided before.
const ASIDE_DIVISOR: u64 = 4;

impl TrimPlan {
    /// As an aside or a shortened history does.
    fn shares_little(&self) -> bool {
        self.decision == Plan::Diverged
            && self.shared_tokens < self.committed_tokens / ASIDE_DIVISOR
    }
}

impl Session {
    /// Whether the prompt differs only in or after the newest answer, whose text may hide end
    /// tokens. Then the client has changed nothing, so the divergence streak doesn't grow.
    pub(crate) fn has_hidden_end_tokens(&self, plan: &TrimPlan) -> bool {
        let answer_start = self.client.hidden_end_tokens_from;
        plan.decision == Plan::Diverged
            && answer_start.is_some_and(|answer_start| plan.shared_tokens >= answer_start)
    }
}

impl Histories {
    /// Returns false if the turn doesn't await a plan.
    pub(crate) fn handle_question(
        &mut self,
        step: &mut Step,
        question: u64,
        plan: &TrimPlan,
    ) -> bool {
        let rid = &plan.rid;
        let Some(turn) = TurnAwaitingPlan::find(self, rid) else {
            answer_question(step, question, None);
            return false;
        };
        let TurnAwaitingPlan { key, need, awaited, .. } = turn;
        volatile_prefix::record_divergence(&mut self.pins.sessions, step, &key, plan);
        let need = Need { prompt_tokens: plan.prompt_tokens, is_exact: true, ..need };
        let target_tokens = self.pins.full_history_target_tokens(&key, need);
        let TrimRequest { tokens_max, must_continue } = awaited.request;
        let session = &self.pins.sessions[&key];
        let has_hidden_end_tokens = session.has_hidden_end_tokens(plan);
        // More room doesn't help a prompt whose KV the session doesn't have.
        let has_other_kv = session.has_other_kv(need.kv);
        let exceeds_reserved =
            plan.decision == Plan::NotTrimmed && plan.prompt_tokens > tokens_max && !has_other_kv;
        let can_fit = self.pins.fits_pinned(&key, target_tokens);
        if !exceeds_reserved && !has_hidden_end_tokens {
            let sessions = &mut self.pins.sessions;
            sessions.change(step, &key, |session| session.client.extend_divergence_streak());
        }
        let session = &self.pins.sessions[&key];
        let has_auto_retention = session.has_auto_retention();
        let streak = session.client.divergence_streak;
        let has_moved = session.prefix_tracker.has_moved();
        let is_aside = has_auto_retention && plan.shares_little() && streak == 1 && !has_moved;
        let is_streak_too_long = has_auto_retention && streak > DIVERGENCE_STREAK_MAX;
        let must_keep_history = must_continue && !exceeds_reserved;
        let may_reopen = can_fit && !is_streak_too_long;
        if let Some(awaited) = self.turns.awaited_plan_mut(rid) {
            awaited.request.tokens_max = tokens_max.max(plan.prompt_tokens);
            let reopen_tokens = may_reopen.then_some(target_tokens);
            awaited.question = Question::Open { number: question, exceeds_reserved, reopen_tokens };
        }
        let session = &self.pins.sessions[&key];
        // A closing session may still run its last turn in more room.
        let may_run_inside = session.state.is_open()
            || (session.state.is_closing() && must_continue && exceeds_reserved);
        if !may_run_inside || is_aside || must_keep_history || (!can_fit && !has_auto_retention) {
            self.turns.answer_run_outside(step, &key);
        } else if exceeds_reserved && can_fit {
            self.pins.sessions.change(step, &key, |session| session.state.reserve(target_tokens));
            answer_run_inside(self, step, rid, &key);
        } else {
            release_before_reopen(self, step, rid, &key);
        }
        true
    }

    /// `is_demoted`: the KV is in the radix tree now. Returns false if no turn waits.
    pub(super) fn continue_reopen(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        is_demoted: bool,
    ) -> bool {
        let Some(rid) = self.turns.with_question(key).map(str::to_owned) else { return false };
        if is_demoted {
            self.pins.sessions.change(step, key, |session| session.state.drop_row());
        }
        reopen(self, step, &rid, key);
        true
    }

    /// For an open that a turn inside asked for. Returns false if no turn of the session is inside.
    pub(crate) fn finish_reopen(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        is_open: bool,
    ) -> bool {
        let session = self.pins.sessions.get(key);
        let Some(session) = session.filter(|session| session.turns.running > 0) else {
            return false;
        };
        match self.turns.with_question(key).map(str::to_owned) {
            Some(rid) if is_open && session.state.is_open() => {
                answer_run_inside(self, step, &rid, key)
            }
            _ => self.turns.answer_run_outside(step, key),
        }
        if !is_open && self.pins.sessions[key].state.is_closing() {
            // The incarnation may be open all the same. It is being closed under its old id.
            lose_history(&mut self.pins.sessions, step, key);
        } else if !is_open {
            leave_without_incarnation(self, step, key);
        }
        true
    }
}

impl RunningTurns {
    /// Does nothing if no question about a turn of the session is open.
    pub(crate) fn answer_run_outside(&mut self, step: &mut Step, key: &SessionKey) {
        let Some(rid) = self.with_question(key).map(str::to_owned) else { return };
        let question = self.awaited_plan_mut(&rid).and_then(AwaitedPlan::close_question);
        if let Some(question) = question {
            answer_question(step, question, None);
        }
    }
}

impl RunningTurn {
    /// Returns the tokens to reserve if the turn is to run in the new incarnation.
    fn move_to(&mut self, incarnation: &str) -> Option<u64> {
        self.incarnation = Some(incarnation.to_owned());
        let Some(PinnedRun { had_no_kv, trim: Trim::Awaited(awaited) }) = &mut self.pinned else {
            return None;
        };
        *had_no_kv = false;
        match awaited.question {
            Question::Open { reopen_tokens, .. } => reopen_tokens,
            Question::NotAsked | Question::Answered { .. } => None,
        }
    }
}

/// Gives the KV of the old incarnation to the radix tree first, if possible.
fn release_before_reopen(histories: &mut Histories, step: &mut Step, rid: &str, key: &SessionKey) {
    let had_no_kv = histories.turns.get(rid).is_some_and(RunningTurn::had_no_kv);
    let sessions = &mut histories.pins.sessions;
    let holds_kv = sessions.change(step, key, |session| {
        session.state.release_reserved();
        if session.history.tokens == 0 || had_no_kv {
            session.state.drop_row();
        }
        session.state.row().is_some()
    });
    if holds_kv && sessions.can_demote(&sessions[key]) {
        histories.release_kv(step, key);
    } else {
        reopen(histories, step, rid, key);
    }
}

/// Opens a new incarnation if one is wanted and there is room, or lets the turn run beside.
fn reopen(histories: &mut Histories, step: &mut Step, rid: &str, key: &SessionKey) {
    let pins = &mut histories.pins;
    pins.close_at_engine(step, key);
    pins.sessions.reincarnate(key);
    let deltas_before = pins.sessions.change(step, key, |session| {
        session.begin_anew(State::Planned);
        session.client.may_be_ahead = true;
        std::mem::replace(&mut session.client.deltas, Deltas::Refused)
    });
    let session = &pins.sessions[key];
    let (incarnation, dp_rank) = (session.incarnation.clone(), session.dp_rank);
    let wanted_tokens = histories.turns.get_mut(rid).and_then(|turn| turn.move_to(&incarnation));
    // The room that was free when the shim asked may be taken by now.
    let has_room = |target_tokens: &u64| {
        matches!(pins.row_shortage(dp_rank), Ok(None)) && pins.fits_pinned(key, *target_tokens)
    };
    let Some(target_tokens) = wanted_tokens.filter(has_room) else {
        histories.turns.answer_run_outside(step, key);
        return leave_without_incarnation(histories, step, key);
    };
    if let Some(awaited) = histories.turns.awaited_plan_mut(rid) {
        let has_deltas = deltas_before == Deltas::Taken;
        awaited.replaced =
            Some(if has_deltas { Replaced::Deltas } else { Replaced::FullHistories });
    }
    histories.begin_open(step, key, target_tokens);
    step.write_journal(Record::Turn { incarnation, rid: rid.to_owned() });
}

/// The caller has begun the close of any incarnation that may be open at the engine.
fn leave_without_incarnation(histories: &mut Histories, step: &mut Step, key: &SessionKey) {
    if histories.pins.sessions[key].has_auto_retention() {
        histories.unpin_without_close(step, key);
    } else {
        lose_history(&mut histories.pins.sessions, step, key);
    }
    let session = &histories.pins.sessions[key];
    for turn in histories.turns.of_session_mut(session.generation) {
        turn.incarnation = Some(session.incarnation.clone());
    }
}

fn lose_history(sessions: &mut Sessions, step: &mut Step, key: &SessionKey) {
    sessions.reincarnate(key);
    sessions.change(step, key, |session| session.lose(GoneReason::HistoryUnknown));
}

fn answer_run_inside(histories: &mut Histories, step: &mut Step, rid: &str, key: &SessionKey) {
    let Some(awaited) = histories.turns.awaited_plan_mut(rid) else { return };
    let tokens_max = awaited.request.tokens_max;
    if let Some(question) = awaited.close_question() {
        let incarnation = histories.pins.sessions[key].incarnation.clone();
        answer_question(step, question, Some((incarnation, tokens_max)));
    }
}

fn answer_question(step: &mut Step, question: u64, run_in: Option<(String, u64)>) {
    let (incarnation, tokens_max) = run_in.unzip();
    let tokens_max = tokens_max.unwrap_or(0);
    step.push(Effect::AnswerQuestion { question, incarnation, tokens_max });
}

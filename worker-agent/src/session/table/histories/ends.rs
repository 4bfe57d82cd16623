//! Updates a session when one of its turns ends.
//!
//! How a turn ended decides whether it became history, and whether the agent can be sure of that.
//! If not, the session becomes suspect: it takes no turn before its history is confirmed.

use contract::id::SessionKey;

use crate::session::table::{
    ExpectedHistory, Guard, Guards, Histories, MeasuredHistory, Outcome, Session, Sessions, Step,
    Usage,
    histories::{running_turns::RunningTurn, trim_turn::Trim},
};

/// What the agent knows of a session's history after a turn.
enum HistoryAfter {
    Certain,
    /// With the history that the shim must report; `None` if there is none to expect.
    Doubtful(Option<ExpectedHistory>),
}

impl HistoryAfter {
    fn doubtful_if(is_doubtful: bool, expected: Option<ExpectedHistory>) -> Self {
        if is_doubtful { Self::Doubtful(expected) } else { Self::Certain }
    }
}

impl Session {
    /// The turn must have changed nothing.
    pub(crate) fn undo_admission(&mut self, had_no_kv: bool) {
        self.state.release_reserved();
        if had_no_kv && self.history.tokens > 0 {
            // The KV that was in the radix tree before the turn is still there.
            self.state.drop_row();
        }
    }
}

impl Histories {
    pub(crate) fn apply_end(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        rid: &str,
        turn: &RunningTurn,
        outcome: Outcome,
    ) {
        let sessions = &mut self.pins.sessions;
        if matches!(turn.trim(), Some(Trim::Refused)) {
            let had_no_kv = turn.had_no_kv();
            return sessions.change(step, key, |session| session.undo_admission(had_no_kv));
        }
        let outcome = measure_full_history(sessions, step, key, turn, outcome);
        let is_session_pinned = sessions[key].is_pinned();
        if turn.runs_pinned() && is_session_pinned {
            if doubt_uncertain_trim(self, step, key, rid, turn, outcome) {
                return;
            }
            let (sessions, guards) = (&mut self.pins.sessions, self.settings.guards);
            if let HistoryAfter::Doubtful(expected) =
                record_pinned_end(sessions, step, guards, key, rid, turn, outcome)
            {
                self.make_suspect(step, key, expected);
            }
            return;
        }
        let ran_beside = is_session_pinned || turn.is_aside;
        if let Outcome::Finished(usage) | Outcome::Unheard(usage) = outcome {
            sessions.change(step, key, |session| {
                session.turns.finished += 1;
                // A turn that ran beside a pinned session doesn't change the session's history.
                session.client.may_be_ahead |= ran_beside && !turn.is_aside;
                if let Some(usage) = usage.filter(|_| !ran_beside) {
                    session.record_usage(usage);
                }
            });
        }
    }
}

impl RunningTurn {
    fn planned_prompt_tokens(&self) -> Option<u64> {
        match self.trim() {
            Some(Trim::Planned { prompt_tokens, .. }) => Some(*prompt_tokens),
            _ => None,
        }
    }

    fn follows_history(&self, history_tokens: u64, usage: Usage) -> bool {
        if let Some(planned_tokens) = self.planned_prompt_tokens() {
            return usage.prompt_tokens == planned_tokens;
        }
        let Some(sent_tokens) = usage.prompt_tokens.checked_sub(history_tokens) else {
            return false;
        };
        // The engine drops the leading BOS token of a prompt that it appends to a history.
        let was_bos_dropped = history_tokens > 0 && sent_tokens + 1 == self.need.prompt_tokens;
        !self.need.is_exact || sent_tokens == self.need.prompt_tokens || was_bos_dropped
    }
}

/// Returns the outcome with the shim's figures if the route reported no usage.
fn measure_full_history(
    sessions: &mut Sessions,
    step: &mut Step,
    key: &SessionKey,
    turn: &RunningTurn,
    outcome: Outcome,
) -> Outcome {
    let usage_from_shim = match turn.trim() {
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
    let ran_beside = turn.is_aside || (sessions[key].is_pinned() && !turn.runs_pinned());
    let is_full_history = !turn.is_delta && !ran_beside;
    if let (true, Outcome::Finished(Some(usage)) | Outcome::Unheard(Some(usage))) =
        (is_full_history, outcome)
    {
        let tokens = usage.prompt_tokens.saturating_add(usage.completion_tokens);
        let prompt_tokens_bound = turn.need.prompt_tokens;
        let measured = Some(MeasuredHistory { prompt_tokens_bound, tokens });
        sessions.change(step, key, |session| {
            session.client.last_measured = measured;
            let longest_tokens = session.client.longest_answer_tokens.max(usage.completion_tokens);
            session.client.longest_answer_tokens = longest_tokens;
        });
    }
    outcome
}

/// Returns false if the end leaves the session's history certain. Otherwise the session becomes
/// suspect and refuses deltas until a full history has run.
fn doubt_uncertain_trim(
    histories: &mut Histories,
    step: &mut Step,
    key: &SessionKey,
    rid: &str,
    turn: &RunningTurn,
    outcome: Outcome,
) -> bool {
    let has_plan = match turn.trim() {
        Some(Trim::Planned { .. }) => true,
        Some(Trim::Awaited(_)) => false,
        None | Some(Trim::NotNeeded | Trim::Refused) => return false,
    };
    let is_certain = match outcome {
        Outcome::Finished(usage) => has_plan && usage.is_some() && !turn.asks_again,
        // On most routes an abort looks the same for a running turn and for a turn in the
        // engine's queue. In the second case the session keeps its row and KV.
        Outcome::Aborted => false,
        // The engine may have run a planned turn, whatever the route reported.
        Outcome::Refused => !has_plan,
        Outcome::Unheard(_) | Outcome::Partial | Outcome::Lost => false,
    };
    let is_guard_on = has_plan || histories.settings.guards.is_on(Guard::PlanReported);
    if is_certain || !is_guard_on {
        return false;
    }
    let is_open = histories.pins.sessions[key].state.is_open();
    let may_still_run = matches!(outcome, Outcome::Refused | Outcome::Partial | Outcome::Lost);
    let has_run = matches!(outcome, Outcome::Finished(_) | Outcome::Unheard(_));
    histories.pins.sessions.change(step, key, |session| {
        session.turns.finished += u64::from(has_run);
        session.client.may_be_ahead = true;
        if may_still_run {
            session.state.note_lost_turn(rid);
        }
    });
    if is_open {
        // Any history is accepted, because the shim compares each later full history with it.
        histories.make_suspect(step, key, Some(ExpectedHistory::AtLeast(0)));
    }
    true
}

/// Returns how certain the session's history is now. That of a closing session need not be.
fn record_pinned_end(
    sessions: &mut Sessions,
    step: &mut Step,
    guards: Guards,
    key: &SessionKey,
    rid: &str,
    turn: &RunningTurn,
    outcome: Outcome,
) -> HistoryAfter {
    let history_before = sessions[key].history.tokens;
    let is_open = sessions[key].state.is_open();
    let after = match outcome {
        Outcome::Refused if !turn.was_aborted => {
            sessions.change(step, key, |session| {
                session.undo_admission(turn.had_no_kv());
                session.turns.was_last_refused = true;
            });
            HistoryAfter::Certain
        }
        // The engine rolls the history back and gives the session's KV to its radix tree. It may
        // answer such a turn as it answers one that it never ran.
        Outcome::Refused | Outcome::Aborted => {
            sessions.change(step, key, |session| session.state.drop_row());
            HistoryAfter::Certain
        }
        Outcome::Finished(usage) => {
            record_growth(sessions, step, key, usage);
            // With `ignore_eos`, the answer's text may hide end tokens.
            let measured_usage = usage.filter(|_| turn.need.ignores_eos);
            let answer_start = measured_usage.map(|usage| usage.prompt_tokens);
            let history_tokens = sessions.update(key, |session| {
                session.client.hidden_end_tokens_from = answer_start;
                session.history.tokens
            });
            judge_finished(guards, turn, usage, history_before, history_tokens)
        }
        Outcome::Unheard(usage) => {
            record_growth(sessions, step, key, usage);
            HistoryAfter::doubtful_if(guards.is_on(Guard::UnheardSuspect), None)
        }
        // The reserved tokens stay counted until the session is certain.
        Outcome::Partial if guards.is_on(Guard::RetractionSuspect) => {
            HistoryAfter::Doubtful(Some(ExpectedHistory::Exactly(history_before)))
        }
        Outcome::Partial => {
            sessions.change(step, key, |session| session.state.release_reserved());
            HistoryAfter::Certain
        }
        Outcome::Lost => {
            if guards.is_on(Guard::AbortBeforeClose) {
                sessions.change(step, key, |session| session.state.note_lost_turn(rid));
            }
            // The session can continue only if the engine committed nothing of the turn. Then the
            // history is the one that the client knows.
            let expected = ExpectedHistory::Exactly(history_before);
            HistoryAfter::doubtful_if(guards.is_on(Guard::LostEndSuspect), Some(expected))
        }
    };
    if is_open { after } else { HistoryAfter::Certain }
}

fn judge_finished(
    guards: Guards,
    turn: &RunningTurn,
    usage: Option<Usage>,
    history_before: u64,
    history_tokens: u64,
) -> HistoryAfter {
    let was_retracted = usage.is_some_and(|usage| usage.retractions > 0);
    if usage.is_none_or(|usage| !turn.follows_history(history_before, usage))
        && guards.is_on(Guard::HistoryChecked)
    {
        // The shim has compared the engine's own count with its plan. The usage may be lower,
        // because one route subtracts its template's tokens.
        let planned_tokens = turn.planned_prompt_tokens();
        return HistoryAfter::Doubtful(planned_tokens.map(ExpectedHistory::AtLeast));
    }
    // The engine commits a partial answer when it retracts a turn from its batch, so only the
    // engine knows the final history.
    let is_doubtful = was_retracted && guards.is_on(Guard::RetractionSuspect);
    HistoryAfter::doubtful_if(is_doubtful, Some(ExpectedHistory::Exactly(history_tokens)))
}

fn record_growth(sessions: &mut Sessions, step: &mut Step, key: &SessionKey, usage: Option<Usage>) {
    sessions.change(step, key, |session| {
        session.turns.finished += 1;
        session.state.release_reserved();
        session.client.may_be_ahead = false;
        if let Some(usage) = usage {
            session.record_usage(usage);
        }
    });
}

//! Doubts a history until the shim reports it as expected.
//!
//! Only an answer that was asked for clears a suspect session. Reports that nobody asked for count
//! foreign sessions, which other clients of the engine opened.

use std::time::Instant;

use contract::id::SessionKey;

use crate::session::table::{
    Doubt, ExpectedHistory, GoneReason, Guard, Histories, Row, SessionEvent, SessionReport,
    ShimRequest, State, Step, histories::shim_requests::ShimTask,
};

impl Histories {
    /// `until`: without an answer by then, the session is closed; `None`: time runs from sending.
    pub(crate) fn inspect_again(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        until: Option<Instant>,
        is_repeat: bool,
    ) {
        let (sessions, task) =
            (&mut self.pins.sessions, ShimTask::Inspect { rid: None, is_repeat });
        let request = self.shim_requests.add(sessions, key, task);
        let dp_rank = sessions.update(key, |session| {
            session.state.request_again(ShimRequest { until, ..request });
            session.dp_rank
        });
        self.shim_requests.send(step, sessions, dp_rank);
    }

    /// Takes the answer about a session. Returns whether it has cleared the doubt or ended the
    /// session.
    pub(crate) fn apply_inspection(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        report: Option<&SessionReport>,
    ) -> bool {
        let State::Suspect { doubt, .. } = self.pins.sessions[key].state else { return false };
        resolve_doubt(self, step, key, doubt, report)
    }

    /// Returns whether the report has settled what becomes of one of the agent's sessions.
    pub(crate) fn handle_session_report(
        &mut self,
        step: &mut Step,
        dp_rank: u32,
        report: &SessionReport,
    ) -> bool {
        if let Some(key) = self.pins.sessions.key_of(&report.id).cloned() {
            // The engine opens a session on every rank, but its history is on one rank only.
            let is_rank_of_session = self.pins.sessions[&key].dp_rank == dp_rank;
            return is_rank_of_session
                && !self.settings.guards.is_on(Guard::AnswerMatched)
                && take_as_answer(self, step, &key, report);
        }
        if !self.pins.closes.contains(&report.id) && !self.pins.sessions.has_made(&report.id) {
            let page_tokens = self.pins.page_tokens;
            self.pins.foreign.report(dp_rank, report, page_tokens);
        }
        false
    }

    /// A turn's end left the history uncertain: the shim must report the `expected` one. Without a
    /// shim or an expected history, the session is closed.
    pub(super) fn make_suspect(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        expected: Option<ExpectedHistory>,
    ) {
        let sessions = &mut self.pins.sessions;
        let can_verify = self.shims.can_verify(sessions[key].dp_rank);
        let (true, Some(expected)) = (can_verify, expected) else {
            return self.close_as_gone(step, key, GoneReason::HistoryUnknown);
        };
        let task = ShimTask::Inspect { rid: sessions[key].state.lost_rid(), is_repeat: false };
        let request = self.shim_requests.add(sessions, key, task);
        let doubt = Doubt { expected, request, otherwise: GoneReason::HistoryUnknown };
        let dp_rank = sessions.change(step, key, |session| {
            session.state.move_row(|row| State::Suspect { row: Some(row), doubt });
            session.dp_rank
        });
        self.shim_requests.send(step, sessions, dp_rank);
    }
}

/// Takes any report for the awaited answer. Only the simulation does that.
fn take_as_answer(
    histories: &mut Histories,
    step: &mut Step,
    key: &SessionKey,
    report: &SessionReport,
) -> bool {
    match histories.pins.sessions[key].state {
        State::Suspect { doubt, .. } => resolve_doubt(histories, step, key, doubt, Some(report)),
        State::Demoting { .. } if !report.holds_row && !report.in_flight => {
            histories.end_demotion(step, key, true)
        }
        _ => false,
    }
}

/// Returns false if the shim is asked again, because the uncertain turn has not ended yet.
fn resolve_doubt(
    histories: &mut Histories,
    step: &mut Step,
    key: &SessionKey,
    doubt: Doubt,
    report: Option<&SessionReport>,
) -> bool {
    if report.is_some_and(|report| report.in_flight) {
        histories.inspect_again(step, key, doubt.request.until, true);
        return false;
    }
    // A demoted session gets a row only from a turn, and this agent has run none.
    let may_hold_row = histories.pins.sessions[key].state.row().is_some();
    let expected = report.filter(|report| {
        doubt.expected.matches(report.history_tokens) && (may_hold_row || !report.holds_row)
    });
    if let Some(report) = expected {
        let is_handed = doubt.otherwise == GoneReason::NotTakenOver;
        let event = if is_handed { SessionEvent::TakenOver } else { SessionEvent::Verified };
        step.report_event(key, event);
        let resident_tokens = report.allocated_tokens;
        histories.pins.sessions.change(step, key, |session| {
            session.history.tokens = report.history_tokens;
            let row = Row { resident_tokens, ..Row::default() };
            session.state.clear_doubt(report.holds_row.then_some(row));
        });
    } else {
        histories.close_as_gone(step, key, doubt.otherwise);
    }
    true
}

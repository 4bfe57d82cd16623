//! Applies what the shim of a rank reports, or that it is there or not.

use contract::id::SessionKey;

use crate::session::table::{
    CloseResult, GoneReason, Guard, Histories, Queue, Session, SessionReport, Sessions, ShimReport,
    State, Step, TablePart,
};

impl Queue {
    pub(crate) fn apply_shim_report(
        &mut self,
        step: &mut Step,
        dp_rank: u32,
        report: ShimReport<'_>,
    ) {
        let has_rank = self.histories.shims.has_rank(dp_rank);
        let has_decided = match report {
            ShimReport::Up { .. } | ShimReport::Down if !has_rank => false,
            ShimReport::Up { can_demote } => {
                connect(&mut self.histories, step, dp_rank, can_demote);
                false
            }
            ShimReport::Down => {
                disconnect(&mut self.histories, step, dp_rank);
                true
            }
            ShimReport::Demotion { number, is_demoted } => {
                let key = take_answer(&mut self.histories, step, dp_rank, number);
                key.is_some_and(|key| self.histories.end_demotion(step, &key, is_demoted))
            }
            ShimReport::Inspection { number, report } => {
                let key = take_answer(&mut self.histories, step, dp_rank, number);
                key.is_some_and(|key| self.histories.apply_inspection(step, &key, report))
            }
            ShimReport::Sessions { part, reports } => {
                apply_sessions(self, step, dp_rank, part, reports)
            }
            ShimReport::SessionGone { id } => {
                let gone = gone_session(self.sessions(), dp_rank, id);
                if let Some(key) = &gone {
                    // Another client of the engine closed the session.
                    self.histories.close_as_gone(step, key, GoneReason::HistoryUnknown);
                }
                if self.pins().closes.is_on_rank(dp_rank, id) {
                    self.apply_close_result(step, id, CloseResult::Confirmed);
                }
                self.histories.pins.foreign.forget(dp_rank, id) || gone.is_some()
            }
            ShimReport::Aborted { incarnation } => return self.apply_abort(step, incarnation),
        };
        if has_decided {
            self.admit_waiting(step);
        }
    }
}

fn take_answer(
    histories: &mut Histories,
    step: &mut Step,
    dp_rank: u32,
    number: u64,
) -> Option<SessionKey> {
    let sessions = &mut histories.pins.sessions;
    histories.shim_requests.take_answer(step, sessions, dp_rank, number)
}

fn connect(histories: &mut Histories, step: &mut Step, dp_rank: u32, can_demote: bool) {
    histories.shims.connect(dp_rank);
    histories.pins.foreign.drop_estimate(dp_rank);
    histories.pins.sessions.set_can_demote(dp_rank, can_demote);
    let is_unasked = |session: &Session| {
        let request = session.state.shim_request();
        session.dp_rank == dp_rank && request.is_some_and(|request| request.number.is_none())
    };
    for key in histories.pins.sessions.keys(is_unasked) {
        histories.inspect_again(step, &key, None, false);
    }
}

fn disconnect(histories: &mut Histories, step: &mut Step, dp_rank: u32) {
    histories.forget_shim(dp_rank);
    histories.pins.foreign.forget_all(dp_rank);
    let awaits_shim =
        |session: &Session| session.dp_rank == dp_rank && session.state.shim_request().is_some();
    let keys = histories.pins.sessions.keys(awaits_shim);
    keys.iter().for_each(|key| histories.close_without_answer(step, key));
}

/// Returns whether a foreign session is gone.
fn apply_sessions(
    queue: &mut Queue,
    step: &mut Step,
    dp_rank: u32,
    part: TablePart,
    reports: &[SessionReport],
) -> bool {
    if part.begins_table {
        queue.histories.pins.foreign.begin_table(dp_rank);
    }
    for report in reports {
        if queue.histories.handle_session_report(step, dp_rank, report) {
            queue.admit_waiting(step);
        }
    }
    let is_guard_on = queue.settings.guards.is_on(Guard::TableComplete);
    let is_complete = part.ends_table || (part.begins_table && !is_guard_on);
    is_complete && queue.histories.pins.foreign.end_table(dp_rank)
}

/// The engine closes a session on every rank, but its row and KV were on one.
fn gone_session(sessions: &Sessions, dp_rank: u32, id: &str) -> Option<SessionKey> {
    let key = sessions.key_of(id)?;
    let session = &sessions[key];
    let is_at_rest = matches!(session.state, State::Open(_) | State::InTree(_) | State::Demoted);
    let is_gone = session.dp_rank == dp_rank && session.turns.running == 0 && is_at_rest;
    is_gone.then(|| key.clone())
}

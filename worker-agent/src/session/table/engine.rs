//! Handles what the engine and the shim report: load, the engine's sessions, and the engine's loss.
//!
//! A foreign session is one that another client of the engine opened. Only the answer to a request
//! clears a suspect session: what the shim reports unasked concerns foreign sessions.

use std::time::{Duration, Instant};

use contract::{
    id::SessionKey,
    load::{Retention, RetentionOff},
};

use super::{
    CloseResult, Doubt, EngineCapacity, Error, GoneReason, Guard, Row, Session, SessionEvent,
    ShimRequest, State, Table, shim_requests::ShimTask,
};

/// Once a rank has been idle for this long, the engine's lagging load figures show that.
const LOAD_LAG_MAX: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLoad {
    pub waiting_requests: u64,
    /// KV tokens that the engine can't evict.
    pub used_tokens: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionReport {
    pub id: String,
    pub holds_row: bool,
    pub allocated_tokens: u64,
    /// Of the committed history.
    pub history_tokens: u64,
    pub in_flight: bool,
}

/// Which part of a full session table some reports are. Reports of changes are neither the
/// beginning nor the end of one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TablePart {
    pub begins_table: bool,
    pub ends_table: bool,
}

impl Table {
    pub fn handle_load(&mut self, now: Instant, dp_rank: u32, load: EngineLoad) {
        if !self.shims.has_rank(dp_rank) {
            return;
        }
        let has_pending_close = self.closes.on_rank(dp_rank).next().is_some();
        let queue_length = i64::try_from(load.waiting_requests).unwrap_or(i64::MAX);
        let idle_since =
            self.tickets.load_mut(dp_rank).sample(now, queue_length, has_pending_close);
        let is_load_current = idle_since.is_some_and(|since| since + LOAD_LAG_MAX <= now);
        if !self.shims.can_verify(dp_rank) && is_load_current {
            // Tokens that can't be evicted and that none of the agent's sessions hold are foreign.
            let totals = self.totals(dp_rank);
            let own_tokens = totals.pinned_tokens - totals.foreign_tokens;
            let pool_tokens =
                self.engine.ranks.get(dp_rank as usize).map_or(0, |rank| rank.pool_tokens);
            let foreign_tokens = load.used_tokens.min(pool_tokens).saturating_sub(own_tokens);
            self.shims.estimate_foreign(dp_rank, foreign_tokens);
        }
        self.process_queue(now);
        self.debug_check();
    }

    /// Sessions keep what they have. Returns whether anything has changed.
    pub fn set_retentions(
        &mut self,
        offered: Vec<Retention>,
        retentions_off: Vec<RetentionOff>,
    ) -> bool {
        let has_changed =
            self.engine.retentions != offered || self.retentions_off != retentions_off;
        self.engine.retentions = offered;
        self.retentions_off = retentions_off;
        has_changed
    }

    /// Asks about the sessions that were handed over; no other is suspect without a shim.
    pub fn handle_shim_up(&mut self, now: Instant, dp_rank: u32, can_demote: bool) {
        if !self.shims.has_rank(dp_rank) {
            return;
        }
        self.shims.connect(dp_rank, can_demote);
        self.sessions.set_can_demote(dp_rank, can_demote);
        let is_unasked = |session: &Session| {
            let request = session.state.shim_request();
            session.dp_rank == dp_rank && request.is_some_and(|request| request.number.is_none())
        };
        for key in self.sessions.keys(is_unasked) {
            self.inspect_again(now, &key, None, false);
        }
        self.debug_check();
    }

    /// `until`: when the session is closed; `None` if the time begins with the sending.
    fn inspect_again(
        &mut self,
        now: Instant,
        key: &SessionKey,
        until: Option<Instant>,
        is_repeat: bool,
    ) {
        let request = self.request_of_shim(key, ShimTask::Inspect { rid: None, is_repeat });
        let dp_rank = self.sessions.update(key, |session| {
            session.state.request_again(ShimRequest { until, ..request });
            session.dp_rank
        });
        self.send_shim_requests(now, dp_rank);
    }

    /// Closes every session that was waiting for the shim's answer.
    pub fn handle_shim_down(&mut self, now: Instant, dp_rank: u32) {
        if !self.shims.has_rank(dp_rank) {
            return;
        }
        self.shims.disconnect(dp_rank);
        self.sessions.set_can_demote(dp_rank, false);
        self.shim_requests.clear(dp_rank);
        let keys = self
            .sessions
            .keys(|session| session.dp_rank == dp_rank && session.state.shim_request().is_some());
        keys.iter().for_each(|key| self.close_without_answer(now, key));
        self.process_queue(now);
        self.debug_check();
    }

    fn handle_session_report(&mut self, now: Instant, dp_rank: u32, report: &SessionReport) {
        if let Some(key) = self.sessions.key_of(&report.id).cloned() {
            // The engine opens a session on every rank, but its history is on one rank only.
            let is_rank_of_session = self.sessions[&key].dp_rank == dp_rank;
            if is_rank_of_session && !self.settings.guards.is_on(Guard::AnswerMatched) {
                self.settle_by_report(now, &key, report);
            }
            return;
        }
        if self.closes.contains(&report.id) || self.sessions.has_made(&report.id) {
            return;
        }
        self.shims.report_foreign(dp_rank, report, self.engine.page_tokens);
    }

    /// Takes any report for the awaited answer. Only the simulation does that.
    fn settle_by_report(&mut self, now: Instant, key: &SessionKey, report: &SessionReport) {
        match self.sessions[key].state {
            State::Suspect { doubt, .. } => self.settle_doubt(now, key, doubt, Some(report)),
            State::Demoting { .. } if !report.holds_row && !report.in_flight => {
                self.settle_demotion(now, key, true);
            }
            _ => {}
        }
    }

    /// Takes the answer to the [`Effect::Inspect`](super::Effect::Inspect) with this number.
    /// `report` is `None` if the engine doesn't have the session.
    pub fn handle_inspection(
        &mut self,
        now: Instant,
        dp_rank: u32,
        number: u64,
        report: Option<&SessionReport>,
    ) {
        if let Some(key) = self.take_shim_answer(now, dp_rank, number)
            && let State::Suspect { doubt, .. } = self.sessions[&key].state
        {
            self.settle_doubt(now, &key, doubt, report);
        }
        self.debug_check();
    }

    fn settle_doubt(
        &mut self,
        now: Instant,
        key: &SessionKey,
        doubt: Doubt,
        report: Option<&SessionReport>,
    ) {
        if report.is_some_and(|report| report.in_flight) {
            // The uncertain turn has not ended yet.
            return self.inspect_again(now, key, doubt.request.until, true);
        }
        // A demoted session takes a row only for a turn, and this process has run none.
        let may_hold_row = self.sessions[key].state.row().is_some();
        let expected = report.filter(|report| {
            doubt.expected.matches(report.history_tokens) && (may_hold_row || !report.holds_row)
        });
        if let Some(report) = expected {
            let is_handed = doubt.otherwise == GoneReason::NotTakenOver;
            let event = if is_handed { SessionEvent::TakenOver } else { SessionEvent::Verified };
            self.effects.report_event(key, event);
            let resident_tokens = report.allocated_tokens;
            self.change_session(key, |session| {
                session.history.tokens = report.history_tokens;
                let row = Row { resident_tokens, ..Row::default() };
                session.state.clear_doubt(report.holds_row.then_some(row));
            });
        } else {
            self.close_as_gone(now, key, doubt.otherwise);
        }
        self.process_queue(now);
    }

    /// The end of a full table means that the engine doesn't have the foreign sessions that the
    /// table lacks. It proves nothing of the agent's own: one that is being opened or closed may be
    /// listed or not. The shim reports each that ends, and a close is repeated until the engine
    /// confirms it.
    pub fn handle_session_reports(
        &mut self,
        now: Instant,
        dp_rank: u32,
        part: TablePart,
        reports: &[SessionReport],
    ) {
        if part.begins_table {
            self.shims.begin_table(dp_rank);
        }
        reports.iter().for_each(|report| self.handle_session_report(now, dp_rank, report));
        let is_guard_on = self.settings.guards.is_on(Guard::TableComplete);
        let is_complete = part.ends_table || (part.begins_table && !is_guard_on);
        if is_complete && self.shims.end_table(dp_rank) {
            self.process_queue(now);
        }
        self.debug_check();
    }

    pub fn handle_session_gone(&mut self, now: Instant, dp_rank: u32, id: &str) {
        // The engine closes the session on every rank, but its row and KV were on one.
        if let Some(key) = self.sessions.key_of(id).cloned()
            && self.sessions[&key].dp_rank == dp_rank
            && self.sessions[&key].turns.running == 0
            && matches!(
                self.sessions[&key].state,
                State::Open(_) | State::InTree(_) | State::Demoted
            )
        {
            // Another client of the engine closed the session.
            self.close_as_gone(now, &key, GoneReason::HistoryUnknown);
        }
        if self.closes.is_on_rank(dp_rank, id) {
            self.handle_close_result(now, id, CloseResult::Confirmed);
        }
        if self.shims.forget_foreign(dp_rank, id) {
            self.process_queue(now);
            self.debug_check();
        }
    }

    /// `reason`: the engine's process runs, but has said nothing for too long. Then the table
    /// refuses what waits and what comes; turns inside the engine go on. `None`: it speaks.
    pub fn set_engine_silent(&mut self, now: Instant, reason: Option<String>) {
        self.silent_reason = reason;
        if let Err(error) = self.check_engine_speaks() {
            self.refuse_waiting(now, &error);
        } else {
            self.process_queue(now);
        }
        self.debug_check();
    }

    #[must_use]
    pub fn silent_reason(&self) -> Option<&String> {
        self.silent_reason.as_ref()
    }

    pub(super) fn check_engine_speaks(&self) -> Result<(), Error> {
        self.silent_reason.clone().map_or(Ok(()), |reason| Err(Error::EngineSilent(reason)))
    }

    /// All rows, KV and histories are lost too. `engine` describes the next engine.
    pub fn handle_engine_lost(&mut self, now: Instant, engine: EngineCapacity) {
        self.refuse_waiting(now, &Error::EngineLost);
        // In case the same process answers again, the journal keeps the closes until it names
        // another.
        self.closes.reset(engine.page_tokens);
        self.tickets.forget_samples();
        self.reset_weights();
        for dp_rank in self.shims.disconnect_all() {
            self.sessions.set_can_demote(dp_rank, false);
            self.shim_requests.clear(dp_rank);
        }
        let keys = self.sessions.keys(|_| true);
        for key in &keys {
            let is_lost_already = matches!(
                self.sessions[key].state,
                State::Gone { reason: GoneReason::EngineRestarted, .. }
            );
            if !is_lost_already {
                self.effects.report_event(key, SessionEvent::EngineLost);
            }
            // A running turn still ends under its old incarnation id.
            if self.sessions[key].turns.running == 0 {
                self.sessions.reincarnate(key);
            }
            self.change_session(key, |session| session.lose(GoneReason::EngineRestarted));
        }
        // Closing sessions are closed now. Those of ranks that no longer exist can't continue.
        let rank_count = engine.ranks.len();
        for key in keys {
            let session = &self.sessions[&key];
            let must_be_dropped =
                session.state.is_closing() || session.dp_rank as usize >= rank_count;
            if must_be_dropped && session.turns.running == 0 {
                self.drop_session(now, &key, &Error::EngineLost);
            }
        }
        self.engine = engine;
        self.add_ranks();
        self.debug_check();
    }
}

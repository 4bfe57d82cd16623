//! Handles what the engine and the shim report: load, the engine's sessions, and the engine's loss.
//!
//! The shim is Berth's part in the engine's process. A foreign session is one that another client
//! of the engine opened. An incarnation is one life of a session in the engine, and its id is the
//! session's id there. A suspect session's history is uncertain until the shim, asked about this
//! session, confirms it. What the shim reports without a request only concerns foreign sessions.
//!
//! This module does no I/O. The module `owner` receives the reports and calls these functions. The
//! shim's plans for single turns are handled in the module `trim`.

use std::time::{Duration, Instant};

use proto::{
    id::SessionKey,
    load::{Retention, RetentionOff},
};

use super::{
    CloseResult, Doubt, EngineCapacity, Error, GoneReason, Guard, Row, Session, SessionEvent,
    ShimRequest, State, Table, shim_requests::ShimTask,
};

/// The longest time by which the engine's load figures lag behind. Once a rank has been idle for
/// this long, the figures show the rank as idle.
const LOAD_LAG_MAX: Duration = Duration::from_millis(500);

/// One rank's load, as the engine reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLoad {
    /// The number of requests in the engine's queue.
    pub waiting_requests: u64,
    /// KV tokens that the engine can't evict.
    pub used_tokens: u64,
}

/// One session inside the engine, as the shim reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionReport {
    /// The session's id inside the engine.
    pub id: String,
    /// Whether the session holds a request row.
    pub holds_row: bool,
    /// KV tokens that the session holds.
    pub allocated_tokens: u64,
    /// Tokens of the session's committed history.
    pub history_tokens: u64,
    /// Whether a turn of the session is in the engine.
    pub in_flight: bool,
}

/// Which part of a full session table some reports of sessions are. Changes are neither its
/// beginning nor its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TablePart {
    /// Whether a full table begins with these reports.
    pub begins_table: bool,
    /// Whether a full table ends with these reports.
    pub ends_table: bool,
}

impl Table {
    /// Handles an engine's load sample for one rank.
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

    /// Sets the retentions that the engine offers from now on, and why it doesn't offer the others.
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

    /// Marks that the shim of `dp_rank` is connected. `can_demote`: whether the shim can give a
    /// session's KV to the radix tree. Asks it about the sessions that the last agent process
    /// handed over; no other session is suspect without a shim.
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

    /// Asks the shim once more about a suspect session. `until`: when the session is closed if that
    /// doesn't help; `None` if the time begins when the request is sent.
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

    /// Handles the loss of the shim's connection for `dp_rank`. Discards what the shim reported,
    /// and closes every session that was waiting for the shim's answer.
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

    /// Handles the shim's report of one session.
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

    /// Takes any report of a session for the answer that it awaits. Only the simulation does that.
    fn settle_by_report(&mut self, now: Instant, key: &SessionKey, report: &SessionReport) {
        match self.sessions[key].state {
            State::Suspect { doubt, .. } => self.settle_doubt(now, key, doubt, Some(report)),
            State::Demoting { .. } if !report.holds_row && !report.in_flight => {
                self.settle_demotion(now, key, true);
            }
            _ => {}
        }
    }

    /// Handles the shim's answer to the [`Effect::Inspect`](super::Effect::Inspect) with this
    /// number. `None`: the engine doesn't have the session.
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

    /// Handles what the shim has found of a suspect session.
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

    /// Handles the shim's reports of sessions that have changed, or that are part of a full table.
    ///
    /// The end of a full table means that the engine doesn't have the foreign sessions that it
    /// lacks. It proves nothing of the agent's own sessions: one that the agent opens or closes
    /// meanwhile may be listed or not. The shim reports each that ends, and a close is repeated
    /// until the engine confirms it.
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

    /// Handles the shim's report that a session is closed in the engine.
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

    /// Notes whether the engine is silent: its process runs, but it has said nothing for too long.
    /// While it is silent, refuses what waits and what comes. Turns inside the engine go on.
    pub fn set_engine_silent(&mut self, now: Instant, reason: Option<String>) {
        self.silent_reason = reason;
        if let Err(error) = self.check_engine_speaks() {
            self.refuse_waiting(now, &error);
        } else {
            self.process_queue(now);
        }
        self.debug_check();
    }

    /// Returns why the engine is silent, as the table was told.
    #[must_use]
    pub fn silent_reason(&self) -> Option<&String> {
        self.silent_reason.as_ref()
    }

    /// Refuses a turn or an open while the engine is silent.
    pub(super) fn check_engine_speaks(&self) -> Result<(), Error> {
        self.silent_reason.clone().map_or(Ok(()), |reason| Err(Error::EngineSilent(reason)))
    }

    /// Handles the loss of the engine process, and with it of all rows, KV and histories. `engine`
    /// describes the engine from now on.
    pub fn handle_engine_lost(&mut self, now: Instant, engine: EngineCapacity) {
        self.refuse_waiting(now, &Error::EngineLost);
        // In case the same process answers again, the journal keeps the closes until it names
        // another engine process.
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
            // A running turn still ends under its old incarnation id. A session without running
            // turns gets a new id.
            if self.sessions[key].turns.running == 0 {
                self.sessions.reincarnate(key);
            }
            self.change_session(key, |session| session.lose(GoneReason::EngineRestarted));
        }
        // Sessions that were closing are closed now. Sessions of ranks that no longer exist can't
        // continue.
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

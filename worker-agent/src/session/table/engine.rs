//! Handles what the engine and the shim report: load, the engine's sessions, and the engine's loss.
//!
//! The shim is Berth's part in the engine's process. A foreign session is one that another client
//! of the engine opened. An incarnation is one life of a session in the engine, and its id is the
//! session's id there. A suspect session's history is uncertain until the shim's session table (a
//! report of all sessions in the engine) confirms it.
//!
//! This module does no I/O. The module `owner` receives the reports and calls these functions. The
//! shim's plans for single turns are handled in the module `trim`.

use std::time::{Duration, Instant};

use proto::id::SessionKey;

use super::{
    CloseResult, Doubt, Effect, EngineCapacity, Error, GoneReason, Row, SessionEvent, State, Table,
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
    /// Whether the report is part of a full session table, not a report of a change.
    pub is_from_full_table: bool,
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

    /// Marks that the shim of `dp_rank` is connected. `can_demote`: whether the shim can give a
    /// session's KV to the radix tree.
    pub fn handle_shim_up(&mut self, dp_rank: u32, can_demote: bool) {
        if self.shims.has_rank(dp_rank) {
            self.shims.connect(dp_rank, can_demote);
            // A full table follows each connection. It shows the sessions that the last agent
            // process handed over; no other session is suspect without a shim.
            self.mark_table_requested(dp_rank);
        }
    }

    /// Marks that a full session table was requested from the shim of `dp_rank`. That table will
    /// show whether the histories of suspect sessions are the expected ones.
    pub fn mark_table_requested(&mut self, dp_rank: u32) {
        let of_rank = self.sessions.keys(|session| session.dp_rank == dp_rank);
        of_rank
            .iter()
            .for_each(|key| self.sessions.update(key, |session| session.state.expect_table()));
    }

    /// Handles the loss of the shim's connection for `dp_rank`. Discards what the shim reported,
    /// and closes every session that was waiting for the shim's answer.
    pub fn handle_shim_down(&mut self, now: Instant, dp_rank: u32) {
        if !self.shims.has_rank(dp_rank) {
            return;
        }
        self.shims.disconnect(dp_rank);
        let keys = self.sessions.keys(|session| {
            session.dp_rank == dp_rank && session.state.awaits_shim_until().is_some()
        });
        keys.iter().for_each(|key| self.close_without_answer(now, key));
        self.process_queue(now);
        self.debug_check();
    }

    /// Handles the shim's report of one session.
    pub fn handle_session_report(&mut self, now: Instant, dp_rank: u32, report: &SessionReport) {
        if let Some(key) = self.sessions.key_of(&report.id).cloned() {
            // The engine opens a session on every rank, but its history is on one rank only.
            if self.sessions[&key].dp_rank == dp_rank {
                self.handle_own_session(now, &key, report);
            }
            return self.debug_check();
        }
        if self.closes.contains(&report.id) || self.sessions.has_made(&report.id) {
            return;
        }
        self.shims.report_foreign(dp_rank, report, self.engine.page_tokens);
        self.debug_check();
    }

    /// Handles the shim's report of a session that is in the table.
    fn handle_own_session(&mut self, now: Instant, key: &SessionKey, report: &SessionReport) {
        let session = &self.sessions[key];
        match session.state {
            // Only a table that was requested after the uncertain turn counts. An earlier table may
            // describe the state before that turn.
            State::Suspect { doubt, .. }
                if doubt.is_table_requested && report.is_from_full_table =>
            {
                self.settle_doubt(now, key, doubt, report);
            }
            State::Demoting { .. } if !report.holds_row && !report.in_flight => {
                self.handle_demote_result(now, &report.id, true)
            }
            _ => {}
        }
    }

    /// Handles the report of a suspect session in a table that was requested for it.
    fn settle_doubt(
        &mut self,
        now: Instant,
        key: &SessionKey,
        doubt: Doubt,
        report: &SessionReport,
    ) {
        if report.in_flight {
            // The uncertain turn has not ended yet, so the session table must be requested again.
            let dp_rank = self.sessions.update(key, |session| {
                session.state.expect_no_table();
                session.dp_rank
            });
            return self.effects.push(Effect::RequestShimTable { dp_rank, rid: None });
        }
        // A demoted session takes a row only for a turn, and this process has run none.
        let may_hold_row = self.sessions[key].state.row().is_some();
        if doubt.expected.matches(report.history_tokens) && (may_hold_row || !report.holds_row) {
            let is_handed = doubt.otherwise == GoneReason::NotTakenOver;
            let event = if is_handed { SessionEvent::TakenOver } else { SessionEvent::Verified };
            self.effects.report_event(key, event);
            let resident_tokens = report.allocated_tokens;
            self.change_session(key, |session| {
                session.history.tokens = report.history_tokens;
                let row = Row { resident_tokens, ..Row::default() };
                session.state.clear_doubt(report.holds_row.then_some(row));
            });
            // The session has a deadline of its own again.
            self.schedule_deadline(key);
        } else {
            self.close_as_gone(now, key, doubt.otherwise);
        }
        self.process_queue(now);
    }

    /// Handles the end of a full session table. `reported_ids` are the ids of all sessions that the
    /// shim sees.
    pub fn handle_session_table(&mut self, now: Instant, dp_rank: u32, reported_ids: &[&str]) {
        let known_ids = self.closes.on_rank(dp_rank).chain(self.shims.foreign_ids(dp_rank));
        let gone_ids: Vec<String> =
            known_ids.filter(|id| !reported_ids.contains(&id.as_str())).cloned().collect();
        gone_ids.iter().for_each(|id| self.handle_session_gone(now, dp_rank, id));
        // A suspect session that is not in the table which was requested for it is closed.
        let missing = self.sessions.keys(|session| {
            let is_listed = || reported_ids.contains(&session.incarnation.as_str());
            session.dp_rank == dp_rank && session.state.awaits_table() && !is_listed()
        });
        if !missing.is_empty() {
            missing.iter().for_each(|key| self.close_without_answer(now, key));
            self.process_queue(now);
            self.debug_check();
        }
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
        if self.closes.on_rank(dp_rank).any(|closing| closing == id) {
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
        self.closes.clear();
        self.tickets.forget_samples();
        self.reset_weights();
        self.shims.disconnect_all();
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

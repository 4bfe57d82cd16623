//! Handles what the engine and the shim report: load, the engine's sessions, and the engine's loss.
//!
//! The shim is Berth's part in the engine's process. A foreign session is one that another client
//! of the engine opened. An incarnation is one life of a session in the engine, and its id is the
//! session's id there. A suspect session's history is uncertain until the shim's session table (a
//! report of all sessions in the engine) confirms it.
//!
//! This module does no I/O. The module `owner` receives the reports and calls these functions. The
//! shim's plans for single turns are handled in the module `trim`.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use proto::id::SessionKey;

use super::{
    CloseResult, Doubt, Effect, EngineCapacity, Error, GoneReason, Guard, Row, Session,
    SessionEvent, State, Table,
    rank_account::{ConnectedShim, ForeignSession},
};

/// The most foreign sessions that are tracked per rank. Sessions beyond this number are not
/// counted.
const FOREIGN_SESSIONS_MAX: usize = 4096;
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
        let has_pending_close =
            self.pending_closes.values().any(|closing| closing.dp_rank == dp_rank);
        let guards = self.settings.guards;
        let Some(account) = self.accounts.get_mut(dp_rank as usize) else { return };
        let queue_length = i64::try_from(load.waiting_requests).unwrap_or(i64::MAX);
        let idle_since =
            self.tickets.load_mut(dp_rank).sample(now, queue_length, has_pending_close);
        let is_load_current = idle_since.is_some_and(|since| since + LOAD_LAG_MAX <= now);
        if account.shim.is_none() && is_load_current && guards.is_on(Guard::ForeignCounted) {
            // Tokens that can't be evicted and that none of the agent's sessions hold are foreign.
            let own_tokens = account.totals.pinned_tokens - account.totals.foreign_tokens;
            let pool_tokens =
                self.engine.ranks.get(dp_rank as usize).map_or(0, |rank| rank.pool_tokens);
            let foreign_tokens = load.used_tokens.min(pool_tokens).saturating_sub(own_tokens);
            account.totals.pinned_tokens = own_tokens + foreign_tokens;
            account.totals.foreign_tokens = foreign_tokens;
        }
        self.process_queue(now);
        self.debug_check();
    }

    /// Marks that the shim of `dp_rank` is connected. `can_demote`: whether the shim can give a
    /// session's KV to the radix tree.
    pub fn handle_shim_up(&mut self, dp_rank: u32, can_demote: bool) {
        if let Some(account) = self.accounts.get_mut(dp_rank as usize) {
            account.shim = Some(ConnectedShim { can_demote });
            // The shim reports each foreign session, which replaces the estimate from load samples.
            self.recount_foreign(dp_rank);
        }
    }

    /// Marks that a full session table was requested from the shim of `dp_rank`. That table will
    /// show whether the histories of suspect sessions are the expected ones.
    pub fn mark_table_requested(&mut self, dp_rank: u32) {
        for session in self.sessions.values_mut().filter(|session| session.dp_rank == dp_rank) {
            if let State::Suspect { doubt, .. } = &mut session.state {
                doubt.is_table_requested = true;
            }
        }
    }

    /// Handles the loss of the shim's connection for `dp_rank`. Discards what the shim reported,
    /// and closes every session that was waiting for the shim's answer.
    pub fn handle_shim_down(&mut self, now: Instant, dp_rank: u32) {
        let Some(account) = self.accounts.get_mut(dp_rank as usize) else { return };
        account.shim = None;
        account.foreign_sessions.clear();
        self.recount_foreign(dp_rank);
        let waits_for_shim =
            |session: &Session| session.dp_rank == dp_rank && session.awaits_shim_until().is_some();
        let keys: Vec<SessionKey> = self
            .sessions
            .iter()
            .filter(|(_, session)| waits_for_shim(session))
            .map(|(key, _)| key.clone())
            .collect();
        keys.iter().for_each(|key| self.close_without_answer(now, key));
        self.process_queue(now);
        self.debug_check();
    }

    /// Handles the shim's report of one session.
    pub fn handle_session_report(&mut self, now: Instant, dp_rank: u32, report: &SessionReport) {
        if let Some(key) = self.keys_by_incarnation.get(&report.id).cloned() {
            // The engine opens a session on every rank, but its history is on one rank only.
            if self.sessions[&key].dp_rank == dp_rank {
                self.handle_own_session(now, &key, report);
            }
            return self.debug_check();
        }
        if self.pending_closes.contains_key(&report.id) || self.is_own_incarnation(&report.id) {
            return;
        }
        let page_tokens = self.engine.page_tokens;
        let Some(account) = self.accounts.get_mut(dp_rank as usize) else { return };
        if account.foreign_sessions.len() < FOREIGN_SESSIONS_MAX
            || account.foreign_sessions.contains_key(&report.id)
        {
            let tokens = report.allocated_tokens.next_multiple_of(page_tokens);
            let session = ForeignSession { holds_row: report.holds_row, tokens };
            account.foreign_sessions.insert(report.id.clone(), session);
        }
        self.recount_foreign(dp_rank);
        self.debug_check();
    }

    /// Handles the shim's report of a session that is in the table.
    fn handle_own_session(&mut self, now: Instant, key: &SessionKey, report: &SessionReport) {
        let session = self.sessions.get_mut(key).expect("the caller has it");
        match &mut session.state {
            // The uncertain turn has not ended yet, so the session table must be requested again.
            State::Suspect { doubt, .. }
                if doubt.is_table_requested && report.is_from_full_table && report.in_flight =>
            {
                doubt.is_table_requested = false;
                let dp_rank = session.dp_rank;
                self.effects.push(Effect::RequestShimTable { dp_rank, rid: None });
            }
            // Only a table that was requested after the uncertain turn counts. An earlier table may
            // describe the state before that turn.
            &mut State::Suspect {
                doubt: Doubt { expected, is_table_requested: true, .. }, ..
            } if report.is_from_full_table => {
                if expected.matches(report.history_tokens) {
                    self.effects.push(Effect::SessionEvent(key.clone(), SessionEvent::Verified));
                    let resident_tokens = report.allocated_tokens;
                    self.change_session(key, |session| {
                        session.history.tokens = report.history_tokens;
                        session.state = if report.holds_row {
                            State::Open(Row { resident_tokens, ..Row::default() })
                        } else {
                            State::Demoted
                        };
                    });
                    // The session has a deadline of its own again.
                    self.schedule_deadline(key);
                } else {
                    self.close_as_gone(now, key, GoneReason::HistoryUnknown);
                }
                self.process_queue(now);
            }
            State::Demoting { .. } if !report.holds_row && !report.in_flight => {
                self.handle_demote_result(now, &report.id, true)
            }
            _ => {}
        }
    }

    /// Whether this agent process made an incarnation id, even if the table has forgotten the
    /// session.
    fn is_own_incarnation(&self, id: &str) -> bool {
        let suffix = id.strip_prefix(&self.settings.incarnation_prefix);
        suffix.is_some_and(|suffix| suffix.starts_with('-'))
    }

    /// Handles the end of a full session table. `reported_ids` are the ids of all sessions that the
    /// shim sees.
    pub fn handle_session_table(&mut self, now: Instant, dp_rank: u32, reported_ids: &[&str]) {
        let closing_ids =
            self.pending_closes.iter().filter(|(_, closing)| closing.dp_rank == dp_rank);
        let foreign_sessions =
            self.accounts.get(dp_rank as usize).map(|account| &account.foreign_sessions);
        let known_ids = closing_ids
            .map(|(id, _)| id)
            .chain(foreign_sessions.into_iter().flat_map(HashMap::keys));
        let gone_ids: Vec<String> =
            known_ids.filter(|id| !reported_ids.contains(&id.as_str())).cloned().collect();
        gone_ids.iter().for_each(|id| self.handle_session_gone(now, dp_rank, id));
    }

    /// Handles the shim's report that a session is closed in the engine.
    pub fn handle_session_gone(&mut self, now: Instant, dp_rank: u32, id: &str) {
        // The engine closes the session on every rank, but its row and KV were on one.
        if let Some(key) = self.keys_by_incarnation.get(id).cloned()
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
        if self.pending_closes.get(id).is_some_and(|closing| closing.dp_rank == dp_rank) {
            self.handle_close_result(now, id, CloseResult::Confirmed);
        }
        let Some(account) = self.accounts.get_mut(dp_rank as usize) else { return };
        if account.foreign_sessions.remove(id).is_some() {
            self.recount_foreign(dp_rank);
            self.process_queue(now);
            self.debug_check();
        }
    }

    /// Sets the totals of foreign sessions to what the shim has reported.
    fn recount_foreign(&mut self, dp_rank: u32) {
        if !self.settings.guards.is_on(Guard::ForeignCounted) {
            return;
        }
        let account = self.account(dp_rank);
        let totals = &mut account.totals;
        totals.rows_held -= totals.foreign_rows;
        totals.pinned_tokens -= totals.foreign_tokens;
        totals.foreign_rows =
            account.foreign_sessions.values().map(|session| u32::from(session.holds_row)).sum();
        totals.foreign_tokens =
            account.foreign_sessions.values().map(|session| session.tokens).sum();
        totals.rows_held += totals.foreign_rows;
        totals.pinned_tokens += totals.foreign_tokens;
    }

    /// Handles the loss of the engine process, and with it of all rows, KV and histories. `engine`
    /// describes the engine from now on.
    pub fn handle_engine_lost(&mut self, now: Instant, engine: EngineCapacity) {
        self.refuse_waiting(now, &Error::EngineLost);
        self.forget_closes();
        self.tickets.forget_samples();
        for dp_rank in 0..self.accounts.len() {
            let account = &mut self.accounts[dp_rank];
            account.foreign_sessions.clear();
            account.shim = None;
            self.recount_foreign(u32::try_from(dp_rank).expect("few ranks"));
        }
        let keys: Vec<SessionKey> = self.sessions.keys().cloned().collect();
        for key in &keys {
            let is_lost_already = matches!(
                self.sessions[key].state,
                State::Gone { reason: GoneReason::EngineRestarted, .. }
            );
            if !is_lost_already {
                self.effects.push(Effect::SessionEvent(key.clone(), SessionEvent::EngineLost));
            }
            // A running turn still ends under its old incarnation id. A session without running
            // turns gets a new id.
            if self.sessions[key].turns.running == 0 {
                self.reincarnate(key);
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

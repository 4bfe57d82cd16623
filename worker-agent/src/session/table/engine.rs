//! What the table learns from the engine: its capacity, load samples, the shim's reports, its loss.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use proto::id::SessionKey;

use super::{
    CloseResult, Effect, EngineCapacity, Error, GoneReason, Guard, Phase, RankCapacity, RankTotals,
    Session, SessionEvent, Table,
};

/// The most foreign sessions that are tracked per rank. Further ones are not counted.
const FOREIGN_MAX: usize = 4096;
/// How far the engine's load figures may lag behind.
const SETTLED: Duration = Duration::from_millis(500);

/// One rank's load, as the engine reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The number of requests in the engine's queue.
    pub waiting: u64,
    /// KV tokens that the engine can't evict.
    pub used_tokens: u64,
}

/// One session inside the engine, as the shim reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionReport {
    /// The session's id inside the engine.
    pub id: String,
    /// Whether the session holds a request row.
    pub row: bool,
    /// KV tokens that the session holds.
    pub allocated_tokens: u64,
    /// Tokens of the session's committed history.
    pub history_tokens: u64,
    /// Whether a turn of the session is in the engine.
    pub in_flight: bool,
    /// Whether this is part of a full session table, not a report of changes.
    pub full: bool,
}

/// The account of one rank.
#[derive(Debug, Default)]
pub(super) struct RankAccount {
    pub(super) totals: RankTotals,
    /// The number of turns whose body is being read.
    pub(super) claimed: u32,
    /// KV tokens needed by the largest turn that waits for pinned sessions to give up room; 0 if
    /// none does.
    waits_for_pins: u64,
    /// The number of running turns that are not pinned.
    plain: u64,
    /// KV tokens of each running turn that may need more than pinned sessions leave.
    large: Vec<u64>,
    /// The length of the engine's queue: its last reported value, changed by turns sent and ended
    /// since.
    waiting: Option<i64>,
    /// Since when no turn is inside the engine.
    quiet: Option<Instant>,
    /// Foreign sessions by engine-side id: whether each holds a row, and its KV tokens. Needs a
    /// shim.
    foreign: HashMap<String, (bool, u64)>,
    shim: Option<Shim>,
}

#[derive(Debug, Clone, Copy)]
struct Shim {
    demotes: bool,
}

impl RankAccount {
    pub(super) fn add(&mut self, session: &Session, page: u64) {
        let (rows, pinned, estimate) = weight(session, page);
        self.totals.sessions += 1;
        self.totals.rows_held += rows;
        self.totals.pinned_tokens += pinned;
        self.totals.estimate_tokens += estimate;
    }

    pub(super) fn remove(&mut self, session: &Session, page: u64) {
        let (rows, pinned, estimate) = weight(session, page);
        self.totals.sessions -= 1;
        self.totals.rows_held -= rows;
        self.totals.pinned_tokens -= pinned;
        self.totals.estimate_tokens -= estimate;
    }

    /// Counts a turn that was sent to the engine.
    pub(super) fn entered(&mut self, pinned: bool, large: Option<u64>, rows: u32) {
        self.plain += u64::from(!pinned);
        self.large.extend(large);
        self.quiet = None;
        // A turn that finds a free row doesn't wait in the engine's queue.
        let free = u64::from(rows.saturating_sub(self.totals.rows_held));
        if let (Some(waiting), true) = (&mut self.waiting, self.plain > free) {
            *waiting += 1;
        }
    }

    /// Counts a turn as plain that was admitted as pinned and runs beside its session.
    pub(super) fn turned_plain(&mut self) {
        self.plain += 1;
    }

    /// Counts the KV tokens of a turn that runs beside its session and may need more than pinned
    /// sessions leave.
    pub(super) fn turned_large(&mut self, tokens: u64) {
        self.large.push(tokens);
    }

    /// Counts a turn that has ended.
    pub(super) fn left(&mut self, pinned: bool, large: Option<u64>) {
        self.totals.turns_running -= 1;
        self.plain -= u64::from(!pinned);
        if let Some(at) = large.and_then(|large| self.large.iter().position(|one| *one == large)) {
            self.large.swap_remove(at);
        }
        if let Some(waiting) = &mut self.waiting {
            *waiting = (*waiting - 1).max(0);
        }
    }

    /// Returns the most KV tokens that a large running turn, or a turn that waits for pinned room,
    /// may need.
    pub(super) fn largest(&self) -> u64 {
        self.large.iter().copied().max().unwrap_or(0).max(self.waits_for_pins)
    }

    /// Starts a new pass over the queue.
    pub(super) fn look_again(&mut self) {
        self.waits_for_pins = 0;
    }

    /// Counts a turn that waits for pinned sessions to give up room. Returns whether it is the
    /// first of this pass.
    pub(super) fn first_to_wait_for_pins(&mut self, tokens: u64) -> bool {
        let first = self.waits_for_pins == 0;
        self.waits_for_pins = self.waits_for_pins.max(tokens);
        first
    }

    /// Whether the engine can run one more plain turn now, or would have at most `ahead` turns
    /// waiting.
    pub(super) fn engine_has_room(&self, capacity: &RankCapacity, ahead: u64) -> bool {
        let rows = u64::from(capacity.rows.saturating_sub(self.totals.rows_held));
        let waiting = self.waiting.map_or(0, |waiting| u64::try_from(waiting).unwrap_or(0));
        self.plain < rows + ahead && waiting < ahead
    }

    pub(super) fn demotes(&self) -> bool {
        self.shim.is_some_and(|shim| shim.demotes)
    }

    pub(super) fn verifies(&self) -> bool {
        self.shim.is_some()
    }
}

/// Returns the rows, pinned tokens and estimated tokens that a session adds to its rank's totals.
fn weight(session: &Session, page: u64) -> (u32, u64, u64) {
    if session.retention != proto::load::Retention::Pinned {
        return (0, 0, session.resident_tokens);
    }
    if !session.row {
        return (0, 0, 0);
    }
    let tokens = session.resident_tokens.max(session.reserved_tokens);
    (1, tokens.next_multiple_of(page), 0)
}

impl Table {
    /// Handles an engine's load sample for one rank.
    pub fn handle_load(&mut self, now: Instant, dp_rank: u32, load: Load) {
        let pending = self.closing.values().any(|one| one.dp_rank == dp_rank);
        let guards = self.rules.guards;
        let Some(account) = self.accounts.get_mut(dp_rank as usize) else { return };
        account.waiting = Some(i64::try_from(load.waiting).unwrap_or(i64::MAX));
        let idle = account.totals.turns_running == 0 && !pending;
        let quiet = idle.then(|| *account.quiet.get_or_insert(now));
        account.quiet = quiet;
        let settled = quiet.is_some_and(|since| since + SETTLED <= now);
        if account.shim.is_none() && settled && guards.hold(Guard::ForeignCounted) {
            // Tokens that can't be evicted and that none of the agent's sessions hold are foreign.
            let own = account.totals.pinned_tokens - account.totals.foreign_tokens;
            let pool = self.engine.ranks.get(dp_rank as usize).map_or(0, |rank| rank.pool_tokens);
            let foreign = load.used_tokens.min(pool).saturating_sub(own);
            account.totals.pinned_tokens = own + foreign;
            account.totals.foreign_tokens = foreign;
        }
        self.pump(now);
        self.debug_check();
    }

    /// Marks that the shim of `dp_rank` is connected.
    pub fn handle_shim_up(&mut self, dp_rank: u32, demotes: bool) {
        if let Some(account) = self.accounts.get_mut(dp_rank as usize) {
            account.shim = Some(Shim { demotes });
            // The shim reports each foreign session, which replaces the estimate from load samples.
            self.count_foreign(dp_rank);
        }
    }

    /// Marks that a full session table was requested from the shim of `dp_rank`. The reply decides
    /// about suspect sessions.
    pub fn mark_table_requested(&mut self, dp_rank: u32) {
        for session in self.sessions.values_mut().filter(|one| one.dp_rank == dp_rank) {
            if let Phase::Suspect { asked, .. } = &mut session.phase {
                *asked = true;
            }
        }
    }

    /// Handles the loss of the shim's connection for `dp_rank`: discards what it reported, and
    /// closes every session that was waiting for its answer.
    pub fn handle_shim_down(&mut self, now: Instant, dp_rank: u32) {
        let Some(account) = self.accounts.get_mut(dp_rank as usize) else { return };
        account.shim = None;
        account.foreign.clear();
        self.count_foreign(dp_rank);
        let waits = |one: &Session| {
            one.dp_rank == dp_rank
                && matches!(one.phase, Phase::Demoting { .. } | Phase::Suspect { .. })
        };
        let keys: Vec<SessionKey> = self
            .sessions
            .iter()
            .filter(|(_, one)| waits(one))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            let demoting = matches!(self.sessions[&key].phase, Phase::Demoting { .. });
            self.retire(
                now,
                &key,
                if demoting { GoneReason::Reclaimed } else { GoneReason::HistoryUnknown },
            );
        }
        self.pump(now);
        self.debug_check();
    }

    /// Handles the shim's report of one session.
    pub fn handle_session_report(&mut self, now: Instant, dp_rank: u32, seen: &SessionReport) {
        if let Some(key) = self.by_incarnation.get(&seen.id).cloned() {
            // The session is open on every rank, but its history is on one rank only.
            if self.sessions[&key].dp_rank == dp_rank {
                self.seen_own(now, &key, seen);
            }
            return self.debug_check();
        }
        if self.closing.contains_key(&seen.id) || self.is_own(&seen.id) {
            return;
        }
        let page = self.engine.page_tokens;
        let Some(account) = self.accounts.get_mut(dp_rank as usize) else { return };
        if account.foreign.len() < FOREIGN_MAX || account.foreign.contains_key(&seen.id) {
            let tokens = seen.allocated_tokens.next_multiple_of(page);
            account.foreign.insert(seen.id.clone(), (seen.row, tokens));
        }
        self.count_foreign(dp_rank);
        self.debug_check();
    }

    fn seen_own(&mut self, now: Instant, key: &SessionKey, seen: &SessionReport) {
        match &mut self.sessions.get_mut(key).expect("the caller has it").phase {
            // The uncertain turn has not ended yet, so the table must be requested again.
            Phase::Suspect { asked, .. } if *asked && seen.full && seen.in_flight => {
                *asked = false;
                let dp_rank = self.sessions[key].dp_rank;
                self.effects.push(Effect::Look { dp_rank, rid: None });
            }
            // A report from before the request may describe the state before the uncertain turn.
            &mut Phase::Suspect { expected, asked: true, .. } if seen.full => {
                if expected.is(seen.history_tokens) {
                    self.effects.push(Effect::Happened(key.clone(), SessionEvent::Verified));
                    self.change(key, |session| {
                        session.phase = if seen.row { Phase::Open } else { Phase::Demoted };
                        session.row = seen.row;
                        session.history_tokens = seen.history_tokens;
                        session.resident_tokens = seen.allocated_tokens;
                        session.reserved_tokens = 0;
                        session.lost_rid = None;
                    });
                    // The session has a deadline of its own again.
                    self.watch(key);
                } else {
                    self.retire(now, key, GoneReason::HistoryUnknown);
                }
                self.pump(now);
            }
            Phase::Demoting { .. } if !seen.row && !seen.in_flight => {
                self.handle_demote_result(now, &seen.id, true)
            }
            _ => {}
        }
    }

    /// Whether an engine-side id is from this agent process, even if the table has forgotten it.
    fn is_own(&self, id: &str) -> bool {
        let number = id.strip_prefix(&self.rules.prefix).and_then(|rest| rest.strip_prefix('-'));
        number.is_some()
    }

    /// Handles the end of a full session table: `there` are all sessions that the shim sees.
    pub fn handle_session_table(&mut self, now: Instant, dp_rank: u32, there: &[&str]) {
        let closing = self.closing.iter().filter(|(_, one)| one.dp_rank == dp_rank);
        let foreign = self.accounts.get(dp_rank as usize).map(|account| &account.foreign);
        let known = closing.map(|(id, _)| id).chain(foreign.into_iter().flat_map(HashMap::keys));
        let gone: Vec<String> = known.filter(|id| !there.contains(&id.as_str())).cloned().collect();
        gone.iter().for_each(|id| self.handle_session_gone(now, dp_rank, id));
    }

    /// Handles the shim's report that a session is closed in the engine.
    pub fn handle_session_gone(&mut self, now: Instant, dp_rank: u32, id: &str) {
        // The engine closes the session on every rank, but its row and KV were on one.
        if let Some(key) = self.by_incarnation.get(id).cloned()
            && self.sessions[&key].dp_rank == dp_rank
            && self.sessions[&key].running == 0
            && matches!(self.sessions[&key].phase, Phase::Open | Phase::Demoted)
        {
            // Another client of the engine closed the session.
            self.retire(now, &key, GoneReason::HistoryUnknown);
        }
        if self.closing.get(id).is_some_and(|one| one.dp_rank == dp_rank) {
            self.handle_close_result(now, id, CloseResult::Confirmed);
        }
        let Some(account) = self.accounts.get_mut(dp_rank as usize) else { return };
        if account.foreign.remove(id).is_some() {
            self.count_foreign(dp_rank);
            self.pump(now);
            self.debug_check();
        }
    }

    fn count_foreign(&mut self, dp_rank: u32) {
        if !self.rules.guards.hold(Guard::ForeignCounted) {
            return;
        }
        let account = self.account(dp_rank);
        let totals = &mut account.totals;
        totals.rows_held -= totals.foreign_rows;
        totals.pinned_tokens -= totals.foreign_tokens;
        totals.foreign_rows = account.foreign.values().map(|(row, _)| u32::from(*row)).sum();
        totals.foreign_tokens = account.foreign.values().map(|(_, tokens)| tokens).sum();
        totals.rows_held += totals.foreign_rows;
        totals.pinned_tokens += totals.foreign_tokens;
    }

    /// Handles the loss of the engine process, and with it of every row, KV token and history.
    pub fn handle_engine_lost(&mut self, now: Instant, engine: EngineCapacity) {
        self.refuse_waiting(now, &Error::EngineLost);
        self.forget_closes();
        for dp_rank in 0..self.accounts.len() {
            let account = &mut self.accounts[dp_rank];
            account.foreign.clear();
            (account.waiting, account.quiet, account.shim) = (None, None, None);
            self.count_foreign(u32::try_from(dp_rank).expect("few ranks"));
        }
        let keys: Vec<SessionKey> = self.sessions.keys().cloned().collect();
        for key in &keys {
            if self.sessions[key].phase != Phase::Gone(GoneReason::EngineRestarted) {
                self.effects.push(Effect::Happened(key.clone(), SessionEvent::EngineLost));
            }
            // A running turn still ends under its old incarnation id; an idle session gets a new
            // one.
            if self.sessions[key].running == 0 {
                self.reincarnate(key);
            }
            self.change(key, |session| {
                if session.phase != Phase::Closing {
                    session.phase = Phase::Gone(GoneReason::EngineRestarted);
                }
                session.row = false;
                session.resident_tokens = 0;
                session.reserved_tokens = 0;
                session.history_tokens = 0;
            });
        }
        // Sessions that were closing are closed now. Sessions of ranks that no longer exist are
        // dropped.
        let ranks = engine.ranks.len();
        for key in keys {
            let session = &self.sessions[&key];
            let goes = session.phase == Phase::Closing || session.dp_rank as usize >= ranks;
            if goes && session.running == 0 {
                self.drop_session(now, &key, &Error::EngineLost);
            }
        }
        // Turns of a rank that no longer exists must still end, so the rank's account stays.
        self.accounts.resize_with(ranks.max(self.accounts.len()), RankAccount::default);
        self.engine = engine;
        self.debug_check();
    }
}

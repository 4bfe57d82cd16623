//! What the table learns from the engine: its facts, its loads, what the shim sees inside, and that
//! it has gone.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use proto::id::SessionKey;

use super::{
    Capacity, Closed, Effect, Engine, Error, Event, Guard, Phase, Session, Table, Totals, Why,
};

/// Sessions of others that are told apart; more are counted in the sums alone.
const FOREIGN_MAX: usize = 4096;
/// The engine's load figures follow what happens by up to this long.
const SETTLED: Duration = Duration::from_millis(500);

/// One rank's load, as the engine reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Requests in its queue.
    pub waiting: u64,
    /// Tokens that eviction can't take.
    pub used_tokens: u64,
}

/// One session inside the engine, as the shim sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The engine-side id.
    pub id: String,
    /// It holds a row.
    pub row: bool,
    /// KV it holds, tokens.
    pub allocated_tokens: u64,
    /// Its committed history, tokens.
    pub history_tokens: u64,
    /// A turn of it is in the engine.
    pub in_flight: bool,
    /// Part of a whole table, not of what changed.
    pub full: bool,
}

/// The account of one rank.
#[derive(Debug, Default)]
pub(super) struct Book {
    pub(super) totals: Totals,
    /// Turns whose body is being read.
    pub(super) claimed: u32,
    /// What the first turn that waits for pinned sessions to give room may need, tokens.
    waits_for_pins: u64,
    /// Running turns that are not pinned.
    plain: u64,
    /// What running turns may need that is more than pinned sessions leave, tokens.
    large: Vec<u64>,
    /// The engine's queue at its last word, and what went in and out since.
    waiting: Option<i64>,
    /// Since when no turn is inside.
    quiet: Option<Instant>,
    /// Others' sessions with row and tokens, where the shim sees them.
    foreign: HashMap<String, (bool, u64)>,
    shim: Option<Shim>,
}

#[derive(Debug, Clone, Copy)]
struct Shim {
    demotes: bool,
}

impl Book {
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

    /// A turn went in.
    pub(super) fn entered(&mut self, pinned: bool, large: Option<u64>, rows: u32) {
        self.plain += u64::from(!pinned);
        self.large.extend(large);
        self.quiet = None;
        // One that finds a row free does not wait.
        let free = u64::from(rows.saturating_sub(self.totals.rows_held));
        if let (Some(waiting), true) = (&mut self.waiting, self.plain > free) {
            *waiting += 1;
        }
    }

    /// A turn that went in for a pinned session runs beside it.
    pub(super) fn turned_plain(&mut self) {
        self.plain += 1;
    }

    /// What runs beside a pinned session after all may need more than pinned sessions leave.
    pub(super) fn turned_large(&mut self, tokens: u64) {
        self.large.push(tokens);
    }

    /// A turn came out.
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

    /// The most that a turn inside may need, or one that waits for room that is pinned.
    pub(super) fn largest(&self) -> u64 {
        self.large.iter().copied().max().unwrap_or(0).max(self.waits_for_pins)
    }

    /// A new round over what waits.
    pub(super) fn look_again(&mut self) {
        self.waits_for_pins = 0;
    }

    /// Takes a turn that waits for pinned sessions to give room; is it the round's first?
    pub(super) fn first_to_wait_for_pins(&mut self, tokens: u64) -> bool {
        let first = self.waits_for_pins == 0;
        self.waits_for_pins = self.waits_for_pins.max(tokens);
        first
    }

    /// Would the engine run one more plain turn now, or keep at most `ahead` waiting?
    pub(super) fn engine_has_room(&self, capacity: &Capacity, ahead: u64) -> bool {
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

/// Rows, pinned and estimated tokens that a session adds to its rank.
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
    /// Takes an engine's load sample for one rank.
    pub fn sampled(&mut self, now: Instant, dp_rank: u32, load: Load) {
        let pending = self.closing.values().any(|one| one.dp_rank == dp_rank);
        let guards = self.rules.guards;
        let Some(book) = self.books.get_mut(dp_rank as usize) else { return };
        book.waiting = Some(i64::try_from(load.waiting).unwrap_or(i64::MAX));
        let idle = book.totals.turns_running == 0 && !pending;
        let quiet = idle.then(|| *book.quiet.get_or_insert(now));
        book.quiet = quiet;
        let settled = quiet.is_some_and(|since| since + SETTLED <= now);
        if book.shim.is_none() && settled && guards.hold(Guard::ForeignCounted) {
            // What nobody here holds, others do.
            let own = book.totals.pinned_tokens - book.totals.foreign_tokens;
            let pool = self.engine.ranks.get(dp_rank as usize).map_or(0, |rank| rank.pool_tokens);
            let foreign = load.used_tokens.min(pool).saturating_sub(own);
            book.totals.pinned_tokens = own + foreign;
            book.totals.foreign_tokens = foreign;
        }
        self.pump(now);
        self.debug_check();
    }

    /// The shim inside the engine answers for this rank.
    pub fn shim_up(&mut self, dp_rank: u32, demotes: bool) {
        if let Some(book) = self.books.get_mut(dp_rank as usize) {
            book.shim = Some(Shim { demotes });
            // It names them; what was estimated before is over.
            self.count_foreign(dp_rank);
        }
    }

    /// The shim is being asked for its whole table: what it then says of doubtful sessions counts.
    pub fn looking(&mut self, dp_rank: u32) {
        for session in self.sessions.values_mut().filter(|one| one.dp_rank == dp_rank) {
            if let Phase::Suspect { asked, .. } = &mut session.phase {
                *asked = true;
            }
        }
    }

    /// It doesn't any more: what it was asked is unanswered.
    pub fn shim_down(&mut self, now: Instant, dp_rank: u32) {
        let Some(book) = self.books.get_mut(dp_rank as usize) else { return };
        book.shim = None;
        book.foreign.clear();
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
            self.retire(now, &key, if demoting { Why::Reclaimed } else { Why::HistoryUnknown });
        }
        self.pump(now);
        self.debug_check();
    }

    /// Takes what the shim sees of one session.
    pub fn seen(&mut self, now: Instant, dp_rank: u32, seen: &Seen) {
        if let Some(key) = self.by_incarnation.get(&seen.id).cloned() {
            // The session is open on every rank; its history is on one.
            if self.sessions[&key].dp_rank == dp_rank {
                self.seen_own(now, &key, seen);
            }
            return self.debug_check();
        }
        if self.closing.contains_key(&seen.id) || self.is_own(&seen.id) {
            return;
        }
        let page = self.engine.page_tokens;
        let Some(book) = self.books.get_mut(dp_rank as usize) else { return };
        if book.foreign.len() < FOREIGN_MAX || book.foreign.contains_key(&seen.id) {
            let tokens = seen.allocated_tokens.next_multiple_of(page);
            book.foreign.insert(seen.id.clone(), (seen.row, tokens));
        }
        self.count_foreign(dp_rank);
        self.debug_check();
    }

    fn seen_own(&mut self, now: Instant, key: &SessionKey, seen: &Seen) {
        match &mut self.sessions.get_mut(key).expect("the caller has it").phase {
            // The turn that left the doubt has yet to end.
            Phase::Suspect { asked, .. } if *asked && seen.full && seen.in_flight => {
                *asked = false;
                let dp_rank = self.sessions[key].dp_rank;
                self.effects.push(Effect::Look { dp_rank, rid: None });
            }
            // Its word on the state before the doubt proves nothing.
            &mut Phase::Suspect { expected, asked: true, .. } if seen.full => {
                if expected.is(seen.history_tokens) {
                    self.effects.push(Effect::Happened(key.clone(), Event::Verified));
                    self.change(key, |session| {
                        session.phase = if seen.row { Phase::Open } else { Phase::Demoted };
                        session.row = seen.row;
                        session.history_tokens = seen.history_tokens;
                        session.resident_tokens = seen.allocated_tokens;
                        session.reserved_tokens = 0;
                        session.lost_rid = None;
                    });
                    // A deadline of its own again.
                    self.watch(key);
                } else {
                    self.retire(now, key, Why::HistoryUnknown);
                }
                self.pump(now);
            }
            Phase::Demoting { .. } if !seen.row && !seen.in_flight => {
                self.demoted(now, &seen.id, true)
            }
            _ => {}
        }
    }

    /// One of this agent's, though the table has forgotten it.
    fn is_own(&self, id: &str) -> bool {
        let number = id.strip_prefix(&self.rules.prefix).and_then(|rest| rest.strip_prefix('-'));
        number.is_some()
    }

    /// The shim sees these sessions and no others.
    pub fn seen_all(&mut self, now: Instant, dp_rank: u32, there: &[&str]) {
        let closing = self.closing.iter().filter(|(_, one)| one.dp_rank == dp_rank);
        let foreign = self.books.get(dp_rank as usize).map(|book| &book.foreign);
        let known = closing.map(|(id, _)| id).chain(foreign.into_iter().flat_map(HashMap::keys));
        let gone: Vec<String> = known.filter(|id| !there.contains(&id.as_str())).cloned().collect();
        gone.iter().for_each(|id| self.vanished(now, dp_rank, id));
    }

    /// The shim sees a session no more: the engine has closed it.
    pub fn vanished(&mut self, now: Instant, dp_rank: u32, id: &str) {
        // Every rank closes it, and what it held was on one.
        if let Some(key) = self.by_incarnation.get(id).cloned()
            && self.sessions[&key].dp_rank == dp_rank
            && self.sessions[&key].running == 0
            && matches!(self.sessions[&key].phase, Phase::Open | Phase::Demoted)
        {
            // Someone else closed it.
            self.retire(now, &key, Why::HistoryUnknown);
        }
        if self.closing.get(id).is_some_and(|one| one.dp_rank == dp_rank) {
            self.closed(now, id, Closed::Confirmed);
        }
        let Some(book) = self.books.get_mut(dp_rank as usize) else { return };
        if book.foreign.remove(id).is_some() {
            self.count_foreign(dp_rank);
            self.pump(now);
            self.debug_check();
        }
    }

    fn count_foreign(&mut self, dp_rank: u32) {
        if !self.rules.guards.hold(Guard::ForeignCounted) {
            return;
        }
        let book = self.book(dp_rank);
        let totals = &mut book.totals;
        totals.rows_held -= totals.foreign_rows;
        totals.pinned_tokens -= totals.foreign_tokens;
        totals.foreign_rows = book.foreign.values().map(|(row, _)| u32::from(*row)).sum();
        totals.foreign_tokens = book.foreign.values().map(|(_, tokens)| tokens).sum();
        totals.rows_held += totals.foreign_rows;
        totals.pinned_tokens += totals.foreign_tokens;
    }

    /// The engine process is gone: with it every row, every token and every history.
    pub fn engine_lost(&mut self, now: Instant, engine: Engine) {
        self.refuse_waiting(now, &Error::EngineLost);
        self.forget_closes();
        for dp_rank in 0..self.books.len() {
            let book = &mut self.books[dp_rank];
            book.foreign.clear();
            (book.waiting, book.quiet, book.shim) = (None, None, None);
            self.count_foreign(u32::try_from(dp_rank).expect("few ranks"));
        }
        let keys: Vec<SessionKey> = self.sessions.keys().cloned().collect();
        for key in &keys {
            if self.sessions[key].phase != Phase::Gone(Why::EngineRestarted) {
                self.effects.push(Effect::Happened(key.clone(), Event::EngineLost));
            }
            // A running turn still ends under its old incarnation; an idle session gets a new one.
            if self.sessions[key].running == 0 {
                self.reincarnate(key);
            }
            self.change(key, |session| {
                if session.phase != Phase::Closing {
                    session.phase = Phase::Gone(Why::EngineRestarted);
                }
                session.row = false;
                session.resident_tokens = 0;
                session.reserved_tokens = 0;
                session.history_tokens = 0;
            });
        }
        // What is to close is closed, and what was on a rank that is no more has no place.
        let ranks = engine.ranks.len();
        for key in keys {
            let session = &self.sessions[&key];
            let goes = session.phase == Phase::Closing || session.dp_rank as usize >= ranks;
            if goes && session.running == 0 {
                self.drop_session(now, &key, &Error::EngineLost);
            }
        }
        // Turns of a vanished rank are still to end, so its book stays.
        self.books.resize_with(ranks.max(self.books.len()), Book::default);
        self.engine = engine;
        self.debug_check();
    }
}

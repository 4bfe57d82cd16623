//! The session table: who is open, on which rank, which turns wait and which are inside the engine,
//! and what is still to be closed. Whoever holds it tells it what happened and carries out the
//! [`Effect`]s that come out; nothing here waits, reads a clock or talks to the engine.
//!
//! A turn is claimed ([`Table::claim`], before its body is read), queued with what it needs
//! ([`Table::admit`]), admitted or refused (an effect), and ended ([`Table::end`]).
//!
//! Promises, each asserted by `check_invariants` or by the simulation:
//! - at most one turn of an exclusive session is inside the engine;
//! - pinned sessions leave rows free, and stay within the pin budget even if every turn grows as
//!   far as it may;
//! - rows and KV stay counted until the engine has confirmed a close;
//! - an incarnation's engine-side id is never used twice, so a late close can't hit a successor;
//! - nothing is appended to a history the agent isn't sure of;
//! - no full history replaces one that clients append to, and nothing is appended to one that a
//!   full history has replaced, unless a client opens the session again.

mod admission;
mod audit;
mod backlog;
mod capacity;
mod claims;
mod closing;
mod ends;
mod engine;
mod prefix;
mod reclaim;
mod trim;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Instant,
};

use proto::{claim::Claim, id::SessionKey};

use self::{closing::Closing, engine::Book, trim::Marked};
use super::{
    Appends, Capacity, Close, Closed, Deltas, Effect, Engine, Error, Event, Expected, Guard, Need,
    Opened, Outcome, Phase, PrefixTracker, PromptStart, Ran, Rules, Session, Totals, Trim, Turn,
    TurnSession, Usage, Whole, Why, check_appends, check_turn,
};
use crate::journal::Record;

pub use self::{
    engine::{Load, Seen},
    trim::{Became, Plan, Planned},
};

/// Sessions one agent keeps. A session costs under 1 KiB here; the bound keeps a flood of ids from
/// eating the agent's 40 MiB.
const SESSIONS_MAX: usize = 16_384;

/// All sessions and turns of one engine.
#[derive(Debug)]
pub struct Table {
    rules: Rules,
    engine: Engine,
    /// One per rank; also of ranks that are no more, while turns there are to end.
    books: Vec<Book>,
    /// In order, as all that effects follow from: the same events give the same effects.
    sessions: BTreeMap<SessionKey, Session>,
    by_incarnation: HashMap<String, SessionKey>,
    tickets: BTreeMap<String, Ticket>,
    /// Tickets that wait for room, oldest first.
    queue: VecDeque<String>,
    /// Incarnations whose close the engine has not confirmed yet.
    closing: BTreeMap<String, Closing>,
    effects: Vec<Effect>,
    incarnations: u64,
    born: u64,
    claims: u64,
    sessions_max: usize,
    /// No session is due before.
    due_from: Option<Instant>,
    /// The shim trims whole histories.
    trims: bool,
}

/// A turn between its claim and its end, or a client that waits for an open.
#[derive(Debug)]
struct Ticket {
    /// What its client means; none without a session.
    claim: Option<Claim>,
    key: Option<SessionKey>,
    appends: Appends,
    dp_rank: u32,
    stage: Stage,
    /// Since when it is in its stage.
    since: Instant,
    need: Need,
    /// How its prompt begins, until it is inside.
    start: PromptStart,
    /// The session it was claimed for, told from successors under the same key.
    born: u64,
    /// The incarnation it runs in.
    incarnation: String,
    /// What it may need of the pool, if that is more than pinned sessions leave.
    large_tokens: Option<u64>,
    /// Its client has gone; its end at the engine is waited for since then.
    abandoned: Option<Instant>,
    /// Claims of a session go in in this order, whatever their bodies take.
    order: u64,
    /// Its session held no KV when it went in.
    from_nothing: bool,
    /// A turn before it did not become history.
    orphaned: bool,
    /// It went in as a pinned session's turn.
    pinned: bool,
    /// It holds a whole history, which the shim is to trim.
    marked: Option<Marked>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its body is being read.
    Claimed,
    /// It waits for room.
    Queued,
    /// Not a turn: waits until its session is open.
    Open,
    Inside,
}

impl Ticket {
    /// Without a session.
    fn new(now: Instant, stage: Stage, appends: Appends, dp_rank: u32, order: u64) -> Self {
        Self {
            claim: None,
            key: None,
            appends,
            dp_rank,
            stage,
            since: now,
            need: Need::default(),
            start: PromptStart::default(),
            born: 0,
            incarnation: String::new(),
            large_tokens: None,
            abandoned: None,
            order,
            from_nothing: false,
            orphaned: false,
            pinned: false,
            marked: None,
        }
    }
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(rules: Rules, engine: Engine) -> Self {
        let books = engine.ranks.iter().map(|_| Book::default()).collect();
        Self {
            rules,
            engine,
            books,
            sessions: BTreeMap::new(),
            by_incarnation: HashMap::new(),
            tickets: BTreeMap::new(),
            queue: VecDeque::new(),
            closing: BTreeMap::new(),
            effects: vec![],
            incarnations: 0,
            born: 0,
            claims: 0,
            sessions_max: SESSIONS_MAX,
            due_from: None,
            trims: false,
        }
    }

    /// Closes a session, at once or when its running turns have ended; answers whether it waits.
    ///
    /// # Errors
    /// [`Error::Unknown`] when there is none or it is closing already.
    pub fn close(&mut self, now: Instant, key: &SessionKey) -> Result<bool, Error> {
        self.begin_close(now, key)?;
        self.pump(now);
        self.debug_check();
        Ok(self.sessions.contains_key(key))
    }

    fn begin_close(&mut self, now: Instant, key: &SessionKey) -> Result<(), Error> {
        let session = self.sessions.get(key).ok_or(Error::Unknown)?;
        match session.phase {
            Phase::Closing => return Err(Error::Unknown),
            Phase::Planned if session.running == 0 => self.drop_session(now, key, &Error::Unknown),
            Phase::Gone(_) if session.running == 0 => self.drop_session(now, key, &Error::Unknown),
            _ => {
                // An open still under way is closed by its answer.
                let opening = session.phase == Phase::Opening;
                self.runs_as_it_came(key);
                self.change(key, |session| session.phase = Phase::Closing);
                if !opening {
                    self.close_if_due(now, key);
                }
            }
        }
        Ok(())
    }

    /// Closes every session; what runs ends first, what waits is refused.
    pub fn drain(&mut self, now: Instant) {
        self.refuse_waiting(now, &Error::Stopping);
        let keys: Vec<SessionKey> = self.sessions.keys().cloned().collect();
        // One that is closing already needs no second word.
        keys.iter().for_each(|key| drop(self.close(now, key)));
    }

    /// Does what is due: closes sessions whose idle time has run out, settles doubts, repeats
    /// closes, refuses turns that waited too long.
    pub fn on_time(&mut self, now: Instant) {
        if self.due_from.is_some_and(|due| due <= now) {
            self.expire(now);
        }
        self.repeat_closes(now);
        self.time_out(now);
    }

    /// When this session is to be looked at next.
    fn due_of(&self, session: &Session) -> Option<Instant> {
        if let Phase::Suspect { until, .. } | Phase::Demoting { until } = session.phase {
            return Some(until);
        }
        let demote = self.is_idle_auto(session).then(|| session.last_end + self.rules.demote_idle);
        let expire = session.can_expire().then(|| session.last_end + session.idle_max);
        [demote, expire].into_iter().flatten().min()
    }

    fn expire(&mut self, now: Instant) {
        let guards = self.rules.guards;
        let due = |session: &Session| match session.phase {
            Phase::Suspect { until, .. } | Phase::Demoting { until } => until <= now,
            _ => session.can_expire() && session.last_end + session.idle_max <= now,
        };
        let keys: Vec<SessionKey> =
            self.sessions.iter().filter(|(_, one)| due(one)).map(|(key, _)| key.clone()).collect();
        for key in keys {
            let phase = self.sessions[&key].phase;
            if matches!(phase, Phase::Suspect { .. }) {
                self.retire(now, &key, Why::HistoryUnknown);
            } else if matches!(phase, Phase::Demoting { .. }) {
                self.retire(now, &key, Why::Reclaimed);
            } else if guards.hold(Guard::Expiry) {
                self.effects.push(Effect::Happened(key.clone(), Event::Expired));
                let _ = self.close(now, &key);
            }
        }
        self.demote_idle(now);
        let next = self.sessions.values().filter_map(|session| self.due_of(session));
        // One that was kept by a turn refused just now is overdue, and the next to be looked at.
        let goes = |due: &Instant| *due > now || guards.hold(Guard::Expiry);
        self.due_from = next.filter(goes).min();
        self.pump(now);
    }

    /// When [`Self::on_time`] has something to do next.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let front = self.queue.front().map(|rid| self.tickets[rid].since);
        let waited = front.map(|since| since + self.rules.queue_wait_max);
        let repeats = self.closing.values().filter_map(|one| one.due).min();
        [self.due_from, waited, repeats].into_iter().flatten().min()
    }

    /// What is to be done now, in order.
    #[must_use]
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// One session.
    #[must_use]
    pub fn get(&self, key: &SessionKey) -> Option<&Session> {
        self.sessions.get(key)
    }

    /// All sessions, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&SessionKey, &Session)> {
        self.sessions.iter()
    }

    /// Ids of the turns inside the engine.
    pub fn inside(&self) -> impl Iterator<Item = &str> {
        let inside = self.tickets.iter().filter(|(_, ticket)| ticket.stage == Stage::Inside);
        inside.map(|(rid, _)| rid.as_str())
    }

    /// Closes asked of the engine and not confirmed, and opens not answered.
    #[must_use]
    pub fn pending(&self) -> usize {
        let opening = |session: &&Session| matches!(session.phase, Phase::Opening | Phase::Closing);
        self.closing.len() + self.sessions.values().filter(opening).count()
    }

    fn next_incarnation(&mut self, key: &SessionKey) -> String {
        if !self.rules.guards.hold(Guard::FreshIncarnation) {
            return format!("{}-{}", self.rules.prefix, key.digest());
        }
        self.incarnations += 1;
        format!("{}-{}", self.rules.prefix, self.incarnations)
    }

    /// Changes a session; the totals follow.
    fn change<T>(&mut self, key: &SessionKey, change: impl FnOnce(&mut Session) -> T) -> T {
        let page = self.engine.page_tokens;
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let book = &mut self.books[session.dp_rank as usize];
        book.remove(session, page);
        let result = change(session);
        book.add(session, page);
        self.touch(key);
        result
    }

    /// Forgets a session; the engine holds nothing of it, or a close is under way.
    fn remove(&mut self, key: &SessionKey) {
        let session = self.sessions.remove(key).expect("the caller has seen it");
        self.books[session.dp_rank as usize].remove(&session, self.engine.page_tokens);
        self.by_incarnation.remove(&session.incarnation);
        self.touch(key);
    }

    /// Gives a session a new life at the engine; what the old one left there can't hit it.
    fn reincarnate(&mut self, key: &SessionKey) {
        let fresh = self.next_incarnation(key);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        self.by_incarnation.remove(&session.incarnation);
        session.incarnation.clone_from(&fresh);
        self.by_incarnation.insert(fresh, key.clone());
    }

    /// Forgets a session of which nothing is at the engine, and refuses what waits for it.
    fn drop_session(&mut self, now: Instant, key: &SessionKey, error: &Error) {
        self.remove(key);
        let waits = |rid: &&String| self.tickets[*rid].key.as_ref() == Some(key);
        let rids: Vec<String> = self.queue.iter().filter(waits).cloned().collect();
        rids.iter().for_each(|rid| self.refuse(now, rid, error.clone()));
    }

    fn capacity(&self, dp_rank: u32) -> Result<&Capacity, Error> {
        self.engine.ranks.get(dp_rank as usize).ok_or(Error::NoRank(dp_rank))
    }

    fn book(&mut self, dp_rank: u32) -> &mut Book {
        &mut self.books[dp_rank as usize]
    }

    fn touch(&mut self, key: &SessionKey) {
        // What was touched twice in one go is told once.
        let again = matches!(self.effects.last(), Some(Effect::Touched(last)) if last == key);
        if !again {
            self.effects.push(Effect::Touched(key.clone()));
        }
    }

    fn journal(&mut self, record: Record) {
        self.effects.push(Effect::Journal(record));
    }

    /// Sees to it that the session expires in time.
    fn watch(&mut self, key: &SessionKey) {
        let session = &self.sessions[key];
        let due = session.last_end + session.idle_max;
        self.watch_until(self.due_of(session).map_or(due, |early| early.min(due)));
    }

    fn watch_until(&mut self, due: Instant) {
        self.due_from = Some(self.due_from.map_or(due, |before| before.min(due)));
    }

    fn debug_check(&self) {
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }
}

#[cfg(test)]
mod tests;

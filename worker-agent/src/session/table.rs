//! The session table: who is open, on which rank, and what may happen next. Engine calls come out
//! as values; whoever holds the table makes them.
//!
//! It keeps these promises (see `check_invariants`):
//! - at most one turn of an exclusive session is inside the engine;
//! - rows and KV of a pinned session stay counted until the engine has confirmed its close;
//! - an incarnation's engine-side id is never used twice, so a late close can't hit a successor;
//! - nothing is appended to a history the agent isn't sure of.

mod audit;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use proto::{claim::Claim, id::SessionKey, load::Retention};

use super::{
    Appends, Capacity, Close, Engine, Error, Outcome, Phase, Session, Totals, Turn, TurnSession,
    check_turn, settle,
};

/// Sessions one agent keeps. A session costs under 1 KiB here; the bound keeps a flood of ids from
/// eating the agent's 40 MiB.
const SESSIONS_MAX: usize = 16_384;

/// Longest idle time anyone can ask for: more is a mistake, and must not overflow a point in time.
const IDLE_MAX: Duration = Duration::from_secs(365 * 86_400);

/// All sessions of one engine.
#[derive(Debug)]
pub struct Table {
    engine: Engine,
    sessions: HashMap<SessionKey, Session>,
    /// Incarnations whose close the engine has not confirmed yet, with rank and tokens held.
    closing: HashMap<String, (u32, u64)>,
    /// Closes that the engine is still to be asked for.
    closes: Vec<Close>,
    /// Sessions forgotten to make room for others.
    displaced: Vec<SessionKey>,
    /// Turns inside the engine, per rank, with and without a session.
    turns: Vec<u32>,
    /// Prefix of incarnation ids, unique per agent process.
    prefix: String,
    incarnations: u64,
    idle_max: Duration,
    sessions_max: usize,
}

impl Table {
    /// An empty table. `prefix` must differ for every agent process that meets the same engine.
    #[must_use]
    pub fn new(prefix: String, idle_max: Duration, engine: Engine) -> Self {
        let turns = vec![0; engine.ranks.len()];
        Self {
            engine,
            sessions: HashMap::new(),
            closing: HashMap::new(),
            closes: vec![],
            displaced: vec![],
            turns,
            prefix,
            incarnations: 0,
            idle_max,
            sessions_max: SESSIONS_MAX,
        }
    }

    /// Lets a turn in, or says why not. What was let in must be ended by [`Self::end`].
    ///
    /// # Errors
    /// See [`Error`]; a refused turn changes nothing.
    pub fn begin(
        &mut self,
        now: Instant,
        claim: Option<(&Claim, &SessionKey)>,
        rank: Option<u32>,
        appends: Appends,
    ) -> Result<Turn, Error> {
        let turn = match claim {
            None => {
                let dp_rank = self.choose_rank(rank, None)?;
                self.check_turns(dp_rank)?;
                Turn { session: None, dp_rank }
            }
            Some((claim, key)) => self.begin_in_session(now, claim, key, rank, appends)?,
        };
        self.turns[turn.dp_rank as usize] += 1;
        self.debug_check();
        Ok(turn)
    }

    fn begin_in_session(
        &mut self,
        now: Instant,
        claim: &Claim,
        key: &SessionKey,
        rank: Option<u32>,
        appends: Appends,
    ) -> Result<Turn, Error> {
        let ranks = self.engine.ranks.len();
        let homeless =
            |session: &Session| session.running == 0 && session.dp_rank as usize >= ranks;
        if self.sessions.get(key).is_some_and(homeless) {
            // The engine came back with fewer ranks while a turn ran there or was about to.
            self.close(key)?;
        }
        if !self.sessions.contains_key(key) {
            if claim.delta && !claim.open {
                return Err(Error::Unknown);
            }
            // Who opens a session with its first new tokens means to send only new ones.
            let wanted = claim.retention.or(claim.delta.then_some(Retention::Pinned));
            let retention = self.retention(wanted)?;
            match retention {
                Retention::Pinned if appends == Appends::Never => return Err(Error::WholeHistory),
                Retention::Tagged | Retention::None if claim.delta => {
                    return Err(Error::DeltaNeedsPinned(retention));
                }
                _ => {}
            }
            let dp_rank = self.choose_rank(rank, Some(retention))?;
            self.check_turns(dp_rank)?;
            self.insert(now, key, retention, dp_rank, claim)?;
        }
        let session = &self.sessions[key];
        check_turn(session, claim, appends)?;
        let dp_rank = session.dp_rank;
        let must_open = session.phase == Phase::Opening;
        let pinned = session.retention == Retention::Pinned;
        self.check_turns(dp_rank)?;
        if pinned && !must_open {
            self.check_pins(dp_rank, 0)?;
        }
        let session = self.sessions.get_mut(key).expect("checked above");
        if session.phase == Phase::Lost {
            // Only an evictable session comes here: its KV is gone, which costs recomputation only.
            session.phase = Phase::Open;
            session.resident_tokens = 0;
        }
        session.running += 1;
        // Turns that already run side by side stay so; the next one is alone.
        session.exclusive |= claim.open && session.running == 1;
        if let Some(idle_ms) = claim.idle_ms_max {
            session.idle_max = idle_max_of(idle_ms);
        }
        let turn = TurnSession {
            key: key.clone(),
            incarnation: session.incarnation.clone(),
            retention: session.retention,
            must_open,
        };
        Ok(Turn { session: Some(turn), dp_rank })
    }

    /// Opens a session without a turn. Answers with the incarnation that the engine must open
    /// first, if any; [`Self::opened`] follows. An open session is left as it is; one that can't go
    /// on is replaced by a new incarnation.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn open(
        &mut self,
        now: Instant,
        key: &SessionKey,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
        rank: Option<u32>,
    ) -> Result<Option<String>, Error> {
        if let Some(session) = self.sessions.get_mut(key) {
            match session.phase {
                Phase::Closing => return Err(Error::Closing),
                Phase::Opening | Phase::Open
                    if retention.is_some_and(|wanted| wanted != session.retention) =>
                {
                    return Err(Error::OpenOtherwise(session.retention));
                }
                Phase::Opening => return Ok(Some(session.incarnation.clone())),
                Phase::Open => {
                    session.exclusive |= session.running <= 1;
                    session.idle_max = idle_max.map_or(session.idle_max, |max| max.min(IDLE_MAX));
                    return Ok(None);
                }
                Phase::Suspect | Phase::Lost if session.running > 0 => return Err(Error::Busy),
                Phase::Suspect | Phase::Lost => drop(self.close(key)?),
            }
        }
        let retention = self.retention(retention)?;
        let dp_rank = self.choose_rank(rank, Some(retention))?;
        let claim = Claim {
            open: true,
            idle_ms_max: idle_max.and_then(|idle| u64::try_from(idle.as_millis()).ok()),
            ..Claim::of(key)
        };
        self.insert(now, key, retention, dp_rank, &claim)?;
        self.debug_check();
        let session = &self.sessions[key];
        Ok((session.phase == Phase::Opening).then(|| session.incarnation.clone()))
    }

    /// The engine's answer to an open. A refused open forgets the session; a session closed in the
    /// meantime is closed now.
    pub fn opened(&mut self, key: &SessionKey, incarnation: &str, ok: bool) {
        let waiting = self.sessions.get_mut(key).filter(|one| one.incarnation == incarnation);
        let Some(session) = waiting else {
            // Nobody waits for it any more: what was opened must not stay.
            return self.ask_to_close(incarnation.to_owned());
        };
        if !ok {
            let dp_rank = session.dp_rank;
            self.turns[dp_rank as usize] -= session.running;
            self.sessions.remove(key);
            // An answer that was lost may have been a yes.
            self.ask_to_close(incarnation.to_owned());
            return self.debug_check();
        }
        if session.phase == Phase::Opening {
            session.phase = Phase::Open;
        }
        self.close_if_due(key);
    }

    /// Ends a turn that [`Self::begin`] let in, and closes its session if that was asked for.
    pub fn end(&mut self, now: Instant, turn: &Turn, outcome: Outcome) {
        let Some(of) = &turn.session else {
            self.turns[turn.dp_rank as usize] -= 1;
            return;
        };
        // An open that failed has removed the session and its turns already.
        let mine = |session: &&mut Session| session.incarnation == of.incarnation;
        let Some(session) = self.sessions.get_mut(&of.key).filter(mine) else { return };
        self.turns[turn.dp_rank as usize] -= 1;
        session.running -= 1;
        session.last_end = now;
        settle(session, outcome);
        self.close_if_due(&of.key);
        self.debug_check();
    }

    /// Closes a session, at once or when its running turns have ended; answers whether it waits.
    ///
    /// # Errors
    /// [`Error::Unknown`] when there is none or it is closing already.
    pub fn close(&mut self, key: &SessionKey) -> Result<bool, Error> {
        let session = self.sessions.get_mut(key).ok_or(Error::Unknown)?;
        match session.phase {
            Phase::Closing => return Err(Error::Unknown),
            Phase::Lost if session.running == 0 => {
                // The engine has forgotten it already.
                self.sessions.remove(key);
                return Ok(false);
            }
            // An open still under way is closed by its answer.
            Phase::Opening => session.phase = Phase::Closing,
            Phase::Open | Phase::Suspect | Phase::Lost => {
                session.phase = Phase::Closing;
                self.close_if_due(key);
            }
        }
        Ok(self.sessions.contains_key(key))
    }

    /// Closes every session; what runs ends first.
    pub fn close_all(&mut self) {
        let keys: Vec<SessionKey> = self.sessions.keys().cloned().collect();
        // One that is closing already needs no second word.
        keys.iter().for_each(|key| drop(self.close(key)));
    }

    /// Closes the sessions whose idle time has run out, and names them.
    pub fn expire(&mut self, now: Instant) -> Vec<SessionKey> {
        let due = self.sessions.iter().filter(|(_, session)| {
            session.can_expire() && session.last_end + session.idle_max <= now
        });
        let due: Vec<SessionKey> = due.map(|(key, _)| key.clone()).collect();
        due.iter().for_each(|key| drop(self.close(key)));
        due
    }

    /// What the engine must now be asked to close. [`Self::closed`] follows each.
    #[must_use]
    pub fn take_closes(&mut self) -> Vec<Close> {
        std::mem::take(&mut self.closes)
    }

    /// When [`Self::expire`] has something to do next.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.sessions
            .values()
            .filter(|session| session.can_expire())
            .map(|session| session.last_end + session.idle_max)
            .min()
    }

    /// The engine has freed what an incarnation held.
    pub fn closed(&mut self, incarnation: &str) {
        self.closing.remove(incarnation);
    }

    /// The engine process is gone: with it every row, every token and every history.
    pub fn engine_lost(&mut self, engine: Engine) {
        self.closing.clear();
        self.closes.clear();
        for session in self.sessions.values_mut() {
            if session.phase != Phase::Closing && session.phase != Phase::Opening {
                session.phase = Phase::Lost;
            }
            session.resident_tokens = 0;
            session.history_tokens = 0;
            self.incarnations += 1;
            // A running turn still ends under its old incarnation; an idle session gets a new one.
            if session.running == 0 && session.phase != Phase::Opening {
                session.incarnation = format!("{}-{}", self.prefix, self.incarnations);
            }
        }
        // What is to close is closed, and what was on a rank that is no more has no place.
        let ranks = engine.ranks.len();
        self.sessions.retain(|_, session| {
            let stays = session.phase != Phase::Closing && (session.dp_rank as usize) < ranks;
            stays || session.running > 0
        });
        // Turns of a vanished rank are still to end, so its count stays.
        self.turns.resize(ranks.max(self.turns.len()), 0);
        self.engine = engine;
        self.debug_check();
    }

    /// One session.
    #[must_use]
    pub fn get(&self, key: &SessionKey) -> Option<&Session> {
        self.sessions.get(key)
    }

    /// All sessions, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&SessionKey, &Session)> {
        self.sessions.iter()
    }

    /// Closes asked of the engine and not confirmed.
    #[must_use]
    pub fn closes_pending(&self) -> usize {
        self.closing.len()
    }

    fn insert(
        &mut self,
        now: Instant,
        key: &SessionKey,
        retention: Retention,
        dp_rank: u32,
        claim: &Claim,
    ) -> Result<(), Error> {
        if self.sessions.len() >= self.sessions_max && !self.make_room() {
            let detail = format!("{} are open; close some", self.sessions_max);
            return Err(Error::Short { what: "sessions", detail });
        }
        let pinned = retention == Retention::Pinned;
        if pinned {
            self.check_pins(dp_rank, 1)?;
        }
        self.incarnations += 1;
        let session = Session {
            retention,
            dp_rank,
            incarnation: format!("{}-{}", self.prefix, self.incarnations),
            exclusive: pinned || claim.open,
            turns: 0,
            running: 0,
            history_tokens: 0,
            resident_tokens: 0,
            phase: if pinned { Phase::Opening } else { Phase::Open },
            last_end: now,
            idle_max: claim.idle_ms_max.map_or(self.idle_max, idle_max_of),
        };
        self.sessions.insert(key.clone(), session);
        Ok(())
    }

    /// Closes the inferred session that was idle longest: its client has no claim to it, and finds
    /// its KV in the tree if it comes back soon.
    fn make_room(&mut self) -> bool {
        let inferred = self.sessions.iter().filter(|(_, one)| !one.exclusive && one.can_expire());
        let longest = inferred.min_by_key(|(_, one)| one.last_end).map(|(key, _)| key.clone());
        let Some(key) = longest else { return false };
        let closed = self.close(&key).is_ok();
        self.displaced.push(key);
        closed
    }

    /// Sessions that were forgotten to make room, for those who watch.
    #[must_use]
    pub fn take_displaced(&mut self) -> Vec<SessionKey> {
        std::mem::take(&mut self.displaced)
    }

    fn retention(&self, wanted: Option<Retention>) -> Result<Retention, Error> {
        let offered = &self.engine.retentions;
        let Some(wanted) = wanted else {
            let tagged = offered.contains(&Retention::Tagged);
            return Ok(if tagged { Retention::Tagged } else { Retention::None });
        };
        if wanted == Retention::None || offered.contains(&wanted) {
            return Ok(wanted);
        }
        let names: Vec<&str> = offered.iter().map(|mode| mode.as_str()).collect();
        Err(Error::NotOffered { wanted, offered: names.join(", ") })
    }

    /// The rank asked for, else the one with the most room for what is to come.
    fn choose_rank(&self, rank: Option<u32>, retention: Option<Retention>) -> Result<u32, Error> {
        let count = u32::try_from(self.engine.ranks.len()).expect("few ranks");
        if let Some(rank) = rank {
            return if rank < count { Ok(rank) } else { Err(Error::NoRank(rank)) };
        }
        let burden = |dp_rank: &u32| {
            let totals = self.totals(*dp_rank);
            let held = if retention == Some(Retention::Pinned) { totals.rows_held } else { 0 };
            (held, totals.turns_running, totals.pinned_tokens + totals.estimate_tokens)
        };
        (0..count).min_by_key(burden).ok_or(Error::NoRank(0))
    }

    fn check_turns(&self, dp_rank: u32) -> Result<(), Error> {
        let max = self.capacity(dp_rank)?.turns_max;
        if self.turns[dp_rank as usize] >= max {
            let detail = format!("{max} are inside the engine");
            return Err(Error::Short { what: "turns", detail });
        }
        Ok(())
    }

    /// Is there room for `rows` more pinned sessions, and for any growth at all?
    fn check_pins(&self, dp_rank: u32, rows: u32) -> Result<(), Error> {
        let capacity = self.capacity(dp_rank)?;
        let Totals { rows_held, pinned_tokens, .. } = self.totals(dp_rank);
        let rows_max = capacity.rows.saturating_sub(capacity.rows_reserve);
        if rows_held + rows > rows_max {
            let detail = format!("pinned sessions hold {rows_held} of {rows_max}; close some");
            return Err(Error::Short { what: "rows", detail });
        }
        let max = capacity.pin_tokens_max;
        if pinned_tokens >= max {
            let detail = format!("pinned sessions hold {pinned_tokens} of {max}; close some");
            return Err(Error::Short { what: "pin_tokens", detail });
        }
        Ok(())
    }

    fn capacity(&self, dp_rank: u32) -> Result<&Capacity, Error> {
        self.engine.ranks.get(dp_rank as usize).ok_or(Error::NoRank(dp_rank))
    }

    /// A pinned session holds whole pages.
    fn pages_of(&self, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.engine.page_tokens)
    }

    /// Takes a closing session out when nothing of it is inside the engine any more.
    fn close_if_due(&mut self, key: &SessionKey) {
        let due = |session: &Session| session.phase == Phase::Closing && session.running == 0;
        if !self.sessions.get(key).is_some_and(due) {
            return;
        }
        let session = self.sessions.remove(key).expect("it was just read");
        if session.retention == Retention::Pinned {
            let held = (session.dp_rank, session.resident_tokens);
            self.closing.insert(session.incarnation.clone(), held);
        }
        if session.retention != Retention::None {
            self.ask_to_close(session.incarnation);
        }
    }

    fn ask_to_close(&mut self, incarnation: String) {
        self.closes.push(Close { incarnation });
    }

    fn debug_check(&self) {
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }
}

fn idle_max_of(idle_ms: u64) -> Duration {
    Duration::from_millis(idle_ms).min(IDLE_MAX)
}

#[cfg(test)]
mod tests;

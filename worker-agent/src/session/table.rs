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
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::session::Usage;

    const IDLE: Duration = Duration::from_secs(60);

    fn engine(ranks: usize) -> Engine {
        let capacity = Capacity { rows: 4, rows_reserve: 1, pin_tokens_max: 1000, turns_max: 6 };
        let retentions = vec![Retention::Pinned, Retention::Tagged, Retention::None];
        Engine { ranks: vec![capacity; ranks], page_tokens: 16, retentions }
    }

    fn table() -> (Table, Instant) {
        let now = tokio::time::Instant::now().into_std();
        (Table::new("berth-a-1".into(), IDLE, engine(1)), now)
    }

    fn key(id: &str) -> SessionKey {
        SessionKey::new("p", id).unwrap()
    }

    fn finished(prompt_tokens: u64, completion_tokens: u64) -> Outcome {
        Outcome::Finished(Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() }))
    }

    /// A turn with this claim on `/generate`.
    fn begin(table: &mut Table, now: Instant, claim: &Claim) -> Result<Turn, Error> {
        table.begin(now, Some((claim, &claim.key().unwrap())), None, Appends::Possible)
    }

    fn pinned(id: &str) -> Claim {
        Claim { retention: Some(Retention::Pinned), ..Claim::of(&key(id)) }
    }

    fn delta(id: &str) -> Claim {
        Claim { delta: true, ..Claim::of(&key(id)) }
    }

    fn opened_pin(table: &mut Table, now: Instant, id: &str) -> String {
        let opened = table.open(now, &key(id), Some(Retention::Pinned), None, None);
        let incarnation = opened.unwrap().expect("a pinned session is opened at the engine");
        table.opened(&key(id), &incarnation, true);
        incarnation
    }

    #[test]
    fn a_pinned_session_runs_one_turn_and_counts_its_tokens() {
        let (mut table, now) = table();
        opened_pin(&mut table, now, "s");
        let turn = begin(&mut table, now, &delta("s")).unwrap();
        assert_eq!(begin(&mut table, now, &delta("s")), Err(Error::Busy));
        table.end(now, &turn, finished(25, 6));
        let session = table.get(&key("s")).unwrap();
        assert_eq!(session.resident_tokens, 30, "the last token's KV isn't computed yet");
        assert_eq!(table.totals(0).pinned_tokens, 32, "a page is held whole");
        assert_eq!(table.totals(0).rows_held, 1);
        assert!(begin(&mut table, now, &delta("s")).is_ok());
    }

    #[test]
    fn a_close_waits_for_the_turn_and_shuts_the_door_meanwhile() {
        let (mut table, now) = table();
        let incarnation = opened_pin(&mut table, now, "s");
        let turn = begin(&mut table, now, &delta("s")).unwrap();
        assert_eq!(table.close(&key("s")), Ok(true), "it waits");
        assert_eq!(table.close(&key("s")), Err(Error::Unknown), "two closes: one is too late");
        assert_eq!(begin(&mut table, now, &delta("s")), Err(Error::Unknown), "closing beats busy");
        let reopened = table.open(now, &key("s"), None, None, None);
        assert_eq!(reopened, Err(Error::Closing));
        assert_eq!(table.take_closes(), [], "the turn still runs");
        table.end(now, &turn, finished(10, 1));
        assert_eq!(table.take_closes(), [Close { incarnation: incarnation.clone() }]);
        assert_eq!(table.totals(0).rows_held, 1, "held until the engine has confirmed");
        table.closed(&incarnation);
        assert_eq!(table.totals(0), Totals::default());
        assert_ne!(opened_pin(&mut table, now, "s"), incarnation, "a new life has a new id");
    }

    #[test]
    fn rows_in_reserve_are_never_pinned() {
        let (mut table, now) = table();
        for id in ["a", "b", "c"] {
            opened_pin(&mut table, now, id);
        }
        let refused = table.open(now, &key("d"), Some(Retention::Pinned), None, None);
        assert!(matches!(refused, Err(Error::Short { what: "rows", .. })), "{refused:?}");
        assert!(begin(&mut table, now, &Claim::of(&key("d"))).is_ok(), "tagged ones hold no row");
        assert_eq!(table.close(&key("a")), Ok(false));
        let close = table.take_closes().pop().unwrap();
        let refused = table.open(now, &key("e"), Some(Retention::Pinned), None, None);
        assert!(refused.is_err(), "the row is free only when the engine says so");
        table.closed(&close.incarnation);
        opened_pin(&mut table, now, "e");
    }

    #[test]
    fn each_session_holds_pages_of_its_own() {
        let (mut table, now) = table();
        for (id, prompt) in [("a", 42), ("b", 49), ("c", 56)] {
            opened_pin(&mut table, now, id);
            let turn = begin(&mut table, now, &delta(id)).unwrap();
            table.end(now, &turn, finished(prompt, 2));
        }
        assert_eq!(table.totals(0).pinned_tokens, 48 + 64 + 64, "43, 50 and 57 tokens");
    }

    #[test]
    fn the_pin_budget_bounds_growth() {
        let (mut table, now) = table();
        opened_pin(&mut table, now, "s");
        let turn = begin(&mut table, now, &delta("s")).unwrap();
        table.end(now, &turn, finished(1000, 1));
        let refused = begin(&mut table, now, &delta("s"));
        assert!(matches!(refused, Err(Error::Short { what: "pin_tokens", .. })), "{refused:?}");
        assert_eq!(table.totals(0).turns_running, 0, "a refused turn isn't counted");
    }

    #[test]
    fn nothing_is_appended_to_a_history_in_doubt() {
        let ends = [
            ("nobody saw the end", Outcome::Lost),
            ("the client did not hear it", Outcome::Unheard(None)),
            ("the history shrank", finished(5, 1)),
            (
                "retracted",
                Outcome::Finished(Some(Usage {
                    prompt_tokens: 40,
                    completion_tokens: 5,
                    cached_tokens: None,
                    retractions: 1,
                })),
            ),
        ];
        for (why, end) in ends {
            let (mut table, now) = table();
            opened_pin(&mut table, now, "s");
            let turn = begin(&mut table, now, &delta("s")).unwrap();
            table.end(now, &turn, finished(20, 5));
            let turn = begin(&mut table, now, &delta("s")).unwrap();
            table.end(now, &turn, end);
            assert_eq!(begin(&mut table, now, &delta("s")), Err(Error::HistoryUnknown), "{why}");
            let reopened = table.open(now, &key("s"), Some(Retention::Pinned), None, None).unwrap();
            assert!(reopened.is_some(), "a new incarnation is the way out: {why}");
            assert_eq!(table.take_closes().len(), 1, "the old one leaves the engine: {why}");
        }
    }

    #[test]
    fn an_abort_rolls_back_and_a_refusal_changes_nothing() {
        let (mut table, now) = table();
        opened_pin(&mut table, now, "s");
        let turn = begin(&mut table, now, &delta("s")).unwrap();
        table.end(now, &turn, finished(20, 5));
        let turn = begin(&mut table, now, &delta("s")).unwrap();
        table.end(now, &turn, Outcome::Refused);
        assert_eq!(table.get(&key("s")).unwrap().resident_tokens, 24);
        let turn = begin(&mut table, now, &delta("s")).unwrap();
        table.end(now, &turn, Outcome::Aborted);
        assert_eq!(table.totals(0).pinned_tokens, 0, "the KV went to the tree");
        let session = table.get(&key("s")).unwrap();
        assert_eq!((session.history_tokens, session.turns), (25, 1));
        assert!(begin(&mut table, now, &delta("s")).is_ok());
    }

    #[test]
    fn a_whole_history_never_reaches_a_pinned_session() {
        let (mut table, now) = table();
        let first = begin(&mut table, now, &pinned("s")).unwrap();
        let session = first.session.clone().unwrap();
        assert!(session.must_open, "the first turn opens it");
        table.opened(&session.key, &session.incarnation, true);
        table.end(now, &first, finished(20, 5));
        assert_eq!(begin(&mut table, now, &pinned("s")), Err(Error::WholeHistory));
        let claim = delta("s");
        let on_chat = table.begin(now, Some((&claim, &key("s"))), None, Appends::Never);
        assert_eq!(on_chat, Err(Error::WholeHistory), "chat would drop the session silently");
        let claim = pinned("new");
        let on_chat = table.begin(now, Some((&claim, &key("new"))), None, Appends::Never);
        assert_eq!(on_chat, Err(Error::WholeHistory));
        assert!(table.get(&key("new")).is_none(), "a refused turn opens nothing");
    }

    #[test]
    fn a_delta_may_open_its_session() {
        let (mut table, now) = table();
        let turn = begin(&mut table, now, &Claim { open: true, ..delta("s") }).unwrap();
        let session = turn.session.unwrap();
        assert_eq!((session.retention, session.must_open), (Retention::Pinned, true));
        let tagged = Claim { retention: Some(Retention::Tagged), ..delta("t") };
        let refused = begin(&mut table, now, &Claim { open: true, ..tagged });
        assert_eq!(refused, Err(Error::DeltaNeedsPinned(Retention::Tagged)));
        assert!(table.get(&key("t")).is_none(), "a refused turn opens nothing");
    }

    #[test]
    fn a_delta_needs_a_pinned_history() {
        let (mut table, now) = table();
        assert_eq!(begin(&mut table, now, &delta("s")), Err(Error::Unknown));
        let turn = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
        table.end(now, &turn, finished(20, 5));
        let refused = begin(&mut table, now, &delta("s"));
        assert_eq!(refused, Err(Error::DeltaNeedsPinned(Retention::Tagged)));
    }

    #[test]
    fn inferred_sessions_overlap_and_opened_ones_do_not() {
        let (mut table, now) = table();
        let inferred = Claim::of(&key("s"));
        let turns = [(); 2].map(|()| begin(&mut table, now, &inferred).unwrap());
        turns.iter().for_each(|turn| table.end(now, turn, finished(20, 5)));
        table.open(now, &key("o"), None, None, None).unwrap();
        let _running = begin(&mut table, now, &Claim::of(&key("o"))).unwrap();
        assert_eq!(begin(&mut table, now, &Claim::of(&key("o"))), Err(Error::Busy));
    }

    #[test]
    fn a_full_table_forgets_the_longest_idle_inferred_session() {
        let (mut table, now) = table();
        table.sessions_max = 8;
        table.open(now, &key("opened"), None, None, None).unwrap();
        for number in 1..table.sessions_max {
            let at = now + Duration::from_millis(number as u64);
            let turn = begin(&mut table, at, &Claim::of(&key(&number.to_string()))).unwrap();
            table.end(at, &turn, Outcome::Finished(None));
        }
        let late = now + IDLE / 2;
        assert!(begin(&mut table, late, &Claim::of(&key("new"))).is_ok());
        assert_eq!(table.take_displaced(), [key("1")]);
        assert!(table.get(&key("opened")).is_some(), "its client asked for it");
        assert_eq!(table.take_closes().len(), 1);
    }

    #[test]
    fn an_explicit_open_takes_an_inferred_session_over() {
        let (mut table, now) = table();
        let turn = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
        table.end(now, &turn, finished(20, 5));
        let short = Some(IDLE / 2);
        assert_eq!(table.open(now, &key("s"), None, short, None), Ok(None));
        assert_eq!(table.next_expiry(), Some(now + IDLE / 2));
        let _running = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
        assert_eq!(begin(&mut table, now, &Claim::of(&key("s"))), Err(Error::Busy));
        let other = table.open(now, &key("s"), Some(Retention::Pinned), None, None);
        assert_eq!(other, Err(Error::OpenOtherwise(Retention::Tagged)));
    }

    #[test]
    fn a_session_closed_while_it_opens_waits_for_the_engine_alone() {
        let (mut table, now) = table();
        let pin = Some(Retention::Pinned);
        let incarnation = table.open(now, &key("s"), pin, None, None).unwrap().unwrap();
        assert_eq!(table.close(&key("s")), Ok(true));
        assert_eq!(table.next_expiry(), None, "its time doesn't run out again and again");
        table.opened(&key("s"), &incarnation, true);
        assert_eq!(table.take_closes(), [Close { incarnation }]);
    }

    #[test]
    fn an_engine_without_the_mode_says_what_it_offers() {
        let now = tokio::time::Instant::now().into_std();
        let retentions = vec![Retention::None];
        let mut table = Table::new("b".into(), IDLE, Engine { retentions, ..engine(1) });
        let refused = table.open(now, &key("s"), Some(Retention::Pinned), None, None).unwrap_err();
        assert!(refused.to_string().contains("offers none"), "{refused}");
        let turn = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
        assert_eq!(turn.session.unwrap().retention, Retention::None, "auto falls back");
    }

    #[test]
    fn idle_time_counts_from_the_end_of_a_turn() {
        let (mut table, now) = table();
        let turn = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
        let late = now + 10 * IDLE;
        assert_eq!(table.next_expiry(), None, "a running session never expires");
        assert!(table.expire(late).is_empty());
        table.end(late, &turn, finished(20, 5));
        assert_eq!(table.next_expiry(), Some(late + IDLE));
        assert!(table.expire(late + IDLE / 2).is_empty());
        assert_eq!(table.expire(late + IDLE).len(), 1);
        assert!(table.get(&key("s")).is_none());
    }

    #[test]
    fn no_idle_time_is_too_long() {
        let (mut table, now) = table();
        let claim = Claim { idle_ms_max: Some(u64::MAX), ..Claim::of(&key("s")) };
        let turn = begin(&mut table, now, &claim).unwrap();
        table.end(now, &turn, finished(20, 5));
        assert!(table.next_expiry().unwrap() > now + 1000 * IDLE);
        let opened = table.open(now, &key("o"), None, Some(Duration::MAX), None);
        assert_eq!(opened, Ok(None));
        assert!(table.expire(now).is_empty());
    }

    #[test]
    fn an_engine_that_comes_back_smaller_keeps_no_session_on_a_rank_it_lost() {
        let now = tokio::time::Instant::now().into_std();
        let mut table = Table::new("b".into(), IDLE, engine(2));
        let claim = Claim::of(&key("s"));
        let on_second = Some((&claim, &key("s")));
        let turn = table.begin(now, on_second, Some(1), Appends::Possible).unwrap();
        table.engine_lost(engine(1));
        table.end(now, &turn, Outcome::Lost);
        let next = table.begin(now, on_second, None, Appends::Possible);
        assert_eq!(next.map(|turn| turn.dp_rank), Ok(0), "it starts anew where there is a rank");
    }

    #[test]
    fn an_engine_restart_loses_pinned_sessions_and_forgives_others() {
        let (mut table, now) = table();
        opened_pin(&mut table, now, "p");
        let turn = begin(&mut table, now, &delta("p")).unwrap();
        table.end(now, &turn, finished(20, 5));
        let turn = begin(&mut table, now, &Claim::of(&key("t"))).unwrap();
        table.end(now, &turn, finished(20, 5));
        let before = table.get(&key("t")).unwrap().incarnation.clone();
        table.engine_lost(engine(1));
        let totals = table.totals(0);
        let held = (totals.rows_held, totals.pinned_tokens, totals.estimate_tokens);
        assert_eq!(held, (0, 0, 0), "no ghost is left in the ledger");
        assert_eq!(begin(&mut table, now, &delta("p")), Err(Error::Lost));
        let turn = begin(&mut table, now, &Claim::of(&key("t"))).unwrap();
        assert_ne!(turn.session.unwrap().incarnation, before);
        assert_eq!(table.close(&key("p")), Ok(false));
        assert_eq!(table.take_closes(), [], "the engine has nothing to close");
        assert!(table.get(&key("p")).is_none());
    }

    /// Random use by many clients of an engine with two ranks.
    struct World {
        random: fastrand::Rng,
        at: Instant,
        table: Table,
        running: Vec<Turn>,
        opening: Vec<(SessionKey, String)>,
        /// Sessions open inside the engine.
        inside: HashSet<String>,
    }

    impl World {
        fn new(seed: u64) -> Self {
            Self {
                random: fastrand::Rng::with_seed(seed),
                at: tokio::time::Instant::now().into_std(),
                table: Table::new("b".into(), IDLE, engine(2)),
                running: vec![],
                opening: vec![],
                inside: HashSet::new(),
            }
        }

        fn step(&mut self) {
            self.at += Duration::from_millis(self.random.u64(0..4000));
            let id = key(&self.random.u8(0..8).to_string());
            match self.random.u8(0..100) {
                0..=44 => self.begin(id),
                45..=74 if !self.running.is_empty() => self.end(),
                75..=82 => {
                    let opened = self.table.open(self.at, &id, Some(Retention::Pinned), None, None);
                    if let Ok(Some(incarnation)) = opened {
                        self.ask_engine(id, incarnation);
                    }
                }
                83..=88 => drop(self.table.close(&id)),
                89..=94 if !self.opening.is_empty() => self.engine_opens(),
                95..=97 => self.engine_closes(),
                98 => drop(self.table.expire(self.at)),
                99 => {
                    self.table.engine_lost(engine(self.random.usize(1..3)));
                    self.inside.clear();
                }
                _ => {}
            }
            self.table.check_invariants();
        }

        fn begin(&mut self, id: SessionKey) {
            let claim = Claim {
                delta: self.random.u8(0..3) > 0,
                open: self.random.u8(0..5) == 0,
                retention: self.random.bool().then_some(Retention::Pinned),
                ..Claim::of(&id)
            };
            let Ok(turn) = begin(&mut self.table, self.at, &claim) else { return };
            let session = turn.session.as_ref().unwrap();
            if session.must_open {
                self.ask_engine(id, session.incarnation.clone());
            }
            self.running.push(turn);
        }

        /// Once per incarnation; whoever comes later waits for the same answer.
        fn ask_engine(&mut self, id: SessionKey, incarnation: String) {
            if !self.opening.iter().any(|(_, asked)| *asked == incarnation) {
                self.opening.push((id, incarnation));
            }
        }

        fn end(&mut self) {
            let turn = self.running.swap_remove(self.random.usize(..self.running.len()));
            let ends = [
                finished(self.random.u64(1..300), self.random.u64(0..50)),
                Outcome::Finished(None),
                Outcome::Aborted,
                Outcome::Refused,
                Outcome::Lost,
            ];
            let end = ends[self.random.usize(..ends.len())];
            self.table.end(self.at, &turn, end);
        }

        fn engine_opens(&mut self) {
            let (id, incarnation) =
                self.opening.swap_remove(self.random.usize(..self.opening.len()));
            let ok = self.random.u8(0..4) > 0;
            if ok {
                self.inside.insert(incarnation.clone());
            }
            self.table.opened(&id, &incarnation, ok);
            if !ok {
                // Its turns were told that it did not open.
                let of = |turn: &Turn| turn.session.as_ref().unwrap().incarnation.clone();
                self.running.retain(|turn| of(turn) != incarnation);
            }
        }

        fn engine_closes(&mut self) {
            for close in self.table.take_closes() {
                self.inside.remove(&close.incarnation);
                self.table.closed(&close.incarnation);
            }
        }

        /// All clients go home.
        fn finish(&mut self) {
            for (id, incarnation) in std::mem::take(&mut self.opening) {
                self.inside.insert(incarnation.clone());
                self.table.opened(&id, &incarnation, true);
            }
            self.table.close_all();
            while !self.running.is_empty() {
                self.end();
            }
            self.table.close_all();
            self.engine_closes();
        }
    }

    #[test]
    fn any_order_of_events_keeps_the_promises_and_leaves_nothing() {
        for seed in 0..64 {
            let mut world = World::new(seed);
            (0..400).for_each(|_| world.step());
            world.finish();
            assert_eq!(world.table.iter().count(), 0, "a session is left with seed {seed}");
            assert!(world.inside.is_empty(), "{:?} leaked with seed {seed}", world.inside);
            for rank in 0..2 {
                assert_eq!(world.table.totals(rank), Totals::default(), "left with seed {seed}");
            }
        }
    }
}

//! Holds the session table: it decides which turns run, and when sessions open and close.
//!
//! A session is a conversation: ordered turns that share a growing prefix. A turn is one request
//! and its answer. An incarnation is one life of a session inside the engine. A pinned session
//! keeps its KV and a request row to itself. The KV of other sessions is in the radix tree. A table
//! holds the sessions of one engine.
//!
//! The owner task (`crate::owner`) tells the table what happened and carries out the [`Effect`]s
//! that the table returns. The table never waits, reads no clock, and doesn't talk to the engine.
//!
//! Each turn goes through these steps:
//! - [`Table::claim`] claims the turn's session before the turn's body is read (`claims`).
//! - [`Table::admit`] puts the turn into the queue, with the room that it needs (`admission`).
//! - [`Effect::Admitted`] or [`Effect::Refused`] follows, at once or when there is room.
//! - [`Table::end_turn`] ends the turn (`ends`).
//!
//! The other child modules: `capacity` computes room, `rank_account` counts what is in use,
//! `reclaim` frees room, `closing` closes incarnations, `engine` handles reports of the engine and
//! the shim, `trim` runs full histories in pinned sessions, `backlog` estimates the prompt tokens
//! that wait, `volatile_prefix` looks for texts that change from turn to turn, and `invariants`
//! checks the promises.
//!
//! The table promises the following. `check_invariants` or the simulation asserts each promise:
//! - At most one turn of an exclusive session is inside the engine.
//! - Pinned sessions leave some rows free. Their KV stays within the pin budget even if every
//!   running turn grows as far as it may.
//! - Rows and KV stay counted until the engine has confirmed a close.
//! - An incarnation id is never used twice, so a late close can't hit a later incarnation.
//! - Nothing is appended to a history that the agent isn't sure of.
//! - No full history (a turn with the whole conversation) replaces a history that clients append
//!   deltas to (turns with only new tokens), and no delta is appended to a history that a full
//!   history has replaced. A client allows both when it opens the session again.

mod admission;
mod backlog;
mod capacity;
mod claims;
mod closing;
mod ends;
mod engine;
mod invariants;
mod rank_account;
mod reclaim;
mod tickets;
mod trim;
mod trim_turn;
mod volatile_prefix;

use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use proto::id::SessionKey;

use self::{closing::PendingClose, rank_account::RankAccount, tickets::Tickets};
use super::{
    CloseRequest, CloseResult, Effect, EngineCapacity, Error, Need, OpenResult, Outcome,
    PrefixTracker, PromptStart, RankCapacity, RankTotals, Record, RouteTurns, RunMode, Session,
    SessionEvent, TableSettings, TrimRequest, Turn, TurnSession, Usage,
    deltas::{Deltas, check_route, check_turn},
    state::{
        Chooser, ClientHistory, Doubt, EngineHistory, ExpectedHistory, GoneReason, MeasuredHistory,
        Row, Sharing, State, Tree, TurnCounts,
    },
};
use crate::{guard::Guard, shim::trim::Plan};

pub use self::{
    engine::{EngineLoad, SessionReport},
    trim::{TrimOutcome, TrimPlan},
};

/// The most sessions in one table. A session takes less than 1 KiB here, so a flood of session ids
/// can't exceed the agent's 40 MiB.
const SESSIONS_MAX: usize = 16_384;

/// All sessions and turns of one engine.
#[derive(Debug)]
pub struct Table {
    settings: TableSettings,
    engine: EngineCapacity,
    /// The account of each rank. Includes ranks that no longer exist, as turns there may still have
    /// to end.
    accounts: Vec<RankAccount>,
    /// Ordered by key, so that the same events always produce the same effects.
    sessions: BTreeMap<SessionKey, Session>,
    /// The key of each session, by the id of its present incarnation.
    keys_by_incarnation: HashMap<String, SessionKey>,
    /// Turns and open requests.
    tickets: Tickets,
    /// Incarnations whose close the engine has not confirmed, by incarnation id.
    pending_closes: BTreeMap<String, PendingClose>,
    /// What the owner task must do next, in order.
    effects: Vec<Effect>,
    /// How many incarnation ids and sessions were made so far.
    made: MadeCounts,
    /// The most sessions in the table: [`SESSIONS_MAX`], except in tests.
    sessions_max: usize,
    /// No session has a deadline before this time. `None`: no session has a deadline.
    earliest_deadline: Option<Instant>,
    /// Whether the shim trims full histories, that is, removes the tokens that the turn's session
    /// already holds.
    shim_trims: bool,
}

/// How many incarnation ids and sessions a table has made so far.
#[derive(Debug, Default)]
struct MadeCounts {
    incarnations: u64,
    sessions: u64,
}

impl Table {
    /// Returns an empty table.
    #[must_use]
    pub fn new(settings: TableSettings, engine: EngineCapacity) -> Self {
        let mut table = Self {
            settings,
            engine,
            accounts: vec![],
            sessions: BTreeMap::new(),
            keys_by_incarnation: HashMap::new(),
            tickets: Tickets::default(),
            pending_closes: BTreeMap::new(),
            effects: vec![],
            made: MadeCounts::default(),
            sessions_max: SESSIONS_MAX,
            earliest_deadline: None,
            shim_trims: false,
        };
        table.add_ranks();
        table
    }

    /// Closes a session, now or when its running turns have ended. Returns true if the session
    /// is still in the table, because it waits for running turns or for the engine's answer to its
    /// open.
    ///
    /// # Errors
    /// [`Error::UnknownSession`] if the session doesn't exist or is already closing.
    pub fn close_session(&mut self, now: Instant, key: &SessionKey) -> Result<bool, Error> {
        self.begin_close(now, key)?;
        self.process_queue(now);
        self.debug_check();
        Ok(self.sessions.contains_key(key))
    }

    /// Does what [`Self::close_session`] does, but decides on no waiting ticket.
    fn begin_close(&mut self, now: Instant, key: &SessionKey) -> Result<(), Error> {
        let session = self.sessions.get(key).ok_or(Error::UnknownSession)?;
        match session.state {
            State::Closing(_) => return Err(Error::UnknownSession),
            State::Planned | State::Gone { .. } if session.turns.running == 0 => {
                self.drop_session(now, key, &Error::UnknownSession)
            }
            _ => {
                // If the engine is still opening the session, its answer triggers the close.
                let is_opening = matches!(session.state, State::Opening(_));
                self.answer_run_outside(key);
                self.change_session(key, Session::begin_closing);
                if !is_opening {
                    self.close_if_due(now, key);
                }
            }
        }
        Ok(())
    }

    /// Closes every session. Running turns end first; waiting turns are refused.
    pub fn drain(&mut self, now: Instant) {
        self.refuse_waiting(now, &Error::Stopping);
        let keys: Vec<SessionKey> = self.sessions.keys().cloned().collect();
        // `close_session` fails only for a session that is already closing.
        keys.iter().for_each(|key| drop(self.close_session(now, key)));
    }

    /// Does everything whose deadline has passed. Closes sessions whose idle limit has passed, or
    /// that waited too long for the shim's session table or for a demotion. Demotes idle sessions
    /// that the agent pinned on its own. Repeats unconfirmed closes, and refuses turns that waited
    /// too long.
    pub fn run_deadlines(&mut self, now: Instant) {
        if self.earliest_deadline.is_some_and(|deadline| deadline <= now) {
            self.run_session_deadlines(now);
        }
        self.repeat_closes(now);
        self.refuse_overdue(now);
    }

    /// Returns when the session must be closed or demoted if nothing happens to it until then.
    /// `None` if the session needs neither, for example because a turn of it runs.
    fn session_deadline(&self, session: &Session) -> Option<Instant> {
        if let Some(until) = session.awaits_shim_until() {
            return Some(until);
        }
        let demote_at = self
            .is_idle_auto_pin(session)
            .then(|| session.turns.last_end + self.settings.demote_idle);
        let expires_at = session.can_expire().then(|| session.expires_at());
        [demote_at, expires_at].into_iter().flatten().min()
    }

    /// Closes and demotes the sessions whose deadline has passed.
    fn run_session_deadlines(&mut self, now: Instant) {
        let guards = self.settings.guards;
        let is_due = |session: &Session| match session.awaits_shim_until() {
            Some(until) => until <= now,
            None => session.can_expire() && session.expires_at() <= now,
        };
        let keys: Vec<SessionKey> = self
            .sessions
            .iter()
            .filter(|(_, session)| is_due(session))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            if self.sessions[&key].awaits_shim_until().is_some() {
                self.close_without_answer(now, &key);
            } else if guards.is_on(Guard::Expiry) {
                self.effects.push(Effect::SessionEvent(key.clone(), SessionEvent::Expired));
                let _ = self.close_session(now, &key);
            }
        }
        self.demote_idle_sessions(now);
        let deadlines = self.sessions.values().filter_map(|session| self.session_deadline(session));
        // A close above may have refused the turn that kept another session from expiring. That
        // session is overdue now, and its deadline counts, so that the following call closes it.
        // With the guard off, overdue sessions are never closed, so their deadlines don't count.
        let is_counted = |deadline: &Instant| *deadline > now || guards.is_on(Guard::Expiry);
        self.earliest_deadline = deadlines.filter(is_counted).min();
        self.process_queue(now);
    }

    /// Returns when [`Self::run_deadlines`] must be called next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let oldest_since = self.tickets.oldest_since();
        let queue_deadline = oldest_since.map(|since| since + self.settings.queue_wait_max);
        let close_deadline =
            self.pending_closes.values().filter_map(|closing| closing.repeat_at).min();
        [self.earliest_deadline, queue_deadline, close_deadline].into_iter().flatten().min()
    }

    /// Returns the effects that the owner task must carry out now, in order.
    #[must_use]
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Returns the totals of one rank.
    #[must_use]
    pub fn totals(&self, dp_rank: u32) -> RankTotals {
        let load = self.tickets.load(dp_rank);
        RankTotals {
            turns_running: load.running,
            turns_queued: load.queued,
            ..self.accounts[dp_rank as usize].totals
        }
    }

    /// Returns a session.
    #[must_use]
    pub fn get(&self, key: &SessionKey) -> Option<&Session> {
        self.sessions.get(key)
    }

    /// Returns all sessions, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&SessionKey, &Session)> {
        self.sessions.iter()
    }

    /// Returns the ids of the turns inside the engine.
    pub fn rids_inside(&self) -> impl Iterator<Item = &str> {
        self.tickets.inside().map(|(rid, ..)| rid)
    }

    /// Returns the number of closes that the engine has not confirmed, plus sessions that are
    /// opening or closing.
    #[must_use]
    pub fn pending_count(&self) -> usize {
        let is_pending =
            |session: &&Session| matches!(session.state, State::Opening(_) | State::Closing(_));
        self.pending_closes.len() + self.sessions.values().filter(is_pending).count()
    }

    /// Returns a new incarnation id.
    fn next_incarnation(&mut self, key: &SessionKey) -> String {
        if !self.settings.guards.is_on(Guard::FreshIncarnation) {
            return format!("{}-{}", self.settings.incarnation_prefix, key.digest());
        }
        self.made.incarnations += 1;
        format!("{}-{}", self.settings.incarnation_prefix, self.made.incarnations)
    }

    /// Changes a session and updates the totals of its rank.
    fn change_session<T>(&mut self, key: &SessionKey, change: impl FnOnce(&mut Session) -> T) -> T {
        let page = self.engine.page_tokens;
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let account = &mut self.accounts[session.dp_rank as usize];
        account.remove_session(session, page);
        let result = change(session);
        account.add_session(session, page);
        self.report_change(key);
        result
    }

    /// Removes a session from the table. The caller has made sure that the engine holds nothing of
    /// the session, or has begun the close.
    fn remove_session(&mut self, key: &SessionKey) {
        let session = self.sessions.remove(key).expect("the caller has seen it");
        self.accounts[session.dp_rank as usize].remove_session(&session, self.engine.page_tokens);
        self.keys_by_incarnation.remove(&session.incarnation);
        self.report_change(key);
    }

    /// Gives a session a new incarnation id, so that a late close of the old incarnation can't
    /// close the session.
    fn reincarnate(&mut self, key: &SessionKey) {
        let new_id = self.next_incarnation(key);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        self.keys_by_incarnation.remove(&session.incarnation);
        session.incarnation.clone_from(&new_id);
        self.keys_by_incarnation.insert(new_id, key.clone());
    }

    /// Removes a session, and refuses the turns that wait for it. The engine holds nothing of the
    /// session, or its close has begun.
    fn drop_session(&mut self, now: Instant, key: &SessionKey, error: &Error) {
        self.remove_session(key);
        let queue = self.tickets.queue().iter();
        let rids: Vec<String> =
            queue.filter(|rid| self.tickets[rid].key() == Some(key)).cloned().collect();
        rids.iter().for_each(|rid| self.refuse_ticket(now, rid, error.clone()));
    }

    /// Makes sure that each rank of the engine has an account. The accounts of ranks that no longer
    /// exist stay, because turns there must still end.
    fn add_ranks(&mut self) {
        let rank_count = self.engine.ranks.len().max(self.accounts.len());
        self.accounts.resize_with(rank_count, RankAccount::default);
        self.tickets.add_ranks(rank_count);
    }

    fn capacity(&self, dp_rank: u32) -> Result<&RankCapacity, Error> {
        self.engine.ranks.get(dp_rank as usize).ok_or(Error::NoRank(dp_rank))
    }

    fn account(&mut self, dp_rank: u32) -> &mut RankAccount {
        &mut self.accounts[dp_rank as usize]
    }

    fn report_change(&mut self, key: &SessionKey) {
        // Consecutive changes of one session are reported once.
        let is_repeated =
            matches!(self.effects.last(), Some(Effect::SessionChanged(changed)) if changed == key);
        if !is_repeated {
            self.effects.push(Effect::SessionChanged(key.clone()));
        }
    }

    fn write_journal(&mut self, record: Record) {
        self.effects.push(Effect::Journal(record));
    }

    /// Makes sure that [`Self::run_deadlines`] looks at the session at its deadline, and also when
    /// its idle limit has passed, even if it has turns now.
    fn schedule_deadline(&mut self, key: &SessionKey) {
        let session = &self.sessions[key];
        let expires_at = session.expires_at();
        let deadline = self.session_deadline(session).unwrap_or(expires_at);
        self.schedule_deadline_at(deadline.min(expires_at));
    }

    /// Makes sure that [`Self::run_deadlines`] looks at all sessions at `deadline`.
    fn schedule_deadline_at(&mut self, deadline: Instant) {
        let earliest = self.earliest_deadline.map_or(deadline, |before| before.min(deadline));
        self.earliest_deadline = Some(earliest);
    }

    fn debug_check(&self) {
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }
}

#[cfg(test)]
mod tests;

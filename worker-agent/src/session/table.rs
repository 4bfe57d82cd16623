//! Holds the session table: it decides which turns run, and when sessions open and close.
//!
//! It never waits, reads no clock, and doesn't talk to the engine: the owner task carries out its
//! [`Effect`]s. A part of the table (a field) keeps and checks figures of its own, and never calls
//! another part or the table, but for adding [`Effects`]. Rules need several parts, so they are
//! functions of [`Table`], by topic.
//!
//! A turn goes through [`Table::claim`], before its body is read, then [`Table::admit`],
//! [`Effect::Admitted`] or [`Effect::Refused`], and [`Table::end_turn`] if it was admitted.
//!
//! The table promises the following. `check_invariants` or the simulation asserts each promise:
//! - At most one turn of an exclusive session is inside the engine.
//! - Pinned sessions leave some rows free. Their KV stays within the pin budget even if every
//!   running turn grows as far as it may.
//! - Rows and KV stay counted until the engine has confirmed a close.
//! - The engine keeps no tag without its session: each is in the journal until it is closed.
//! - An incarnation id is never used twice, so a late close can't hit a later incarnation.
//! - Nothing is appended to a history that the agent isn't sure of.
//! - No pinned turn continues KV that the engine computed with older weights, another adapter, or
//!   another cache salt or extra key.
//! - No full history (a turn with the whole conversation) replaces a history that clients append
//!   deltas to (turns with only new tokens), and no delta is appended to a history that a full
//!   history has replaced. A client allows both when it opens the session again.

mod adapters;
mod admission;
mod asides;
mod backlog;
mod capacity;
mod claims;
mod closes;
mod closing;
mod ends;
mod engine;
mod handover;
mod held;
mod invariants;
mod keys_by_time;
mod overdue;
mod principals;
mod queue_pace;
mod reclaim;
mod sessions;
mod shares;
mod shim_requests;
mod shims;
mod tags;
mod ticket;
mod tickets;
mod trim;
mod trim_turn;
mod turn_shares;
mod volatile_prefix;
mod weights;

use std::time::Instant;

use contract::{id::SessionKey, load::RetentionOff};

use self::{
    closes::Closes, held::Held, queue_pace::QueuePace, sessions::Sessions,
    shim_requests::ShimRequests, shims::RankShims, tickets::Tickets, weights::WeightsState,
};
use super::{
    CloseRequest, CloseResult, Effect, EngineCapacity, Error, Need, OpenResult, Outcome,
    PrefixTracker, PromptStart, RankCapacity, RankTotals, Record, RouteTurns, RunMode, Session,
    SessionEvent, TableSettings, TrimRequest, Turn, TurnSession, Usage,
    deltas::{Deltas, check_route, check_turn},
    lifecycle::{Doubt, ExpectedHistory, GoneReason, Row, ShimRequest, State, Tree},
    state::{Chooser, ClientHistory, EngineHistory, MeasuredHistory, Sharing, TurnCounts},
};
use crate::{guard::Guard, shim::trim::Plan};

pub use self::{
    engine::{EngineLoad, SessionReport, TablePart},
    handover::Legacy,
    shares::{PrincipalView, ShareFigures},
    trim::{TrimOutcome, TrimPlan},
    weights::WeightsReport,
};

#[derive(Debug)]
pub struct Table {
    settings: TableSettings,
    engine: EngineCapacity,
    /// Why the engine doesn't offer the other retentions.
    retentions_off: Vec<RetentionOff>,
    sessions: Sessions,
    tickets: Tickets,
    closes: Closes,
    shims: RankShims,
    shim_requests: ShimRequests,
    queue_pace: QueuePace,
    effects: Effects,
    /// Why the engine counts as silent; `None` while it speaks.
    silent_reason: Option<String>,
    weights: WeightsState,
    /// When the first turn that waits for its session's history has waited long enough.
    history_awaited_until: Option<Instant>,
}

#[derive(Debug, Default)]
struct Effects(Vec<Effect>);

impl Effects {
    fn push(&mut self, effect: Effect) {
        self.0.push(effect);
    }

    fn write_journal(&mut self, record: Record) {
        self.push(Effect::Journal(record));
    }

    fn report_event(&mut self, key: &SessionKey, event: SessionEvent) {
        self.push(Effect::SessionEvent(key.clone(), event));
    }

    /// Consecutive changes of one session are reported once.
    fn report_change(&mut self, key: &SessionKey) {
        if !matches!(self.0.last(), Some(Effect::SessionChanged(changed)) if changed == key) {
            self.push(Effect::SessionChanged(key.clone()));
        }
    }
}

impl Table {
    #[must_use]
    pub fn new(settings: TableSettings, engine: EngineCapacity) -> Self {
        let mut closes = Closes::new(settings.stuck_after);
        closes.reset(engine.page_tokens);
        let mut table = Self {
            retentions_off: vec![],
            sessions: Sessions::new(&settings),
            shim_requests: ShimRequests::new(settings.shim_requests_max()),
            settings,
            engine,
            tickets: Tickets::default(),
            closes,
            shims: RankShims::default(),
            queue_pace: QueuePace::default(),
            effects: Effects::default(),
            silent_reason: None,
            weights: WeightsState::default(),
            history_awaited_until: None,
        };
        table.add_ranks();
        table
    }

    /// Closes a session, now or when its running turns have ended. Returns true if it is still in
    /// the table, for them or for the engine's answer to its open. A session that is already
    /// closing counts as unknown.
    pub fn close_session(&mut self, now: Instant, key: &SessionKey) -> Result<bool, Error> {
        self.begin_close(now, key)?;
        self.process_queue(now);
        self.debug_check();
        Ok(self.sessions.has(key))
    }

    /// With `only_if_idle`, refuses to close a session of which a turn runs or waits.
    pub fn close_session_if(
        &mut self,
        now: Instant,
        key: &SessionKey,
        only_if_idle: bool,
    ) -> Result<bool, Error> {
        let has_turns = self.sessions.get(key).is_some_and(Session::has_turns);
        if only_if_idle && has_turns { Err(Error::Busy) } else { self.close_session(now, key) }
    }

    /// As [`Self::close_session`], but decides on no waiting ticket.
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
                self.change_session(key, |session| session.state.begin_closing());
                if !is_opening {
                    self.close_if_due(now, key);
                }
            }
        }
        Ok(())
    }

    /// Closes all sessions. Running turns end first.
    pub fn drain(&mut self, now: Instant) {
        self.refuse_waiting(now, &Error::Stopping);
        let keys = self.sessions.keys(|_| true);
        // `close_session` fails only for a session that is already closing.
        keys.iter().for_each(|key| drop(self.close_session(now, key)));
    }

    /// Does everything whose deadline has passed; see [`Self::next_deadline`].
    pub fn run_deadlines(&mut self, now: Instant) {
        if self.sessions.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.run_session_deadlines(now);
        }
        if self.history_awaited_until.is_some_and(|until| until <= now) {
            self.process_queue(now);
        }
        self.replace_unanswered_requests(now);
        self.closes.repeat_due(now, &mut self.effects);
        self.refuse_overdue(now);
    }

    fn run_session_deadlines(&mut self, now: Instant) {
        for key in self.sessions.due(now) {
            // What was done about another session may have changed this one.
            let Some(session) = self.sessions.get(&key) else { continue };
            if session.state.shim_request().is_some() {
                self.close_without_answer(now, &key);
            } else if self.sessions.may_expire(session) && session.expires_at() <= now {
                self.effects.report_event(&key, SessionEvent::Expired);
                let _ = self.close_session(now, &key);
            } else if self.sessions.is_idle_auto_pin(session)
                && self.sessions.demotes_at(session) <= now
            {
                self.release_kv(now, &key);
            }
        }
        self.process_queue(now);
    }

    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let oldest_since = self.tickets.oldest_since();
        let queue_deadline = oldest_since.map(|since| since + self.settings.queue_wait_max);
        let deadlines = [
            self.sessions.next_deadline(),
            self.shim_requests.next_place(),
            queue_deadline,
            self.closes.next_repeat(),
            self.history_awaited_until,
        ];
        deadlines.into_iter().flatten().min()
    }

    #[must_use]
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects.0)
    }

    #[must_use]
    pub fn totals(&self, dp_rank: u32) -> RankTotals {
        let guards = self.settings.guards;
        let counted = |held: Held, guard| if guards.is_on(guard) { held } else { Held::default() };
        let sessions = self.sessions.rank(dp_rank);
        let closing = self.closes.held(dp_rank);
        let foreign = counted(self.shims.foreign(dp_rank), Guard::ForeignCounted);
        let held = sessions.held + counted(closing, Guard::CountedUntilClosed) + foreign;
        let load = self.tickets.load(dp_rank);
        RankTotals {
            sessions: sessions.sessions,
            rows_held: held.rows,
            pinned_tokens: held.tokens,
            tree_tokens_estimate: sessions.tree_tokens,
            turns_running: load.running,
            turns_queued: load.queued,
            foreign_rows: foreign.rows,
            foreign_tokens: foreign.tokens,
        }
    }

    #[must_use]
    pub fn get(&self, key: &SessionKey) -> Option<&Session> {
        self.sessions.get(key)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&SessionKey, &Session)> {
        self.sessions.iter()
    }

    pub fn rids_inside(&self) -> impl Iterator<Item = &str> {
        self.tickets.inside().map(|(rid, ..)| rid)
    }

    #[must_use]
    pub fn turns_inside(&self) -> usize {
        self.tickets.turns_inside()
    }

    /// Closes that the engine has not confirmed, and sessions that are opening or closing.
    #[must_use]
    pub fn pending_count(&self) -> usize {
        let ranks = self.sessions.all_ranks();
        self.closes.len() + ranks.map(|rank| rank.opening + rank.closing).sum::<usize>()
    }

    fn change_session<T>(&mut self, key: &SessionKey, change: impl FnOnce(&mut Session) -> T) -> T {
        self.sessions.change(&mut self.effects, key, change)
    }

    /// The engine must hold nothing of the session, or its close must have begun.
    fn drop_session(&mut self, now: Instant, key: &SessionKey, error: &Error) {
        self.sessions.remove(&mut self.effects, key);
        let queue = self.tickets.queue().iter();
        let rids: Vec<String> =
            queue.filter(|rid| self.tickets[rid].key() == Some(key)).cloned().collect();
        rids.iter().for_each(|rid| self.refuse_ticket(now, rid, error.clone()));
    }

    /// Figures of ranks that no longer exist stay, because turns there must still end.
    fn add_ranks(&mut self) {
        let rank_count = self.engine.ranks.len();
        self.sessions.set_engine(rank_count, self.engine.page_tokens);
        self.tickets.add_ranks(rank_count);
        self.shims.add_ranks(rank_count);
        self.shim_requests.add_ranks(rank_count);
    }

    fn capacity(&self, dp_rank: u32) -> Result<&RankCapacity, Error> {
        self.engine.ranks.get(dp_rank as usize).ok_or(Error::NoRank(dp_rank))
    }

    fn debug_check(&self) {
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }
}

#[cfg(test)]
mod tests;

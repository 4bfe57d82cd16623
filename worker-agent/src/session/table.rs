//! Holds the session table: it decides which turns run, and when sessions open and close.
//!
//! It never waits, reads no clock, and doesn't talk to the engine: the owner task carries out its
//! [`Effect`]s.
//!
//! Four owners keep all state, each in fields that it checks itself, and each owns the next:
//! [`Queue`] the [`Histories`], these the [`Pins`], and these the [`Sessions`]. So an owner can't
//! name a higher one. A rule is a method of the highest owner that it needs, in a module by topic.
//! A step of a rule that only one module needs is a function there, which takes this owner. The
//! table only passes each event on, with the [`Step`] that collects its effects.
//!
//! A turn goes through [`Table::claim`], before its body is read if it is a session's, then
//! [`Table::enqueue`], [`Effect::Admitted`] or [`Effect::Refused`], and [`Table::end_turn`] if it
//! was admitted.
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

mod histories;
mod pins;
mod queue;
mod reports;
mod room;
mod sessions;
mod step;

use std::{mem, sync::Arc, time::Instant};

use contract::{
    id::SessionKey,
    load::{Retention, RetentionOff},
};

use self::{
    histories::Histories,
    pins::Pins,
    queue::{Queue, backlog, shares},
    sessions::Sessions,
    step::Step,
};
use super::{
    ClaimRequest, CloseRequest, CloseResult, Effect, EngineCapacity, Error, Need, OpenRequest,
    OpenResult, Outcome, PlannedTurn, PrefixTracker, PromptStart, RankCapacity, RankTotals, Record,
    RouteTurns, RunMode, Session, SessionEvent, TableSettings, TrimRequest, TurnSession, Usage,
    deltas::{Deltas, check_route, check_turn},
    handover::HandedSession,
    lifecycle::{Doubt, ExpectedHistory, GoneReason, Row, ShimRequest, State, Tree},
    state::{Chooser, ClientHistory, EngineHistory, MeasuredHistory, Sharing, TurnCounts},
};
use crate::guard::{Guard, Guards};

pub use self::{
    histories::{
        handover::Legacy,
        trim_turn::{TrimOutcome, TrimPlan},
        weights::WeightsReport,
    },
    queue::{backlog::UnseenBy, shares::PrincipalView},
    reports::{EngineLoad, KvChange, SessionReport, ShimReport, TablePart},
    sessions::ShareFigures,
};

/// A check reads the whole table. With more sessions than this not each change is checked, or an
/// agent of a debug build would fall behind its engine.
const SESSIONS_CHECKED_PER_CHANGE: usize = 64;

#[derive(Debug)]
pub struct Table {
    queue: Queue,
    effects: Vec<Effect>,
    /// In debug builds: the changes since the invariants were checked.
    unchecked_changes: usize,
}

/// What keeps the table from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unfinished {
    /// Closes that the engine has not confirmed, and sessions that are opening or closing.
    pub closes: usize,
    /// Turns inside, and sessions that an answer is about to change. A hold counts as one.
    pub changes: usize,
}

impl Table {
    #[must_use]
    pub fn new(settings: TableSettings, engine: EngineCapacity) -> Self {
        Self {
            queue: Queue::new(&Arc::new(settings), engine),
            effects: vec![],
            unchecked_changes: 0,
        }
    }

    /// Claims a turn's place. A session's turn claims it before the body is read, so that one that
    /// its session can't take is refused at once. [`Self::enqueue`] or [`Self::end_turn`] must
    /// follow.
    pub fn claim(&mut self, now: Instant, rid: &str, request: &ClaimRequest) -> Result<(), Error> {
        self.step(now, |queue, step| queue.claim(step, rid, request))
    }

    /// Must come before [`Self::enqueue`].
    pub fn set_prompt_start(&mut self, rid: &str, start: PromptStart) {
        self.queue.set_prompt_start(rid, start);
    }

    /// [`Effect::Admitted`] or [`Effect::Refused`] follows, at once or when there is room. Returns
    /// false if the turn has ended meanwhile.
    pub fn enqueue(&mut self, now: Instant, rid: &str, need: Need) -> bool {
        self.step(now, |queue, step| queue.enqueue(step, rid, need))
    }

    /// The turn's client has disconnected. The caller aborts the turn, which counts as inside until
    /// the engine acknowledges its end.
    pub fn abandon_turn(&mut self, now: Instant, rid: &str) {
        self.step(now, |queue, step| queue.abandon_turn(step, rid));
    }

    /// Ends a claimed turn at any stage, and closes its session if the claim asked for that. Does
    /// nothing if the turn has already ended.
    pub fn end_turn(&mut self, now: Instant, rid: &str, outcome: Outcome) {
        self.step(now, |queue, step| queue.end_turn(step, rid, outcome));
    }

    /// Opens a session without a turn. [`Effect::Admitted`] or [`Effect::Refused`] with the id
    /// `rid` follows. A session that is already open keeps its history. One that can't continue is
    /// replaced.
    pub fn open_session(
        &mut self,
        now: Instant,
        rid: &str,
        request: &OpenRequest,
    ) -> Result<(), Error> {
        self.step(now, |queue, step| queue.open_session(step, rid, request))
    }

    /// Closes a session, now or when its running turns have ended. Returns true if it is still in
    /// the table, for them or for the engine's answer to its open. A session that is already
    /// closing counts as unknown.
    pub fn close_session(&mut self, now: Instant, key: &SessionKey) -> Result<bool, Error> {
        self.step(now, |queue, step| queue.close_session(step, key))
    }

    /// With `only_if_idle`, refuses to close a session of which a turn runs or waits.
    pub fn close_session_if(
        &mut self,
        now: Instant,
        key: &SessionKey,
        only_if_idle: bool,
    ) -> Result<bool, Error> {
        let has_turns = self.sessions().get(key).is_some_and(Session::has_turns);
        if only_if_idle && has_turns { Err(Error::Busy) } else { self.close_session(now, key) }
    }

    /// Demotes a session between two turns, for its owner or an operator. Returns true if it is
    /// demoted already; otherwise `Sessions::demotion_result` tells the end. A session that the
    /// shim can't demote stays.
    pub fn demote_session(&mut self, now: Instant, key: &SessionKey) -> Result<bool, Error> {
        self.step(now, |queue, step| queue.histories.demote_session(step, key))
    }

    pub fn handle_open_result(&mut self, now: Instant, incarnation: &str, result: &OpenResult) {
        self.step(now, |queue, step| queue.handle_open_result(step, incarnation, result));
    }

    /// The engine has answered, or the shim has reported that the session is closed.
    pub fn handle_close_result(&mut self, now: Instant, incarnation: &str, result: CloseResult) {
        self.step(now, |queue, step| queue.apply_close_result(step, incarnation, result));
    }

    /// The shim reports its final plan before the engine gets the turn. Returns how many tokens the
    /// engine need not compute, as the session holds them; `None` if the turn has a plan already.
    pub fn handle_plan(&mut self, now: Instant, plan: &TrimPlan) -> Option<(TrimOutcome, u64)> {
        self.step(now, |queue, step| queue.handle_plan(step, plan))
    }

    /// An [`Effect::AnswerQuestion`] follows. Without one, the shim decides after two seconds.
    pub fn handle_question(&mut self, now: Instant, question: u64, plan: &TrimPlan) {
        self.step(now, |queue, step| {
            if queue.histories.handle_question(step, question, plan) {
                queue.admit_waiting(step);
            }
        });
    }

    /// `was_retracted`: the engine will resume the turn, so `history_tokens` isn't final.
    pub fn handle_commit(
        &mut self,
        rid: &str,
        incarnation: &str,
        history_tokens: u64,
        was_retracted: bool,
    ) {
        let turns = &mut self.queue.histories.turns;
        turns.note_commit(rid, incarnation, history_tokens, was_retracted);
    }

    pub fn handle_load(&mut self, now: Instant, dp_rank: u32, load: EngineLoad) {
        self.step(now, |queue, step| queue.handle_load(step, dp_rank, load));
    }

    pub fn handle_shim_report(&mut self, now: Instant, dp_rank: u32, report: ShimReport<'_>) {
        self.step(now, |queue, step| queue.apply_shim_report(step, dp_rank, report));
    }

    pub fn handle_kv_change(&mut self, now: Instant, change: KvChange<'_>) {
        self.step(now, |queue, step| queue.apply_kv_change(step, change));
    }

    /// Sessions keep what they have. Returns whether anything has changed.
    pub fn set_retentions(
        &mut self,
        offered: Vec<Retention>,
        retentions_off: Vec<RetentionOff>,
    ) -> bool {
        self.queue.histories.retentions.set(offered, retentions_off)
    }

    pub fn set_trimming(&mut self, now: Instant, shim_trims: bool) {
        self.step(now, |queue, step| {
            queue.histories.shims.set_trims(shim_trims);
            queue.admit_waiting(step);
        });
    }

    /// `reason`: the engine's process runs, but has said nothing for too long. Then the table
    /// refuses what waits and what comes; turns inside the engine go on. `None`: it speaks.
    pub fn set_engine_silent(&mut self, now: Instant, reason: Option<String>) {
        self.step(now, |queue, step| queue.set_silent(step, reason));
    }

    /// Holds back the turns that are not inside the engine, for example because it is paused. They
    /// wait in the queue like turns without room, and are refused with the reason after too long a
    /// wait. `None` lets them go on.
    pub fn set_hold(&mut self, now: Instant, reason: Option<String>) {
        self.step(now, |queue, step| queue.set_hold(step, reason));
    }

    /// All rows, KV and histories are lost too. `engine` describes the next engine.
    pub fn handle_engine_lost(&mut self, now: Instant, engine: EngineCapacity) {
        self.step(now, |queue, step| queue.lose_engine(step, engine));
    }

    /// Closes all sessions. Running turns end first.
    pub fn drain(&mut self, now: Instant) {
        self.step(now, Queue::drain);
    }

    /// Refuses all turns that wait. The caller admits no others, and calls [`Self::hand_over`] once
    /// nothing is about to change.
    pub fn begin_handover(&mut self, now: Instant) {
        self.step(now, |queue, step| queue.refuse_waiting(step, &Error::Stopping));
    }

    /// Nothing may be changed afterwards.
    #[must_use]
    pub fn hand_over(&self, now: Instant) -> Vec<HandedSession> {
        self.queue.histories.hand_over(now)
    }

    /// Closes the other incarnations and tags that the last agent process left open.
    pub fn take_over(&mut self, now: Instant, legacy: Legacy) {
        self.step(now, |queue, step| queue.histories.take_over(step, legacy));
    }

    /// Does everything whose deadline has passed; see [`Self::next_deadline`].
    pub fn run_deadlines(&mut self, now: Instant) {
        self.step(now, Queue::run_deadlines);
    }

    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.queue.next_deadline()
    }

    #[must_use]
    pub fn take_effects(&mut self) -> Vec<Effect> {
        mem::take(&mut self.effects)
    }

    #[must_use]
    pub fn sessions(&self) -> &Sessions {
        self.queue.sessions()
    }

    #[must_use]
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    #[must_use]
    pub fn weights_epoch(&self) -> u64 {
        self.queue.histories.weights.epoch()
    }

    #[must_use]
    pub fn totals(&self, dp_rank: u32) -> RankTotals {
        shares::totals(&self.queue, dp_rank)
    }

    #[must_use]
    pub fn principal_view(&self, now: Instant, principal: &str, dp_rank: u32) -> PrincipalView {
        shares::principal_view(&self.queue, now, principal, dp_rank)
    }

    /// Returns the prompt tokens of a rank that the engine's load figures don't show yet. Leaves
    /// out tokens whose KV is resident, as far as that is known.
    #[must_use]
    pub fn unseen_prompt_tokens(&self, dp_rank: u32, unseen_by: UnseenBy) -> u64 {
        backlog::unseen_prompt_tokens(&self.queue, dp_rank, unseen_by)
    }

    #[must_use]
    pub fn unfinished(&self) -> Unfinished {
        let ranks = self.sessions().all_ranks();
        let (closing, changing) = ranks.fold((0, 0), |(closing, changing), rank| {
            (closing + rank.opening + rank.closing, changing + rank.opening + rank.await_shim)
        });
        let holds = usize::from(self.queue.hold_reason().is_some());
        Unfinished {
            closes: self.queue.pins().closes.len() + closing,
            changes: self.queue.turns_inside() + changing + holds,
        }
    }

    /// Returns why: the engine keeps a session half closed, or doesn't end an aborted turn. An
    /// engine that is held back, such as a paused one, ends neither before it goes on.
    #[must_use]
    pub fn restart_required(&self, now: Instant) -> Option<String> {
        if self.queue.hold_reason().is_some() {
            return None;
        }
        let stuck_closes = self.queue.pins().closes.stuck_count(now);
        if stuck_closes > 0 {
            return Some(format!(
                "the engine keeps {stuck_closes} sessions half closed; their rows and KV come back \
                 only when it restarts"
            ));
        }
        let stuck_turns = self.queue.stuck_turns(now);
        (stuck_turns > 0).then(|| {
            format!(
                "the engine doesn't end {stuck_turns} aborted turns; restart it to free their rows"
            )
        })
    }

    /// Panics if a promise is broken. A promise is not checked while its guard is off.
    /// `crate::audit` checks the engine's own KV pages.
    pub fn check_invariants(&self) {
        self.queue.check_invariants();
    }

    fn step<T>(&mut self, now: Instant, act: impl FnOnce(&mut Queue, &mut Step) -> T) -> T {
        let mut step = Step::new(now, mem::take(&mut self.effects));
        let result = act(&mut self.queue, &mut step);
        self.effects = step.into_effects();
        if cfg!(debug_assertions) {
            self.unchecked_changes += 1;
            if self.unchecked_changes * SESSIONS_CHECKED_PER_CHANGE >= self.sessions().len() {
                self.unchecked_changes = 0;
                self.check_invariants();
            }
        }
        result
    }
}

#[cfg(test)]
mod tests;

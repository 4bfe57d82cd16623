//! The affinity table: which worker this router has bound each session to. Pure.
//!
//! The agents' tables are authoritative for sessions. This table remembers what they can't show, or
//! not yet: placements whose first turn is running, placements without engine state, and what this
//! router opened or closed a moment ago. A binding stays while its turns run and for an idle time
//! after that. The table is bounded; when it is full, the binding idle for longest is dropped.
//! Every method takes `now`.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use proto::{id::SessionKey, load::Session};

use crate::fleet::worker::WorkerRef;

/// How long an agent's table may lag behind this router's own actions. Changes arrive within
/// milliseconds; this is the longest silence for which an agent is not yet stale.
pub const TABLE_LAG: Duration = Duration::from_secs(3);

/// A session's worker, as this router decided it, and what the agents' tables may not show yet.
#[derive(Debug)]
pub struct Binding {
    /// The worker that gets the session's turns.
    pub worker: WorkerRef,
    /// Number of turns that this router has in flight for the session.
    pub turns: u32,
    /// Number of those turns whose answer has not begun, so that no client can have all of the
    /// answer.
    pub unanswered: u32,
    /// Whether the session takes one turn at a time, as the client asked.
    pub exclusive: bool,
    /// When the last turn through this router ended.
    pub last_turn_ended: Option<Instant>,
    /// The agent's answer to an open. It counts for [`TABLE_LAG`].
    pub opened: Option<OpenAnswer>,
    /// The state of a close through this router.
    pub closing: Closing,
    /// When a turn last moved the session to another worker.
    pub moved_at: Option<Instant>,
    /// When the session was last reopened after a close.
    pub reopened: Option<Instant>,
    /// Whether the client asked for placement only. No agent will ever report such a session.
    pub placement_only: bool,
    /// Size of the body of the session's last turn, in bytes.
    pub body_bytes: u64,
    /// The binding's place in the idle order. `None` while a turn runs.
    idle: Option<(Instant, u64)>,
}

/// An agent's positive answer to an open.
#[derive(Debug)]
pub struct OpenAnswer {
    /// The session as the agent answered.
    pub session: Arc<Session>,
    /// The agent's epoch. Sessions of another epoch are gone.
    pub epoch: Option<u64>,
    /// When the answer arrived.
    pub at: Instant,
}

/// The state of a close.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    /// No close was requested.
    No,
    /// The agent was asked to close the session.
    Asked,
    /// The agent has agreed to close the session.
    Closed {
        /// When the agent agreed.
        at: Instant,
        /// Whether a turn was still running, so that the session closes at its end.
        deferred: bool,
    },
}

/// The table is full, and every binding is held by a running turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all sessions_max sessions have turns in flight; try again")]
pub struct Full;

/// The affinity table.
#[derive(Debug)]
pub struct Affinity {
    bindings: HashMap<SessionKey, Binding>,
    idle: BTreeMap<(Instant, u64), SessionKey>,
    next_number: u64,
    idle_max: Duration,
    bindings_max: usize,
}

impl Binding {
    /// Whether the session takes one turn at a time and a turn surely runs.
    ///
    /// A turn whose answer has begun may have ended already, and its client may have the whole
    /// answer. For such turns, and for turns of other routers, whose ends the tables show late, the
    /// agent's gate decides.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.exclusive && self.unanswered > 0
    }

    /// Whether a turn through this router runs or ended within the tables' lag.
    #[must_use]
    pub fn is_recent(&self, now: Instant) -> bool {
        let within = |at: Instant| now.saturating_duration_since(at) <= TABLE_LAG;
        self.turns > 0 || self.last_turn_ended.is_some_and(within)
    }

    /// Whether the session was reopened within the tables' lag, so that a table may still show its
    /// previous life.
    #[must_use]
    pub fn was_reopened(&self, now: Instant) -> bool {
        self.reopened.is_some_and(|at| now.saturating_duration_since(at) <= TABLE_LAG)
    }

    /// Returns the answer to an open within the tables' lag, if the agent still has this epoch.
    #[must_use]
    pub fn just_opened(&self, epoch: Option<u64>, now: Instant) -> Option<&Arc<Session>> {
        let opened = self.opened.as_ref().filter(|opened| opened.epoch == epoch)?;
        (now.saturating_duration_since(opened.at) <= TABLE_LAG).then_some(&opened.session)
    }
}

impl Affinity {
    /// Creates an empty table.
    #[must_use]
    pub fn new(bindings_max: usize, idle_max: Duration) -> Self {
        Self {
            bindings: HashMap::new(),
            idle: BTreeMap::new(),
            next_number: 0,
            idle_max,
            bindings_max,
        }
    }

    /// Returns the binding, unless it was idle for too long.
    #[must_use]
    pub fn get(&self, key: &SessionKey, now: Instant) -> Option<&Binding> {
        let binding = self.bindings.get(key)?;
        let expired = binding
            .idle
            .is_some_and(|(since, _)| now.saturating_duration_since(since) > self.idle_max);
        (!expired).then_some(binding)
    }

    /// Counts a turn on the session and binds the session to the worker. Reopens a binding that was
    /// closed.
    ///
    /// # Errors
    /// If the table is full of sessions with running turns.
    pub fn begin_turn(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        exclusive: bool,
        now: Instant,
    ) -> Result<(), Full> {
        let binding = self.entry(key, worker, now)?;
        if binding.closing != Closing::No {
            binding.closing = Closing::No;
            binding.exclusive = false;
            binding.reopened = Some(now);
        }
        if std::mem::replace(&mut binding.worker, worker) != worker {
            binding.moved_at = Some(now);
        }
        binding.exclusive |= exclusive;
        binding.turns += 1;
        binding.unanswered += 1;
        self.update_idle_order(key, now);
        Ok(())
    }

    /// Records that a turn's answer has begun, or never will. Call it at most once per turn, before
    /// [`Self::end_turn`].
    pub fn record_answer(&mut self, key: &SessionKey) {
        let binding = self.bindings.get_mut(key).expect("a running turn holds its binding");
        assert!(binding.unanswered > 0, "a turn was answered twice");
        binding.unanswered -= 1;
    }

    /// Ends a turn that was begun.
    pub fn end_turn(&mut self, key: &SessionKey, now: Instant) {
        let binding = self.bindings.get_mut(key).expect("a running turn holds its binding");
        assert!(binding.turns > 0, "a turn ended twice");
        binding.turns -= 1;
        binding.unanswered = binding.unanswered.min(binding.turns);
        binding.last_turn_ended = Some(now);
        self.update_idle_order(key, now);
    }

    /// Sets whether the client wants nothing but placement for the session.
    pub fn set_placement_only(&mut self, key: &SessionKey, placement_only: bool) {
        if let Some(binding) = self.bindings.get_mut(key) {
            binding.placement_only = placement_only;
        }
    }

    /// Records the body size of the session's newest turn.
    pub fn record_body_size(&mut self, key: &SessionKey, bytes: u64) {
        if let Some(binding) = self.bindings.get_mut(key) {
            binding.body_bytes = bytes;
        }
    }

    /// Moves a session with a running turn to another worker.
    pub fn rebind(&mut self, key: &SessionKey, worker: WorkerRef) {
        if let Some(binding) = self.bindings.get_mut(key) {
            binding.worker = worker;
            binding.opened = None;
        }
    }

    /// Records the agent's answer to an open.
    ///
    /// # Errors
    /// If the table is full of sessions with running turns.
    pub fn record_open(
        &mut self,
        worker: WorkerRef,
        opened: OpenAnswer,
        now: Instant,
    ) -> Result<(), Full> {
        let (session, key) = (&opened.session, opened.session.key.clone());
        let binding = self.entry(&key, worker, now)?;
        binding.worker = worker;
        binding.exclusive = session.exclusive;
        if binding.closing != Closing::No {
            binding.closing = Closing::No;
            binding.reopened = Some(now);
        }
        binding.placement_only = false;
        binding.opened = Some(opened);
        self.update_idle_order(&key, now);
        Ok(())
    }

    /// Records that the agent is being asked to close the session. The caller has checked that no
    /// other close is under way.
    ///
    /// # Errors
    /// If the table is full of sessions with running turns.
    pub fn record_close_request(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        now: Instant,
    ) -> Result<(), Full> {
        self.entry(key, worker, now)?.closing = Closing::Asked;
        self.update_idle_order(key, now);
        Ok(())
    }

    /// Records that the agent has closed the session.
    pub fn record_close(&mut self, key: &SessionKey, deferred: bool, now: Instant) {
        if let Some(binding) = self.bindings.get_mut(key) {
            binding.closing = Closing::Closed { at: now, deferred };
            binding.opened = None;
            binding.exclusive = false;
        }
        self.update_idle_order(key, now);
    }

    /// Records that the agent could not be asked, so the session stays as it was.
    pub fn record_close_failure(&mut self, key: &SessionKey) {
        if let Some(binding) = self.bindings.get_mut(key) {
            binding.closing = Closing::No;
        }
    }

    /// Removes a binding, unless a running turn holds it.
    pub fn forget(&mut self, key: &SessionKey) {
        let Some(binding) = self.bindings.get(key) else { return };
        if binding.turns == 0 {
            if let Some(idle_place) = binding.idle {
                self.idle.remove(&idle_place);
            }
            self.bindings.remove(key);
        }
    }

    /// Iterates over the keys of one principal's bindings.
    pub fn keys_of_principal<'a>(
        &'a self,
        principal: &'a str,
        now: Instant,
    ) -> impl Iterator<Item = &'a SessionKey> {
        self.bindings
            .keys()
            .filter(move |key| key.principal() == principal && self.get(key, now).is_some())
    }

    /// Returns the number of bindings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bindings.len()
    }

    /// Whether there are no bindings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bindings.is_empty()
    }

    /// Returns the binding of the key. Makes room and inserts a new binding if there is none.
    fn entry(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        now: Instant,
    ) -> Result<&mut Binding, Full> {
        self.expire(now);
        if !self.bindings.contains_key(key) {
            if self.bindings.len() >= self.bindings_max {
                let (_, oldest) = self.idle.pop_first().ok_or(Full)?;
                self.bindings.remove(&oldest);
            }
            let binding = Binding {
                worker,
                turns: 0,
                unanswered: 0,
                exclusive: false,
                last_turn_ended: None,
                opened: None,
                closing: Closing::No,
                moved_at: None,
                reopened: None,
                placement_only: false,
                body_bytes: 0,
                idle: None,
            };
            self.bindings.insert(key.clone(), binding);
        }
        Ok(self.bindings.get_mut(key).expect("the binding was inserted above"))
    }

    /// Drops the bindings that were idle for too long. `idle` is ordered by time.
    fn expire(&mut self, now: Instant) {
        while let Some((&(since, _), _)) = self.idle.first_key_value() {
            if now.saturating_duration_since(since) <= self.idle_max {
                break;
            }
            let (_, key) = self.idle.pop_first().expect("the entry was seen just above");
            self.bindings.remove(&key);
        }
    }

    /// Puts the binding at the end of the idle order, or takes it out of the order while a turn
    /// runs.
    fn update_idle_order(&mut self, key: &SessionKey, now: Instant) {
        let Some(binding) = self.bindings.get_mut(key) else { return };
        if let Some(idle_place) = binding.idle.take() {
            self.idle.remove(&idle_place);
        }
        if binding.turns == 0 {
            self.next_number += 1;
            let idle_place = (now, self.next_number);
            binding.idle = Some(idle_place);
            self.idle.insert(idle_place, key.clone());
        }
        #[cfg(test)]
        self.check_invariants();
    }

    /// Panics if the table contradicts itself.
    pub fn check_invariants(&self) {
        assert!(self.bindings.len() <= self.bindings_max, "over the bound");
        let mut idle = 0;
        for (key, binding) in &self.bindings {
            assert_eq!(binding.turns == 0, binding.idle.is_some(), "held but in the idle order");
            if let Some(idle_place) = &binding.idle {
                assert_eq!(self.idle.get(idle_place), Some(key), "another key's place");
                idle += 1;
            }
        }
        assert_eq!(idle, self.idle.len(), "places of bindings that were removed");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::testing::start;

    fn key(n: u8) -> SessionKey {
        SessionKey::new("p", format!("s{n}")).unwrap()
    }

    fn worker(agent: usize) -> WorkerRef {
        WorkerRef { agent, dp_rank: 0 }
    }

    #[test]
    fn a_held_binding_outlives_its_idle_time_and_an_idle_one_does_not() {
        let t0 = start();
        let mut affinity = Affinity::new(4, Duration::from_secs(10));
        affinity.begin_turn(&key(1), worker(1), false, t0).unwrap();
        let later = t0 + Duration::from_secs(60);
        assert_eq!(affinity.get(&key(1), later).unwrap().worker, worker(1));
        affinity.end_turn(&key(1), later);
        assert!(affinity.get(&key(1), later + Duration::from_secs(10)).is_some());
        assert!(affinity.get(&key(1), later + Duration::from_secs(11)).is_none());
    }

    #[test]
    fn the_longest_idle_makes_room_and_held_ones_never_do() {
        let t0 = start();
        let mut affinity = Affinity::new(2, Duration::from_secs(10));
        affinity.begin_turn(&key(1), worker(1), false, t0).unwrap();
        affinity.begin_turn(&key(2), worker(2), false, t0).unwrap();
        assert_eq!(affinity.begin_turn(&key(3), worker(1), false, t0), Err(Full));
        affinity.end_turn(&key(2), t0);
        affinity.begin_turn(&key(3), worker(1), false, t0).unwrap();
        assert!(affinity.get(&key(2), t0).is_none());
        assert!(affinity.get(&key(1), t0).is_some());
    }

    #[test]
    fn a_turn_after_a_close_begins_a_new_life() {
        let t0 = start();
        let mut affinity = Affinity::new(2, Duration::from_secs(10));
        affinity.begin_turn(&key(1), worker(1), true, t0).unwrap();
        affinity.end_turn(&key(1), t0);
        affinity.record_close_request(&key(1), worker(1), t0).unwrap();
        affinity.record_close(&key(1), false, t0);
        affinity.begin_turn(&key(1), worker(2), false, t0).unwrap();
        let binding = affinity.get(&key(1), t0).unwrap();
        assert_eq!((binding.closing, binding.exclusive), (Closing::No, false));
    }

    proptest! {
        #[test]
        fn invariants_hold_whatever_happens(ops in prop::collection::vec((0..6_u8, 0..5_u8, 0..4_u64), 0..120)) {
            let mut now = start();
            let mut affinity = Affinity::new(3, Duration::from_secs(5));
            let mut running: Vec<SessionKey> = vec![];
            for (op, id, wait) in ops {
                now += Duration::from_secs(wait);
                let key = key(id);
                match op {
                    0 | 1 => {
                        if affinity.begin_turn(&key, worker(usize::from(id)), false, now).is_ok() {
                            running.push(key);
                        }
                    }
                    2 => {
                        if let Some(key) = running.pop() {
                            affinity.end_turn(&key, now);
                        }
                    }
                    3 => drop(affinity.record_close_request(&key, worker(0), now)),
                    4 => affinity.record_close(&key, id % 2 == 0, now),
                    _ => affinity.forget(&key),
                }
                affinity.check_invariants();
                for key in &running {
                    prop_assert!(affinity.get(key, now).is_some(), "a held binding is gone");
                }
            }
        }
    }
}

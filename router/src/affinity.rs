//! Session -> worker, as this router decided it. Pure: every method takes `now`.
//!
//! The agents' tables are the truth about sessions; this remembers what they can't tell yet or at
//! all: decisions whose first turn is under way, placements without engine state, and what this
//! router opened or closed a moment ago. A binding is held while its turns run, then forgotten
//! after an idle time; the table is bounded, the longest idle goes first.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use proto::{id::SessionKey, load::Session};

use crate::view::WorkerRef;

/// How long an agent's table may lag behind what this router did itself. Changes arrive within
/// milliseconds; this is the bound on staleness under which an agent still counts as heard.
pub const TABLE_LAG: Duration = Duration::from_secs(3);

/// One remembered decision.
#[derive(Debug)]
pub struct Binding {
    /// Where its turns go.
    pub worker: WorkerRef,
    /// Turns this router has in flight on it.
    pub turns: u32,
    /// Those of them whose answer has not begun: no client can have the whole of it yet.
    pub unanswered: u32,
    /// One turn at a time, by the client's wish.
    pub exclusive: bool,
    /// When the last turn through this router ended.
    pub ended: Option<Instant>,
    /// What the agent answered to an open. Counts for [`TABLE_LAG`].
    pub opened: Option<Opened>,
    /// A close through this router.
    pub closing: Closing,
    /// When a turn took it to another worker last.
    pub moved: Option<Instant>,
    /// When it began a new life after a close.
    pub reborn: Option<Instant>,
    /// The client asked for placement only: no agent will ever report it.
    pub placement_only: bool,
    /// Of its last turn.
    pub body_bytes: u64,
    /// The place in the order of forgetting; only while no turn runs.
    idle: Option<(Instant, u64)>,
}

/// An open that an agent agreed to.
#[derive(Debug)]
pub struct Opened {
    /// As answered.
    pub session: Arc<Session>,
    /// The agent's epoch: what another one opened went with it.
    pub epoch: Option<u64>,
    /// When.
    pub at: Instant,
}

/// How far a close has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    /// None was asked for.
    No,
    /// The agent has been asked.
    Asked,
    /// The agent has agreed; `deferred` while a turn still runs.
    Closed {
        /// When.
        at: Instant,
        /// A turn still ran.
        deferred: bool,
    },
}

/// Every binding is held by a running turn and the table is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("sessions_max sessions have turns in flight")]
pub struct Full;

/// The table.
#[derive(Debug)]
pub struct Affinity {
    bindings: HashMap<SessionKey, Binding>,
    idle: BTreeMap<(Instant, u64), SessionKey>,
    next: u64,
    idle_max: Duration,
    size_max: usize,
}

impl Binding {
    /// It takes one turn at a time, and one runs for certain. One whose answer has begun may have
    /// ended already, and its client may have all of it: there the agent's gate decides. So it does
    /// for turns of other routers, whose ends the tables tell late.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.exclusive && self.unanswered > 0
    }

    /// A turn through this router runs or ended within the tables' lag.
    #[must_use]
    pub fn is_recent(&self, now: Instant) -> bool {
        let within = |at: Instant| now.saturating_duration_since(at) <= TABLE_LAG;
        self.turns > 0 || self.ended.is_some_and(within)
    }

    /// The table may still speak of the life before.
    #[must_use]
    pub fn is_reborn(&self, now: Instant) -> bool {
        self.reborn.is_some_and(|at| now.saturating_duration_since(at) <= TABLE_LAG)
    }

    /// What an open answered, while the table of the agent of this epoch may lag behind it.
    #[must_use]
    pub fn just_opened(&self, epoch: Option<u64>, now: Instant) -> Option<&Arc<Session>> {
        let opened = self.opened.as_ref().filter(|opened| opened.epoch == epoch)?;
        (now.saturating_duration_since(opened.at) <= TABLE_LAG).then_some(&opened.session)
    }
}

impl Affinity {
    /// Empty.
    #[must_use]
    pub fn new(size_max: usize, idle_max: Duration) -> Self {
        Self { bindings: HashMap::new(), idle: BTreeMap::new(), next: 0, idle_max, size_max }
    }

    /// The binding, unless it was idle for too long.
    #[must_use]
    pub fn get(&self, key: &SessionKey, now: Instant) -> Option<&Binding> {
        let binding = self.bindings.get(key)?;
        let expired = binding
            .idle
            .is_some_and(|(since, _)| now.saturating_duration_since(since) > self.idle_max);
        (!expired).then_some(binding)
    }

    /// Counts a turn on the session and binds it to the worker. A binding that was closed begins
    /// a new life.
    ///
    /// # Errors
    /// When the table is full of sessions with running turns.
    pub fn begin(
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
            binding.reborn = Some(now);
        }
        if std::mem::replace(&mut binding.worker, worker) != worker {
            binding.moved = Some(now);
        }
        binding.exclusive |= exclusive;
        binding.turns += 1;
        binding.unanswered += 1;
        self.settle(key, now);
        Ok(())
    }

    /// A turn's answer has begun, or never will. At most once for each turn, before its end.
    pub fn answered(&mut self, key: &SessionKey) {
        let binding = self.bindings.get_mut(key).expect("a begun turn holds its binding");
        assert!(binding.unanswered > 0, "a turn was answered twice");
        binding.unanswered -= 1;
    }

    /// Ends a turn that was begun.
    pub fn end(&mut self, key: &SessionKey, now: Instant) {
        let binding = self.bindings.get_mut(key).expect("a begun turn holds its binding");
        assert!(binding.turns > 0, "a turn ended twice");
        binding.turns -= 1;
        binding.unanswered = binding.unanswered.min(binding.turns);
        binding.ended = Some(now);
        self.settle(key, now);
    }

    /// Says whether the client wants more of it than placement.
    pub fn set_placement_only(&mut self, key: &SessionKey, placement_only: bool) {
        if let Some(binding) = self.bindings.get_mut(key) {
            binding.placement_only = placement_only;
        }
    }

    /// Notes how large the session's newest turn is.
    pub fn note_body(&mut self, key: &SessionKey, bytes: u64) {
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

    /// Remembers what the agent answered to an open.
    ///
    /// # Errors
    /// When the table is full of sessions with running turns.
    pub fn opened(&mut self, worker: WorkerRef, opened: Opened, now: Instant) -> Result<(), Full> {
        let (session, key) = (&opened.session, opened.session.key.clone());
        let binding = self.entry(&key, worker, now)?;
        binding.worker = worker;
        binding.exclusive = session.exclusive;
        if binding.closing != Closing::No {
            binding.closing = Closing::No;
            binding.reborn = Some(now);
        }
        binding.placement_only = false;
        binding.opened = Some(opened);
        self.settle(&key, now);
        Ok(())
    }

    /// Notes that the agent is asked to close. The caller has checked that nobody else does.
    ///
    /// # Errors
    /// When the table is full of sessions with running turns.
    pub fn close_asked(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        now: Instant,
    ) -> Result<(), Full> {
        self.entry(key, worker, now)?.closing = Closing::Asked;
        self.settle(key, now);
        Ok(())
    }

    /// The agent has closed it.
    pub fn closed(&mut self, key: &SessionKey, deferred: bool, now: Instant) {
        if let Some(binding) = self.bindings.get_mut(key) {
            binding.closing = Closing::Closed { at: now, deferred };
            binding.opened = None;
            binding.exclusive = false;
        }
        self.settle(key, now);
    }

    /// The agent could not be asked: the session is as before.
    pub fn close_failed(&mut self, key: &SessionKey) {
        if let Some(binding) = self.bindings.get_mut(key) {
            binding.closing = Closing::No;
        }
    }

    /// Forgets a binding that no turn holds.
    pub fn forget(&mut self, key: &SessionKey) {
        let Some(binding) = self.bindings.get(key) else { return };
        if binding.turns == 0 {
            if let Some(place) = binding.idle {
                self.idle.remove(&place);
            }
            self.bindings.remove(key);
        }
    }

    /// All bindings of one principal.
    pub fn of_principal<'a>(
        &'a self,
        principal: &'a str,
        now: Instant,
    ) -> impl Iterator<Item = &'a SessionKey> {
        self.bindings
            .keys()
            .filter(move |key| key.principal() == principal && self.get(key, now).is_some())
    }

    /// Bindings held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bindings.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bindings.is_empty()
    }

    /// The binding under the key, made if absent, with room made first.
    fn entry(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        now: Instant,
    ) -> Result<&mut Binding, Full> {
        self.expire(now);
        if !self.bindings.contains_key(key) {
            if self.bindings.len() >= self.size_max {
                let (_, oldest) = self.idle.pop_first().ok_or(Full)?;
                self.bindings.remove(&oldest);
            }
            let binding = Binding {
                worker,
                turns: 0,
                unanswered: 0,
                exclusive: false,
                ended: None,
                opened: None,
                closing: Closing::No,
                moved: None,
                reborn: None,
                placement_only: false,
                body_bytes: 0,
                idle: None,
            };
            self.bindings.insert(key.clone(), binding);
        }
        Ok(self.bindings.get_mut(key).expect("it was inserted above"))
    }

    /// Drops what was idle for too long; the order of `idle` is that of time.
    fn expire(&mut self, now: Instant) {
        while let Some((&(since, _), _)) = self.idle.first_key_value() {
            if now.saturating_duration_since(since) <= self.idle_max {
                break;
            }
            let (_, key) = self.idle.pop_first().expect("it was first a line above");
            self.bindings.remove(&key);
        }
    }

    /// Puts the binding at its place in the order of forgetting, or takes it out while held.
    fn settle(&mut self, key: &SessionKey, now: Instant) {
        let Some(binding) = self.bindings.get_mut(key) else { return };
        if let Some(place) = binding.idle.take() {
            self.idle.remove(&place);
        }
        if binding.turns == 0 {
            self.next += 1;
            let place = (now, self.next);
            binding.idle = Some(place);
            self.idle.insert(place, key.clone());
        }
        #[cfg(test)]
        self.check_invariants();
    }

    /// Panics where the table contradicts itself.
    pub fn check_invariants(&self) {
        assert!(self.bindings.len() <= self.size_max, "over the bound");
        let mut idle = 0;
        for (key, binding) in &self.bindings {
            assert_eq!(binding.turns == 0, binding.idle.is_some(), "held and in the idle order");
            if let Some(place) = &binding.idle {
                assert_eq!(self.idle.get(place), Some(key), "a foreign place in the order");
                idle += 1;
            }
        }
        assert_eq!(idle, self.idle.len(), "places of forgotten bindings");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::start;

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
        affinity.begin(&key(1), worker(1), false, t0).unwrap();
        let later = t0 + Duration::from_secs(60);
        assert_eq!(affinity.get(&key(1), later).unwrap().worker, worker(1));
        affinity.end(&key(1), later);
        assert!(affinity.get(&key(1), later + Duration::from_secs(10)).is_some());
        assert!(affinity.get(&key(1), later + Duration::from_secs(11)).is_none());
    }

    #[test]
    fn the_longest_idle_makes_room_and_held_ones_never_do() {
        let t0 = start();
        let mut affinity = Affinity::new(2, Duration::from_secs(10));
        affinity.begin(&key(1), worker(1), false, t0).unwrap();
        affinity.begin(&key(2), worker(2), false, t0).unwrap();
        assert_eq!(affinity.begin(&key(3), worker(1), false, t0), Err(Full));
        affinity.end(&key(2), t0);
        affinity.begin(&key(3), worker(1), false, t0).unwrap();
        assert!(affinity.get(&key(2), t0).is_none());
        assert!(affinity.get(&key(1), t0).is_some());
    }

    #[test]
    fn a_turn_after_a_close_begins_a_new_life() {
        let t0 = start();
        let mut affinity = Affinity::new(2, Duration::from_secs(10));
        affinity.begin(&key(1), worker(1), true, t0).unwrap();
        affinity.end(&key(1), t0);
        affinity.close_asked(&key(1), worker(1), t0).unwrap();
        affinity.closed(&key(1), false, t0);
        affinity.begin(&key(1), worker(2), false, t0).unwrap();
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
                        if affinity.begin(&key, worker(usize::from(id)), false, now).is_ok() {
                            running.push(key);
                        }
                    }
                    2 => {
                        if let Some(key) = running.pop() {
                            affinity.end(&key, now);
                        }
                    }
                    3 => drop(affinity.close_asked(&key, worker(0), now)),
                    4 => affinity.closed(&key, id % 2 == 0, now),
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

//! Remembers to which worker this router has bound each session. Pure.
//!
//! The *session tables* of the agents are authoritative. This table adds what they don't show:
//! sessions whose first turn still runs, sessions that are only placed, without state in the
//! engine, and what this router opened or closed within the last seconds.
//!
//! A *binding* stays while its session's turns run, and for an idle time after the last of them. A
//! binding to an agent that has left the fleet is dropped when it is met.
//! The table is bounded, and a principal gets its share of it by the rule of `shares`. Beyond that,
//! and when the table is full, the binding that has been idle for longest is dropped: the
//! principal's own, if it has one.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{id::SessionKey, load::Session};
use service::auth::keys::PriorityClass;

use crate::{
    fleet::{snapshot::Snapshot, worker::WorkerRef},
    shares::{self, Ask},
};

/// How long an agent's session table may lag behind this router's own actions. Changes normally
/// arrive within milliseconds. Longer silence makes the agent's workers stale.
pub const TABLE_LAG_MAX: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownPlacementClaim {
    /// `None` if nobody gave a claim.
    pub generation: Option<u64>,
    /// Until then other routers know the binding.
    pub valid_until: Instant,
}

#[derive(Debug)]
pub struct OpenAnswer {
    pub session: Arc<Session>,
    /// The agent's epoch when it answered. Sessions that an earlier process opened are gone.
    pub epoch: Option<u64>,
    pub answered_at: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseProgress {
    NotRequested,
    Requested,
    /// The agent has agreed to close the session.
    Closed {
        at: Instant,
        /// A turn was still running. The session closes when the turn ends.
        is_deferred: bool,
    },
}

/// A session's worker, as this router decided it, and what the agents' session tables may not show.
#[derive(Debug)]
pub struct Binding {
    pub worker: WorkerRef,
    pub turns: u32,
    /// Of `turns`, those whose answer has not begun. Such a turn surely still runs.
    pub unanswered_turns: u32,
    /// The session takes one turn at a time, as the client asked.
    pub exclusive: bool,
    /// Of the turns through this router.
    pub last_turn_ended: Option<Instant>,
    /// What the agent answered when this router opened the session. Valid for [`TABLE_LAG_MAX`].
    pub open_answer: Option<OpenAnswer>,
    pub close_progress: CloseProgress,
    pub moved_at: Option<Instant>,
    pub reopened_at: Option<Instant>,
    /// Without state in the engine, as the client wants. No agent ever reports such a session.
    pub placement_only: bool,
    /// Of the last turn.
    pub body_bytes: u64,
    /// `None` if the binding was never claimed.
    pub claimed: Option<KnownPlacementClaim>,
    /// `None` while a turn runs.
    idle_order_key: Option<IdleOrderKey>,
}

/// When a binding became idle, and a unique number that orders bindings of the same time.
type IdleOrderKey = (Instant, u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TableFull {
    #[error("all sessions_max sessions have turns in flight; try again")]
    All,
    #[error(
        "this client has its share of sessions_max, and all of these sessions have turns in \
         flight; try again"
    )]
    Share,
}

#[derive(Debug, Default)]
struct PrincipalBindings {
    /// At least one.
    keys: BTreeSet<SessionKey>,
    /// Those without a running turn, longest idle first.
    idle_order: BTreeSet<IdleOrderKey>,
}

#[derive(Debug)]
pub struct Bindings {
    by_key: HashMap<SessionKey, Binding>,
    /// Those without a running turn, longest idle first.
    idle_order: BTreeMap<IdleOrderKey, SessionKey>,
    principals: HashMap<Box<str>, PrincipalBindings>,
    last_order_number: u64,
    /// Idle time after which a binding expires.
    idle_max: Duration,
    bindings_max: usize,
}

impl Binding {
    /// Whether the session takes one turn at a time and a turn through this router surely runs.
    ///
    /// Once a turn's answer has begun, the turn may have ended, and the client may have the whole
    /// answer. This router also learns late when turns of other routers end. In both cases the
    /// result is false, and the agent decides whether the next turn may run.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.exclusive && self.unanswered_turns > 0
    }

    #[must_use]
    pub fn is_close_asked(&self) -> bool {
        self.close_progress != CloseProgress::NotRequested
    }

    #[must_use]
    pub fn is_claimed(&self, now: Instant) -> bool {
        self.claimed.is_some_and(|claimed| now < claimed.valid_until)
    }

    /// Whether a turn through this router runs, or ended less than [`TABLE_LAG_MAX`] ago.
    #[must_use]
    pub fn is_recent(&self, now: Instant) -> bool {
        let is_recent = |at: Instant| now.saturating_duration_since(at) <= TABLE_LAG_MAX;
        self.turns > 0 || self.last_turn_ended.is_some_and(is_recent)
    }

    /// Within [`TABLE_LAG_MAX`]. If so, an agent's table may still show the session as it was
    /// before the close.
    #[must_use]
    pub fn was_just_reopened(&self, now: Instant) -> bool {
        self.reopened_at.is_some_and(|at| now.saturating_duration_since(at) <= TABLE_LAG_MAX)
    }

    /// The session if this router opened it within [`TABLE_LAG_MAX`], at the agent process with
    /// this `epoch`.
    #[must_use]
    pub fn just_opened(&self, epoch: Option<u64>, now: Instant) -> Option<&Arc<Session>> {
        let answer = self.open_answer.as_ref().filter(|answer| answer.epoch == epoch)?;
        (now.saturating_duration_since(answer.answered_at) <= TABLE_LAG_MAX)
            .then_some(&answer.session)
    }
}

impl Bindings {
    #[must_use]
    pub fn new(bindings_max: usize, idle_max: Duration) -> Self {
        Self {
            by_key: HashMap::new(),
            idle_order: BTreeMap::new(),
            principals: HashMap::new(),
            last_order_number: 0,
            idle_max,
            bindings_max,
        }
    }

    /// `None` also if the binding was idle for too long.
    #[must_use]
    pub fn get(&self, key: &SessionKey, now: Instant) -> Option<&Binding> {
        self.by_key.get(key).filter(|binding| !self.is_expired(binding, now))
    }

    /// As [`Self::get`], but a session whose agent has left the fleet counts as never bound, unless
    /// a turn of it still runs there.
    pub fn resolve(&mut self, key: &SessionKey, view: &Snapshot, now: Instant) -> Option<&Binding> {
        let bound_to = self.by_key.get(key).map(|binding| binding.worker.agent);
        if bound_to.is_some_and(|agent| view.has_left(agent)) {
            self.forget(key);
        }
        self.get(key, now)
    }

    fn is_expired(&self, binding: &Binding, now: Instant) -> bool {
        binding
            .idle_order_key
            .is_some_and(|(since, _)| now.saturating_duration_since(since) > self.idle_max)
    }

    /// If the session was closed through this router, the turn opens it again.
    pub fn begin_turn(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        exclusive: bool,
        now: Instant,
    ) -> Result<(), TableFull> {
        let binding = self.get_or_insert(key, worker, now)?;
        if binding.is_close_asked() {
            binding.close_progress = CloseProgress::NotRequested;
            binding.exclusive = false;
            binding.reopened_at = Some(now);
        }
        if std::mem::replace(&mut binding.worker, worker) != worker {
            binding.moved_at = Some(now);
        }
        binding.exclusive |= exclusive;
        binding.turns += 1;
        binding.unanswered_turns += 1;
        self.update_idle_order(key, now);
        Ok(())
    }

    /// Records that a turn's answer has begun, or that it never will. Call this at most once per
    /// turn, and before [`Self::end_turn`].
    pub fn record_answer(&mut self, key: &SessionKey) {
        let binding = self.by_key.get_mut(key).expect("a running turn holds its binding");
        assert!(binding.unanswered_turns > 0, "a turn was answered twice");
        binding.unanswered_turns -= 1;
    }

    pub fn end_turn(&mut self, key: &SessionKey, now: Instant) {
        let binding = self.by_key.get_mut(key).expect("a running turn holds its binding");
        assert!(binding.turns > 0, "a turn ended twice");
        binding.turns -= 1;
        binding.unanswered_turns = binding.unanswered_turns.min(binding.turns);
        binding.last_turn_ended = Some(now);
        self.update_idle_order(key, now);
    }

    pub fn set_placement_only(&mut self, key: &SessionKey, placement_only: bool) {
        if let Some(binding) = self.by_key.get_mut(key) {
            binding.placement_only = placement_only;
        }
    }

    pub fn record_body_size(&mut self, key: &SessionKey, bytes: u64) {
        if let Some(binding) = self.by_key.get_mut(key) {
            binding.body_bytes = bytes;
        }
    }

    /// The session has a running turn.
    pub fn rebind(&mut self, key: &SessionKey, worker: WorkerRef) {
        if let Some(binding) = self.by_key.get_mut(key) {
            binding.worker = worker;
            binding.open_answer = None;
        }
    }

    /// Binds a session with a running turn to the worker that all routers know.
    pub fn record_claim(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        claimed: KnownPlacementClaim,
    ) {
        if self.by_key.get(key).is_some_and(|binding| binding.worker.agent != worker.agent) {
            self.rebind(key, worker);
        }
        self.renew_claim(key, worker, claimed);
    }

    /// Does nothing if the session is no longer bound to this worker's agent.
    pub fn renew_claim(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        claimed: KnownPlacementClaim,
    ) {
        let binding = self.by_key.get_mut(key);
        if let Some(binding) = binding.filter(|binding| binding.worker.agent == worker.agent) {
            binding.claimed = Some(claimed);
        }
    }

    pub fn record_open(
        &mut self,
        worker: WorkerRef,
        open_answer: OpenAnswer,
        now: Instant,
    ) -> Result<(), TableFull> {
        let (session, key) = (&open_answer.session, open_answer.session.key.clone());
        let binding = self.get_or_insert(&key, worker, now)?;
        binding.worker = worker;
        binding.exclusive = session.exclusive;
        if binding.is_close_asked() {
            binding.close_progress = CloseProgress::NotRequested;
            binding.reopened_at = Some(now);
        }
        binding.placement_only = false;
        binding.open_answer = Some(open_answer);
        self.update_idle_order(&key, now);
        Ok(())
    }

    /// The caller has checked that no other close is under way.
    pub fn record_close_request(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        now: Instant,
    ) -> Result<(), TableFull> {
        self.get_or_insert(key, worker, now)?.close_progress = CloseProgress::Requested;
        self.update_idle_order(key, now);
        Ok(())
    }

    pub fn record_close(&mut self, key: &SessionKey, is_deferred: bool, now: Instant) {
        if let Some(binding) = self.by_key.get_mut(key) {
            binding.close_progress = CloseProgress::Closed { at: now, is_deferred };
            binding.open_answer = None;
            binding.exclusive = false;
        }
        self.update_idle_order(key, now);
    }

    /// The agent could not be asked, so the session stays open.
    pub fn record_close_failure(&mut self, key: &SessionKey) {
        if let Some(binding) = self.by_key.get_mut(key) {
            binding.close_progress = CloseProgress::NotRequested;
        }
    }

    /// Does nothing if a running turn holds the binding.
    pub fn forget(&mut self, key: &SessionKey) {
        let Some(binding) = self.by_key.get(key) else { return };
        if binding.turns == 0 {
            self.remove(&key.clone());
        }
    }

    /// In order, from the one after `after`.
    pub fn keys_of_principal(
        &self,
        principal: &str,
        after: Option<&SessionKey>,
        now: Instant,
    ) -> impl Iterator<Item = &SessionKey> {
        let own = self.principals.get(principal);
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let keys = own.into_iter().flat_map(move |own| own.keys.range((start, Bound::Unbounded)));
        keys.filter(move |key| self.get(key, now).is_some())
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    fn get_or_insert(
        &mut self,
        key: &SessionKey,
        worker: WorkerRef,
        now: Instant,
    ) -> Result<&mut Binding, TableFull> {
        self.drop_expired(now);
        if !self.by_key.contains_key(key) {
            self.make_room(key.principal())?;
            let binding = Binding {
                worker,
                turns: 0,
                unanswered_turns: 0,
                exclusive: false,
                last_turn_ended: None,
                open_answer: None,
                close_progress: CloseProgress::NotRequested,
                moved_at: None,
                reopened_at: None,
                placement_only: false,
                body_bytes: 0,
                claimed: None,
                idle_order_key: None,
            };
            self.by_key.insert(key.clone(), binding);
            match self.principals.get_mut(key.principal()) {
                Some(principal) => {
                    principal.keys.insert(key.clone());
                }
                None => {
                    let keys = BTreeSet::from([key.clone()]);
                    let principal = PrincipalBindings { keys, ..Default::default() };
                    self.principals.insert(key.principal().into(), principal);
                }
            }
        }
        Ok(self.by_key.get_mut(key).expect("the binding was inserted above"))
    }

    fn drop_expired(&mut self, now: Instant) {
        while let Some((&(since, number), _)) = self.idle_order.first_key_value() {
            if now.saturating_duration_since(since) <= self.idle_max {
                break;
            }
            self.drop_idle((since, number));
        }
    }

    fn make_room(&mut self, principal: &str) -> Result<(), TableFull> {
        let own = self.principals.get(principal);
        let held = own.map_or(0, |own| own.keys.len());
        let (bindings_max, used) = (self.bindings_max as u64, self.by_key.len() as u64);
        let ask = Ask { units: 1, class: PriorityClass::Normal, key_max: None };
        if shares::check(bindings_max, used, held as u64, ask).is_ok() {
            return Ok(());
        }
        let own_oldest = own.and_then(|own| own.idle_order.first().copied());
        let is_full = used >= bindings_max;
        let oldest =
            || self.idle_order.first_key_value().map(|(idle_order_key, _)| *idle_order_key);
        match own_oldest.or_else(|| oldest().filter(|_| is_full)) {
            Some(idle_order_key) => self.drop_idle(idle_order_key),
            None if is_full => return Err(TableFull::All),
            None => return Err(TableFull::Share),
        }
        Ok(())
    }

    fn drop_idle(&mut self, idle_order_key: IdleOrderKey) {
        let key = self.idle_order.get(&idle_order_key).expect("the place was seen before").clone();
        self.remove(&key);
    }

    fn remove(&mut self, key: &SessionKey) {
        let Some(binding) = self.by_key.remove(key) else { return };
        let principal = self.principals.get_mut(key.principal()).expect("it has a binding");
        principal.keys.remove(key);
        if let Some(idle_order_key) = binding.idle_order_key {
            self.idle_order.remove(&idle_order_key);
            principal.idle_order.remove(&idle_order_key);
        }
        if principal.keys.is_empty() {
            self.principals.remove(key.principal());
        }
    }

    /// Moves the binding to the end of the idle order, or out of it while a turn runs.
    fn update_idle_order(&mut self, key: &SessionKey, now: Instant) {
        let Some(binding) = self.by_key.get_mut(key) else { return };
        let principal = self.principals.get_mut(key.principal()).expect("it has a binding");
        if let Some(idle_order_key) = binding.idle_order_key.take() {
            self.idle_order.remove(&idle_order_key);
            principal.idle_order.remove(&idle_order_key);
        }
        if binding.turns == 0 {
            self.last_order_number += 1;
            let idle_order_key = (now, self.last_order_number);
            binding.idle_order_key = Some(idle_order_key);
            self.idle_order.insert(idle_order_key, key.clone());
            principal.idle_order.insert(idle_order_key);
        }
        #[cfg(test)]
        self.check_invariants();
    }

    pub fn check_invariants(&self) {
        assert!(self.by_key.len() <= self.bindings_max, "over the bound");
        let mut idle_count = 0;
        for (key, binding) in &self.by_key {
            assert!(self.principals[key.principal()].keys.contains(key), "no principal's");
            assert_eq!(
                binding.turns == 0,
                binding.idle_order_key.is_some(),
                "held but in the idle order"
            );
            if let Some(idle_order_key) = &binding.idle_order_key {
                assert_eq!(self.idle_order.get(idle_order_key), Some(key), "another key's place");
                idle_count += 1;
            }
        }
        assert_eq!(idle_count, self.idle_order.len(), "places of bindings that were removed");
        let principals = self.principals.values();
        let (count, places) = principals.fold((0, 0), |(count, places), principal| {
            assert!(!principal.keys.is_empty(), "a principal without bindings is kept");
            assert!(principal.keys.iter().all(|key| self.by_key.contains_key(key)));
            (count + principal.keys.len(), places + principal.idle_order.len())
        });
        assert_eq!(count, self.by_key.len(), "bindings of no principal");
        assert_eq!(places, idle_count, "places of no principal");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::{testing::start, worker::AgentKey};

    fn key(n: u8) -> SessionKey {
        SessionKey::new("p", format!("s{n}")).unwrap()
    }

    fn worker(agent: usize) -> WorkerRef {
        WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }
    }

    #[test]
    fn a_held_binding_outlives_its_idle_time_and_an_idle_one_does_not() {
        let t0 = start();
        let mut bindings = Bindings::new(4, Duration::from_secs(10));
        bindings.begin_turn(&key(1), worker(1), false, t0).unwrap();
        let later = t0 + Duration::from_secs(60);
        assert_eq!(bindings.get(&key(1), later).unwrap().worker, worker(1));
        bindings.end_turn(&key(1), later);
        assert!(bindings.get(&key(1), later + Duration::from_secs(10)).is_some());
        assert!(bindings.get(&key(1), later + Duration::from_secs(11)).is_none());
    }

    #[test]
    fn the_longest_idle_makes_room_and_held_ones_never_do() {
        let t0 = start();
        let mut bindings = Bindings::new(2, Duration::from_secs(10));
        bindings.begin_turn(&key(1), worker(1), false, t0).unwrap();
        bindings.begin_turn(&key(2), worker(2), false, t0).unwrap();
        assert_eq!(bindings.begin_turn(&key(3), worker(1), false, t0), Err(TableFull::All));
        bindings.end_turn(&key(2), t0);
        bindings.begin_turn(&key(3), worker(1), false, t0).unwrap();
        assert!(bindings.get(&key(2), t0).is_none());
        assert!(bindings.get(&key(1), t0).is_some());
    }

    #[test]
    fn a_principal_with_many_sessions_takes_its_own_places_first() {
        let key = |principal: &str, n: u32| SessionKey::new(principal, format!("s{n}")).unwrap();
        let t0 = start();
        let mut bindings = Bindings::new(256, Duration::from_secs(10));
        bindings.begin_turn(&key("user", 0), worker(1), false, t0).unwrap();
        bindings.end_turn(&key("user", 0), t0);
        for n in 0..1000 {
            bindings.begin_turn(&key("hog", n), worker(1), false, t0).unwrap();
            bindings.end_turn(&key("hog", n), t0);
        }
        assert!(bindings.get(&key("user", 0), t0).is_some(), "the longest idle of all");
        assert_eq!(bindings.len(), 226, "16/17 of what isn't in reserve");
        let busy = (0..1000)
            .map(|n| bindings.begin_turn(&key("busy hog", n), worker(1), false, t0))
            .find_map(Result::err);
        assert_eq!(busy, Some(TableFull::Share));
        bindings.begin_turn(&key("newcomer", 0), worker(1), false, t0).unwrap();
    }

    #[test]
    fn a_turn_after_a_close_begins_a_new_life() {
        let t0 = start();
        let mut bindings = Bindings::new(2, Duration::from_secs(10));
        bindings.begin_turn(&key(1), worker(1), true, t0).unwrap();
        bindings.end_turn(&key(1), t0);
        bindings.record_close_request(&key(1), worker(1), t0).unwrap();
        bindings.record_close(&key(1), false, t0);
        bindings.begin_turn(&key(1), worker(2), false, t0).unwrap();
        let binding = bindings.get(&key(1), t0).unwrap();
        assert_eq!(
            (binding.close_progress, binding.exclusive),
            (CloseProgress::NotRequested, false)
        );
    }

    proptest! {
        #[test]
        fn invariants_hold_whatever_happens(ops in prop::collection::vec((0..6_u8, 0..5_u8, 0..4_u64), 0..120)) {
            let mut now = start();
            let mut bindings = Bindings::new(3, Duration::from_secs(5));
            let mut running: Vec<SessionKey> = vec![];
            for (op, id, wait) in ops {
                now += Duration::from_secs(wait);
                let key = key(id);
                match op {
                    0 | 1 => {
                        if bindings.begin_turn(&key, worker(usize::from(id)), false, now).is_ok() {
                            running.push(key);
                        }
                    }
                    2 => {
                        if let Some(key) = running.pop() {
                            bindings.end_turn(&key, now);
                        }
                    }
                    3 => drop(bindings.record_close_request(&key, worker(0), now)),
                    4 => bindings.record_close(&key, id % 2 == 0, now),
                    _ => bindings.forget(&key),
                }
                bindings.check_invariants();
                for key in &running {
                    prop_assert!(bindings.get(key, now).is_some(), "a held binding is gone");
                }
            }
        }
    }
}

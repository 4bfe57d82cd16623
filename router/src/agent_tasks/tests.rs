//! Simulates agents that come and go, and checks that no reference to a slot reaches another agent.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    id::SessionKey,
    load::{Retention, Session, SessionState},
};

use crate::{
    config::Config,
    fleet::{
        lease::Lease,
        membership::{AgentIds, Listing, Phase, Source},
        slot_keeper::{SlotKeeper, Step},
        snapshot::Snapshot,
        state::{SourceNews, State, Update},
        testing::{description, report, start},
        worker::{WorkerRef, WorkerState},
    },
    placement::affinity::Affinity,
};

/// Number of different addresses; fewer than the lists' changes, so that agents come back.
const ADDRESSES: usize = 12;
const STEPS: usize = 400;
const SEEDS: u64 = 60;

/// A turn that runs on a worker, and the agent that it was placed on.
struct Turn {
    key: SessionKey,
    worker: WorkerRef,
    control_url: String,
    lease: Lease,
}

struct World {
    state: State,
    keeper: SlotKeeper,
    affinity: Affinity,
    rng: fastrand::Rng,
    now: Instant,
    /// The agents whose tasks run, by slot.
    followed: BTreeMap<usize, String>,
    turns: Vec<Turn>,
    /// Old snapshots that slow decisions still use.
    held: Vec<Snapshot>,
    /// The agent that each session was bound to last.
    bound_to: BTreeMap<SessionKey, String>,
    sessions_begun: usize,
    epoch: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let workers = vec!["http://h0:1".to_owned(), "http://h1:1".to_owned()];
        Self {
            state: State::new(&Config { workers, ..Config::default() }),
            keeper: SlotKeeper::default(),
            affinity: Affinity::new(1000, Duration::from_secs(3600)),
            rng: fastrand::Rng::with_seed(seed),
            now: start(),
            followed: BTreeMap::new(),
            turns: vec![],
            held: vec![],
            bound_to: BTreeMap::new(),
            sessions_begun: 0,
            epoch: 0,
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.rng.u64(0..3000));
        match self.rng.u8(0..20) {
            0..2 => self.change_list(),
            2..8 => self.hear_agent(),
            8..12 => self.begin_turn(),
            12..15 => self.end_turn(),
            15 => self.held.push(self.state.snapshot()),
            16 if !self.held.is_empty() => {
                let index = self.rng.usize(0..self.held.len());
                self.held.swap_remove(index);
            }
            17 => {
                let _ = self.state.end_leaving(self.now);
            }
            _ => self.run_keeper(),
        }
        self.check();
    }

    fn change_list(&mut self) {
        let source = [Source::File, Source::Dns, Source::Kubernetes][self.rng.usize(0..3)];
        let mut list = BTreeMap::new();
        for address in 0..ADDRESSES {
            match self.rng.u8(0..8) {
                0 => list.insert(format!("http://h{address}:1"), Listing::Terminating),
                1..3 => list.insert(format!("http://h{address}:1/"), Listing::Serving),
                _ => None,
            };
        }
        let list = (self.rng.u8(0..6) > 0).then_some(list);
        self.state.apply_news(SourceNews { source, list, agent_ids: AgentIds::new() }, self.now);
    }

    /// Lets one agent that is followed say something.
    fn hear_agent(&mut self) {
        let Some((&slot, url)) = self.rng.choice(&self.followed) else { return };
        let (id, update) = (url.trim_start_matches("http://").replace(':', "-"), self.rng.u8(0..8));
        let session = |number: usize| session(&format!("{id}.{number}"));
        let update = match update {
            0 => Update::AgentLost("gone".to_owned()),
            1 | 2 if !self.state.agent_at(slot).is_up() => {
                self.epoch += 1;
                let sessions = (0..3).map(session).collect();
                let ranks = 1 + u32::try_from(self.epoch % 2).unwrap();
                Update::StreamBegan { description: description(&id, self.epoch, ranks), sessions }
            }
            3 => Update::SessionChanged(session(self.rng.usize(0..6))),
            4 => Update::SessionRemoved(session(self.rng.usize(0..6)).key),
            _ => {
                let ranks = self.state.agent_at(slot).facts.as_ref();
                let ranks = ranks.map_or(0, |facts| facts.description.ranks.len());
                Update::Report(report(&vec![(0, 0); ranks]))
            }
        };
        self.state.apply(slot, update, self.now);
    }

    /// Places a turn by the newest snapshot, or by an old one.
    fn begin_turn(&mut self) {
        let view = match self.rng.usize(0..=self.held.len()) {
            0 => self.state.snapshot(),
            index => self.held[index - 1].clone(),
        };
        let is_usable = |worker: &WorkerRef| {
            matches!(view.state(*worker, self.now), WorkerState::Fresh | WorkerState::Stale)
        };
        let workers: Vec<_> = view.workers().map(|(worker, ..)| worker).filter(is_usable).collect();
        let Some(&worker) = self.rng.choice(&workers) else { return };
        if self.rng.bool() {
            self.sessions_begun += 1;
        }
        let key = SessionKey::new("p", format!("s{}", self.sessions_begun)).unwrap();
        self.affinity.begin_turn(&key, worker, false, self.now).unwrap();
        let agent = view.agent(worker);
        let lease = Lease::acquire(&agent.in_flight[worker.dp_rank as usize], 1);
        let control_url = agent.control_url.clone();
        self.bound_to.insert(key.clone(), control_url.clone());
        self.turns.push(Turn { key, worker, control_url, lease });
    }

    fn end_turn(&mut self) {
        if self.turns.is_empty() {
            return;
        }
        let index = self.rng.usize(0..self.turns.len());
        let Turn { key, lease, .. } = self.turns.swap_remove(index);
        self.affinity.record_answer(&key);
        self.affinity.end_turn(&key, self.now);
        drop(lease);
    }

    fn run_keeper(&mut self) {
        let steps = self.keeper.next_steps(&self.state.snapshot());
        for step in steps {
            match step {
                Step::Start { slot, control_url } => {
                    assert_eq!(self.followed.insert(slot, control_url), None, "followed twice");
                }
                Step::Stop { slot } => {
                    // The last updates of the tasks come before their end.
                    self.state.apply(slot, Update::AgentLost("stopped".to_owned()), self.now);
                    self.followed.remove(&slot);
                    self.state.apply(slot, Update::TasksEnded, self.now);
                }
                Step::RemoveReferences { slot } => {
                    if self.affinity.forget_agent(slot) {
                        self.keeper.release(slot);
                        self.state.apply(slot, Update::Unreferenced, self.now);
                    }
                }
            }
        }
    }

    /// Checks that everything that names a slot means the agent that is there, or an agent that has
    /// left and whose slot is vacant.
    fn check(&self) {
        self.state.check_invariants();
        self.affinity.check_invariants();
        let view = self.state.snapshot();
        let check = |worker: WorkerRef, meant: &str, what: &str| {
            let there = &view.agent(worker).control_url;
            assert!(there.is_empty() || there == meant, "{what} for {meant} reaches {there}");
        };
        for turn in &self.turns {
            check(turn.worker, &turn.control_url, "a turn");
        }
        for (key, meant) in &self.bound_to {
            if let Some(binding) = self.affinity.get(key, self.now) {
                check(binding.worker, meant, "a binding");
            }
        }
        for located in view.sessions.iter() {
            let id = located.session.key.id();
            let of_agent = id.split('.').next().unwrap().replace('-', ":");
            check(located.worker, &format!("http://{of_agent}"), "a session");
        }
        for (&slot, url) in &self.followed {
            let there = &self.state.agent_at(slot).control_url;
            assert_eq!(there, url, "the tasks of {url} write to the slot of {there}");
        }
    }

    /// Lets everything end, and checks that nothing of it is left.
    fn finish(&mut self) {
        for source in Source::ALL {
            let list = Some(BTreeMap::new());
            self.state
                .apply_news(SourceNews { source, list, agent_ids: AgentIds::new() }, self.now);
        }
        self.held.clear();
        while !self.turns.is_empty() {
            self.end_turn();
        }
        self.now += Duration::from_secs(3600);
        for _ in 0..4 {
            let _ = self.state.end_leaving(self.now);
            self.run_keeper();
            self.check();
        }
        let view = self.state.snapshot();
        assert!(view.agents.iter().all(|agent| agent.phase == Phase::Free), "a slot is left");
        assert!(self.followed.is_empty() && self.affinity.is_empty() && view.sessions.is_empty());
        assert_eq!(view.worker_table().workers().len(), 0);
        assert!(!self.keeper.has_ended_slots());
    }
}

fn session(id: &str) -> Session {
    Session {
        key: SessionKey::new("p", id).unwrap(),
        retention: Retention::Pinned,
        state: SessionState::Idle,
        dp_rank: 0,
        turns: 1,
        turns_running: 0,
        exclusive: false,
        resident_tokens: None,
        idle: Duration::ZERO,
        full_history: false,
        volatile_prefix: None,
        began_unix_ms: 0,
        parent: None,
    }
}

#[test]
fn no_turn_binding_or_session_reaches_the_next_agent_of_a_slot() {
    let mut slots_max = 0;
    for seed in 0..SEEDS {
        let mut world = World::new(seed);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..STEPS).for_each(|_| world.step());
            world.finish();
        }));
        assert!(result.is_ok(), "seed {seed} failed");
        slots_max = slots_max.max(world.state.snapshot().agents.len());
    }
    // Slots are used again, so few more are needed than there are agents at once.
    assert!(slots_max < 4 * ADDRESSES, "{slots_max} slots for {ADDRESSES} addresses");
}

#[test]
fn an_agent_that_comes_back_in_time_keeps_all_that_is_known_of_it() {
    let mut state = crate::fleet::testing::fleet(&[(0, 0)], start());
    let (now, later) = (start(), start() + Duration::from_secs(2));
    state.apply(0, Update::SessionChanged(session("s")), now);
    let none = SourceNews {
        source: Source::Static,
        list: Some(BTreeMap::new()),
        agent_ids: AgentIds::new(),
    };
    state.apply_news(none, now);
    let worker = WorkerRef { agent: 0, dp_rank: 0 };
    assert_eq!(state.snapshot().state(worker, now), WorkerState::Draining);
    assert!(state.end_leaving(later).is_empty(), "its sources may name it again");
    let url = state.agent_at(0).control_url.clone();
    let back = BTreeMap::from([(url, Listing::Serving)]);
    state.apply_news(
        SourceNews { source: Source::File, list: Some(back), agent_ids: AgentIds::new() },
        later,
    );
    let view = state.snapshot();
    assert_eq!((view.state(worker, later), view.sessions.len()), (WorkerState::Fresh, 1));
    assert_eq!(view.agent(worker).sources, [Source::File]);
}

#[test]
fn an_agent_leaves_when_its_turns_and_sessions_are_gone_or_after_the_bound() {
    let now = start();
    let mut state = crate::fleet::testing::fleet(&[(0, 0), (0, 0)], now);
    let lease = Lease::acquire(&state.agent_at(0).in_flight[0], 0);
    state.apply(1, Update::SessionChanged(session("s")), now);
    let none = SourceNews {
        source: Source::Static,
        list: Some(BTreeMap::new()),
        agent_ids: AgentIds::new(),
    };
    state.apply_news(none, now);
    let after = |seconds| now + Duration::from_secs(seconds);
    assert!(state.end_leaving(after(60)).is_empty(), "a turn runs on one, one has a session");
    drop(lease);
    assert_eq!(state.end_leaving(after(61)), ["a0"]);
    assert!(state.end_leaving(after(599)).is_empty());
    assert_eq!(state.end_leaving(after(600)), ["a1"]);
    let waits = state.snapshot().agent(WorkerRef { agent: 1, dp_rank: 0 }).lost_for(after(600));
    assert_eq!(waits, None, "nothing waits for it");
    let counts = Arc::downgrade(&state.agent_at(1).in_flight[0]);
    state.apply(1, Update::TasksEnded, after(601));
    assert_eq!(counts.strong_count(), 0);
}

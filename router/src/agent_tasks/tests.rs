//! Simulates agents that come and go, and checks that what names one never reaches another.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    id::SessionKey,
    load::{Retention, Session, SessionState},
};

use super::steps::{Step, Steps};
use crate::{
    config::Config,
    fleet::{
        lease::LoadLease,
        membership::{AgentIds, Listing, Phase, Source},
        snapshot::Snapshot,
        state::{SourceNews, State, Update},
        testing::{description, report, start},
        worker::{AgentKey, WorkerRef, WorkerState},
    },
    sessions::bindings::Bindings,
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
    lease: LoadLease,
}

struct World {
    state: State,
    steps: Steps,
    bindings: Bindings,
    rng: fastrand::Rng,
    now: Instant,
    /// The agents whose tasks run.
    followed: BTreeMap<AgentKey, String>,
    ended: Vec<AgentKey>,
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
            steps: Steps::default(),
            bindings: Bindings::new(1000, Duration::from_secs(3600)),
            rng: fastrand::Rng::with_seed(seed),
            now: start(),
            followed: BTreeMap::new(),
            ended: vec![],
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
            17 if self.rng.bool() => self.hear_of_ended_agent(),
            17 => {
                let _ = self.state.end_leaving(self.now);
            }
            _ => self.run_steps(),
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
        let Some((&agent, url)) = self.rng.choice(&self.followed) else { return };
        let (id, update) = (url.trim_start_matches("http://").replace(':', "-"), self.rng.u8(0..8));
        let session = |number: usize| session(&format!("{id}.{number}"));
        let update = match update {
            0 => Update::AgentLost("gone".to_owned()),
            1 | 2 if !self.state.agent_with(agent).is_up() => {
                self.epoch += 1;
                let sessions = (0..3).map(session).collect();
                let ranks = 1 + u32::try_from(self.epoch % 2).unwrap();
                Update::StreamBegan { description: description(&id, self.epoch, ranks), sessions }
            }
            3 => Update::SessionChanged(session(self.rng.usize(0..6))),
            4 => Update::SessionRemoved(session(self.rng.usize(0..6)).key),
            _ => {
                let ranks = self.state.agent_with(agent).facts.as_ref();
                let ranks = ranks.map_or(0, |facts| facts.description.ranks.len());
                Update::Report(report(&vec![(0, 0); ranks]))
            }
        };
        self.state.apply(agent, update, self.now);
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
        self.bindings.resolve(&key, &view, self.now);
        self.bindings.begin_turn(&key, worker, false, self.now).unwrap();
        let agent = view.agent(worker);
        let lease = LoadLease::acquire(&agent.in_flight[worker.dp_rank as usize], 1);
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
        self.bindings.record_answer(&key);
        self.bindings.end_turn(&key, self.now);
        drop(lease);
    }

    fn run_steps(&mut self) {
        for step in self.steps.next(&self.state.snapshot()) {
            match step {
                Step::Start { agent, control_url } => {
                    assert_eq!(self.followed.insert(agent, control_url), None, "followed twice");
                }
                Step::Stop { agent } => {
                    // The last updates of the tasks come before their end.
                    self.state.apply(agent, Update::AgentLost("stopped".to_owned()), self.now);
                    self.followed.remove(&agent);
                    self.state.apply(agent, Update::TasksEnded, self.now);
                    self.ended.push(agent);
                }
            }
        }
    }

    /// An update of a turn may come after its agent has left, and its slot has gone to another one.
    fn hear_of_ended_agent(&mut self) {
        let Some(&agent) = self.rng.choice(&self.ended) else { return };
        let update = match self.rng.u8(0..3) {
            0 => Update::DataPortUnreachable("refused".to_owned()),
            1 => Update::AgentLost("gone".to_owned()),
            _ => Update::SessionChanged(session("late.0")),
        };
        let before = self.state.snapshot();
        assert_eq!(self.state.apply(agent, update, self.now), None);
        let after = self.state.snapshot();
        let is_same = |(one, other)| Arc::ptr_eq(one, other);
        assert!(before.agents.iter().zip(&after.agents).all(is_same), "an ended agent was heard");
    }

    /// Checks that everything that names an agent means it or, if it has left, none.
    fn check(&self) {
        self.state.check_invariants();
        self.bindings.check_invariants();
        let view = self.state.snapshot();
        let check = |worker: WorkerRef, meant: &str, what: &str| {
            let there = &view.agent(worker).control_url;
            assert!(there.is_empty() || there == meant, "{what} for {meant} reaches {there}");
        };
        for turn in &self.turns {
            check(turn.worker, &turn.control_url, "a turn");
        }
        for (key, meant) in &self.bound_to {
            if let Some(binding) = self.bindings.get(key, self.now) {
                check(binding.worker, meant, "a binding");
            }
        }
        for located in view.sessions.iter() {
            let id = located.session.key.id();
            let of_agent = id.split('.').next().unwrap().replace('-', ":");
            check(located.worker, &format!("http://{of_agent}"), "a session");
        }
        for (&agent, url) in &self.followed {
            let there = &self.state.agent_with(agent).control_url;
            assert_eq!(there, url, "the tasks of {url} write as those of {there}");
        }
        for (key, agent) in view.known_agents() {
            let own = self.turns.iter().filter(|turn| turn.worker.agent == key).count();
            assert_eq!(agent.turns_in_flight() as usize, own, "turns of another agent count here");
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
            self.run_steps();
            self.check();
        }
        let view = self.state.snapshot();
        assert!(view.agents.iter().all(|agent| agent.phase == Phase::Free), "a slot is left");
        for key in self.bound_to.keys() {
            assert!(self.bindings.resolve(key, &view, self.now).is_none(), "a binding is left");
        }
        assert!(self.followed.is_empty() && self.bindings.is_empty() && view.sessions.is_empty());
        assert_eq!(view.worker_table().workers().len(), 0);
        assert_eq!(self.steps.next(&view), []);
        assert!(self.steps.is_empty());
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
    state.apply(AgentKey::first(0), Update::SessionChanged(session("s")), now);
    let none = SourceNews {
        source: Source::Static,
        list: Some(BTreeMap::new()),
        agent_ids: AgentIds::new(),
    };
    state.apply_news(none, now);
    let worker = WorkerRef { agent: AgentKey::first(0), dp_rank: 0 };
    assert_eq!(state.snapshot().state(worker, now), WorkerState::Draining);
    assert!(state.end_leaving(later).is_empty(), "its sources may name it again");
    let url = state.agent_with(AgentKey::first(0)).control_url.clone();
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
    let lease = LoadLease::acquire(&state.agent_with(AgentKey::first(0)).in_flight[0], 0);
    state.apply(AgentKey::first(1), Update::SessionChanged(session("s")), now);
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
    let waits = state
        .snapshot()
        .agent(WorkerRef { agent: AgentKey::first(1), dp_rank: 0 })
        .lost_for(after(600));
    assert_eq!(waits, None, "nothing waits for it");
    let counts = Arc::downgrade(&state.agent_with(AgentKey::first(1)).in_flight[0]);
    state.apply(AgentKey::first(1), Update::TasksEnded, after(601));
    assert_eq!(counts.strong_count(), 0);
}

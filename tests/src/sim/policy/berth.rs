//! Berth's policy: the router's view, affinity, overlap index and placement, used unchanged.
//!
//! This module decides nothing. It replaces the router's shell without sockets: it feeds these
//! parts with what agents would report of the modelled engines.

mod agents;
mod names;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use proto::{
    id::SessionKey,
    load::{Retention, SessionState},
};
use router::{
    affinity::Affinity,
    known::{self, Standing},
    lease::Lease,
    overlap::{Index, Overlap, Tier},
    placement::{self, Prompt, Question, Reason, Sticky},
    view::{State, Update, WorkerRef},
};

use self::{agents::Known, names::Names};
use super::{Choice, Heard, Policy};
use crate::sim::{
    fleet::{Ask, Condition, Fleet},
    options::Mode,
};

/// Bound of sessions and bindings; more than any run has.
const SESSIONS_MAX: usize = 1_000_000;
/// Bound of the overlap index; large enough that the index never drops anything here.
const INDEX_BYTES_MAX: usize = 1 << 30;
/// The idle time after which an agent forgets a session.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// The router without its sockets.
pub(super) struct Berth {
    /// The run's start.
    start: Instant,
    state: State,
    affinity: Affinity,
    index: Index,
    overlap: Overlap,
    names: Names,
    retention: Retention,
    known: HashMap<usize, Known>,
    /// The expected tokens of the turn placed last.
    expected_tokens: u64,
    /// The lease of each running turn.
    leases: HashMap<usize, Lease>,
    /// The idle sessions, longest idle first.
    idle: std::collections::BTreeSet<(Duration, usize)>,
}

impl Berth {
    pub(super) fn new(mode: Mode, fleet: &Fleet) -> Self {
        // Virtual time needs an `Instant` as its zero.
        let start = service::clock::now();
        let mut state = agents::state(fleet.workers.len());
        for (agent, worker) in fleet.workers.iter().enumerate() {
            let description = agents::description(agent, 1, worker, fleet);
            state.apply(agent, Update::Began { description, sessions: vec![] }, start);
            let report = Update::Report(agents::report(worker, fleet));
            state.apply(agent, report, start);
        }
        Self {
            start,
            state,
            affinity: Affinity::new(SESSIONS_MAX, FORGOTTEN_AFTER),
            index: Index::new(INDEX_BYTES_MAX),
            overlap: Overlap::default(),
            names: Names::default(),
            retention: if mode == Mode::Pinned { Retention::Pinned } else { Retention::Tagged },
            known: HashMap::new(),
            expected_tokens: 0,
            leases: HashMap::new(),
            idle: std::collections::BTreeSet::new(),
        }
    }

    /// Returns where a session is, as the router sees it.
    fn sticky(&self, key: &SessionKey, now: Instant) -> Option<Sticky> {
        let binding = self.affinity.get(key, now);
        let moved = binding.and_then(|binding| binding.moved);
        let ended = binding.and_then(|one| if one.turns > 0 { Some(now) } else { one.ended });
        match known::standing(key, &self.state.snapshot(), binding, now) {
            Standing::Open { worker, session, .. } => {
                let fixed = session.exclusive || session.retention == Retention::Pinned;
                let told_tokens = session.resident_tokens.map_or(0, |figure| figure.value);
                Some(Sticky { fixed, ended, moved, told_tokens, ..Sticky::at(worker) })
            }
            Standing::Bound { worker, .. } => Some(Sticky { ended, moved, ..Sticky::at(worker) }),
            Standing::Unknown | Standing::Closing | Standing::Lost { .. } => None,
        }
    }

    /// Returns the tokens that a turn adds to the session's previous prompt.
    fn new_tokens(&self, ask: &Ask<'_>) -> Option<u64> {
        let before = self.known.get(&ask.session).map(|known| known.input_tokens)?;
        ask.input_tokens.checked_sub(before)
    }

    /// Applies an agent's report of a session.
    fn tell(&mut self, session: usize, worker: usize, state: SessionState, now: Instant) {
        if let Some(known) = self.known.get(&session) {
            let update = Update::Upsert(known.session(self.retention, state));
            self.state.apply(worker, update, now);
        }
    }

    /// Closes sessions that were idle for too long, as agents do.
    fn forget(&mut self, now: Duration) {
        while let Some(&(since, session)) = self.idle.first() {
            if now.saturating_sub(since) < FORGOTTEN_AFTER {
                break;
            }
            self.idle.pop_first();
            self.closed(session, now);
        }
    }

    fn closed(&mut self, session: usize, now: Duration) {
        let at = self.start + now;
        if let Some(known) = self.known.remove(&session) {
            self.idle.remove(&(known.idle_since, session));
            for agent in known.agents {
                self.state.apply(agent, Update::Removed(known.key.clone()), at);
            }
            self.affinity.forget(&known.key);
        }
    }

    fn sent(&mut self, ask: &Ask<'_>, worker: usize, leaves: Option<usize>, now: Duration) {
        let at = self.start + now;
        let count = &self.state.agent_at(worker).in_flight[0];
        self.leases.insert(ask.turn, Lease::acquire(count, self.expected_tokens));
        if ask.guessed {
            return;
        }
        let known = self.known.entry(ask.session).or_insert_with(|| Known::new(ask.session));
        self.idle.remove(&(known.idle_since, ask.session));
        known.running += 1;
        known.input_tokens = ask.input_tokens;
        known.agents.insert(worker);
        known.leaves = leaves.or(known.leaves);
        let key = known.key.clone();
        self.affinity.begin(&key, agents::at(worker), false, at).expect("the table has room");
        self.tell(ask.session, worker, SessionState::Running, at);
    }

    fn began(&mut self, turn: usize, session: usize, now: Duration) {
        if let Some(lease) = self.leases.get_mut(&turn) {
            lease.answered();
        }
        if let Some(known) = self.known.get_mut(&session) {
            self.affinity.answered(&known.key);
            if let Some(left) = known.leaves.take() {
                known.agents.remove(&left);
                let removed = Update::Removed(known.key.clone());
                self.state.apply(left, removed, self.start + now);
            }
        }
    }

    fn ended(&mut self, turn: usize, session: usize, worker: usize, now: Duration) {
        let at = self.start + now;
        self.leases.remove(&turn);
        let Some(known) = self.known.get_mut(&session) else { return };
        known.running -= 1;
        known.turns += 1;
        known.resident_tokens = Some(known.input_tokens);
        self.affinity.end(&known.key, at);
        if known.running == 0 {
            known.idle_since = now;
            self.idle.insert((now, session));
        }
        self.tell(session, worker, SessionState::Idle, at);
    }

    fn blocks(&mut self, worker: usize, stored: &[u32], removed: &[u32]) {
        let number = agents::at(worker).number().expect("workers have one rank");
        self.index.remove(number, Tier::Device, &self.names.of_all(removed));
        for (parent, blocks) in self.names.runs(stored) {
            self.index.store(number, Tier::Device, parent, &blocks);
        }
    }

    fn condition(&mut self, worker: usize, fleet: &Fleet, now: Instant) {
        let facts = &fleet.workers[worker];
        match facts.condition {
            Condition::Down => {
                self.state.apply(worker, Update::Lost("its host is gone".to_owned()), now);
                let number = agents::at(worker).number().expect("workers have one rank");
                self.index.clear(number);
            }
            Condition::Draining => {}
            Condition::Up if !self.state.agent_at(worker).is_up() => {
                // A new agent process knows no session.
                let epoch = self.state.agent_at(worker).epoch().unwrap_or(0) + 1;
                let description = agents::description(worker, epoch, facts, fleet);
                let began = Update::Began { description, sessions: vec![] };
                self.state.apply(worker, began, now);
                for known in self.known.values_mut() {
                    known.agents.remove(&worker);
                }
            }
            Condition::Up => {}
        }
        self.report(worker, fleet, now);
    }

    fn report(&mut self, worker: usize, fleet: &Fleet, now: Instant) {
        let report = agents::report(&fleet.workers[worker], fleet);
        self.state.apply(worker, Update::Report(report), now);
    }
}

impl Policy for Berth {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet) -> Choice {
        self.forget(ask.now);
        let now = self.start + ask.now;
        for agent in 0..fleet.workers.len() {
            // Regular reports keep an idle worker's agent from becoming stale.
            self.state.apply(
                agent,
                Update::Report(agents::report(&fleet.workers[agent], fleet)),
                now,
            );
        }
        let hashes = self.names.hash(ask.chain);
        let key = agents::key(ask.session);
        let new_tokens = self.new_tokens(ask);
        let sticky = self.sticky(&key, now).filter(|_| !ask.guessed);
        let sticky = sticky.map(|sticky| Sticky { new_tokens, ..sticky });
        let parent = ask.parent.and_then(|parent| self.sticky(&agents::key(parent), now));
        let bare = Question {
            digest: key.digest(),
            returns: !ask.guessed,
            sticky,
            prefer: parent.map(|parent| (parent.worker, Reason::Parent)),
            prompt: None,
            retention: None,
            model: None,
            exclude: None,
        };
        let view = self.state.snapshot();
        let placement = placement::settled(&bare, &view, now).filter(|placement| {
            // A worker that has just gone down refuses the turn, which then goes elsewhere.
            !fleet.is_down(placement.worker.agent)
        });
        let is_known = placement.is_none();
        let placement = placement.unwrap_or_else(|| {
            self.index.look_up(&hashes, &mut self.overlap);
            let question = Question {
                prompt: Some(Prompt {
                    tokens: ask.input_tokens,
                    block_tokens: fleet.block_tokens,
                    overlap: &self.overlap,
                }),
                exclude: ask.last.filter(|&last| fleet.is_down(last)).map(agents::at),
                ..bare
            };
            placement::place(&question, &view, now).expect("a run keeps at least one worker")
        });
        self.expected_tokens = placement.tokens_expected();
        let WorkerRef { agent: worker, .. } = placement.worker;
        let moved = placement.reason == Reason::Moved;
        let leaves = sticky.filter(|_| moved).map(|sticky| sticky.worker.agent);
        Choice { worker, leaves, is_known }
    }

    fn hear(&mut self, what: &Heard<'_>, fleet: &Fleet) {
        match *what {
            Heard::Sent { ask, worker, leaves, now } => self.sent(ask, worker, leaves, now),
            Heard::Began { turn, session, now, .. } => self.began(turn, session, now),
            Heard::Ended { turn, session, worker, now } => self.ended(turn, session, worker, now),
            Heard::Closed { session, now } => self.closed(session, now),
            Heard::Blocks { worker, stored, removed } => self.blocks(worker, stored, removed),
            Heard::Condition { worker, now } => self.condition(worker, fleet, self.start + now),
            Heard::Load { worker, now } => self.report(worker, fleet, self.start + now),
        }
    }
}

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

use blocks::block::{BlockHash, Tier};
use blocks::index::{Index, Overlap};
use contract::{
    id::{Digest, SessionKey},
    load::{Retention, SessionState},
};
use router::{
    fleet::{
        conversations::{Begun, ConversationId},
        lease::LoadLease,
        state::{State, Update},
        worker::AgentKey,
    },
    placement::{self, PairUse, PlacementRequest, Reason, Sticky},
    residency::PromptOverlap,
    sessions::{
        bindings::Bindings,
        status::{self, SessionStatus},
    },
};

use self::{
    agents::{KnownSession, Measured},
    names::BlockNames,
};
use super::{Policy, PolicyChoice, PolicyEvent};
use crate::{
    engine::Moves,
    fleet::{Condition, Fleet, TurnToPlace},
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
    bindings: Bindings,
    index: Index,
    overlap: Overlap,
    names: BlockNames,
    retention: Retention,
    known: HashMap<usize, KnownSession>,
    /// What each agent has measured.
    measured: Vec<Measured>,
    /// The expected tokens of the turn placed last.
    expected_tokens: u64,
    /// Whether clients name their sessions.
    has_names: bool,
    /// The conversation without a name of each running turn.
    unnamed: HashMap<usize, ConversationId>,
    /// The lease of each running turn.
    leases: HashMap<usize, LoadLease>,
    /// The idle sessions, longest idle first.
    idle: std::collections::BTreeSet<(Duration, usize)>,
}

impl Berth {
    pub(super) fn new(mode: Mode, fleet: &Fleet, has_names: bool) -> Self {
        // Virtual time needs an `Instant` as its zero.
        let start = service::clock::now();
        let mut state = agents::state(fleet.workers.len());
        let mut measured = Vec::new();
        for (agent, worker) in fleet.workers.iter().enumerate() {
            measured.push(Measured::default());
            if worker.condition == Condition::Down {
                continue;
            }
            let description = agents::description(agent, 1, worker, fleet);
            state.apply(
                AgentKey::first(agent),
                Update::StreamBegan { description, sessions: vec![] },
                start,
            );
            let report = agents::report(&mut measured[agent], worker, fleet, start);
            state.apply(AgentKey::first(agent), Update::Report(report), start);
        }
        Self {
            start,
            state,
            bindings: Bindings::new(SESSIONS_MAX, FORGOTTEN_AFTER),
            index: Index::new(INDEX_BYTES_MAX),
            overlap: Overlap::default(),
            names: BlockNames::default(),
            retention: if mode == Mode::Pinned { Retention::Pinned } else { Retention::Tagged },
            known: HashMap::new(),
            measured,
            expected_tokens: 0,
            has_names,
            unnamed: HashMap::new(),
            leases: HashMap::new(),
            idle: std::collections::BTreeSet::new(),
        }
    }

    /// Returns where a session is, as the router sees it.
    fn sticky(&self, key: &SessionKey, now: Instant) -> Option<Sticky> {
        let binding = self.bindings.get(key, now);
        let moved = binding.and_then(|binding| binding.moved_at);
        let ended =
            binding.and_then(|one| if one.turns > 0 { Some(now) } else { one.last_turn_ended });
        match status::determine_status(key, &self.state.snapshot(), binding, now) {
            SessionStatus::Open { worker, session, .. } => {
                let fixed = session.exclusive || session.retention == Retention::Pinned;
                let reported_tokens = session.resident_tokens.map_or(0, |figure| figure.value);
                Some(Sticky {
                    fixed,
                    last_turn_ended: ended,
                    moved_at: moved,
                    reported_tokens,
                    ..Sticky::new(worker)
                })
            }
            SessionStatus::Bound { worker, .. } => {
                Some(Sticky { last_turn_ended: ended, moved_at: moved, ..Sticky::new(worker) })
            }
            SessionStatus::Unknown | SessionStatus::Closing | SessionStatus::Lost { .. } => None,
        }
    }

    /// Returns the tokens that a turn adds to the session's previous prompt.
    fn new_tokens(&self, request: &TurnToPlace<'_>) -> Option<u64> {
        let before = self.known.get(&request.session).map(|known| known.input_tokens)?;
        request.input_tokens.checked_sub(before)
    }

    /// Applies an agent's report of a session.
    fn report_session(&mut self, session: usize, worker: usize, state: SessionState, now: Instant) {
        if let Some(known) = self.known.get(&session) {
            let update = Update::SessionChanged(known.session(self.retention, state));
            self.state.apply(AgentKey::first(worker), update, now);
        }
    }

    /// Closes sessions that were idle for too long, as agents do.
    fn close_forgotten(&mut self, now: Duration) {
        while let Some(&(since, session)) = self.idle.first() {
            if now.saturating_sub(since) < FORGOTTEN_AFTER {
                break;
            }
            self.idle.pop_first();
            self.handle_close(session, now);
        }
    }

    /// Whether the router knows the turn's session by a name.
    fn is_named(&self, request: &TurnToPlace<'_>) -> bool {
        self.has_names && !request.is_inferred
    }

    /// Places a turn by its prompt alone, as the router's placer does.
    fn place_unnamed(
        &mut self,
        request: &TurnToPlace<'_>,
        chain: &[BlockHash],
        fleet: &Fleet,
    ) -> PolicyChoice {
        let (now, view) = (self.start + request.now, self.state.snapshot());
        let table = self.state.conversations();
        let mut conversations = table.lock();
        // A turn of a worker that has crashed is placed again.
        if let Some(id) = self.unnamed.remove(&request.turn) {
            conversations.end_turn(id, now);
        }
        let sticky = conversations.find(chain).map(|continued| Sticky {
            last_turn_ended: Some(continued.idle_since),
            moved_at: continued.moved_at,
            reported_tokens: continued.own_tokens,
            ..Sticky::new(continued.worker)
        });
        self.index.look_up(chain, &mut self.overlap);
        let down = request.previous_worker.filter(|&last| fleet.is_down(last));
        let placement_request = PlacementRequest {
            digest: Digest(request.turn as u64),
            expects_more_turns: sticky.is_some() || conversations.expects_more_turns(),
            sticky,
            conversations: Some(&conversations),
            prefer: None,
            prompt: Some(PromptOverlap {
                tokens: request.input_tokens,
                block_tokens: fleet.block_tokens,
                overlap: &self.overlap,
            }),
            retention: None,
            model: None,
            weights: None,
            exclude: down.map(agents::worker_ref),
            pairs: PairUse::May,
        };
        let placement = placement::place(&placement_request, &view, now)
            .expect("a run keeps at least one worker");
        let begun = Begun {
            chain,
            prompt_tokens: request.input_tokens,
            uncached_tokens: placement.tokens_expected().min(request.input_tokens),
            worker: placement.worker,
        };
        if let Some(id) = conversations.begin_turn(&begun, now) {
            let stats = view.worker_table().get(placement.worker);
            let pool_tokens = stats.and_then(|stats| stats.kept_tokens_max()).unwrap_or(u64::MAX);
            conversations.record_answer(id, pool_tokens);
            self.unnamed.insert(request.turn, id);
        }
        self.expected_tokens = placement.tokens_expected();
        placement.worker.agent.slot().into()
    }

    fn handle_close(&mut self, session: usize, now: Duration) {
        let at = self.start + now;
        if let Some(known) = self.known.remove(&session) {
            self.idle.remove(&(known.idle_since, session));
            for agent in known.agents {
                self.state.apply(
                    AgentKey::first(agent),
                    Update::SessionRemoved(known.key.clone()),
                    at,
                );
            }
            self.bindings.forget(&known.key);
        }
    }

    fn handle_sent(
        &mut self,
        request: &TurnToPlace<'_>,
        worker: usize,
        left_worker: Option<usize>,
        now: Duration,
    ) {
        let at = self.start + now;
        let count = &self.state.agent_with(AgentKey::first(worker)).in_flight[0];
        self.leases.insert(request.turn, LoadLease::acquire(count, self.expected_tokens));
        if !self.is_named(request) {
            return;
        }
        let known =
            self.known.entry(request.session).or_insert_with(|| KnownSession::new(request.session));
        self.idle.remove(&(known.idle_since, request.session));
        known.running += 1;
        known.input_tokens = request.input_tokens;
        known.agents.insert(worker);
        known.left_worker = left_worker.or(known.left_worker);
        let key = known.key.clone();
        self.bindings
            .begin_turn(&key, agents::worker_ref(worker), false, at)
            .expect("the table has room");
        self.report_session(request.session, worker, SessionState::Running, at);
    }

    fn handle_answer_start(&mut self, turn: usize, session: usize, now: Duration) {
        if let Some(lease) = self.leases.get_mut(&turn) {
            lease.record_first_part();
        }
        if let Some(known) = self.known.get_mut(&session) {
            self.bindings.record_answer(&known.key);
            if let Some(left) = known.left_worker.take() {
                known.agents.remove(&left);
                let removed = Update::SessionRemoved(known.key.clone());
                self.state.apply(AgentKey::first(left), removed, self.start + now);
            }
        }
    }

    fn handle_turn_end(&mut self, turn: usize, session: usize, worker: usize, now: Duration) {
        let at = self.start + now;
        self.leases.remove(&turn);
        if let Some(id) = self.unnamed.remove(&turn) {
            self.state.conversations().lock().end_turn(id, at);
        }
        let Some(known) = self.known.get_mut(&session) else { return };
        known.running -= 1;
        known.turns += 1;
        known.resident_tokens = Some(known.input_tokens);
        self.bindings.end_turn(&known.key, at);
        if known.running == 0 {
            known.idle_since = now;
            self.idle.insert((now, session));
        }
        self.report_session(session, worker, SessionState::Idle, at);
    }

    fn handle_blocks(&mut self, worker: usize, moves: &Moves) {
        let number = agents::worker_ref(worker).number().expect("workers have one rank");
        self.index.remove(number, Tier::Device, &self.names.names(&moves.removed));
        self.index.remove(number, Tier::Host, &self.names.names(&moves.removed_from_host));
        for (tier, stored) in [(Tier::Device, &moves.stored), (Tier::Host, &moves.stored_on_host)] {
            for (parent, blocks) in self.names.name_runs(stored) {
                self.index.store(number, tier, parent, &blocks);
            }
        }
    }

    fn handle_condition(&mut self, worker: usize, fleet: &Fleet, now: Instant) {
        let facts = &fleet.workers[worker];
        match facts.condition {
            Condition::Down => {
                self.state.apply(
                    AgentKey::first(worker),
                    Update::AgentLost("its host is gone".to_owned()),
                    now,
                );
                let number = agents::worker_ref(worker).number().expect("workers have one rank");
                self.index.clear(number);
            }
            Condition::Draining => {}
            Condition::Up if !self.state.agent_with(AgentKey::first(worker)).is_up() => {
                // A new agent process knows no session.
                let epoch = self.state.agent_with(AgentKey::first(worker)).epoch().unwrap_or(0) + 1;
                let description = agents::description(worker, epoch, facts, fleet);
                let began = Update::StreamBegan { description, sessions: vec![] };
                self.state.apply(AgentKey::first(worker), began, now);
                for known in self.known.values_mut() {
                    known.agents.remove(&worker);
                }
            }
            Condition::Up => {}
        }
        self.report_load(worker, fleet, now);
    }

    fn report_load(&mut self, worker: usize, fleet: &Fleet, now: Instant) {
        let report = agents::report(&mut self.measured[worker], &fleet.workers[worker], fleet, now);
        self.state.apply(AgentKey::first(worker), Update::Report(report), now);
    }
}

impl Policy for Berth {
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        self.close_forgotten(request.now);
        let now = self.start + request.now;
        for agent in 0..fleet.workers.len() {
            // Regular reports keep an idle worker's agent from becoming stale.
            self.report_load(agent, fleet, now);
        }
        let hashes = self.names.name_chain(request.chain);
        if !self.is_named(request) {
            return self.place_unnamed(request, &hashes, fleet);
        }
        let key = agents::key(request.session);
        let new_tokens = self.new_tokens(request);
        let sticky = self.sticky(&key, now);
        let sticky = sticky.map(|sticky| Sticky { new_tokens, ..sticky });
        let parent = request.parent.and_then(|parent| self.sticky(&agents::key(parent), now));
        let bare = PlacementRequest {
            digest: key.digest(),
            expects_more_turns: true,
            sticky,
            conversations: None,
            prefer: parent.map(|parent| (parent.worker, Reason::Parent)),
            prompt: None,
            retention: None,
            model: None,
            weights: None,
            exclude: None,
            pairs: PairUse::May,
        };
        let view = self.state.snapshot();
        let placement = placement::place_without_prompt(&bare, &view, now).filter(|placement| {
            // A worker that has just gone down refuses the turn, which then goes elsewhere.
            !fleet.is_down(placement.worker.agent.slot())
        });
        let examined_prompt = placement.is_none();
        let placement = placement.unwrap_or_else(|| {
            self.index.look_up(&hashes, &mut self.overlap);
            let placement_request = PlacementRequest {
                prompt: Some(PromptOverlap {
                    tokens: request.input_tokens,
                    block_tokens: fleet.block_tokens,
                    overlap: &self.overlap,
                }),
                exclude: request
                    .previous_worker
                    .filter(|&last| fleet.is_down(last))
                    .map(agents::worker_ref),
                ..bare
            };
            placement::place(&placement_request, &view, now)
                .expect("a run keeps at least one worker")
        });
        self.expected_tokens = placement.tokens_expected();
        let worker = placement.worker.agent.slot();
        let moved = placement.reason == Reason::Moved;
        let left_worker = sticky.filter(|_| moved).map(|sticky| sticky.worker.agent.slot());
        PolicyChoice { worker, left_worker, examined_prompt }
    }

    fn observe(&mut self, event: &PolicyEvent<'_>, fleet: &Fleet) {
        match *event {
            PolicyEvent::Sent { request, worker, left_worker, now } => {
                self.handle_sent(request, worker, left_worker, now)
            }
            PolicyEvent::Began { turn, session, now, .. } => {
                self.handle_answer_start(turn, session, now)
            }
            PolicyEvent::Ended { turn, session, worker, now } => {
                self.handle_turn_end(turn, session, worker, now)
            }
            PolicyEvent::Closed { session, now } => self.handle_close(session, now),
            PolicyEvent::Blocks { worker, moves } => self.handle_blocks(worker, moves),
            PolicyEvent::Condition { worker, now } => {
                self.handle_condition(worker, fleet, self.start + now)
            }
            PolicyEvent::Load { worker, now } => self.report_load(worker, fleet, self.start + now),
        }
    }
}

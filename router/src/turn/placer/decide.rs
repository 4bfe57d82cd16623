//! Decides which worker gets a session's turn, and binds the session. Without I/O or a clock.
//!
//! A decision is one step on the locked table of bindings: it reads the session's status, chooses
//! the worker and binds the session. So concurrent first turns of a session get one worker. All
//! other inputs are values and snapshots, so that no lock is taken.

use std::time::Instant;

use contract::{id::Digest, load::Retention};

use crate::turn::request::Turn;
use crate::{
    fleet::{
        conversations::Conversations,
        snapshot::Snapshot,
        worker::{AgentKey, WorkerRef, WorkerState},
    },
    placement::{self, NoWorker, Placement, PlacementRequest, Reason, Sticky},
    residency::block_locator::{BlockLocator, TurnBlocks},
    sessions::{
        bindings::{Binding, Bindings},
        check::{Error, TURNS_AT_ONCE_MAX, check_session, proposal, worker_left_with_nothing},
        claims::{PlacementClaims, Proposal},
        intent::SessionIntent,
        status::{SessionStatus, determine_status},
    },
};

/// A rough figure, for JSON with prose and code.
const BYTES_PER_TOKEN: u64 = 4;

/// What is known of a turn's prompt.
#[derive(Debug, Clone, Copy)]
pub(super) enum PromptFacts<'a> {
    Unread,
    /// `None` if no blocks can be made of it.
    Read(Option<&'a TurnBlocks>),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct TurnFacts<'a> {
    pub(super) turn: &'a Turn,
    pub(super) turn_id: u64,
    pub(super) view: &'a Snapshot,
    /// Answers the questions asked here without a lock.
    pub(super) block_locator: &'a BlockLocator,
    pub(super) prefer: Option<(WorkerRef, Reason)>,
    /// Where the turn ran that first had the session's name, if it ran without the session.
    pub(super) seen_on: Option<WorkerRef>,
    pub(super) prompt: PromptFacts<'a>,
    /// `None` for a turn with a session.
    pub(super) conversations: Option<&'a Conversations>,
}

/// The bindings table counts the turn on the worker of `placement`.
#[derive(Debug)]
pub(super) struct SessionDecision {
    pub(super) placement: Placement,
    pub(super) can_move: bool,
    /// The worker that the session leaves, if it could have stayed there or nothing is left there.
    /// It is closed there once the new worker has answered.
    pub(super) old_worker: Option<WorkerRef>,
    /// The turn then opens the session on its new worker. `None` if the worker has the session, or
    /// learns of it as of any other.
    pub(super) reopen_as: Option<Retention>,
    /// What to ask other routers before the turn is sent. `None` if they know the session.
    pub(super) proposal: Option<Proposal>,
}

impl<'a> TurnFacts<'a> {
    pub(super) fn blocks(&self) -> Option<&'a TurnBlocks> {
        match self.prompt {
            PromptFacts::Unread => None,
            PromptFacts::Read(blocks) => blocks,
        }
    }

    /// Chooses the worker by what is known of the prompt. `None`: only the prompt can tell.
    pub(super) fn pick_worker(
        &self,
        request: &PlacementRequest<'_>,
        now: Instant,
    ) -> Result<Option<Placement>, Error> {
        if let Some(agent) = self.turn.response_agent {
            return place_at_agent(agent, request, self.view, now).map(Some);
        }
        match self.prompt {
            PromptFacts::Unread => Ok(placement::place_without_prompt(request, self.view, now)),
            PromptFacts::Read(_) => Ok(Some(placement::place(request, self.view, now)?)),
        }
    }

    /// Returns a request as if the turn had no session: by the conversation without a name that its
    /// prompt continues.
    pub(super) fn placement_request(&self, now: Instant) -> PlacementRequest<'a> {
        let continued = self
            .conversations
            .zip(self.blocks())
            .and_then(|(conversations, blocks)| conversations.find(blocks.chain()));
        // Nothing ties it to a worker that can't take turns at once, or whose blocks are unknown.
        let can_stay = |worker| {
            self.view.state(worker, now) == WorkerState::Fresh && self.can_trust_count(worker)
        };
        let sticky =
            continued.filter(|continued| can_stay(continued.worker)).map(|continued| Sticky {
                last_turn_ended: Some(continued.idle_since),
                moved_at: continued.moved_at,
                reported_tokens: continued.own_tokens,
                ..Sticky::new(continued.worker)
            });
        let begins_conversation =
            || self.blocks().and(self.conversations).is_some_and(Conversations::expects_more_turns);
        PlacementRequest {
            digest: Digest(self.turn_id),
            expects_more_turns: expects_more_turns(self.turn)
                || sticky.is_some()
                || begins_conversation(),
            sticky,
            conversations: self.conversations,
            prefer: self.prefer,
            prompt: self.blocks().map(TurnBlocks::prompt_overlap),
            retention: None,
            model: self.turn.model.as_deref(),
            weights: self.turn.weights.as_ref(),
            exclude: None,
            pairs: self.turn.pairs,
        }
    }

    /// Adds what only the session's binding shows.
    fn add_binding(&self, sticky: &mut Sticky, binding: &Binding, now: Instant) {
        sticky.moved_at = binding.moved_at;
        let last_use = if binding.turns > 0 { Some(now) } else { binding.last_turn_ended };
        let reports_blocks = self.block_locator.reports_blocks(sticky.worker);
        sticky.last_turn_ended = last_use.filter(|_| reports_blocks);
        // The size is 0 as long as no worker has taken a turn of the session.
        let previous_bytes = Some(binding.body_bytes).filter(|&bytes| bytes > 0);
        let new_bytes = previous_bytes.and_then(|bytes| self.turn.body_bytes.checked_sub(bytes));
        sticky.new_tokens = new_bytes.map(|bytes| bytes / BYTES_PER_TOKEN);
        // The costs can't be compared while a turn of the session runs: its KV isn't resident yet,
        // and the worker's load includes that turn.
        sticky.fixed |= binding.turns > 0 || binding.exclusive;
    }

    /// Unless the turn's blocks there are known, the worker would seem to have none of the prompt.
    fn can_trust_count(&self, worker: WorkerRef) -> bool {
        self.blocks().is_some_and(|blocks| self.block_locator.can_trust_count(blocks, worker))
    }
}

/// Places a turn of a session and binds the session. `None`: only the prompt can tell.
pub(super) fn decide_session(
    bindings: &mut Bindings,
    facts: &TurnFacts<'_>,
    intent: &SessionIntent,
    now: Instant,
) -> Result<Option<SessionDecision>, Error> {
    let view = facts.view;
    let binding = bindings.resolve(&intent.key, view, now);
    let status = determine_status(&intent.key, view, binding, now);
    let (mut sticky, reopen_as) = check_session(intent, &status, view, now)?;
    let is_exclusive = matches!(&status, SessionStatus::Open { session, .. } if session.exclusive);
    let turns = binding.map_or(0, |binding| if binding.exclusive { 0 } else { binding.turns });
    if intent.hint.is_some() && !is_exclusive && turns >= TURNS_AT_ONCE_MAX {
        return Err(Error::Crowded);
    }
    if matches!(status, SessionStatus::Unknown) {
        // The session's prefix is where its first turn ran, although no agent knows the session.
        sticky = facts.seen_on.map(Sticky::new);
    }
    let left_at = worker_left_with_nothing(&status, binding, now).filter(|_| !intent.is_delta);
    if left_at.is_some() {
        sticky = None;
    }
    // What the binding adds below holds for this choice, not after a refusal by the worker.
    let can_move = !sticky.is_some_and(|sticky| sticky.fixed);
    if let (Some(sticky), Some(binding)) = (&mut sticky, binding) {
        facts.add_binding(sticky, binding, now);
        sticky.fixed |= intent.is_delta;
    }
    let request = facts.placement_request(now);
    let can_trust_counts = sticky.is_none_or(|sticky| facts.can_trust_count(sticky.worker));
    let request = PlacementRequest {
        digest: intent.key.digest(),
        sticky,
        prompt: request.prompt.filter(|_| can_trust_counts),
        retention: if sticky.is_none() { intent.retention } else { None },
        ..request
    };
    let Some(placement) = facts.pick_worker(&request, now)? else { return Ok(None) };
    let old = sticky.filter(|sticky| sticky.worker != placement.worker);
    let left_at = left_at.filter(|worker| worker.agent != placement.worker.agent);
    if let Some(Sticky { worker, fixed: true, .. }) = old
        && intent.is_delta
    {
        // A delta turn has only the new tokens, and another worker doesn't have the history.
        return Err(Error::SessionLost { worker: view.name(worker), agent_up: false });
    }
    let proposal = proposal(&intent.key, &status, binding, placement.worker, view, now);
    // An agent keeps the retention of a session that it has, whatever a turn wishes.
    let is_new = !matches!(status, SessionStatus::Open { .. });
    let exclusive = intent.opens_session || (is_new && intent.retention == Some(Retention::Pinned));
    bindings.begin_turn(&intent.key, placement.worker, exclusive, now)?;
    bindings.set_placement_only(&intent.key, intent.is_placement_only);
    Ok(Some(SessionDecision {
        can_move,
        old_worker: old
            .filter(|_| placement.reason == Reason::Moved && facts.seen_on.is_none())
            .map(|sticky| sticky.worker)
            .or(left_at),
        reopen_as: reopen_as.filter(|_| old.is_some() || left_at.is_some()),
        proposal,
        placement,
    }))
}

/// The turn was placed on `first_worker`; of a pair, either half may have failed.
pub(super) fn decide_again(
    bindings: &mut Bindings,
    turn: &Turn,
    turn_id: u64,
    first_worker: WorkerRef,
    failed_worker: WorkerRef,
    view: &Snapshot,
    now: Instant,
) -> Option<(Placement, Option<Proposal>)> {
    let intent = turn.session.as_ref();
    // Another turn may have moved the session meanwhile. Then this turn follows the session.
    let worker_of_session = |intent: &SessionIntent| {
        bindings.get(&intent.key, now).map_or(first_worker, |binding| binding.worker)
    };
    let request = PlacementRequest {
        digest: intent.map_or(Digest(turn_id), |intent| intent.key.digest()),
        expects_more_turns: expects_more_turns(turn),
        sticky: intent.map(worker_of_session).map(Sticky::new),
        conversations: None,
        prefer: None,
        prompt: None,
        retention: intent.and_then(|intent| intent.retention),
        model: turn.model.as_deref(),
        weights: turn.weights.as_ref(),
        exclude: Some(failed_worker),
        pairs: turn.pairs,
    };
    let placement = placement::place(&request, view, now).ok()?;
    let prefill = placement.prefill.map(|prefill| prefill.worker);
    if placement.worker == failed_worker || prefill == Some(failed_worker) {
        return None;
    }
    let moves = placement.worker != first_worker && PlacementClaims::are_needed(view);
    let proposal = intent.filter(|_| moves).map(|intent| Proposal {
        key: intent.key.clone(),
        wanted: placement.worker,
        leaves: Some(first_worker),
        generation: bindings.get(&intent.key, now).and_then(|binding| binding.claimed?.generation),
    });
    if let Some(intent) = intent {
        bindings.rebind(&intent.key, placement.worker);
    }
    Some((placement, proposal))
}

/// `agent` has the turn's previous response. Fails if the turn's session can't leave another agent,
/// or if no worker of `agent` can take turns.
pub(super) fn place_at_agent(
    agent: AgentKey,
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Result<Placement, Error> {
    let place_on = |worker, reason| {
        let placement = Placement::without_comparison(worker, reason);
        placement::pair::complete(placement, request, view, now).map_err(Error::from)
    };
    if !view.has_agent(agent) {
        return Err(NoWorker::Unusable.into());
    }
    match request.sticky {
        Some(sticky) if sticky.worker.agent == agent => {
            return place_on(sticky.worker, Reason::Sticky);
        }
        Some(sticky) if sticky.fixed => {
            return Err(Error::ResponseElsewhere {
                session_worker: view.name(sticky.worker),
                response_agent: view.agent_with(agent).name().to_owned(),
            });
        }
        Some(_) | None => {}
    }
    // No other worker has the response, so the turn can't go elsewhere while this one drains.
    let can_answer = |worker: &WorkerRef| {
        let state = view.state(*worker, now);
        state.is_usable() || state == WorkerState::Draining
    };
    let ranks = view.workers().map(|(worker, ..)| worker);
    // Ranks of one engine share its responses, so the one with the fewest turns takes this one.
    let turns = |worker: &WorkerRef| {
        let load = view.agent(*worker).rank_load(worker.dp_rank);
        load.map_or(0, |load| load.turns_running)
    };
    let worker = ranks
        .filter(|worker| worker.agent == agent)
        .filter(can_answer)
        .min_by_key(turns)
        .ok_or(NoWorker::Unusable)?;
    let reason = if request.sticky.is_some() { Reason::Moved } else { Reason::Response };
    place_on(worker, reason)
}

fn expects_more_turns(turn: &Turn) -> bool {
    turn.session.as_ref().is_some_and(|intent| !intent.closes_session)
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use contract::{
        id::SessionKey,
        load::{Session, SessionState},
    };

    use super::*;
    use crate::{
        fleet::{
            state::Update,
            testing::{fleet, start},
        },
        prompt::models::Models,
        residency::kv_index::KvIndex,
    };

    fn turn(is_delta: bool) -> Turn {
        let intent = SessionIntent {
            key: SessionKey::new("p", "s").unwrap(),
            hint: None,
            is_kept_required: false,
            retention: None,
            is_delta,
            opens_session: false,
            closes_session: false,
            is_placement_only: false,
            idle_ms_max: None,
        };
        Turn { session: Some(intent), ..Turn::default() }
    }

    /// Decides a turn of session `s` in a fleet of two idle workers.
    fn decide(bindings: &mut Bindings, turn: &Turn) -> Result<SessionDecision, Error> {
        decide_seen(bindings, turn, None)
    }

    /// Decides a turn of a session whose name was seen on a worker before.
    fn decide_seen(
        bindings: &mut Bindings,
        turn: &Turn,
        seen_on: Option<WorkerRef>,
    ) -> Result<SessionDecision, Error> {
        decide_in(&fleet(&[(0, 0), (0, 0)], start()).snapshot(), bindings, turn, seen_on)
    }

    fn decide_in(
        view: &Snapshot,
        bindings: &mut Bindings,
        turn: &Turn,
        seen_on: Option<WorkerRef>,
    ) -> Result<SessionDecision, Error> {
        let kv_index = Arc::new(KvIndex::new(1 << 20));
        let block_locator =
            BlockLocator::new(kv_index, Arc::new(Models::with_memory(1 << 20)), 1 << 20);
        let facts = TurnFacts {
            turn,
            turn_id: 1,
            view,
            block_locator: &block_locator,
            prefer: None,
            seen_on,
            conversations: None,
            prompt: PromptFacts::Read(None),
        };
        let intent = turn.session.as_ref().unwrap();
        decide_session(bindings, &facts, intent, start()).map(Option::unwrap)
    }

    #[test]
    fn a_session_is_bound_by_the_step_that_places_its_first_turn() {
        let mut bindings = Bindings::new(8, Duration::from_secs(60));
        let first = decide(&mut bindings, &turn(false)).unwrap();
        // The first turn still runs, and no agent has reported the session.
        let second = decide(&mut bindings, &turn(true)).unwrap();
        assert_eq!(second.placement.worker, first.placement.worker);
        assert_eq!(second.placement.reason, Reason::Sticky);
        assert!(second.old_worker.is_none() && second.reopen_as.is_none());
    }

    #[test]
    fn a_session_begins_where_its_name_was_first_seen() {
        for agent in [0, 1] {
            let mut bindings = Bindings::new(8, Duration::from_secs(60));
            let worker = WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 };
            let first = decide_seen(&mut bindings, &turn(false), Some(worker)).unwrap();
            let placed = (first.placement.worker, first.placement.reason, first.old_worker);
            assert_eq!(placed, (worker, Reason::Sticky, None));
        }
    }

    fn tagged(state: SessionState) -> Session {
        Session {
            key: turn(false).session.unwrap().key,
            retention: Retention::Tagged,
            state,
            dp_rank: 0,
            turns: 3,
            turns_running: 0,
            exclusive: false,
            resident_tokens: None,
            idle: Duration::ZERO,
            full_history: true,
            volatile_prefix: None,
            began_unix_ms: 0,
            parent: None,
        }
    }

    #[test]
    fn a_turn_that_asks_to_pin_a_shared_session_does_not_fix_it_to_its_worker() {
        let mut fleet = fleet(&[(0, 0), (0, 0)], start());
        let known = Update::SessionChanged(tagged(SessionState::Idle));
        fleet.apply(AgentKey::first(0), known, start());
        let mut pinning = turn(false);
        pinning.session.as_mut().unwrap().retention = Some(Retention::Pinned);
        let key = &pinning.session.as_ref().unwrap().key;
        let mut bindings = Bindings::new(8, Duration::from_secs(60));
        decide_in(&fleet.snapshot(), &mut bindings, &pinning, None).unwrap();
        assert!(!bindings.get(key, start()).unwrap().exclusive);
        let mut bindings = Bindings::new(8, Duration::from_secs(60));
        decide(&mut bindings, &pinning).unwrap();
        assert!(bindings.get(key, start()).unwrap().exclusive, "it is pinned from its begin");
    }

    /// "sticky" would say that the worker has the session's KV.
    #[test]
    fn a_session_that_its_engine_has_lost_begins_anew_on_the_best_worker() {
        let lost = tagged(SessionState::Lost);
        let (busy, idle) = (
            WorkerRef { agent: AgentKey::first(0), dp_rank: 0 },
            WorkerRef { agent: AgentKey::first(1), dp_rank: 0 },
        );
        let mut fleet = fleet(&[(30, 0), (0, 0)], start());
        fleet.apply(busy.agent, Update::SessionChanged(lost), start());
        let mut bindings = Bindings::new(8, Duration::from_secs(60));
        let decision = decide_in(&fleet.snapshot(), &mut bindings, &turn(false), None).unwrap();
        assert_eq!(decision.placement.worker, idle);
        assert_eq!(decision.placement.reason, Reason::LeastLoaded);
        assert_eq!(decision.old_worker, Some(busy), "where its entry is closed");
        let mut bindings = Bindings::new(8, Duration::from_secs(60));
        bindings.begin_turn(&turn(false).session.unwrap().key, busy, false, start()).unwrap();
        let decision = decide_in(&fleet.snapshot(), &mut bindings, &turn(false), None).unwrap();
        assert_eq!(decision.placement.worker, busy, "a turn begins it anew there");
    }

    #[test]
    fn a_refused_turn_binds_nothing() {
        let mut bindings = Bindings::new(8, Duration::from_secs(60));
        let refusal = decide(&mut bindings, &turn(true)).unwrap_err();
        assert!(matches!(refusal, Error::DeltaWithoutHistory), "{refusal}");
        assert!(bindings.is_empty());
        let key = &turn(false).session.unwrap().key;
        let worker = WorkerRef { agent: AgentKey::first(0), dp_rank: 0 };
        bindings.record_close_request(key, worker, start()).unwrap();
        let refusal = decide(&mut bindings, &turn(false)).unwrap_err();
        assert!(matches!(refusal, Error::Closing), "{refusal}");
        assert_eq!(bindings.get(key, start()).unwrap().turns, 0);
    }
}

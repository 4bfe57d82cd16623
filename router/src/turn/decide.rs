//! Decides which worker gets a session's turn, and binds the session. Pure.
//!
//! `placer` and `sessions` call this module in one step on the affinity table, which reads a
//! session's status, chooses the worker and binds the session. So concurrent first turns of a
//! session get one worker. All other inputs are values and snapshots, so that no lock is taken.

mod open;

use std::time::Instant;

use contract::{
    id::{Digest, SessionKey},
    load::Retention,
};

pub(super) use self::open::{OpenDecision, decide_open};
use super::request::{SessionIntent, Turn};
use crate::{
    claims::{Claims, Wish},
    fleet::{
        conversations::Conversations,
        snapshot::Snapshot,
        worker::{WorkerRef, WorkerState},
    },
    placement::{
        self, NoWorker, Placement, PlacementRequest, Reason, Sticky,
        affinity::{Affinity, Binding, TableFull},
        session_status::{self, SessionStatus},
    },
    residency::block_locator::{BlockLocator, TurnBlocks},
};

/// The messages are for the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    NoWorker(#[from] NoWorker),
    #[error(transparent)]
    SessionsFull(#[from] TableFull),
    /// The turn's body has only the new tokens.
    #[error(
        "this turn is a delta, but no session is open under its id; open the session first with \
         POST /v1/sessions, or send the full history not marked as a delta"
    )]
    DeltaWithoutHistory,
    #[error(
        "this session takes one turn at a time and a turn is running; send this turn when that one \
         has ended"
    )]
    SessionBusy,
    /// So many turns at once show that the hinted name isn't that of one conversation.
    #[error(
        "{TURNS_AT_ONCE_MAX} turns of this session run at once; open the session if it is one \
         conversation, or leave its name out"
    )]
    Crowded,
    #[error("this session is closing; wait until its last turn has ended, then open it again")]
    Closing,
    /// The agent's successor may take up the session.
    #[error("the agent of worker {worker} restarts and may keep this session; try again")]
    AgentRestarts {
        /// Name of the worker that has the session.
        worker: String,
    },
    #[error(
        "this session must stay on worker {session_worker}, but the previous response is at agent \
         {response_agent}; leave previous_response_id or the session out, and send the full history"
    )]
    ResponseElsewhere {
        session_worker: String,
        /// Name of the agent that has the response.
        response_agent: String,
    },
    #[error(
        "the session's KV and history were on worker {worker}, {}; open the session again and send \
         the full history",
        if *.agent_up { "whose engine or agent restarted" } else { "which can't be reached" }
    )]
    SessionLost {
        worker: String,
        /// Whether the agent is connected.
        agent_up: bool,
    },
}

/// Bounds sessions that were only hinted at. A coding agent asks for a title and suggests a next
/// message beside its main turn. Some clients send one constant name with all they do, and nothing
/// in common would keep their turns on one worker.
const TURNS_AT_ONCE_MAX: u32 = 4;

/// A rough figure, for JSON with prose and code.
const BYTES_PER_TOKEN: u64 = 4;

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
    /// `None` if the prompt isn't read, or if no blocks can be made of it.
    pub(super) blocks: Option<&'a TurnBlocks>,
    /// `None` for a turn with a session.
    pub(super) conversations: Option<&'a Conversations>,
}

/// The affinity table counts the turn on the worker of `placement`.
#[derive(Debug)]
pub(super) struct SessionDecision {
    pub(super) placement: Placement,
    pub(super) can_move: bool,
    /// The worker that the session leaves, if it could have stayed there or nothing is left there.
    pub(super) old_worker: Option<WorkerRef>,
    /// `None` if the worker has the session, or learns of it as of any other.
    pub(super) reopen_as: Option<Retention>,
    /// What to ask other routers before the turn is sent. `None` if they know the session.
    pub(super) wish: Option<Wish>,
}

impl<'a> TurnFacts<'a> {
    /// Returns a request as if the turn had no session: by the conversation without a name that its
    /// prompt continues.
    pub(super) fn placement_request(&self, now: Instant) -> PlacementRequest<'a> {
        let continued = self
            .conversations
            .zip(self.blocks)
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
            || self.blocks.and(self.conversations).is_some_and(Conversations::expects_more_turns);
        PlacementRequest {
            digest: Digest(self.turn_id),
            expects_more_turns: expects_more_turns(self.turn)
                || sticky.is_some()
                || begins_conversation(),
            sticky,
            conversations: self.conversations,
            prefer: self.prefer,
            prompt: self.blocks.map(TurnBlocks::prompt_overlap),
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
        self.blocks.is_some_and(|blocks| self.block_locator.can_trust_count(blocks, worker))
    }
}

/// Places a turn of a session and binds the session, in one step on the affinity table.
pub(super) fn decide_session<E: From<Error>>(
    affinity: &mut Affinity,
    facts: &TurnFacts<'_>,
    intent: &SessionIntent,
    now: Instant,
    choose: impl FnOnce(&PlacementRequest<'_>, Instant) -> Result<Placement, E>,
) -> Result<SessionDecision, E> {
    let view = facts.view;
    let binding = affinity.get(&intent.key, now);
    let status = session_status::determine_status(&intent.key, view, binding, now);
    let (mut sticky, reopen_as) = check_session(intent, &status, view, now)?;
    let is_open = matches!(&status, SessionStatus::Open { session, .. } if session.exclusive);
    let turns = binding.map_or(0, |binding| if binding.exclusive { 0 } else { binding.turns });
    if intent.hint.is_some() && !is_open && turns >= TURNS_AT_ONCE_MAX {
        return Err(Error::Crowded.into());
    }
    if matches!(status, SessionStatus::Unknown) {
        // The session's prefix is where its first turn ran, although no agent knows the session.
        sticky = facts.seen_on.map(Sticky::new);
    }
    let left_at = worker_left_with_nothing(&status, binding, now).filter(|_| !intent.is_delta);
    if left_at.is_some() {
        sticky = None;
    }
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
    let placement = choose(&request, now)?;
    let old = sticky.filter(|sticky| sticky.worker != placement.worker);
    let left_at = left_at.filter(|worker| worker.agent != placement.worker.agent);
    if let Some(Sticky { worker, fixed: true, .. }) = old
        && intent.is_delta
    {
        // A delta turn has only the new tokens, and another worker doesn't have the history.
        return Err(Error::SessionLost { worker: view.name(worker), agent_up: false }.into());
    }
    let wish = wish(&intent.key, &status, binding, placement.worker, view, now);
    let exclusive = intent.opens_session || intent.retention == Some(Retention::Pinned);
    affinity.begin_turn(&intent.key, placement.worker, exclusive, now).map_err(Error::from)?;
    affinity.set_placement_only(&intent.key, intent.is_placement_only);
    Ok(SessionDecision {
        can_move,
        old_worker: old
            .filter(|_| placement.reason == Reason::Moved && facts.seen_on.is_none())
            .map(|sticky| sticky.worker)
            .or(left_at),
        reopen_as: reopen_as.filter(|_| old.is_some() || left_at.is_some()),
        wish,
        placement,
    })
}

/// The turn was placed on `first_worker`; of a pair, either half may have failed.
pub(super) fn decide_again(
    affinity: &mut Affinity,
    turn: &Turn,
    turn_id: u64,
    first_worker: WorkerRef,
    failed_worker: WorkerRef,
    view: &Snapshot,
    now: Instant,
) -> Option<(Placement, Option<Wish>)> {
    let intent = turn.session.as_ref();
    // Another turn may have moved the session meanwhile. Then this turn follows the session.
    let worker_of_session = |intent: &SessionIntent| {
        affinity.get(&intent.key, now).map_or(first_worker, |binding| binding.worker)
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
    let moves = placement.worker != first_worker && Claims::are_needed(view);
    let wish = intent.filter(|_| moves).map(|intent| Wish {
        key: intent.key.clone(),
        wanted: placement.worker,
        leaves: Some(first_worker),
        generation: affinity.get(&intent.key, now).and_then(|binding| binding.claimed?.generation),
    });
    if let Some(intent) = intent {
        affinity.rebind(&intent.key, placement.worker);
    }
    Some((placement, wish))
}

/// `agent` has the turn's previous response. Fails if the turn's session can't leave another agent,
/// or if no worker of `agent` can take turns.
pub(super) fn place_at_agent(
    agent: usize,
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Result<Placement, Error> {
    let place_on = |worker, reason| {
        let placement = Placement::without_comparison(worker, reason);
        placement::pair::complete(placement, request, view, now).map_err(Error::from)
    };
    match request.sticky {
        Some(sticky) if sticky.worker.agent == agent => {
            return place_on(sticky.worker, Reason::Sticky);
        }
        Some(sticky) if sticky.fixed => {
            return Err(Error::ResponseElsewhere {
                session_worker: view.name(sticky.worker),
                response_agent: view.agents[agent].name().to_owned(),
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
        let load = view.agents[worker.agent].rank_load(worker.dp_rank);
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

/// `None` if other routers know that the session is on `chosen`.
fn wish(
    key: &SessionKey,
    status: &SessionStatus,
    binding: Option<&Binding>,
    chosen: WorkerRef,
    view: &Snapshot,
    now: Instant,
) -> Option<Wish> {
    let old_worker = match status {
        SessionStatus::Unknown | SessionStatus::Closing => None,
        SessionStatus::Bound { worker, .. }
        | SessionStatus::Open { worker, .. }
        | SessionStatus::Lost { worker, .. } => Some(*worker),
    };
    let leaves = old_worker.filter(|worker| worker.agent != chosen.agent);
    let is_known = match status {
        // All routers read it in the agent's table.
        SessionStatus::Open { .. } => true,
        SessionStatus::Bound { .. } => binding.is_some_and(|binding| binding.is_claimed(now)),
        SessionStatus::Unknown | SessionStatus::Closing | SessionStatus::Lost { .. } => false,
    };
    if (is_known && leaves.is_none()) || !Claims::are_needed(view) {
        return None;
    }
    let generation = binding.and_then(|binding| binding.claimed?.generation);
    Some(Wish { key: key.clone(), wanted: chosen, leaves, generation })
}

fn expects_more_turns(turn: &Turn) -> bool {
    turn.session.as_ref().is_some_and(|intent| !intent.closes_session)
}

/// Returns the worker that has the session, and the retention with which the turn opens the session
/// if it goes to another worker; `None`: it doesn't open it there.
fn check_session(
    intent: &SessionIntent,
    status: &SessionStatus,
    view: &Snapshot,
    now: Instant,
) -> Result<(Option<Sticky>, Option<Retention>), Error> {
    let delta_needs_history = intent.is_delta && !intent.opens_session;
    match status {
        SessionStatus::Closing => Err(Error::Closing),
        SessionStatus::Lost { worker, is_agent_up: false, .. }
            if view.agent(*worker).may_hand_over(now) =>
        {
            Err(Error::AgentRestarts { worker: view.name(*worker) })
        }
        SessionStatus::Lost { worker, is_agent_up, .. } => {
            Err(Error::SessionLost { worker: view.name(*worker), agent_up: *is_agent_up })
        }
        _ if is_busy(status, view) => Err(Error::SessionBusy),
        SessionStatus::Unknown | SessionStatus::Bound { is_recent: false, .. }
            if delta_needs_history =>
        {
            Err(Error::DeltaWithoutHistory)
        }
        SessionStatus::Unknown => Ok((None, None)),
        SessionStatus::Bound { worker, is_busy, .. } => {
            // If the session is busy, its turn runs on the worker, and this turn must go there.
            Ok((Some(Sticky { fixed: *is_busy, ..Sticky::new(*worker) }), None))
        }
        SessionStatus::Open { worker, session, .. } => {
            let is_pinned = session.retention == Retention::Pinned;
            let fixed = session.exclusive || (is_pinned && !session.full_history);
            let reported_tokens = session.resident_tokens.map_or(0, |figure| figure.value);
            let private_tokens = if is_pinned { reported_tokens } else { 0 };
            let sticky = Sticky { fixed, reported_tokens, private_tokens, ..Sticky::new(*worker) };
            Ok((Some(sticky), session.exclusive.then_some(session.retention)))
        }
    }
}

/// Returns the worker whose engine has lost all that it had of the session: the next turn has no
/// reason to go there. `None` while a turn of this router may have begun the session anew there,
/// and its agent's report be under way.
fn worker_left_with_nothing(
    status: &SessionStatus,
    binding: Option<&Binding>,
    now: Instant,
) -> Option<WorkerRef> {
    let SessionStatus::Open { worker, session, .. } = status else { return None };
    let is_left = session_status::is_left_with_nothing(session);
    (is_left && !binding.is_some_and(|binding| binding.is_recent(now))).then_some(*worker)
}

/// A busy session refuses a turn only if its agent has no queue in which the turn could wait.
pub(super) fn is_busy(status: &SessionStatus, view: &Snapshot) -> bool {
    let (SessionStatus::Open { is_busy: true, worker, .. }
    | SessionStatus::Bound { is_busy: true, worker, .. }) = status
    else {
        return false;
    };
    let facts = view.agent(*worker).facts.as_ref();
    facts.is_none_or(|facts| facts.description.turns_queued_per_session_max == 0)
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use contract::load::{Session, SessionState};

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
    fn decide(affinity: &mut Affinity, turn: &Turn) -> Result<SessionDecision, Error> {
        decide_seen(affinity, turn, None)
    }

    /// Decides a turn of a session whose name was seen on a worker before.
    fn decide_seen(
        affinity: &mut Affinity,
        turn: &Turn,
        seen_on: Option<WorkerRef>,
    ) -> Result<SessionDecision, Error> {
        decide_in(&fleet(&[(0, 0), (0, 0)], start()).snapshot(), affinity, turn, seen_on)
    }

    fn decide_in(
        view: &Snapshot,
        affinity: &mut Affinity,
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
            blocks: None,
        };
        let intent = turn.session.as_ref().unwrap();
        decide_session(affinity, &facts, intent, start(), |request, now| {
            placement::place(request, view, now).map_err(Error::from)
        })
    }

    #[test]
    fn a_session_is_bound_by_the_step_that_places_its_first_turn() {
        let mut affinity = Affinity::new(8, Duration::from_secs(60));
        let first = decide(&mut affinity, &turn(false)).unwrap();
        // The first turn still runs, and no agent has reported the session.
        let second = decide(&mut affinity, &turn(true)).unwrap();
        assert_eq!(second.placement.worker, first.placement.worker);
        assert_eq!(second.placement.reason, Reason::Sticky);
        assert!(second.old_worker.is_none() && second.reopen_as.is_none());
    }

    #[test]
    fn a_session_begins_where_its_name_was_first_seen() {
        for agent in [0, 1] {
            let mut affinity = Affinity::new(8, Duration::from_secs(60));
            let worker = WorkerRef { agent, dp_rank: 0 };
            let first = decide_seen(&mut affinity, &turn(false), Some(worker)).unwrap();
            let placed = (first.placement.worker, first.placement.reason, first.old_worker);
            assert_eq!(placed, (worker, Reason::Sticky, None));
        }
    }

    /// "sticky" would say that the worker has the session's KV.
    #[test]
    fn a_session_that_its_engine_has_lost_begins_anew_on_the_best_worker() {
        let lost = Session {
            key: turn(false).session.unwrap().key,
            retention: Retention::Tagged,
            state: SessionState::Lost,
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
        };
        let (busy, idle) = (WorkerRef { agent: 0, dp_rank: 0 }, WorkerRef { agent: 1, dp_rank: 0 });
        let mut fleet = fleet(&[(30, 0), (0, 0)], start());
        fleet.apply(busy.agent, Update::SessionChanged(lost), start());
        let mut affinity = Affinity::new(8, Duration::from_secs(60));
        let decision = decide_in(&fleet.snapshot(), &mut affinity, &turn(false), None).unwrap();
        assert_eq!(decision.placement.worker, idle);
        assert_eq!(decision.placement.reason, Reason::LeastLoaded);
        assert_eq!(decision.old_worker, Some(busy), "where its entry is closed");
        let mut affinity = Affinity::new(8, Duration::from_secs(60));
        affinity.begin_turn(&turn(false).session.unwrap().key, busy, false, start()).unwrap();
        let decision = decide_in(&fleet.snapshot(), &mut affinity, &turn(false), None).unwrap();
        assert_eq!(decision.placement.worker, busy, "a turn begins it anew there");
    }

    #[test]
    fn a_refused_turn_binds_nothing() {
        let mut affinity = Affinity::new(8, Duration::from_secs(60));
        let refusal = decide(&mut affinity, &turn(true)).unwrap_err();
        assert!(matches!(refusal, Error::DeltaWithoutHistory), "{refusal}");
        assert!(affinity.is_empty());
        let key = &turn(false).session.unwrap().key;
        let worker = WorkerRef { agent: 0, dp_rank: 0 };
        affinity.record_close_request(key, worker, start()).unwrap();
        let refusal = decide(&mut affinity, &turn(false)).unwrap_err();
        assert!(matches!(refusal, Error::Closing), "{refusal}");
        assert_eq!(affinity.get(key, start()).unwrap().turns, 0);
    }
}

//! Decides to which worker a turn goes, and holds the turn's place there. Sends nothing.
//!
//! A session is a sequence of turns that share a growing prefix, and a turn is one request and its
//! answer. `turn` passes in a turn that it has read, and gets a [`PlacedTurn`] or the reason for a
//! refusal. `placement` compares the workers; this module gives it what is known of the turn.
//!
//! The affinity table binds sessions to workers. One step under its lock reads a session's status,
//! places the turn and binds the session, so that concurrent first turns get one worker.
//!
//! A placed turn has a claim, a hold and a lease. The claim is a header that tells the agent what
//! the turn does to its session. The hold keeps the binding while the turn runs. The lease counts
//! the turn's tokens as load of the worker.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::MutexGuard;
use proto::{
    claim::Claim,
    id::{Digest, SessionKey},
    load::Retention,
};
use service::clock::now;
use tracing::debug;

use super::{
    error::Error,
    request::{SessionIntent, Turn},
    shared::Shared,
};
use crate::{
    fleet::{lease::Lease, snapshot::Snapshot, worker::WorkerRef},
    placement::{
        self, Figures, Placement, PlacementRequest, Reason, Sticky,
        affinity::{Affinity, Binding},
        recent::PlacementRecord,
        session_status::{self, SessionStatus},
    },
    residency::block_locator::TurnBlocks,
};

/// A turn with its worker, and what the turn holds while it runs.
#[derive(Debug)]
pub(crate) struct PlacedTurn {
    pub(crate) worker: WorkerRef,
    pub(crate) worker_name: String,
    /// The address of the agent's data port.
    pub(crate) data_authority: Arc<str>,
    pub(crate) reason: Reason,
    /// What the agent is told about the session, as a header. `None` without a session.
    pub(crate) claim: Option<Claim>,
    /// Whether the turn may go to another worker if this one refuses it.
    pub(crate) can_move: bool,
    pub(crate) lease: Lease,
    pub(crate) hold: Option<BindingHold>,
    /// The blocks of the turn's prompt, if they were made. The worker has them after the turn.
    pub(crate) blocks: Option<TurnBlocks>,
    /// Leading prompt tokens resident on the worker, if known.
    pub(crate) resident_tokens: Option<u64>,
}

/// Keeps a session bound to its worker while a turn runs. Dropped when the turn ends.
#[derive(Debug)]
pub(crate) struct BindingHold {
    shared: Arc<Shared>,
    key: SessionKey,
    /// Whether the agent closes the session when this turn ends.
    closes_session: bool,
    /// Whether the affinity table knows that the answer began, or that none will come.
    is_answer_recorded: bool,
    /// The worker from which this turn moves its session, until the new worker takes the turn.
    old_worker: Option<WorkerRef>,
    /// Size of the turn's body, in bytes.
    body_bytes: u64,
}

impl BindingHold {
    /// Records that the agent closes the session when this turn ends. From then on, the router
    /// treats the session as closed, even if the agent's table doesn't show the close yet.
    pub(crate) fn close_at_end(&mut self) {
        self.closes_session = true;
    }

    /// Whether a client has asked to close the session since the turn was placed.
    pub(crate) fn is_closing(&self) -> bool {
        let affinity = self.shared.affinity.lock();
        affinity.get(&self.key, now()).is_some_and(Binding::is_close_asked)
    }

    /// Records that the head of the answer has come. `is_success`: whether its status is 2xx.
    pub(crate) fn record_answer(&mut self, is_success: bool) {
        self.record_answer_once();
        if is_success {
            self.shared.affinity.lock().record_body_size(&self.key, self.body_bytes);
        }
        let Some(old_worker) = self.old_worker.take().filter(|_| is_success) else { return };
        // Another turn of the session may still run on the old worker, or may have moved the
        // session back there. Then the old worker still needs the session.
        let has_moved_away =
            self.shared.affinity.lock().get(&self.key, now()).is_some_and(|binding| {
                binding.turns == 1 && binding.worker.agent != old_worker.agent
            });
        if has_moved_away {
            // The session's KV on the old worker is of no use. Closed, it is evicted first.
            self.shared.close_detached(self.key.clone(), old_worker);
        }
    }

    fn record_answer_once(&mut self) {
        if !std::mem::replace(&mut self.is_answer_recorded, true) {
            self.shared.affinity.lock().record_answer(&self.key);
        }
    }
}

impl Drop for BindingHold {
    fn drop(&mut self) {
        self.record_answer_once();
        let mut affinity = self.shared.affinity.lock();
        affinity.end_turn(&self.key, now());
        if self.closes_session {
            affinity.record_close(&self.key, false, now());
        }
    }
}

/// What the session's status means for placing its turn.
struct PlacementConstraint {
    /// The worker that has the session, and what is known of the session there.
    sticky: Option<Sticky>,
    /// Whether no worker but the session's worker can take the turn.
    is_fixed: bool,
    /// The retention with which the turn opens the session if it goes to another worker. `None` if
    /// it doesn't open the session there.
    reopen_as: Option<Retention>,
}

/// What is known of a turn's prompt when it is placed.
#[derive(Debug, Clone, Copy)]
enum PromptBlocks<'a> {
    /// The prompt isn't read yet. Reading takes time and may be unnecessary.
    NotRead,
    /// The prompt's blocks. `None` if no blocks can be made of the prompt.
    Read(Option<&'a TurnBlocks>),
}

/// Rough number of bytes per token in a request body, which is JSON with prose and code.
const BYTES_PER_TOKEN: u64 = 4;

/// The result of one attempt to decide.
enum Decision {
    Placed(Box<PlacedTurn>),
    /// The prompt must be read, because the decision depends on its cost on each worker.
    NeedsPrompt,
}

impl Shared {
    /// Places a turn. Reads the prompt only if the worker can't be chosen without it.
    pub(crate) async fn decide(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        path: &str,
        body: &Bytes,
    ) -> Result<PlacedTurn, Error> {
        if let Decision::Placed(placed) = self.try_decide(turn, turn_id, PromptBlocks::NotRead)? {
            return Ok(*placed);
        }
        // Reading a long prompt takes milliseconds. The affinity lock isn't held meanwhile, so that
        // other sessions' turns can be placed.
        let blocks = self
            .block_locator
            .locate(&turn.prompt, turn.model.as_deref(), path, body, &self.view.load())
            .await;
        match self.try_decide(turn, turn_id, PromptBlocks::Read(blocks.as_ref()))? {
            Decision::Placed(placed) => {
                let count = |blocks| self.block_locator.reported_tokens(blocks, placed.worker);
                let resident_tokens = blocks.as_ref().and_then(count);
                Ok(PlacedTurn { blocks, resident_tokens, ..*placed })
            }
            Decision::NeedsPrompt => unreachable!("the prompt was given"),
        }
    }

    /// Places a turn if what is known of its prompt is enough for that.
    fn try_decide(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        prompt_blocks: PromptBlocks<'_>,
    ) -> Result<Decision, Error> {
        let view = self.view.load();
        let prefer = self.preferred_worker(turn, &view);
        let blocks = match prompt_blocks {
            PromptBlocks::NotRead => None,
            PromptBlocks::Read(blocks) => blocks,
        };
        let request = PlacementRequest {
            digest: Digest(turn_id),
            expects_more_turns: turn.session.as_ref().is_some_and(|intent| !intent.closes_session),
            sticky: None,
            prefer,
            prompt: blocks.map(TurnBlocks::prompt_overlap),
            retention: None,
            model: turn.model.as_deref(),
            exclude: None,
        };
        let decision = match &turn.session {
            None => match prompt_blocks {
                PromptBlocks::NotRead => Decision::NeedsPrompt,
                PromptBlocks::Read(_) => {
                    let placement = placement::place(&request, &view, now())?;
                    let placed = self.commit_placement(turn, turn_id, &view, placement, None, true);
                    Decision::Placed(Box::new(placed))
                }
            },
            Some(intent) => {
                self.decide_session(turn, turn_id, intent, request, prompt_blocks, &view)?
            }
        };
        if let Decision::Placed(placed) = &decision {
            self.remember_cache_key(turn, placed.worker);
        }
        Ok(decision)
    }

    /// Places a turn on another worker after its first worker could not take it. Returns `None` if
    /// there is no other worker or the turn can't move.
    pub(crate) fn decide_again(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        first_placed: &mut PlacedTurn,
    ) -> Option<PlacedTurn> {
        if !first_placed.can_move {
            return None;
        }
        let view = self.view.load();
        let intent = turn.session.as_ref();
        let mut affinity = self.affinity.lock();
        // Another turn may have moved the session meanwhile. Then this turn follows the session.
        let moved_to = intent
            .and_then(|intent| affinity.get(&intent.key, now()))
            .map(|binding| binding.worker)
            .filter(|worker| *worker != first_placed.worker);
        let request = PlacementRequest {
            digest: intent.map_or(Digest(turn_id), |intent| intent.key.digest()),
            expects_more_turns: intent.is_some_and(|intent| !intent.closes_session),
            sticky: Some(moved_to.unwrap_or(first_placed.worker))
                .filter(|_| intent.is_some())
                .map(Sticky::new),
            prefer: None,
            prompt: None,
            retention: intent.and_then(|intent| intent.retention),
            model: turn.model.as_deref(),
            exclude: Some(first_placed.worker),
        };
        let placement = placement::place(&request, &view, now()).ok()?;
        if placement.worker == first_placed.worker {
            return None;
        }
        if let Some(intent) = intent {
            affinity.rebind(&intent.key, placement.worker);
        }
        if let Some(hold) = &mut first_placed.hold {
            // If this turn was moving the session, its first move failed. The session may still
            // need its KV on the worker that it was on before.
            hold.old_worker = None;
        }
        drop(affinity);
        // The hold stays with the turn. The lease counts on one worker, so the turn gets a new one.
        let second =
            self.commit_placement(turn, turn_id, &view, placement, first_placed.hold.take(), true);
        Some(PlacedTurn { blocks: first_placed.blocks.take(), ..second })
    }

    /// Places a turn of a session, in one step under the affinity lock.
    fn decide_session(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        intent: &SessionIntent,
        request: PlacementRequest<'_>,
        prompt_blocks: PromptBlocks<'_>,
        view: &Snapshot,
    ) -> Result<Decision, Error> {
        let mut affinity = self.affinity.lock();
        let binding = affinity.get(&intent.key, now());
        let status = session_status::determine_status(&intent.key, view, binding, now());
        let PlacementConstraint { mut sticky, is_fixed, reopen_as } =
            check_session(intent, &status, view)?;
        if let (Some(sticky), Some(binding)) = (&mut sticky, affinity.get(&intent.key, now())) {
            self.add_binding(sticky, binding, turn);
            sticky.fixed |= intent.is_delta;
        }
        // If the blocks of the session's worker are unknown, the worker would seem to have none of
        // the prompt. Then the turn is placed without its prompt.
        let has_trusted_count = |blocks: &TurnBlocks| {
            sticky.is_none_or(|sticky| self.block_locator.can_trust_count(blocks, sticky.worker))
        };
        let request = match prompt_blocks {
            PromptBlocks::Read(Some(blocks)) if !has_trusted_count(blocks) => {
                PlacementRequest { prompt: None, ..request }
            }
            _ => request,
        };
        let request = PlacementRequest {
            digest: intent.key.digest(),
            sticky,
            retention: if sticky.is_none() { intent.retention } else { None },
            ..request
        };
        let placement = match prompt_blocks {
            PromptBlocks::NotRead => match placement::place_without_prompt(&request, view, now()) {
                Some(placement) => placement,
                None => return Ok(Decision::NeedsPrompt),
            },
            PromptBlocks::Read(_) => placement::place(&request, view, now())?,
        };
        if let Some(Sticky { worker, fixed: true, .. }) = sticky
            && worker != placement.worker
            && intent.is_delta
        {
            // A delta turn has only the new tokens, and another worker doesn't have the history.
            return Err(Error::SessionLost { worker: view.name(worker), agent_up: false });
        }
        let mut hold = self.hold_binding(&mut affinity, intent, placement.worker)?;
        hold.body_bytes = turn.body_bytes;
        if placement.reason == Reason::Moved {
            hold.old_worker = sticky.map(|sticky| sticky.worker);
        }
        drop(affinity);
        let is_moved = sticky.is_some_and(|sticky| sticky.worker != placement.worker);
        let mut placed =
            self.commit_placement(turn, turn_id, view, placement, Some(hold), !is_fixed);
        if let (true, Some(retention), Some(claim)) = (is_moved, reopen_as, &mut placed.claim) {
            claim.open = true;
            claim.retention = claim.retention.or(Some(retention));
        }
        Ok(Decision::Placed(Box::new(placed)))
    }

    /// Adds to `sticky` what only the session's binding shows.
    fn add_binding(&self, sticky: &mut Sticky, binding: &Binding, turn: &Turn) {
        sticky.moved_at = binding.moved_at;
        let last_use = if binding.turns > 0 { Some(now()) } else { binding.last_turn_ended };
        let reports_blocks = self.block_locator.reports_blocks(sticky.worker);
        sticky.last_turn_ended = last_use.filter(|_| reports_blocks);
        // The size is 0 as long as no worker has taken a turn of the session.
        let previous_bytes = Some(binding.body_bytes).filter(|&bytes| bytes > 0);
        let new_bytes = previous_bytes.and_then(|bytes| turn.body_bytes.checked_sub(bytes));
        sticky.new_tokens = new_bytes.map(|bytes| bytes / BYTES_PER_TOKEN);
        // The costs can't be compared while a turn of the session runs: its KV isn't resident yet,
        // and the worker's load includes that turn.
        sticky.fixed |= binding.turns > 0 || binding.exclusive;
    }

    /// Counts the turn on the session's binding until the returned hold is dropped.
    fn hold_binding(
        self: &Arc<Self>,
        affinity: &mut MutexGuard<'_, Affinity>,
        intent: &SessionIntent,
        worker: WorkerRef,
    ) -> Result<BindingHold, Error> {
        let exclusive = intent.opens_session || intent.retention == Some(Retention::Pinned);
        affinity.begin_turn(&intent.key, worker, exclusive, now())?;
        affinity.set_placement_only(&intent.key, intent.is_placement_only);
        Ok(BindingHold {
            shared: Arc::clone(self),
            key: intent.key.clone(),
            closes_session: false,
            is_answer_recorded: false,
            old_worker: None,
            body_bytes: 0,
        })
    }

    /// Acquires the lease of a placed turn, and counts, logs and records its placement.
    fn commit_placement(
        &self,
        turn: &Turn,
        turn_id: u64,
        view: &Snapshot,
        placement: Placement,
        hold: Option<BindingHold>,
        can_move: bool,
    ) -> PlacedTurn {
        let tokens_expected = placement.tokens_expected();
        let Placement { worker, reason, ref figures, .. } = placement;
        let agent = view.agent(worker);
        let facts = agent.facts.as_ref().expect("a placed worker was described");
        let intent = turn.session.as_ref();
        let claim = intent.filter(|intent| !intent.is_placement_only).map(|intent| Claim {
            retention: intent.retention,
            delta: intent.is_delta,
            open: intent.opens_session,
            close: intent.closes_session,
            idle_ms_max: intent.idle_ms_max,
            ..Claim::for_session(&intent.key)
        });
        self.metrics.count_placement(reason.as_str());
        let worker_name = view.name(worker);
        let with_worker_name = |figures: &Figures| (view.name(figures.worker), *figures);
        debug!(
            worker = worker_name,
            reason = reason.as_str(),
            session = intent.map(|intent| tracing::field::display(intent.key.digest())),
            figures = ?figures.iter().map(with_worker_name).collect::<Vec<_>>(),
            "turn placed"
        );
        let session = intent.map(|intent| intent.key.digest());
        self.recent_placements
            .lock()
            .add(turn_id, PlacementRecord { placed_at: now(), session, placement });
        PlacedTurn {
            worker,
            worker_name,
            data_authority: Arc::clone(&facts.data_authority),
            reason,
            claim,
            can_move: can_move && !intent.is_some_and(|intent| intent.is_delta),
            lease: Lease::acquire(&agent.in_flight[worker.dp_rank as usize], tokens_expected),
            hold,
            blocks: None,
            resident_tokens: None,
        }
    }

    /// Returns the worker of the parent session, or else the last worker of the turn's cache key.
    fn preferred_worker(&self, turn: &Turn, view: &Snapshot) -> Option<(WorkerRef, Reason)> {
        if let Some(parent) = &turn.parent
            && let SessionStatus::Open { worker, .. } | SessionStatus::Bound { worker, .. } =
                self.session_status(parent, view)
        {
            return Some((worker, Reason::Parent));
        }
        let cache_key = turn.cache_key.as_ref()?;
        let cache_keys = self.cache_keys.lock();
        Some((cache_keys.get(cache_key, now())?.worker, Reason::CacheKey))
    }

    fn remember_cache_key(&self, turn: &Turn, worker: WorkerRef) {
        let Some(key) = &turn.cache_key else { return };
        let mut cache_keys = self.cache_keys.lock();
        // A turn that ends at once renews the key's binding. A full table doesn't store the key.
        if cache_keys.begin_turn(key, worker, false, now()).is_ok() {
            cache_keys.end_turn(key, now());
        }
    }
}

/// Refuses the turn if the session's status doesn't allow it. Otherwise returns what the status
/// means for placing the turn.
fn check_session(
    intent: &SessionIntent,
    status: &SessionStatus,
    view: &Snapshot,
) -> Result<PlacementConstraint, Error> {
    let delta_needs_history = intent.is_delta && !intent.opens_session;
    match status {
        SessionStatus::Closing => Err(Error::TurnWhileClosing),
        SessionStatus::Lost { worker, is_agent_up, .. } => {
            Err(Error::SessionLost { worker: view.name(*worker), agent_up: *is_agent_up })
        }
        _ if is_busy(status, view) => Err(Error::SessionBusy),
        SessionStatus::Unknown | SessionStatus::Bound { is_recent: false, .. }
            if delta_needs_history =>
        {
            Err(Error::DeltaWithoutHistory)
        }
        SessionStatus::Unknown => {
            Ok(PlacementConstraint { sticky: None, is_fixed: false, reopen_as: None })
        }
        SessionStatus::Bound { worker, is_busy, .. } => {
            // If the session is busy, its turn runs on the worker, and this turn must go there.
            let sticky = Some(Sticky { fixed: *is_busy, ..Sticky::new(*worker) });
            Ok(PlacementConstraint { sticky, is_fixed: *is_busy, reopen_as: None })
        }
        SessionStatus::Open { worker, session, .. } => {
            let is_pinned = session.retention == Retention::Pinned;
            let fixed = session.exclusive || (is_pinned && !session.full_history);
            let reported_tokens = session.resident_tokens.map_or(0, |figure| figure.value);
            let private_tokens = if is_pinned { reported_tokens } else { 0 };
            let sticky = Sticky { fixed, reported_tokens, private_tokens, ..Sticky::new(*worker) };
            let reopen_as = session.exclusive.then_some(session.retention);
            Ok(PlacementConstraint { sticky: Some(sticky), is_fixed: fixed, reopen_as })
        }
    }
}

/// Whether a turn of the session runs and its agent has no queue in which another turn could wait.
pub(crate) fn is_busy(status: &SessionStatus, view: &Snapshot) -> bool {
    let (SessionStatus::Open { is_busy: true, worker, .. }
    | SessionStatus::Bound { is_busy: true, worker, .. }) = status
    else {
        return false;
    };
    let facts = view.agent(*worker).facts.as_ref();
    facts.is_none_or(|facts| facts.description.turns_queued_per_session_max == 0)
}

//! Decides where a turn goes, and sends nothing.
//!
//! Status, placement, binding and lease are one step under the affinity lock, so that concurrent
//! first turns of a session get one worker.

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
        affinity::{Affinity, Binding, Closing},
        recent::PlacementRecord,
        session_status::{self, SessionStatus},
    },
    residency::block_locator::TurnBlocks,
};

/// A placed turn and everything it holds.
#[derive(Debug)]
pub(crate) struct PlacedTurn {
    pub(crate) worker: WorkerRef,
    pub(crate) name: String,
    pub(crate) authority: Arc<str>,
    pub(crate) reason: Reason,
    /// The claim that is sent to the agent as a header.
    pub(crate) claim: Option<Claim>,
    /// Whether the turn may go to another worker if this one refuses it.
    pub(crate) movable: bool,
    pub(crate) lease: Lease,
    pub(crate) hold: Option<BindingHold>,
    /// The blocks of the turn's prompt, which the worker has once it has taken the turn.
    pub(crate) blocks: Option<TurnBlocks>,
    /// Leading prompt tokens resident on the worker, if known.
    pub(crate) resident_tokens: Option<u64>,
}

/// Holds a session's binding while a turn runs.
#[derive(Debug)]
pub(crate) struct BindingHold {
    shared: Arc<Shared>,
    key: SessionKey,
    /// Whether the agent closes the session when this turn ends.
    closes_session: bool,
    /// Whether the affinity table was told that the answer began.
    answered: bool,
    /// The worker that the session left for a better one.
    left_worker: Option<WorkerRef>,
    /// Size of the turn's body, in bytes.
    body_bytes: u64,
}

impl BindingHold {
    /// Marks the turn as its session's last. From its end on, the session counts as unknown until
    /// the agent's table shows the close.
    pub(crate) fn close_at_end(&mut self) {
        self.closes_session = true;
    }

    /// Whether the session was closed after its turn was placed, when the worker didn't know of the
    /// turn yet.
    pub(crate) fn is_closing(&self) -> bool {
        let affinity = self.shared.affinity.lock();
        affinity.get(&self.key, now()).is_some_and(|binding| binding.closing != Closing::No)
    }

    /// Handles the head of the answer. `taken` is false if the agent refused the turn.
    pub(crate) fn record_answer(&mut self, taken: bool) {
        self.record_answer_once();
        if taken {
            self.shared.affinity.lock().record_body_size(&self.key, self.body_bytes);
        }
        let Some(left_worker) = self.left_worker.take().filter(|_| taken) else { return };
        // Another turn of the session may still run on the old worker, or have moved back to it.
        let is_away =
            self.shared.affinity.lock().get(&self.key, now()).is_some_and(|binding| {
                binding.turns == 1 && binding.worker.agent != left_worker.agent
            });
        if is_away {
            // The session's KV on the old worker has no use; once closed, it is evicted first.
            self.shared.close_detached(self.key.clone(), left_worker);
        }
    }

    fn record_answer_once(&mut self) {
        if !std::mem::replace(&mut self.answered, true) {
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
    sticky: Option<Sticky>,
    /// Whether no other worker can take it: the session is pinned or takes one turn at a time.
    fixed: bool,
    /// The retention with which another worker must open the session, if the client opened it.
    open_as: Option<Retention>,
}

/// What is known of a turn's prompt when it is placed.
#[derive(Debug, Clone, Copy)]
enum PromptBlocks<'a> {
    /// The prompt wasn't read. That takes time and may be unnecessary.
    NotRead,
    /// The prompt's blocks. `None` if no blocks can be made of it.
    Read(Option<&'a TurnBlocks>),
}

/// Rough number of bytes per token in a body: JSON with prose and code.
const BYTES_PER_TOKEN: u64 = 4;

/// The result of one attempt to decide.
enum Step {
    Placed(Box<PlacedTurn>),
    /// The decision depends on what the prompt costs on each worker.
    NeedsPrompt,
}

impl Shared {
    /// Places a turn. Reads its prompt only if the session's worker can't be settled without it.
    pub(crate) async fn decide(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        path: &str,
        body: &Bytes,
    ) -> Result<PlacedTurn, Error> {
        if let Step::Placed(placed) = self.try_decide(turn, turn_id, PromptBlocks::NotRead)? {
            return Ok(*placed);
        }
        // Runs without the lock: a long prompt takes milliseconds, and other sessions must go on.
        let blocks = self
            .block_locator
            .locate(&turn.prompt, turn.model.as_deref(), path, body, &self.view.load())
            .await;
        match self.try_decide(turn, turn_id, PromptBlocks::Read(blocks.as_ref()))? {
            Step::Placed(placed) => {
                let reported = |blocks| self.block_locator.reported_tokens(blocks, placed.worker);
                let resident_tokens = blocks.as_ref().and_then(reported);
                Ok(PlacedTurn { blocks, resident_tokens, ..*placed })
            }
            Step::NeedsPrompt => unreachable!("the prompt was given"),
        }
    }

    fn try_decide(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        prompt: PromptBlocks<'_>,
    ) -> Result<Step, Error> {
        let view = self.view.load();
        let prefer = self.preferred(turn, &view);
        let blocks = match prompt {
            PromptBlocks::NotRead => None,
            PromptBlocks::Read(blocks) => blocks,
        };
        let base = PlacementRequest {
            digest: Digest(turn_id),
            expects_more_turns: turn.session.as_ref().is_some_and(|intent| !intent.close),
            sticky: None,
            prefer,
            prompt: blocks.map(TurnBlocks::prompt),
            retention: None,
            model: turn.model.as_deref(),
            exclude: None,
        };
        let step = match &turn.session {
            None => match prompt {
                PromptBlocks::NotRead => Step::NeedsPrompt,
                PromptBlocks::Read(_) => {
                    let placement = placement::place(&base, &view, now())?;
                    let placed = self.commit_placement(turn, turn_id, &view, placement, None, true);
                    Step::Placed(Box::new(placed))
                }
            },
            Some(intent) => self.decide_session(turn, turn_id, intent, base, prompt, &view)?,
        };
        if let Step::Placed(placed) = &step {
            self.remember_cache_key(turn, placed.worker);
        }
        Ok(step)
    }

    /// Places a turn on another worker after the first could not take it. `None` if there is no
    /// other worker or the session can't move.
    pub(crate) fn decide_again(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        first: &mut PlacedTurn,
    ) -> Option<PlacedTurn> {
        if !first.movable {
            return None;
        }
        let view = self.view.load();
        let intent = turn.session.as_ref();
        let mut affinity = self.affinity.lock();
        // Another turn may have moved the session in the meantime. Then this turn follows it.
        let bound = intent
            .and_then(|intent| affinity.get(&intent.key, now()))
            .map(|binding| binding.worker)
            .filter(|worker| *worker != first.worker);
        let request = PlacementRequest {
            digest: intent.map_or(Digest(turn_id), |intent| intent.key.digest()),
            expects_more_turns: intent.is_some_and(|intent| !intent.close),
            sticky: Some(bound.unwrap_or(first.worker))
                .filter(|_| intent.is_some())
                .map(Sticky::new),
            prefer: None,
            prompt: None,
            retention: intent.and_then(|intent| intent.retention),
            model: turn.model.as_deref(),
            exclude: Some(first.worker),
        };
        let placement = placement::place(&request, &view, now()).ok()?;
        if placement.worker == first.worker {
            return None;
        }
        if let Some(intent) = intent {
            affinity.rebind(&intent.key, placement.worker);
        }
        if let Some(hold) = &mut first.hold {
            // The move failed, so the session may still need its KV on the worker it left.
            hold.left_worker = None;
        }
        drop(affinity);
        // The hold goes with the turn. The lease doesn't, as it counts on one worker.
        let second =
            self.commit_placement(turn, turn_id, &view, placement, first.hold.take(), true);
        Some(PlacedTurn { blocks: first.blocks.take(), ..second })
    }

    fn decide_session(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        intent: &SessionIntent,
        base: PlacementRequest<'_>,
        prompt: PromptBlocks<'_>,
        view: &Snapshot,
    ) -> Result<Step, Error> {
        let mut affinity = self.affinity.lock();
        let status = session_status::determine_status(
            &intent.key,
            view,
            affinity.get(&intent.key, now()),
            now(),
        );
        let PlacementConstraint { mut sticky, fixed, open_as } = admit(intent, &status, view)?;
        if let (Some(sticky), Some(binding)) = (&mut sticky, affinity.get(&intent.key, now())) {
            self.add_binding(sticky, binding, turn);
            sticky.fixed |= intent.delta;
        }
        // A worker whose blocks are unknown would seem to have none: place without the prompt.
        let is_counted = |blocks: &TurnBlocks| {
            sticky.is_none_or(|sticky| self.block_locator.is_known_on(blocks, sticky.worker))
        };
        let base = match prompt {
            PromptBlocks::Read(Some(blocks)) if !is_counted(blocks) => {
                PlacementRequest { prompt: None, ..base }
            }
            _ => base,
        };
        let request = PlacementRequest {
            digest: intent.key.digest(),
            sticky,
            retention: if sticky.is_none() { intent.retention } else { None },
            ..base
        };
        let placement = match prompt {
            PromptBlocks::NotRead => match placement::place_without_prompt(&request, view, now()) {
                Some(placement) => placement,
                None => return Ok(Step::NeedsPrompt),
            },
            PromptBlocks::Read(_) => placement::place(&request, view, now())?,
        };
        if let Some(Sticky { worker, fixed: true, .. }) = sticky
            && worker != placement.worker
            && intent.delta
        {
            // On another worker there is no history that a delta could be appended to.
            return Err(Error::SessionLost { worker: view.name(worker), agent_up: false });
        }
        let exclusive = intent.open || intent.retention == Some(Retention::Pinned);
        let mut hold = self.hold_binding(&mut affinity, intent, placement.worker, exclusive)?;
        hold.body_bytes = turn.body_bytes;
        if placement.reason == Reason::Moved {
            hold.left_worker = sticky.map(|sticky| sticky.worker);
        }
        drop(affinity);
        let moved = sticky.is_some_and(|sticky| sticky.worker != placement.worker);
        let mut placed = self.commit_placement(turn, turn_id, view, placement, Some(hold), !fixed);
        if let (true, Some(retention), Some(claim)) = (moved, open_as, &mut placed.claim) {
            claim.open = true;
            claim.retention = claim.retention.or(Some(retention));
        }
        Ok(Step::Placed(Box::new(placed)))
    }

    /// Adds what the session's binding shows to what is known of the session's worker.
    fn add_binding(&self, sticky: &mut Sticky, binding: &Binding, turn: &Turn) {
        sticky.moved_at = binding.moved_at;
        let ended = if binding.turns > 0 { Some(now()) } else { binding.last_turn_ended };
        sticky.last_turn_ended = ended.filter(|_| self.block_locator.reports_blocks(sticky.worker));
        // A binding without a turn has no body size to compare with.
        let before = Some(binding.body_bytes).filter(|&bytes| bytes > 0);
        let new_bytes = before.and_then(|before| turn.body_bytes.checked_sub(before));
        sticky.new_tokens = new_bytes.map(|bytes| bytes / BYTES_PER_TOKEN);
        // The KV of a running turn isn't resident yet, and the load there is the turn itself.
        sticky.fixed |= binding.turns > 0 || binding.exclusive;
    }

    /// Counts the turn on the session's binding until the returned hold is dropped.
    fn hold_binding(
        self: &Arc<Self>,
        affinity: &mut MutexGuard<'_, Affinity>,
        intent: &SessionIntent,
        worker: WorkerRef,
        exclusive: bool,
    ) -> Result<BindingHold, Error> {
        affinity.begin_turn(&intent.key, worker, exclusive, now())?;
        affinity.set_placement_only(&intent.key, intent.placement_only);
        Ok(BindingHold {
            shared: Arc::clone(self),
            key: intent.key.clone(),
            closes_session: false,
            answered: false,
            left_worker: None,
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
        movable: bool,
    ) -> PlacedTurn {
        let tokens = placement.tokens_expected();
        let Placement { worker, reason, ref figures, .. } = placement;
        let agent = view.agent(worker);
        let facts = agent.facts.as_ref().expect("a placed worker was described");
        let intent = turn.session.as_ref();
        let claim = intent.filter(|intent| !intent.placement_only).map(|intent| Claim {
            retention: intent.retention,
            delta: intent.delta,
            open: intent.open,
            close: intent.close,
            idle_ms_max: intent.idle_ms_max,
            ..Claim::for_session(&intent.key)
        });
        self.metrics.placed(reason.as_str());
        let name = view.name(worker);
        debug!(
            worker = name,
            reason = reason.as_str(),
            session = intent.map(|intent| tracing::field::display(intent.key.digest())),
            figures = ?with_names(figures, view),
            "turn placed"
        );
        let session = intent.map(|intent| intent.key.digest());
        self.recent_placements
            .lock()
            .add(turn_id, PlacementRecord { at: now(), session, placement });
        PlacedTurn {
            worker,
            name,
            authority: Arc::clone(&facts.data_authority),
            reason,
            claim,
            movable: movable && !intent.is_some_and(|intent| intent.delta),
            lease: Lease::acquire(&agent.in_flight[worker.dp_rank as usize], tokens),
            hold,
            blocks: None,
            resident_tokens: None,
        }
    }

    /// Returns the worker of the parent session, or else the worker of the turn's cache key.
    fn preferred(&self, turn: &Turn, view: &Snapshot) -> Option<(WorkerRef, Reason)> {
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
        // Renews the binding by a turn that ends at once. A full table doesn't store the key.
        if cache_keys.begin_turn(key, worker, false, now()).is_ok() {
            cache_keys.end_turn(key, now());
        }
    }
}

/// Returns the compared figures with their workers' names, for the log.
fn with_names(figures: &[Figures], view: &Snapshot) -> Vec<(String, Figures)> {
    figures.iter().map(|one| (view.name(one.worker), *one)).collect()
}

/// Checks whether the session's status allows the turn, and returns what it means for placement.
fn admit(
    intent: &SessionIntent,
    status: &SessionStatus,
    view: &Snapshot,
) -> Result<PlacementConstraint, Error> {
    let delta_needs_history = intent.delta && !intent.open;
    match status {
        SessionStatus::Closing => Err(Error::TurnWhileClosing),
        SessionStatus::Lost { worker, agent_up } => {
            Err(Error::SessionLost { worker: view.name(*worker), agent_up: *agent_up })
        }
        busy if is_busy(busy, view) => Err(Error::SessionBusy),
        SessionStatus::Unknown | SessionStatus::Bound { recent: false, .. }
            if delta_needs_history =>
        {
            Err(Error::DeltaWithoutHistory)
        }
        SessionStatus::Unknown => Ok(PlacementConstraint {
            sticky: None,
            // No worker has any state of the session yet.
            fixed: false,
            open_as: None,
        }),
        SessionStatus::Bound { worker, busy, .. } => {
            // A turn of the session runs on the worker, so this turn must follow it there.
            let sticky = Some(Sticky { fixed: *busy, ..Sticky::new(*worker) });
            Ok(PlacementConstraint { sticky, fixed: *busy, open_as: None })
        }
        SessionStatus::Open { worker, session, .. } => {
            let pinned = session.retention == Retention::Pinned;
            let fixed = session.exclusive || (pinned && !session.whole_history);
            let reported_tokens = session.resident_tokens.map_or(0, |figure| figure.value);
            let private_tokens = if pinned { reported_tokens } else { 0 };
            let sticky = Sticky { fixed, reported_tokens, private_tokens, ..Sticky::new(*worker) };
            let sticky = Some(sticky);
            Ok(PlacementConstraint {
                sticky,
                fixed,
                open_as: session.exclusive.then_some(session.retention),
            })
        }
    }
}

/// Whether a turn runs that this one can't wait for. If turns may queue, the agent decides instead.
pub(crate) fn is_busy(status: &SessionStatus, view: &Snapshot) -> bool {
    let (SessionStatus::Open { busy: true, worker, .. }
    | SessionStatus::Bound { busy: true, worker, .. }) = status
    else {
        return false;
    };
    let facts = view.agent(*worker).facts.as_ref();
    facts.is_none_or(|facts| facts.description.turns_queued_per_session_max == 0)
}

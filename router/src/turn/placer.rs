//! Chooses the worker of each turn, binds its session, and counts its load there.
//!
//! `decide` makes each decision in one step on the table of bindings. Before a session begins or
//! moves, `claims` makes sure that all routers know its worker. Nothing is sent to a worker here.

pub(super) mod assignment;
mod decide;
mod unnamed;

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use contract::{claim::Claim, id::SessionKey};
use parking_lot::Mutex;
use service::clock::now;
use tracing::debug;

pub(super) use self::unnamed::ConversationHold;
use self::{
    assignment::{Assignment, Destination, PrefillHalf},
    decide::{PromptFacts, SessionDecision, TurnFacts},
};
use super::request::Turn;
use crate::{
    fleet::{
        conversations::Conversations, lease::LoadLease, snapshot::Snapshot, worker::WorkerRef,
    },
    metrics::Metrics,
    placement::{
        Figures, Placement, Reason, pair,
        recent::{self, PlacementRecord, RecentPlacements},
    },
    residency::block_locator::{BlockLocator, TurnBlocks},
    sessions::{
        bindings::{Bindings, KnownPlacementClaim},
        check::Error,
        claims::{AgreedWorker, PlacementClaims, Proposal},
        directory::{BindingHold, SessionDirectory},
        intent::{HintKind, SessionIntent},
        renewal::{self, RenewalQueue, Renewals},
        status::SessionStatus,
    },
    shares::Sharer,
};

/// A decision that was carried out: the turn counts on its worker, and its session is bound there.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) assignment: Assignment,
    pub(super) lease: LoadLease,
    pub(super) hold: Option<BindingHold>,
    /// Set if the conversation has no name and the prompt was read.
    pub(super) conversation: Option<ConversationHold>,
    /// What to ask other routers before the turn is sent.
    proposal: Option<Proposal>,
}

#[derive(Debug)]
pub(crate) struct Placer {
    directory: Arc<SessionDirectory>,
    claims: Arc<PlacementClaims>,
    renewals: Renewals,
    block_locator: Arc<BlockLocator>,
    /// The conversations without a name.
    conversations: Arc<Mutex<Conversations>>,
    /// The worker of each `prompt_cache_key`.
    cache_keys: Mutex<Bindings>,
    /// The worker of each name that came once and may be the name of a request.
    names_seen_once: Mutex<Bindings>,
    recent_placements: Mutex<RecentPlacements>,
    /// Hashes turn numbers to turn ids, with a random key.
    turn_id_hasher: RandomState,
    next_turn_number: AtomicU64,
    metrics: Arc<Metrics>,
}

impl Placer {
    pub(crate) fn new(
        directory: Arc<SessionDirectory>,
        claims: Arc<PlacementClaims>,
        block_locator: Arc<BlockLocator>,
        cache_keys: Bindings,
        names_seen_once: Bindings,
        metrics: Arc<Metrics>,
    ) -> (Self, RenewalQueue) {
        let (renewals, renewal_queue) = renewal::queue();
        let placer = Self {
            conversations: directory.conversations(),
            directory,
            claims,
            renewals,
            block_locator,
            cache_keys: Mutex::new(cache_keys),
            names_seen_once: Mutex::new(names_seen_once),
            recent_placements: Mutex::new(RecentPlacements::new(recent::WEIGHT_MAX)),
            turn_id_hasher: RandomState::new(),
            next_turn_number: AtomicU64::new(0),
            metrics,
        };
        (placer, renewal_queue)
    }

    /// Clients see the id as 16 hex digits. It is a number hashed with a secret key of the process
    /// (SipHash), so it can't be guessed from other ids. It gives no right: only admins may ask why
    /// a turn went to its worker.
    pub(super) fn new_turn_id(&self) -> u64 {
        self.turn_id_hasher.hash_one(self.next_turn_number.fetch_add(1, Ordering::Relaxed))
    }

    /// Oldest first.
    pub(crate) fn placements(&self, turn_id: u64, view: &Snapshot) -> Vec<PlacementRecord> {
        self.recent_placements.lock().placements(turn_id, view).into_iter().cloned().collect()
    }

    /// Oldest first, each with its place in the order of all placements. Without `after`, returns
    /// the last `limit` placements.
    pub(crate) fn placements_page(
        &self,
        after: Option<u64>,
        limit: usize,
        view: &Snapshot,
    ) -> Vec<(u64, PlacementRecord)> {
        let recent = self.recent_placements.lock();
        let page = recent.page(after, limit, view);
        page.into_iter().map(|(place, record)| (place, record.clone())).collect()
    }

    /// Reads the prompt only if the worker can't be chosen without it. All routers then know the
    /// worker of the turn's session, unless the turn continues a stored response.
    pub(super) async fn place(
        &self,
        turn: &Turn,
        turn_id: u64,
        path: &str,
        body: &Bytes,
        sharer: &Sharer,
    ) -> Result<Chosen, Error> {
        let chosen = match self.decide_and_bind(turn, turn_id, PromptFacts::Unread)? {
            Some(chosen) => chosen,
            None => {
                // Reading a long prompt takes milliseconds. The table of bindings isn't locked
                // meanwhile, so that other sessions' turns can be placed.
                let (model, view) = (turn.model.as_deref(), self.directory.view());
                let locating =
                    self.block_locator.locate(&turn.prompt, model, path, body, &view, sharer);
                self.decide_by_prompt(turn, turn_id, locating.await)?
            }
        };
        if turn.response_agent.is_some() {
            return Ok(chosen);
        }
        let chosen = self.agree(turn, turn_id, chosen).await;
        self.remember_cache_key(turn, chosen.assignment.to.worker);
        self.remember_name(turn, chosen.assignment.to.worker);
        Ok(chosen)
    }

    /// Chooses another worker than `failed`, which is the first one or that of the prefill half.
    /// `None` if there is none, or if the turn can't move. What holds the turn's binding moves too.
    pub(super) async fn place_again(
        &self,
        turn: &Turn,
        turn_id: u64,
        first: &mut Assignment,
        hold: Option<&mut BindingHold>,
        failed: WorkerRef,
    ) -> Option<Chosen> {
        if !first.can_move {
            return None;
        }
        let view = self.directory.view();
        let (placement, proposal) = self.directory.step(|bindings, now| {
            let first_worker = first.to.worker;
            decide::decide_again(bindings, turn, turn_id, first_worker, failed, &view, now)
        })?;
        if let Some(hold) = hold {
            hold.forget_old_worker();
        }
        let mut chosen = self.carry_out(turn, turn_id, &view, placement, None, true);
        chosen.proposal = proposal;
        // It may say more by now than the client's request: to open the session, or to close it.
        chosen.assignment.claim = first.claim.take();
        let mut chosen = self.agree(turn, turn_id, chosen).await;
        chosen.assignment.blocks = first.blocks.take();
        Some(chosen)
    }

    /// If another router has placed the session, the turn follows the session.
    async fn agree(&self, turn: &Turn, turn_id: u64, mut chosen: Chosen) -> Chosen {
        let Some(proposal) = chosen.proposal.take() else { return chosen };
        let key = proposal.key.clone();
        let AgreedWorker { worker, generation, valid_until, view } =
            self.claims.agree(proposal).await;
        // Bound there even if this turn can't follow: the next ones must.
        self.directory.step(|bindings, _| {
            bindings.record_claim(&key, worker, KnownPlacementClaim { generation, valid_until });
        });
        self.renewals.watch(&key, worker, generation);
        let own = &mut chosen.assignment;
        if worker.agent == own.to.worker.agent || view.agent(worker).facts.is_none() {
            return chosen;
        }
        let placement = Placement::without_comparison(worker, Reason::Claimed);
        let prompt = PromptFacts::Read(own.blocks.as_ref());
        let request = self.facts(turn, turn_id, &view, prompt).placement_request(now());
        let Ok(placement) = pair::complete(placement, &request, &view, now()) else {
            return chosen;
        };
        let mut hold = chosen.hold.take();
        if let Some(hold) = &mut hold {
            hold.forget_old_worker();
        }
        let mut followed = self.carry_out(turn, turn_id, &view, placement, hold, true);
        let blocks = own.blocks.take();
        self.count_resident(&mut followed.assignment, blocks.as_ref());
        followed.assignment.can_move = own.can_move;
        followed.assignment.claim = own.claim.take();
        followed.assignment.blocks = blocks;
        followed
    }

    fn decide_by_prompt(
        &self,
        turn: &Turn,
        turn_id: u64,
        blocks: Option<TurnBlocks>,
    ) -> Result<Chosen, Error> {
        let decided = self.decide_and_bind(turn, turn_id, PromptFacts::Read(blocks.as_ref()))?;
        let mut chosen = decided.expect("nothing more can be known of a prompt that was read");
        let assignment = &mut chosen.assignment;
        self.count_resident(assignment, blocks.as_ref());
        // Without reports, what the conversation is expected to have there: else the agent would
        // report the whole prompt as backlog, and the conversation's next turn would avoid it.
        let expected_tokens = || {
            let prompt_tokens = blocks.as_ref()?.prompt_overlap().tokens;
            let tokens = prompt_tokens.saturating_sub(assignment.uncached_tokens_expected?);
            Some(tokens).filter(|tokens| *tokens > 0)
        };
        if assignment.prefill.is_none() {
            assignment.resident_tokens = assignment.resident_tokens.max(expected_tokens());
        }
        assignment.blocks = blocks;
        Ok(chosen)
    }

    /// Notes what the workers report to have of the prompt.
    fn count_resident(&self, assignment: &mut Assignment, blocks: Option<&TurnBlocks>) {
        let count = |worker| self.block_locator.reported_tokens(blocks?, worker);
        assignment.resident_tokens = count(assignment.to.worker);
        if let Some(prefill) = &mut assignment.prefill {
            prefill.resident_tokens = count(prefill.to.worker);
        }
    }

    /// Decides the turn's worker in one step on the table in which the session or the conversation
    /// is bound, and carries the decision out. `None`: only the prompt can tell.
    fn decide_and_bind(
        &self,
        turn: &Turn,
        turn_id: u64,
        prompt: PromptFacts<'_>,
    ) -> Result<Option<Chosen>, Error> {
        let view = self.directory.view();
        let facts = self.facts(turn, turn_id, &view, prompt);
        let Some(intent) = &turn.session else {
            return self.decide_unnamed(&facts);
        };
        let decided = self
            .directory
            .step(|bindings, now| decide::decide_session(bindings, &facts, intent, now))?;
        let Some(decision) = decided else { return Ok(None) };
        let SessionDecision { placement, can_move, old_worker, reopen_as, proposal } = decision;
        let hold =
            BindingHold::new(&self.directory, intent.key.clone(), old_worker, turn.body_bytes);
        let mut chosen = self.carry_out(turn, turn_id, &view, placement, Some(hold), can_move);
        if let (Some(retention), Some(claim)) = (reopen_as, &mut chosen.assignment.claim) {
            claim.open = true;
            claim.retention = claim.retention.or(Some(retention));
        }
        Ok(Some(Chosen { proposal, ..chosen }))
    }

    fn facts<'a>(
        &'a self,
        turn: &'a Turn,
        turn_id: u64,
        view: &'a Snapshot,
        prompt: PromptFacts<'a>,
    ) -> TurnFacts<'a> {
        let prefer = self.preferred_worker(turn, view);
        let intent = turn.session.as_ref();
        let seen_on = intent.and_then(|intent| self.worker_of_name(intent, view));
        let block_locator = &self.block_locator;
        let conversations = None;
        TurnFacts { turn, turn_id, view, block_locator, prefer, seen_on, prompt, conversations }
    }

    /// Counts the turn on the worker of `placement`, and notes why it goes there.
    fn carry_out(
        &self,
        turn: &Turn,
        turn_id: u64,
        view: &Snapshot,
        placement: Placement,
        hold: Option<BindingHold>,
        can_move: bool,
    ) -> Chosen {
        let tokens_expected = placement.tokens_expected();
        let Placement { worker, reason, ref figures, .. } = placement;
        let agent = view.agent(worker);
        let intent = turn.session.as_ref();
        let to = Destination::new(view, worker);
        self.metrics.count_placement(reason.as_str());
        let with_worker_name =
            |&(worker, figures): &(WorkerRef, Figures)| (view.name(worker), figures);
        debug!(
            worker = to.name,
            reason = reason.as_str(),
            session = intent.map(|intent| tracing::field::display(intent.key.digest())),
            figures = ?figures.iter().map(with_worker_name).collect::<Vec<_>>(),
            "turn placed"
        );
        let prefill = placement.prefill.as_ref();
        let uncached_tokens_expected = match prefill {
            Some(prefill) => prefill.uncached_tokens,
            None => placement.uncached_tokens,
        };
        let is_delta = intent.is_some_and(|intent| intent.is_delta);
        let transfer = agent.facts.as_ref().and_then(|it| it.description.engine.transfer.as_ref());
        let assignment = Assignment {
            to,
            reason,
            claim: claim(turn),
            can_move: can_move && !is_delta && turn.response_agent.is_none(),
            blocks: None,
            resident_tokens: None,
            uncached_tokens_expected,
            ttft_expected: placement.ttft_expected(),
            prefill: prefill.map(|prefill| PrefillHalf::new(view, prefill, self.new_turn_id())),
            keeps_kv: transfer.is_none_or(|transfer| transfer.decode_cache),
        };
        let session = intent.map(|intent| intent.key.digest());
        let record = PlacementRecord { turn: turn_id, placed_at: now(), session, placement };
        self.recent_placements.lock().add(record);
        let lease = LoadLease::acquire(&agent.in_flight[worker.dp_rank as usize], tokens_expected);
        Chosen { assignment, lease, hold, conversation: None, proposal: None }
    }

    /// The parent session comes before the cache key.
    fn preferred_worker(&self, turn: &Turn, view: &Snapshot) -> Option<(WorkerRef, Reason)> {
        if let Some(parent) = &turn.parent
            && let SessionStatus::Open { worker, .. } | SessionStatus::Bound { worker, .. } =
                self.directory.status(parent, view)
        {
            return Some((worker, Reason::Parent));
        }
        let cache_key = turn.cache_key.as_ref()?;
        let mut cache_keys = self.cache_keys.lock();
        Some((cache_keys.resolve(cache_key, view, now())?.worker, Reason::CacheKey))
    }

    fn remember_cache_key(&self, turn: &Turn, worker: WorkerRef) {
        let Some(key) = &turn.cache_key else { return };
        let mut cache_keys = self.cache_keys.lock();
        // A turn that ends at once renews the key's binding. A full table doesn't store the key.
        if cache_keys.begin_turn(key, worker, false, now()).is_ok() {
            cache_keys.end_turn(key, now());
        }
    }

    pub(in crate::turn) fn has_seen_name(&self, key: &SessionKey) -> bool {
        self.names_seen_once.lock().get(key, now()).is_some()
    }

    /// Returns where the turn ran that first had the session's name, if it ran without the session.
    fn worker_of_name(&self, intent: &SessionIntent, view: &Snapshot) -> Option<WorkerRef> {
        intent.hint.filter(|hint| *hint == HintKind::SessionOrRequest)?;
        Some(self.names_seen_once.lock().resolve(&intent.key, view, now())?.worker)
    }

    /// Also forgets a name that has begun a session.
    fn remember_name(&self, turn: &Turn, worker: WorkerRef) {
        let begun = turn.session.as_ref().filter(|intent| intent.hint.is_some());
        if turn.name_seen_once.is_none() && begun.is_none() {
            return;
        }
        let mut names = self.names_seen_once.lock();
        if let Some(intent) = begun {
            names.forget(&intent.key);
        }
        if let Some(key) = &turn.name_seen_once
            && names.begin_turn(key, worker, false, now()).is_ok()
        {
            names.end_turn(key, now());
        }
    }
}

/// What the agent is told of the turn's session. `None` if it shall know of none.
fn claim(turn: &Turn) -> Option<Claim> {
    let intent = turn.session.as_ref().filter(|intent| !intent.is_placement_only)?;
    Some(Claim {
        retention: intent.retention,
        delta: intent.is_delta,
        open: intent.opens_session,
        close: intent.closes_session,
        idle_ms_max: intent.idle_ms_max,
        parent: turn.parent.as_ref().map(SessionKey::digest),
        ..Claim::for_session(&intent.key)
    })
}

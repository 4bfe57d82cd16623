//! Places turns: decides the worker of each turn, binds its session, and counts its load there.
//!
//! `decide` makes each decision in one step on the table of bindings. Before a session begins or
//! moves, `claims` makes sure that all routers know its worker. Nothing is sent to a worker here.
//!
//! The claim is a header that tells the agent what the turn does to its session. The hold keeps the
//! binding while the turn runs. The lease counts the turn's tokens as load of the worker.

mod names;
mod unnamed;

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use contract::{claim::Claim, id::SessionKey};
use parking_lot::Mutex;
use service::clock::now;
use tracing::debug;

pub(super) use self::unnamed::ConversationHold;
use super::{
    decide::{self, Error, SessionDecision, TurnFacts},
    directory::{BindingHold, SessionDirectory},
    renewal::{self, RenewalQueue, Renewals},
    request::Turn,
    target::{PlacedPrefill, Target},
};
use crate::{
    claims::{Claims, Settled, Wish},
    fleet::{conversations::Conversations, lease::Lease, snapshot::Snapshot, worker::WorkerRef},
    metrics::Metrics,
    placement::{
        self, Figures, Placement, PlacementRequest, Reason,
        affinity::{Affinity, Claimed},
        pair,
        recent::{self, PlacementRecord, RecentPlacements},
        session_status::SessionStatus,
    },
    residency::block_locator::{BlockLocator, TurnBlocks},
    shares::Sharer,
};

#[derive(Debug)]
pub(crate) struct PlacedTurn {
    pub(super) worker: WorkerRef,
    pub(super) worker_name: String,
    pub(super) data_authority: Arc<str>,
    pub(super) data_tls: bool,
    pub(super) reason: Reason,
    /// `None` without a session.
    pub(super) claim: Option<Claim>,
    /// Whether another worker may take the turn if this one refuses it.
    can_move: bool,
    pub(super) lease: Lease,
    pub(super) hold: Option<BindingHold>,
    /// Set if the conversation has no name and the prompt was read.
    pub(super) conversation: Option<ConversationHold>,
    /// Set if the blocks were made. The worker has them after the turn.
    pub(super) blocks: Option<TurnBlocks>,
    /// Leading prompt tokens resident on the worker, as reported or expected.
    pub(super) resident_tokens: Option<u64>,
    /// Prompt tokens that placement expects the worker that computes the prompt to compute.
    pub(super) uncached_tokens_expected: Option<u64>,
    /// Set if placement compared workers by the prompt.
    pub(super) ttft_expected: Option<Duration>,
    /// What to ask other routers before the turn is sent.
    wish: Option<Wish>,
    /// `None` if the worker runs the whole turn.
    pub(super) prefill: Option<PlacedPrefill>,
    /// Whether others can use the turn's KV afterwards.
    keeps_kv: bool,
}

impl PlacedTurn {
    /// Of a pair, returns where the decode half goes.
    pub(super) fn target(&self) -> Target<'_> {
        Target {
            worker: self.worker,
            data_authority: &self.data_authority,
            data_tls: self.data_tls,
            resident_tokens: self.resident_tokens,
            bootstrap: self.prefill.as_ref().map(|prefill| &prefill.bootstrap),
        }
    }

    pub(super) fn workers_with_kv(&self) -> impl Iterator<Item = WorkerRef> {
        let decode = Some(self.worker).filter(|_| self.keeps_kv);
        self.prefill.as_ref().map(|prefill| prefill.worker).into_iter().chain(decode)
    }
}

#[derive(Debug)]
pub(crate) struct Placer {
    directory: Arc<SessionDirectory>,
    claims: Arc<Claims>,
    renewals: Renewals,
    block_locator: Arc<BlockLocator>,
    /// The conversations without a name.
    conversations: Arc<Mutex<Conversations>>,
    /// The worker of each `prompt_cache_key`.
    cache_keys: Mutex<Affinity>,
    /// The worker of each name that came once and may be the name of a request.
    names_seen_once: Mutex<Affinity>,
    recent_placements: Mutex<RecentPlacements>,
    /// Hashes turn numbers to turn ids, with a random key.
    turn_id_hasher: RandomState,
    next_turn_number: AtomicU64,
    metrics: Arc<Metrics>,
}

enum WithoutPrompt {
    Undecided,
    Refused(Error),
}

impl From<Error> for WithoutPrompt {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl Placer {
    pub(crate) fn new(
        directory: Arc<SessionDirectory>,
        claims: Arc<Claims>,
        block_locator: Arc<BlockLocator>,
        cache_keys: Affinity,
        names_seen_once: Affinity,
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
    pub(crate) fn placements(&self, turn_id: u64) -> Vec<PlacementRecord> {
        self.recent_placements.lock().placements(turn_id).into_iter().cloned().collect()
    }

    /// Oldest first, each with its place in the order of all placements. Without `after`, returns
    /// the last `limit` placements.
    pub(crate) fn placements_page(
        &self,
        after: Option<u64>,
        limit: usize,
    ) -> Vec<(u64, PlacementRecord)> {
        let recent = self.recent_placements.lock();
        let page = recent.page(after, limit);
        page.into_iter().map(|(place, record)| (place, record.clone())).collect()
    }

    /// Reads the prompt only if the worker can't be chosen without it.
    pub(super) async fn decide(
        &self,
        turn: &Turn,
        turn_id: u64,
        path: &str,
        body: &Bytes,
        sharer: &Sharer,
    ) -> Result<PlacedTurn, Error> {
        if let Some(agent) = turn.response_agent {
            let view = self.directory.view();
            let facts = self.facts(turn, turn_id, &view, None);
            return self
                .place(&facts, |request, now| decide::place_at_agent(agent, request, &view, now));
        }
        let placed = match self.decide_without_prompt(turn, turn_id) {
            Ok(placed) => placed,
            Err(WithoutPrompt::Refused(error)) => return Err(error),
            Err(WithoutPrompt::Undecided) => {
                // Reading a long prompt takes milliseconds. The table of bindings isn't locked
                // meanwhile, so that other sessions' turns can be placed.
                let (model, view) = (turn.model.as_deref(), self.directory.view());
                let prompt = &turn.prompt;
                let blocks =
                    self.block_locator.locate(prompt, model, path, body, &view, sharer).await;
                self.decide_with_prompt(turn, turn_id, blocks)?
            }
        };
        let placed = self.settle(turn, turn_id, placed).await;
        self.remember_cache_key(turn, placed.worker);
        self.remember_name(turn, placed.worker);
        Ok(placed)
    }

    /// If another router has placed the session, the turn follows the session.
    async fn settle(&self, turn: &Turn, turn_id: u64, mut placed: PlacedTurn) -> PlacedTurn {
        let Some(wish) = placed.wish.take() else { return placed };
        let key = wish.key.clone();
        let Settled { worker, generation, valid_until, view } = self.claims.settle(wish).await;
        self.directory.step(|affinity, _| {
            affinity.record_claim(&key, worker, Claimed { generation, valid_until });
        });
        self.renewals.watch(&key, worker, generation);
        if worker.agent == placed.worker.agent || view.agent(worker).facts.is_none() {
            return placed;
        }
        let placement = Placement::without_comparison(worker, Reason::Claimed);
        let request =
            self.facts(turn, turn_id, &view, placed.blocks.as_ref()).placement_request(now());
        let Ok(placement) = pair::complete(placement, &request, &view, now()) else {
            return placed;
        };
        let mut hold = placed.hold.take();
        if let Some(hold) = &mut hold {
            hold.forget_old_worker();
        }
        let mut followed = self.commit(turn, turn_id, &view, placement, hold, true);
        let count = |worker| {
            let blocks = placed.blocks.as_ref()?;
            self.block_locator.reported_tokens(blocks, worker)
        };
        if let Some(prefill) = &mut followed.prefill {
            prefill.resident_tokens = count(prefill.worker);
        }
        PlacedTurn {
            can_move: placed.can_move,
            claim: placed.claim.take(),
            resident_tokens: count(worker),
            blocks: placed.blocks.take(),
            ..followed
        }
    }

    fn decide_without_prompt(
        &self,
        turn: &Turn,
        turn_id: u64,
    ) -> Result<PlacedTurn, WithoutPrompt> {
        let view = self.directory.view();
        self.place(&self.facts(turn, turn_id, &view, None), |request, now| {
            placement::place_without_prompt(request, &view, now).ok_or(WithoutPrompt::Undecided)
        })
    }

    fn decide_with_prompt(
        &self,
        turn: &Turn,
        turn_id: u64,
        blocks: Option<TurnBlocks>,
    ) -> Result<PlacedTurn, Error> {
        let view = self.directory.view();
        let facts = self.facts(turn, turn_id, &view, blocks.as_ref());
        let placed = self.place(&facts, |request, now| {
            placement::place(request, &view, now).map_err(Error::from)
        })?;
        let count = |worker| {
            blocks.as_ref().and_then(|blocks| self.block_locator.reported_tokens(blocks, worker))
        };
        // Without reports, what the conversation is expected to have there: else the agent would
        // report the whole prompt as backlog, and the conversation's next turn would avoid it.
        let expected_tokens = || {
            let prompt_tokens = blocks.as_ref()?.prompt_overlap().tokens;
            Some(prompt_tokens.saturating_sub(placed.uncached_tokens_expected?))
        };
        let is_whole = placed.prefill.is_none();
        let resident_tokens =
            count(placed.worker).max(is_whole.then(expected_tokens).flatten().filter(|it| *it > 0));
        let mut prefill = placed.prefill;
        if let Some(prefill) = &mut prefill {
            prefill.resident_tokens = count(prefill.worker);
        }
        Ok(PlacedTurn { blocks, resident_tokens, prefill, ..placed })
    }

    fn place<E: From<Error>>(
        &self,
        facts: &TurnFacts<'_>,
        choose: impl FnOnce(&PlacementRequest<'_>, Instant) -> Result<Placement, E>,
    ) -> Result<PlacedTurn, E> {
        let TurnFacts { turn, turn_id, view, .. } = *facts;
        let Some(intent) = &turn.session else {
            return self.place_unnamed(facts, choose);
        };
        let SessionDecision { placement, can_move, old_worker, reopen_as, wish } =
            self.directory.step(|affinity, now| {
                decide::decide_session(affinity, facts, intent, now, choose)
            })?;
        let hold =
            BindingHold::new(&self.directory, intent.key.clone(), old_worker, turn.body_bytes);
        let mut placed = self.commit(turn, turn_id, view, placement, Some(hold), can_move);
        if let (Some(retention), Some(claim)) = (reopen_as, &mut placed.claim) {
            claim.open = true;
            claim.retention = claim.retention.or(Some(retention));
        }
        placed.wish = wish;
        Ok(placed)
    }

    /// `failed_worker` is the first worker or the prefill worker. `None` if there is no other
    /// worker or the turn can't move.
    pub(super) async fn decide_again(
        &self,
        turn: &Turn,
        turn_id: u64,
        first_placed: &mut PlacedTurn,
        failed_worker: WorkerRef,
    ) -> Option<PlacedTurn> {
        if !first_placed.can_move {
            return None;
        }
        let view = self.directory.view();
        let first_worker = first_placed.worker;
        let (placement, wish) = self.directory.step(|affinity, now| {
            decide::decide_again(affinity, turn, turn_id, first_worker, failed_worker, &view, now)
        })?;
        // The hold stays with the turn. The lease counts on one worker, so the turn gets a new one.
        let mut hold = first_placed.hold.take();
        if let Some(hold) = &mut hold {
            hold.forget_old_worker();
        }
        let mut second = self.commit(turn, turn_id, &view, placement, hold, true);
        second.wish = wish;
        let second = self.settle(turn, turn_id, second).await;
        let conversation = first_placed.conversation.take();
        if let Some(conversation) = &conversation {
            conversation.rebind(second.worker);
        }
        Some(PlacedTurn { blocks: first_placed.blocks.take(), conversation, ..second })
    }

    fn facts<'a>(
        &'a self,
        turn: &'a Turn,
        turn_id: u64,
        view: &'a Snapshot,
        blocks: Option<&'a TurnBlocks>,
    ) -> TurnFacts<'a> {
        let prefer = self.preferred_worker(turn, view);
        let intent = turn.session.as_ref();
        let seen_on = intent.and_then(|intent| self.worker_of_name(intent));
        let block_locator = &self.block_locator;
        let conversations = None;
        TurnFacts { turn, turn_id, view, block_locator, prefer, seen_on, blocks, conversations }
    }

    fn commit(
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
            parent: turn.parent.as_ref().map(SessionKey::digest),
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
        let prefill = placement
            .prefill
            .as_ref()
            .map(|prefill| PlacedPrefill::new(view, prefill, self.new_turn_id()));
        let session = intent.map(|intent| intent.key.digest());
        let uncached_tokens_expected = match &placement.prefill {
            Some(prefill) => prefill.uncached_tokens,
            None => placement.uncached_tokens,
        };
        let ttft_expected = placement.ttft_expected();
        let record = PlacementRecord { turn: turn_id, placed_at: now(), session, placement };
        self.recent_placements.lock().add(record);
        PlacedTurn {
            worker,
            worker_name,
            data_authority: Arc::clone(&facts.data_authority),
            data_tls: facts.data_tls,
            reason,
            claim,
            can_move: can_move
                && !intent.is_some_and(|intent| intent.is_delta)
                && turn.response_agent.is_none(),
            lease: Lease::acquire(&agent.in_flight[worker.dp_rank as usize], tokens_expected),
            hold,
            conversation: None,
            blocks: None,
            resident_tokens: None,
            uncached_tokens_expected,
            ttft_expected,
            wish: None,
            prefill,
            keeps_kv: facts.description.engine.transfer.as_ref().is_none_or(|it| it.decode_cache),
        }
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
        let cache_keys = self.cache_keys.lock();
        Some((cache_keys.get(cache_key, now())?.worker, Reason::CacheKey))
    }

    /// Returns whether nothing of the agent's workers is left.
    pub(crate) fn forget_agent(&self, agent: usize) -> bool {
        self.recent_placements.lock().forget_agent(agent);
        self.conversations.lock().forget_agent(agent);
        let has_no_keys = self.cache_keys.lock().forget_agent(agent);
        let has_no_names = self.names_seen_once.lock().forget_agent(agent);
        has_no_keys && has_no_names
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

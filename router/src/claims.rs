//! Agrees with other routers on the worker of a session, before its first turn runs.
//!
//! Several routers serve one fleet, and know nothing of each other. Where sessions are, the agents
//! report. But no agent has a session whose first turn is still under way, and two routers would
//! choose two workers for it. So a router *claims* the worker first: at an agent, or at a store of
//! the operator's. What a claim is, is in [`proto::placement_claim`].
//!
//! `turn` asks [`Claims::settle`] before a session's first turn, an open, or a move. Turns of
//! sessions that stay where they are pay nothing. Whatever fails here, the turn goes on: with a
//! claim of the agents if the store gave none, and without a claim if the agents gave none either.
//!
//! - `store`: what a place that holds claims can do; claims in this process.
//! - `agents`, `arbiters`: agents hold the claims.
//! - `redis`, `etcd`: stores outside of Berth.
//! - `connection`: keeps a connection to each.
//! - `breaker`: a store that failed isn't asked for a while.
//! - `metrics`: counts of all this.

mod agents;
mod arbiters;
mod breaker;
mod connection;
mod etcd;
pub(crate) mod metrics;
mod redis;
mod store;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use proto::{
    id::SessionKey,
    placement_claim::{CLAIMS_MAX, ClaimKey, ClaimRequest, ClaimTable, PlacementClaim},
};
use service::{clock::now, tasks::Tasks, tls::client::ClientTls};
use tokio::sync::watch;
use tracing::{info, warn};

use self::{
    agents::AgentStore,
    breaker::{Breaker, Change},
    etcd::EtcdStore,
    metrics::{Metrics, StoreKind, StoreResult},
    redis::RedisStore,
    store::{ClaimStore, Error, MemoryStore},
};
use crate::{
    config::claims::{ClaimsTable, StoreName},
    fleet::{control::ControlClients, snapshot::Snapshot, view::View, worker::WorkerRef},
};

/// How often a claim is asked for at most, where each answer names a worker that the session leaves
/// or that can't take it. Each time, another router was faster.
const TRIES_MAX: usize = 3;

/// For how long a binding without a claim counts as claimed. It saves the session's next turns from
/// waiting for stores that have just failed.
const UNCLAIMED_VALID: Duration = Duration::from_secs(3);

/// Why the client of a store can't be made.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file of the settings can't be read.
    #[error("can't read a file named in [claims]")]
    File(#[from] std::io::Error),
    /// The URL of Redis can't be read.
    #[error("claims.urls: {0:?} is no URL of Redis; write redis://host:port/number")]
    Url(String),
}

/// A wish for a session's worker.
#[derive(Debug, Clone)]
pub(crate) struct Wish {
    pub(crate) key: SessionKey,
    /// The worker that this router has chosen.
    pub(crate) wanted: WorkerRef,
    /// The worker that the session leaves. A claim that names it is replaced.
    pub(crate) leaves: Option<WorkerRef>,
    /// The generation of the newest claim that this router knows.
    pub(crate) generation: Option<u64>,
}

/// What all routers know of a session's worker.
#[derive(Debug, Clone)]
pub(crate) struct Settled {
    /// The worker that gets the session's turns.
    pub(crate) worker: WorkerRef,
    /// The claim's generation. `None` if nobody gave a claim.
    pub(crate) generation: Option<u64>,
    /// Until when other routers know this.
    pub(crate) valid_until: Instant,
    /// The snapshot in which the worker was found. As long as it is held, the worker's slot doesn't
    /// go to another agent.
    pub(crate) view: Arc<Snapshot>,
}

/// A store with its breaker.
#[derive(Debug)]
struct Guarded {
    kind: StoreKind,
    store: Box<dyn ClaimStore>,
    breaker: Mutex<Breaker>,
}

/// The client of the store that the settings name, if they name one.
#[derive(Debug)]
pub(crate) struct OpenStore {
    store: Option<Guarded>,
    metrics: Metrics,
}

impl OpenStore {
    /// Creates the client, and starts its task. It connects in time. `tls` is for a store with TLS.
    ///
    /// # Errors
    /// If a file of the settings can't be read, or if the URL can't be read.
    pub(crate) fn open(
        settings: &ClaimsTable,
        tls: Option<ClientTls>,
        metrics: Metrics,
        tasks: &Tasks,
    ) -> Result<Self, SetupError> {
        let (kind, store): (_, Box<dyn ClaimStore>) = match settings.store {
            StoreName::Agents => return Ok(Self { store: None, metrics }),
            StoreName::Memory => {
                let table = ClaimTable::new(CLAIMS_MAX, service::clock::unix_ns());
                (StoreKind::Memory, Box::new(MemoryStore(Mutex::new(table))))
            }
            StoreName::Redis => {
                (StoreKind::Redis, Box::new(RedisStore::open(settings, tls, tasks)?))
            }
            StoreName::Etcd => (StoreKind::Etcd, Box::new(EtcdStore::open(settings, tls, tasks)?)),
        };
        Ok(Self { store: Some(Guarded { kind, store, breaker: Mutex::default() }), metrics })
    }
}

/// Asks for claims.
#[derive(Debug)]
pub(crate) struct Claims {
    view: Arc<View>,
    agents: AgentStore,
    /// The operator's store. `None`: the agents hold the claims.
    store: Option<Guarded>,
    ttl: Duration,
    metrics: Metrics,
    /// The claims that are under way. Each has a turn or an open that waits, or did.
    flights: Mutex<HashMap<SessionKey, watch::Receiver<Option<Settled>>>>,
    tasks: Tasks,
}

impl Claims {
    /// Creates what asks for claims.
    pub(crate) fn new(
        settings: &ClaimsTable,
        store: OpenStore,
        view: Arc<View>,
        control_clients: Arc<ControlClients>,
        tasks: Tasks,
    ) -> Self {
        let OpenStore { store, metrics } = store;
        let agents = AgentStore {
            view: Arc::clone(&view),
            control_clients,
            deadline: settings.deadline(),
            metrics: metrics.clone(),
        };
        let (ttl, flights) = (settings.ttl(), Mutex::default());
        Self { view, agents, store, ttl, metrics, flights, tasks }
    }

    /// Whether routers could place a session on different agents.
    pub(crate) fn are_needed(view: &Snapshot) -> bool {
        view.agents.iter().filter(|agent| agent.facts.is_some()).nth(1).is_some()
    }

    /// Claims a worker, and returns the worker that holds. Concurrent calls for one session share
    /// one claim, which goes on even if its caller goes away.
    pub(crate) async fn settle(self: &Arc<Self>, wish: Wish) -> Settled {
        let started_at = now();
        let unclaimed = Settled {
            worker: wish.wanted,
            generation: None,
            valid_until: started_at + UNCLAIMED_VALID,
            view: self.view.load(),
        };
        let mut flight = self.join_or_start(wish);
        let settled = flight.wait_for(Option::is_some).await.ok();
        let settled = settled.and_then(|settled| settled.clone());
        self.metrics.observe(now().saturating_duration_since(started_at));
        // The task of the claim ends without a result only if the router ends.
        settled.unwrap_or(unclaimed)
    }

    /// Extends the life of a claim. Returns its generation, and until when it lives. `None` if it
    /// isn't the newest any more, or if nobody answers.
    pub(crate) async fn renew(
        &self,
        key: &SessionKey,
        worker: WorkerRef,
        generation: u64,
    ) -> Option<(u64, Instant)> {
        let started_at = now();
        let request = self.request(key.into(), &self.view.load(), worker, Some(generation))?;
        let claim = self.ask(request).await.filter(|claim| claim.is_granted)?;
        Some((claim.generation, started_at + self.ttl))
    }

    /// Counts a session that two agents had, and that this router has closed at one of them.
    pub(crate) fn count_mended(&self) {
        self.metrics.mended.inc();
    }

    /// Returns how long a claim lives without being renewed.
    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    fn join_or_start(self: &Arc<Self>, wish: Wish) -> watch::Receiver<Option<Settled>> {
        let mut flights = self.flights.lock();
        if let Some(flight) = flights.get(&wish.key) {
            return flight.clone();
        }
        let (sender, receiver) = watch::channel(None);
        flights.insert(wish.key.clone(), receiver.clone());
        drop(flights);
        let claims = Arc::clone(self);
        self.tasks.spawn(async move {
            let key = wish.key.clone();
            let settled = claims.claim(wish).await;
            // First the result, so that a call that finds no claim under way sees what it changed.
            sender.send_replace(Some(settled));
            claims.flights.lock().remove(&key);
        });
        receiver
    }

    /// Asks for claims until one names a worker that can take the session.
    async fn claim(&self, wish: Wish) -> Settled {
        let started_at = now();
        let mut expected = wish.generation;
        for _ in 0..TRIES_MAX {
            let view = self.view.load();
            let request = self.request((&wish.key).into(), &view, wish.wanted, expected);
            let Some(request) = request else { break };
            let Some(claim) = self.ask(request).await else { break };
            let view = self.view.load();
            match judge(&claim, &wish, &view, now()) {
                Verdict::Holds(worker) => {
                    let (generation, valid_until) = (Some(claim.generation), started_at + self.ttl);
                    return Settled { worker, generation, valid_until, view };
                }
                Verdict::Replace => expected = Some(claim.generation),
            }
        }
        self.metrics.unclaimed.inc();
        Settled {
            worker: wish.wanted,
            generation: None,
            valid_until: now() + UNCLAIMED_VALID,
            view: self.view.load(),
        }
    }

    /// Returns the request for a claim. `None` if the agent isn't known any more.
    fn request(
        &self,
        key: ClaimKey,
        view: &Snapshot,
        worker: WorkerRef,
        expected: Option<u64>,
    ) -> Option<ClaimRequest> {
        let wanted = view.worker_id(worker)?;
        Some(ClaimRequest { key, wanted, expected, ttl: self.ttl })
    }

    /// Asks the store, then the agents.
    async fn ask(&self, request: ClaimRequest) -> Option<PlacementClaim> {
        if let Some(guarded) = &self.store
            && let Some(claim) = self.ask_store(guarded, request.clone()).await
        {
            return Some(claim);
        }
        // An agent's deadline is its own.
        let claim = self.agents.claim(request).await;
        self.count(StoreKind::Agents, &claim);
        claim.ok()
    }

    /// Asks the operator's store, unless it has just failed.
    async fn ask_store(&self, guarded: &Guarded, request: ClaimRequest) -> Option<PlacementClaim> {
        if !guarded.breaker.lock().try_pass(now()) {
            self.metrics.count(guarded.kind, StoreResult::Skipped);
            return None;
        }
        let claim = guarded.store.claim(request).await;
        self.count(guarded.kind, &claim);
        let store = guarded.kind.as_str();
        match (guarded.breaker.lock().record(claim.is_ok(), now()), &claim) {
            (Some(Change::Opened), Err(error)) => {
                warn!(store, %error, "claim store fails; agents hold the claims meanwhile");
            }
            (Some(Change::Closed), _) => info!(store, "claim store answers again"),
            (Some(Change::Opened) | None, _) => {}
        }
        claim.ok()
    }

    fn count(&self, kind: StoreKind, claim: &Result<PlacementClaim, Error>) {
        let result = match claim {
            Ok(claim) if claim.is_granted => StoreResult::Granted,
            Ok(_) => StoreResult::Held,
            Err(_) => StoreResult::Failed,
        };
        self.metrics.count(kind, result);
    }
}

/// What to do with the claim that holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The session's turns go to this worker.
    Holds(WorkerRef),
    /// The claim names a worker that the session leaves or that can't take it.
    Replace,
}

/// Judges the claim that holds after a request. Pure.
fn judge(claim: &PlacementClaim, wish: &Wish, view: &Snapshot, now: Instant) -> Verdict {
    let Some(worker) = view.worker_named(&claim.worker) else { return Verdict::Replace };
    let is_wanted = worker.agent == wish.wanted.agent;
    let is_left = wish.leaves.is_some_and(|leaves| leaves.agent == worker.agent);
    if claim.is_granted || is_wanted {
        // The router may have chosen another rank, and the agent keeps a session's rank.
        return Verdict::Holds(if claim.is_granted { wish.wanted } else { worker });
    }
    if is_left || !view.state(worker, now).is_usable() {
        return Verdict::Replace;
    }
    Verdict::Holds(worker)
}

#[cfg(test)]
mod tests {
    use proto::id::WorkerId;

    use super::*;
    use crate::fleet::{
        state::Update,
        testing::{fleet, start},
    };

    fn at(agent: usize) -> WorkerRef {
        WorkerRef { agent, dp_rank: 0 }
    }

    fn wish(wanted: usize, leaves: Option<usize>) -> Wish {
        let key = SessionKey::new("p", "s").unwrap();
        Wish { key, wanted: at(wanted), leaves: leaves.map(at), generation: None }
    }

    fn claim(agent: &str, is_granted: bool) -> PlacementClaim {
        let worker = WorkerId { agent: agent.to_owned(), dp_rank: 0 };
        PlacementClaim { worker, generation: 1, is_granted }
    }

    #[test]
    fn a_claim_of_another_router_is_followed_unless_its_worker_is_of_no_use() {
        let now = start();
        let mut state = fleet(&[(0, 0), (0, 0), (0, 0)], now);
        let view = state.snapshot();
        let judged = |name: &str, wish: &Wish| judge(&claim(name, false), wish, &view, now);
        assert_eq!(judged("a1", &wish(0, None)), Verdict::Holds(at(1)));
        assert_eq!(judged("a1", &wish(0, Some(1))), Verdict::Replace, "the session leaves it");
        assert_eq!(judged("a2", &wish(0, Some(1))), Verdict::Holds(at(2)), "moved by another");
        assert_eq!(judged("gone", &wish(0, None)), Verdict::Replace);
        let granted = judge(&claim("a0", true), &wish(0, None), &view, now);
        assert_eq!(granted, Verdict::Holds(at(0)));
        state.apply(1, Update::AgentLost("gone".to_owned()), now);
        let view = state.snapshot();
        let judged = judge(&claim("a1", false), &wish(0, None), &view, now);
        assert_eq!(judged, Verdict::Replace);
    }
}

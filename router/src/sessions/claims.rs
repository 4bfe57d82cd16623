//! Agrees with other routers on the worker of a session, before its first turn runs.
//!
//! Several routers serve one fleet, and know nothing of each other. No agent reports a session
//! whose first turn is still under way, so two routers would choose two workers for it. So a router
//! *claims* the worker first ([`contract::placement_claim`]): at an agent, or at a store of the
//! operator's. Turns of sessions that stay where they are pay nothing. Whatever fails here, the
//! turn goes on, at worst without a claim.

mod agents;
mod agreement;
mod arbiters;
mod breaker;
mod connection;
mod etcd;
pub(crate) mod metrics;
mod places;
#[cfg(feature = "redis")]
mod redis;
mod store;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    id::SessionKey,
    placement_claim::{CLAIMS_MAX, PlacementClaimTable},
};
use parking_lot::Mutex;
use service::{clock::now, tasks::Tasks, tls::client::ClientTls};
use tokio::sync::watch;

#[cfg(feature = "redis")]
use self::redis::RedisStore;
use self::{
    agents::AgentStore,
    agreement::Agreement,
    etcd::EtcdStore,
    metrics::{Metrics, StoreKind},
    places::{ClaimPlaces, Guarded},
    store::{ClaimStore, MemoryStore},
};
use crate::{
    config::claims::{ClaimsTable, StoreName},
    fleet::{control::ControlClients, snapshot::Snapshot, view::View, worker::WorkerRef},
};

/// How long a binding without a claim counts as claimed. It saves the session's next turns from
/// waiting for stores that have just failed.
const UNCLAIMED_VALID: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("can't read a file named in [claims]")]
    File(#[from] std::io::Error),
    /// The check of the settings says so before.
    #[error("claims.store: this router was built without the feature {0}; build it with it")]
    NotBuilt(&'static str),
    #[error("claims.urls: {0:?} is no URL of Redis; write redis://host:port/number")]
    Url(String),
}

#[derive(Debug, Clone)]
pub(crate) struct Proposal {
    pub(crate) key: SessionKey,
    pub(crate) wanted: WorkerRef,
    /// The worker that the session leaves. A claim that names it is replaced.
    pub(crate) leaves: Option<WorkerRef>,
    /// The generation of the newest claim that this router knows.
    pub(crate) generation: Option<u64>,
}

#[derive(Debug, Clone)]
pub(crate) struct AgreedWorker {
    pub(crate) worker: WorkerRef,
    /// `None` if nobody gave a claim.
    pub(crate) generation: Option<u64>,
    /// Until when other routers know this.
    pub(crate) valid_until: Instant,
    /// Has the worker, unless its agent has just left.
    pub(crate) view: Arc<Snapshot>,
}

/// Without a store, agents hold the claims.
#[derive(Debug)]
pub(crate) struct OpenStore {
    store: Option<Guarded>,
    metrics: Metrics,
}

impl OpenStore {
    /// Doesn't wait for a connection. `tls` is for a store with TLS.
    pub(crate) fn open(
        settings: &ClaimsTable,
        tls: Option<ClientTls>,
        metrics: Metrics,
        tasks: &Tasks,
    ) -> Result<Self, SetupError> {
        let (kind, store): (_, Box<dyn ClaimStore>) = match settings.store {
            StoreName::Agents => return Ok(Self { store: None, metrics }),
            StoreName::Memory => {
                let table = PlacementClaimTable::new(CLAIMS_MAX, service::clock::unix_ns());
                (StoreKind::Memory, Box::new(MemoryStore(Mutex::new(table))))
            }
            #[cfg(not(feature = "redis"))]
            StoreName::Redis => return Err(SetupError::NotBuilt("redis")),
            #[cfg(feature = "redis")]
            StoreName::Redis => {
                (StoreKind::Redis, Box::new(RedisStore::open(settings, tls, tasks)?))
            }
            StoreName::Etcd => (StoreKind::Etcd, Box::new(EtcdStore::open(settings, tls, tasks)?)),
        };
        Ok(Self { store: Some(Guarded::new(kind, store)), metrics })
    }
}

#[derive(Debug)]
pub(crate) struct PlacementClaims {
    view: Arc<View>,
    places: ClaimPlaces,
    ttl: Duration,
    metrics: Metrics,
    /// The claims that are under way. Each has a turn or an open that waits, or did.
    flights: Mutex<HashMap<SessionKey, watch::Receiver<Option<AgreedWorker>>>>,
    tasks: Tasks,
}

impl PlacementClaims {
    pub(crate) fn new(
        settings: &ClaimsTable,
        store: OpenStore,
        view: Arc<View>,
        control_clients: Arc<ControlClients>,
        tasks: Tasks,
    ) -> Self {
        let OpenStore { store, metrics } = store;
        let agents = AgentStore::new(control_clients);
        let places = ClaimPlaces::new(store, agents, settings, metrics.clone());
        Self { view, places, ttl: settings.ttl(), metrics, flights: Mutex::default(), tasks }
    }

    /// Whether routers could place a session on different agents.
    pub(crate) fn are_needed(view: &Snapshot) -> bool {
        view.agents.iter().filter(|agent| agent.facts.is_some()).nth(1).is_some()
    }

    /// Returns the worker of the claim that holds. Concurrent calls for one session share one
    /// claim, which goes on even if its caller goes away.
    pub(crate) async fn agree(self: &Arc<Self>, proposal: Proposal) -> AgreedWorker {
        let started_at = now();
        let unclaimed = AgreedWorker {
            worker: proposal.wanted,
            generation: None,
            valid_until: started_at + UNCLAIMED_VALID,
            view: self.view.load(),
        };
        let mut flight = self.join_or_start(proposal);
        let agreed = flight.wait_for(Option::is_some).await.ok();
        let agreed = agreed.and_then(|agreed| agreed.clone());
        self.metrics.observe(now().saturating_duration_since(started_at));
        // The task of the claim ends without a result only if the router ends.
        agreed.unwrap_or(unclaimed)
    }

    /// Returns the claim's generation, and until when it lives. `None` if it names another worker
    /// by now, or if nobody answers.
    pub(crate) async fn renew(
        &self,
        key: &SessionKey,
        worker: WorkerRef,
        generation: u64,
    ) -> Option<(u64, Instant)> {
        let started_at = now();
        let view = self.view.load();
        let places = self.places.in_order(key.into(), &view);
        let agreement = Agreement { places: &places, needed: self.places.needed(), ttl: self.ttl };
        let wanted = view.worker_id(worker)?;
        let generation = agreement.renew(key.into(), wanted, generation).await?;
        Some((generation, started_at + self.ttl))
    }

    /// Counts a session that two agents had, and that this router has closed at one of them.
    pub(crate) fn count_mended(&self) {
        self.metrics.mended.inc();
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
    }

    fn join_or_start(
        self: &Arc<Self>,
        proposal: Proposal,
    ) -> watch::Receiver<Option<AgreedWorker>> {
        let mut flights = self.flights.lock();
        if let Some(flight) = flights.get(&proposal.key) {
            return flight.clone();
        }
        let (sender, receiver) = watch::channel(None);
        flights.insert(proposal.key.clone(), receiver.clone());
        drop(flights);
        let claims = Arc::clone(self);
        self.tasks.spawn(async move {
            let key = proposal.key.clone();
            let agreed = claims.claim(proposal).await;
            // First the result, so that a call that finds no claim under way sees what it changed.
            sender.send_replace(Some(agreed));
            claims.flights.lock().remove(&key);
        });
        receiver
    }

    async fn claim(&self, proposal: Proposal) -> AgreedWorker {
        let started_at = now();
        let view = self.view.load();
        let places = self.places.in_order((&proposal.key).into(), &view);
        let agreement = Agreement { places: &places, needed: self.places.needed(), ttl: self.ttl };
        if let Some(agreed) = agreement.reach(&proposal, || self.view.load()).await {
            let (generation, valid_until) = (Some(agreed.generation), started_at + self.ttl);
            return AgreedWorker {
                worker: agreed.worker,
                generation,
                valid_until,
                view: agreed.view,
            };
        }
        self.metrics.unclaimed.inc();
        AgreedWorker {
            worker: proposal.wanted,
            generation: None,
            valid_until: now() + UNCLAIMED_VALID,
            view: self.view.load(),
        }
    }
}

#[cfg(test)]
mod tests;

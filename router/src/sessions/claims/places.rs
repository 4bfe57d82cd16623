//! The places that hold the claim of a session, in the order in which every router asks them.
//!
//! How long a place may take depends on its last answer. A place that answered is waited for
//! patiently: where it is only busy, going on to the next place would let two routers ask different
//! ones. A place that did not answer gets a short time, until it answers again.

use std::{fmt, sync::Arc, time::Duration};

use contract::placement_claim::{PlacementClaim, PlacementClaimKey, PlacementClaimRequest};
use parking_lot::Mutex;
use service::clock::now;
use tonic::async_trait;
use tracing::{debug, info, warn};

use super::{
    agents::AgentStore,
    agreement::ClaimPlace,
    arbiters::arbiters,
    breaker::{Breaker, Change},
    metrics::{Metrics, StoreKind, StoreResult},
    store::{ClaimStore, Error},
};
use crate::{
    config::claims::ClaimsTable,
    fleet::{snapshot::Snapshot, worker::AgentKey},
};

#[derive(Debug)]
pub(super) struct Guarded {
    kind: StoreKind,
    store: Box<dyn ClaimStore>,
    breaker: Mutex<Breaker>,
}

impl Guarded {
    pub(super) fn new(kind: StoreKind, store: Box<dyn ClaimStore>) -> Self {
        Self { kind, store, breaker: Mutex::default() }
    }
}

#[derive(Debug)]
pub(super) struct ClaimPlaces {
    /// `None`: only agents hold claims.
    store: Option<Guarded>,
    agents: AgentStore,
    /// The time for a place that answered its last question.
    patience: Duration,
    /// The time for any other place.
    deadline: Duration,
    metrics: Metrics,
}

impl ClaimPlaces {
    pub(super) fn new(
        store: Option<Guarded>,
        agents: AgentStore,
        settings: &ClaimsTable,
        metrics: Metrics,
    ) -> Self {
        let (patience, deadline) = (settings.patience(), settings.deadline());
        Self { store, agents, patience, deadline, metrics }
    }

    pub(super) fn needed(&self) -> usize {
        let is_alone = self.store.as_ref().is_some_and(|guarded| guarded.kind == StoreKind::Memory);
        // Claims in this process are those of the only router.
        if is_alone { 1 } else { 2 }
    }

    /// The store first, then the session's arbiters, best first.
    pub(super) fn in_order<'a>(
        &'a self,
        key: PlacementClaimKey,
        view: &'a Arc<Snapshot>,
    ) -> Vec<Box<dyn ClaimPlace + 'a>> {
        let store = self.store.iter().map(|guarded| -> Box<dyn ClaimPlace + 'a> {
            Box::new(StorePlace { guarded, places: self })
        });
        let agents = arbiters(key, view).into_iter().map(|agent| -> Box<dyn ClaimPlace + 'a> {
            Box::new(AgentPlace { agent, view, places: self })
        });
        store.chain(agents).collect()
    }

    fn time_max(&self, is_trusted: bool) -> Duration {
        if is_trusted { self.patience } else { self.deadline }
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

#[derive(Debug)]
struct StorePlace<'a> {
    guarded: &'a Guarded,
    places: &'a ClaimPlaces,
}

#[async_trait]
impl ClaimPlace for StorePlace<'_> {
    async fn ask(&self, request: PlacementClaimRequest) -> Option<PlacementClaim> {
        let Self { guarded: Guarded { kind, store, breaker }, places } = *self;
        let Some(is_trusted) = breaker.lock().try_pass(now()) else {
            places.metrics.count(*kind, StoreResult::Skipped);
            return None;
        };
        let claim = store.claim(request, places.time_max(is_trusted)).await;
        places.count(*kind, &claim);
        let store = kind.as_str();
        match (breaker.lock().record(claim.is_ok(), now()), &claim) {
            (Some(Change::Opened), Err(error)) => {
                warn!(store, %error, "claim store fails; agents hold the claims meanwhile");
            }
            (Some(Change::Closed), _) => info!(store, "claim store answers again"),
            (Some(Change::Opened) | None, _) => {}
        }
        claim.ok()
    }
}

struct AgentPlace<'a> {
    agent: AgentKey,
    view: &'a Arc<Snapshot>,
    places: &'a ClaimPlaces,
}

impl fmt::Debug for AgentPlace<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("AgentPlace").field(&self.agent).finish()
    }
}

#[async_trait]
impl ClaimPlace for AgentPlace<'_> {
    async fn ask(&self, request: PlacementClaimRequest) -> Option<PlacementClaim> {
        let Self { agent, view, places } = *self;
        let agent_id = view.agent_with(agent).name();
        let time_max = places.time_max(places.agents.is_trusted(agent_id));
        let claim = places.agents.claim(agent, request, time_max).await;
        places.agents.record(agent_id, claim.is_ok(), view);
        places.count(StoreKind::Agents, &claim);
        if let Err(error) = &claim {
            debug!(agent = agent_id, %error, "an arbiter gave no claim");
        }
        claim.ok()
    }
}

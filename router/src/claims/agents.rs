//! Has agents hold the claims: the store of a fleet that has no other.
//!
//! `arbiters` says which agents to ask about a session. If an agent is gone, full or slower than
//! the deadline, the next one is asked. Routers that disagree for a moment about which agents live
//! may ask different ones, so a session may begin on two workers. `turn::mending` then closes one.

use std::{sync::Arc, time::Duration};

use proto::placement_claim::{ClaimRequest, PlacementClaim};
use tonic::async_trait;

use super::{
    arbiters::arbiters,
    store::{ClaimStore, Error},
};
use crate::{
    claims::metrics::{Metrics, StoreKind, StoreResult},
    fleet::{control::ControlClients, view::View},
};

/// Asks agents for claims.
#[derive(Debug)]
pub(super) struct AgentStore {
    pub(super) view: Arc<View>,
    pub(super) control_clients: Arc<ControlClients>,
    /// How long one agent may take.
    pub(super) deadline: Duration,
    pub(super) metrics: Metrics,
}

#[async_trait]
impl ClaimStore for AgentStore {
    async fn claim(&self, request: ClaimRequest) -> Result<PlacementClaim, Error> {
        let view = self.view.load();
        let mut last_error = Error::NoArbiter;
        for agent in arbiters(request.key, &view) {
            let answer = async { self.control_clients.get(agent)?.claim(request.clone()).await };
            last_error = match tokio::time::timeout(self.deadline, answer).await {
                Ok(Ok(claim)) => return Ok(claim),
                Ok(Err(status)) => Error::Failed(status.message().to_owned()),
                Err(_) => Error::Late(self.deadline),
            };
            let agent = view.agents[agent].name();
            tracing::debug!(agent, error = %last_error, "an arbiter gave no claim");
            self.metrics.count(StoreKind::Agents, StoreResult::NextArbiter);
        }
        Err(last_error)
    }
}

//! Has agents hold the claims: the places of a fleet that has no store.

use std::{collections::HashSet, sync::Arc, time::Duration};

use contract::placement_claim::{PlacementClaim, PlacementClaimRequest};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::store::Error;
use crate::fleet::{control::ControlClients, snapshot::Snapshot, worker::AgentKey};

#[derive(Debug)]
pub(super) struct AgentStore {
    control_clients: Arc<ControlClients>,
    /// The ids of the agents that did not answer their last question.
    suspects: Mutex<HashSet<String>>,
}

impl AgentStore {
    pub(super) fn new(control_clients: Arc<ControlClients>) -> Self {
        Self { control_clients, suspects: Mutex::default() }
    }

    pub(super) fn is_trusted(&self, agent_id: &str) -> bool {
        !self.suspects.lock().contains(agent_id)
    }

    pub(super) fn record(&self, agent_id: &str, has_answered: bool, view: &Snapshot) {
        let mut suspects = self.suspects.lock();
        if has_answered {
            suspects.remove(agent_id);
        } else if suspects.insert(agent_id.to_owned()) {
            suspects.retain(|id| view.agents.iter().any(|agent| agent.name() == id));
        }
    }

    /// At an error, the agent may have recorded the claim all the same.
    pub(super) async fn claim(
        &self,
        agent: AgentKey,
        request: PlacementClaimRequest,
        time_max: Duration,
    ) -> Result<PlacementClaim, Error> {
        let answer = async { self.control_clients.get(agent)?.claim(request).await };
        match timeout(time_max, answer).await {
            Ok(Ok(claim)) => Ok(claim),
            Ok(Err(status)) => Err(Error::Failed(status.message().to_owned())),
            Err(_) => Err(Error::Late(time_max)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::{fleet, start};

    #[test]
    fn an_agent_is_suspected_until_it_answers_or_leaves() {
        let agents = AgentStore::new(Arc::default());
        let view = fleet(&[(0, 0), (0, 0)], start()).snapshot();
        agents.record("a0", false, &view);
        assert!(!agents.is_trusted("a0") && agents.is_trusted("a1"));
        agents.record("a0", true, &view);
        assert!(agents.is_trusted("a0"));
        agents.record("gone", false, &view);
        agents.record("a1", false, &view);
        assert_eq!(agents.suspects.lock().len(), 1, "the one that is gone is forgotten");
    }
}

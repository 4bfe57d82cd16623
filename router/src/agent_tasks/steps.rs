//! Says when an agent's tasks start and stop. Pure.

use std::collections::BTreeMap;

use crate::fleet::{membership::Phase, snapshot::Snapshot, worker::AgentKey};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Start {
        agent: AgentKey,
        control_url: String,
    },
    /// Stop the tasks of the agent. Then the fleet's state must hear of it, also if there are none.
    Stop {
        agent: AgentKey,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastStep {
    Start,
    Stop,
}

/// Of the agents that are in the fleet.
#[derive(Debug, Default)]
pub(super) struct Steps(BTreeMap<AgentKey, LastStep>);

impl Steps {
    /// Each step comes once. All that an agent needs come, however few snapshots are looked at: it
    /// leaves the fleet only after its `Stop`.
    pub(super) fn next(&mut self, view: &Snapshot) -> Vec<Step> {
        self.0.retain(|agent, _| view.has_agent(*agent));
        let mut steps = vec![];
        for (agent, known) in view.known_agents() {
            match (self.0.get(&agent), known.phase) {
                (None, Phase::Member | Phase::Leaving { .. }) => {
                    self.0.insert(agent, LastStep::Start);
                    steps.push(Step::Start { agent, control_url: known.control_url.clone() });
                }
                (None | Some(LastStep::Start), Phase::Ending) => {
                    self.0.insert(agent, LastStep::Stop);
                    steps.push(Step::Stop { agent });
                }
                _ => {}
            }
        }
        steps
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

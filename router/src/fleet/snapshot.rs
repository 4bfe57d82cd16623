//! The router's view of its fleet: agents, workers, load reports and session locations.
//!
//! [`State`](super::state::State) is the writer's side. It is pure, and only the view task owns it.
//! Readers load a [`Snapshot`], which never changes, and use it for a whole decision. Request tasks
//! write only the in-flight counts, which are the same atomics in every snapshot. Nothing is stored
//! on disk: the router relearns all of it from the agents.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    agent::{Agent, Facts, Link},
    reuse_forecast::ReuseDemand,
    sessions::Sessions,
    worker::{WorkerRef, WorkerState},
    worker_table::WorkerTable,
};

/// An immutable snapshot of the fleet.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// All configured agents, in configured order.
    pub agents: Vec<Arc<Agent>>,
    /// Where each session is, by session key.
    pub sessions: Sessions,
    /// The worker figures that every decision reads.
    pub(super) worker_table: WorkerTable,
    /// KV that sessions are expected to use again, indexed by agent, then by rank.
    pub(super) reuse_demands: Arc<Vec<Vec<ReuseDemand>>>,
    /// Whether all agents serve the same models. If so, a turn may go to any of them, whatever
    /// model it names.
    pub(super) same_models: bool,
    pub(super) report_age_max: Duration,
    pub(super) rebind_gain_min: Duration,
}

impl Snapshot {
    /// Iterates over the workers of all agents that were ever heard, by agent, then by rank.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerRef, &Agent, &Facts)> {
        self.agents.iter().enumerate().flat_map(|(index, agent)| {
            agent.facts.iter().flat_map(move |facts| {
                facts.description.ranks.iter().map(move |rank| {
                    (WorkerRef { agent: index, dp_rank: rank.dp_rank }, &**agent, facts)
                })
            })
        })
    }

    /// Returns the agent of a worker. Panics if the agent's index is not in the configuration.
    #[must_use]
    pub fn agent(&self, worker: WorkerRef) -> &Agent {
        &self.agents[worker.agent]
    }

    /// Returns the worker table: the figures that decisions read of all workers ever heard.
    #[must_use]
    pub fn worker_table(&self) -> &WorkerTable {
        &self.worker_table
    }

    /// Returns what turns the worker may take at `now`.
    #[must_use]
    pub fn state(&self, worker: WorkerRef, now: Instant) -> WorkerState {
        let stats = self.worker_table.get(worker);
        stats.map_or(WorkerState::Lost, |stats| stats.state(now, self.report_age_max))
    }

    /// Returns the KV on the worker that sessions are expected to use again.
    #[must_use]
    pub fn reuse_demand(&self, worker: WorkerRef) -> &ReuseDemand {
        let ranks = self.reuse_demands.get(worker.agent);
        let demand = ranks.and_then(|ranks| ranks.get(worker.dp_rank as usize));
        demand.unwrap_or(&ReuseDemand::NOTHING)
    }

    /// Whether all agents serve the same models.
    #[must_use]
    pub fn serves_same_models(&self) -> bool {
        self.same_models
    }

    /// Returns the least predicted gain for which a session moves to another worker.
    #[must_use]
    pub fn rebind_gain_min(&self) -> Duration {
        self.rebind_gain_min
    }

    /// Returns the longest silence after which a worker is not yet stale.
    #[must_use]
    pub fn report_age_max(&self) -> Duration {
        self.report_age_max
    }

    /// Returns the worker's name for people, as `agent/rank`.
    #[must_use]
    pub fn name(&self, worker: WorkerRef) -> String {
        format!("{}/{}", self.agent(worker).name(), worker.dp_rank)
    }

    /// Whether each configured agent has either sent its session table and a load report, or failed
    /// to connect.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.agents.iter().all(|agent| match agent.link {
            Link::Dialing => false,
            Link::Up => agent.report.is_some(),
            Link::Lost { .. } => true,
        })
    }

    /// Checks whether at least one worker can take turns.
    ///
    /// # Errors
    /// Returns the reason as a sentence for the operator.
    pub fn ready(&self, now: Instant) -> Result<(), String> {
        if !self.is_settled() {
            return Err("waiting for the first load report of every agent".to_owned());
        }
        let usable = self.workers().any(|(worker, ..)| {
            matches!(self.state(worker, now), WorkerState::Fresh | WorkerState::Stale)
        });
        if usable { Ok(()) } else { Err("no worker can take turns; see /v1/workers".to_owned()) }
    }
}

//! A snapshot of the fleet for decisions: agents, workers, load reports and session locations.
//!
//! A decision loads one [`Snapshot`], which never changes, and uses it to the end. Only the counts
//! of what this router has in flight change: they are atomics that all snapshots share. Nothing is
//! stored on disk, because a restarted router learns everything from the agents again.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    id::WorkerId,
    load::{EngineFacts, EngineRole},
};

use super::{
    agent::{Agent, Facts, Link},
    membership::Phase,
    reuse_forecast::ReuseDemand,
    sessions::Sessions,
    worker::{AgentKey, WorkerRef, WorkerState},
    worker_table::{WorkerStats, WorkerTable},
};

#[derive(Debug, Clone)]
pub struct Snapshot {
    /// By slot; those of the settings come first, in their order. A slot may be free.
    pub agents: Vec<Arc<Agent>>,
    /// By slot.
    pub(super) agent_keys: Arc<[AgentKey]>,
    /// Changes whenever an agent joins, leaves or changes its phase or sources.
    pub(super) members_version: u64,
    /// Whether a source has neither sent a list nor failed yet.
    pub(super) has_silent_sources: bool,
    pub sessions: Sessions,
    pub(super) worker_table: WorkerTable,
    /// By slot, then by rank.
    pub(super) reuse_demands: Arc<Vec<Vec<ReuseDemand>>>,
    /// Models and adapters. If true, a turn may go to any agent, or to none.
    pub(super) serves_same_models: bool,
    /// Longest silence of an agent before its workers are stale.
    pub(super) report_age_max: Duration,
    /// Least predicted gain for which a session moves to another worker.
    pub(super) rebind_gain_min: Duration,
    /// KV that one engine hands to another.
    pub(super) transfer_bytes_per_s: u64,
}

impl Snapshot {
    /// Of all agents that were ever heard, in the order of agents, then of ranks.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerRef, &Agent, &Facts)> {
        self.agents.iter().flat_map(|agent| {
            agent.facts.iter().flat_map(move |facts| {
                facts.description.ranks.iter().map(move |rank| {
                    (WorkerRef { agent: agent.key, dp_rank: rank.dp_rank }, &**agent, facts)
                })
            })
        })
    }

    /// The name under which all routers know a worker. `None` if its agent was never heard.
    #[must_use]
    pub fn worker_id(&self, worker: WorkerRef) -> Option<WorkerId> {
        let facts = self.agent(worker).facts.as_ref()?;
        Some(WorkerId { agent: facts.description.agent_id.clone(), dp_rank: worker.dp_rank })
    }

    /// If two agents have the name, the one that is connected counts.
    #[must_use]
    pub fn worker_named(&self, name: &WorkerId) -> Option<WorkerRef> {
        let has_name = |(worker, _, facts): &(WorkerRef, &Agent, &Facts)| {
            worker.dp_rank == name.dp_rank && facts.description.agent_id == name.agent
        };
        let named = self.workers().filter(has_name);
        named.max_by_key(|(_, agent, _)| agent.is_up()).map(|(worker, ..)| worker)
    }

    /// See [`Self::agent_with`].
    #[must_use]
    pub fn agent(&self, worker: WorkerRef) -> &Agent {
        self.agent_with(worker.agent)
    }

    /// An agent that has left the fleet, or joined it after this snapshot, is as one that was never
    /// heard: it has no facts, load or counts, isn't up, and isn't waited for.
    #[must_use]
    pub fn agent_with(&self, key: AgentKey) -> &Agent {
        static GONE: Agent = Agent::GONE;
        let agent = self.agents.get(key.slot()).filter(|agent| agent.key == key);
        agent.map_or(&GONE, |agent| agent)
    }

    /// By slot. That of a free slot is the key of its next agent.
    #[must_use]
    pub fn agent_keys(&self) -> &Arc<[AgentKey]> {
        &self.agent_keys
    }

    #[must_use]
    pub fn has_agent(&self, key: AgentKey) -> bool {
        self.agent_with(key).phase != Phase::Free
    }

    /// False for an agent that joined the fleet after this snapshot.
    #[must_use]
    pub fn has_left(&self, key: AgentKey) -> bool {
        self.agent_keys.get(key.slot()).is_some_and(|newest| key < *newest)
    }

    /// Those that are in the fleet.
    pub fn known_agents(&self) -> impl Iterator<Item = (AgentKey, &Arc<Agent>)> {
        let known = self.agents.iter().filter(|agent| agent.phase != Phase::Free);
        known.map(|agent| (agent.key, agent))
    }

    #[must_use]
    pub fn members_version(&self) -> u64 {
        self.members_version
    }

    /// The agent was never heard. Its slot may be the next new one.
    pub(super) fn place_agent(&mut self, agent: Agent) {
        let slot = agent.key.slot();
        if slot == self.agents.len() {
            self.agents.push(Arc::new(agent));
            self.sessions.add_agent();
            self.worker_table.add_agent();
        } else {
            self.agents[slot] = Arc::new(agent);
        }
    }

    #[must_use]
    pub fn worker_table(&self) -> &WorkerTable {
        &self.worker_table
    }

    #[must_use]
    pub fn state(&self, worker: WorkerRef, now: Instant) -> WorkerState {
        let stats = self.worker_table.get(worker);
        stats.map_or(WorkerState::Lost, |stats| stats.state(now, self.report_age_max))
    }

    #[must_use]
    pub fn reuse_demand(&self, worker: WorkerRef) -> &ReuseDemand {
        // The worker table, which the caller has just read, tells whether the worker is there.
        let known = self.worker_table.get(worker).map(WorkerStats::worker);
        let ranks = known.and_then(|worker| self.reuse_demands.get(worker.agent.slot()));
        let demand = ranks.and_then(|ranks| ranks.get(worker.dp_rank as usize));
        demand.unwrap_or(&ReuseDemand::NOTHING)
    }

    #[must_use]
    pub fn serves_same_models(&self) -> bool {
        self.serves_same_models
    }

    /// The model that a worker must serve to take a turn that names `model`. `None` if any worker
    /// will do: the turn names no model, or all agents serve the same ones, and this too.
    #[must_use]
    pub fn required_model<'a>(&self, model: Option<&'a str>) -> Option<&'a str> {
        let is_served = |model: &str| {
            let first = self.workers().next();
            first.is_some_and(|(.., facts)| facts.description.engine.serves(model))
        };
        model.filter(|model| !self.serves_same_models || !is_served(model))
    }

    /// One stands for all if all agents serve the same models.
    pub fn engines(&self) -> impl Iterator<Item = &EngineFacts> + Clone {
        let engines_max = if self.serves_same_models { 1 } else { usize::MAX };
        let facts = self.agents.iter().filter_map(|agent| agent.facts.as_ref());
        facts.map(|facts| &facts.description.engine).take(engines_max)
    }

    #[must_use]
    pub fn rebind_gain_min(&self) -> Duration {
        self.rebind_gain_min
    }

    #[must_use]
    pub fn report_age_max(&self) -> Duration {
        self.report_age_max
    }

    /// For people, as `agent/rank`.
    #[must_use]
    pub fn name(&self, worker: WorkerRef) -> String {
        format!("{}/{}", self.agent(worker).name(), worker.dp_rank)
    }

    /// Whether every source has sent a list or failed, and every agent has sent its session table
    /// and a load report, or failed to connect.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let is_settled = |agent: &Agent| match agent.link {
            Link::Dialing => false,
            Link::Up => agent.report.is_some(),
            Link::Lost { .. } => true,
        };
        !self.has_silent_sources && self.known_agents().all(|(_, agent)| is_settled(agent))
    }

    pub fn check_ready(&self, now: Instant) -> Result<(), String> {
        if !self.is_settled() {
            return Err("waiting for the first load report of every agent".to_owned());
        }
        if self.has_usable_worker(now) {
            Ok(())
        } else {
            Err("no worker can take turns; see /v1/workers".to_owned())
        }
    }

    #[must_use]
    pub fn has_usable_worker(&self, now: Instant) -> bool {
        let is_usable =
            |worker: &WorkerStats<'_>| worker.state(now, self.report_age_max).is_usable();
        let with_role = |role| {
            let workers = self.worker_table.workers().filter(is_usable);
            workers.filter(move |worker| worker.role() == role)
        };
        let forms_pair = |prefill: WorkerStats<'_>| {
            let fits = |decode: WorkerStats<'_>| {
                prefill.pair_class().zip(decode.pair_class()).is_some_and(|(a, b)| a.fits(b))
            };
            with_role(EngineRole::Decode).any(fits)
        };
        with_role(EngineRole::Aggregated).next().is_some()
            || with_role(EngineRole::Prefill).any(forms_pair)
    }

    /// For how long the agent that has failed last can't take turns. `None` if all can. If no
    /// worker takes a turn, the outage has lasted so long.
    #[must_use]
    pub fn newest_outage(&self, now: Instant) -> Option<Duration> {
        let since = self.known_agents().filter_map(|(_, agent)| agent.unusable_since).max()?;
        Some(now.saturating_duration_since(since))
    }

    #[must_use]
    pub fn has_pairs(&self) -> bool {
        self.worker_table.has_pairs()
    }

    #[must_use]
    pub fn transfer_bytes_per_s(&self) -> u64 {
        self.transfer_bytes_per_s
    }
}

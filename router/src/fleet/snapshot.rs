//! The router's view of its fleet: agents, workers, load reports and session locations.
//!
//! [`State`](super::state::State) is the writer's side. It is pure, and only the view task owns it. Readers load a
//! [`ClusterView`], an immutable snapshot, and use it for a whole decision. Request tasks write
//! only the in-flight counts, which are the same atomics in every snapshot. Nothing is stored on
//! disk: the router relearns all of it from the agents.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::load::{Description, LoadReport, RankLoad};
use serde::Serialize;

use super::{
    lease::{Counts, InFlight},
    reuse_forecast::Wanted,
    sessions::Sessions,
    worker_table::Roster,
};

/// Number of ranks per agent that have a number in the overlap index. A node has eight GPUs.
const RANKS_INDEXED: usize = crate::residency::index::WORKERS_MAX / crate::config::WORKERS_MAX;

/// Identifies a worker by its agent's position in the configuration and its rank. The same in every
/// snapshot, even if the agent changes its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct WorkerRef {
    /// Index of the agent in the configured list.
    pub agent: usize,
    /// The engine's data-parallel rank.
    pub dp_rank: u32,
}

impl WorkerRef {
    /// Returns the worker's number in the overlap index, or `None` for a rank beyond
    /// `RANKS_INDEXED`.
    #[must_use]
    pub fn number(self) -> Option<usize> {
        let rank = self.dp_rank as usize;
        (rank < RANKS_INDEXED).then_some(self.agent * RANKS_INDEXED + rank)
    }
}

/// An immutable snapshot of the fleet.
#[derive(Debug, Clone)]
pub struct ClusterView {
    /// All configured agents, in configured order.
    pub agents: Vec<Arc<Agent>>,
    /// Where each session is, by session key.
    pub sessions: Sessions,
    /// The worker figures that every decision reads.
    pub(super) roster: Roster,
    /// KV that sessions are expected to use again, indexed by agent, then by rank.
    pub(super) wanted: Arc<Vec<Vec<Wanted>>>,
    /// Whether all agents serve the same models. If so, a turn may go to any of them, whatever
    /// model it names.
    pub(super) one_fleet: bool,
    pub(super) report_age_max: Duration,
    pub(super) rebind_gain_min: Duration,
}

/// What the router knows about one agent.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Address of the agent's control port, as configured.
    pub control: String,
    /// State of the connection to the control port.
    pub link: Link,
    /// The agent's description. `None` until the agent was first heard; kept when the connection is
    /// lost.
    pub facts: Option<Facts>,
    /// The agent's last load report, and when it arrived by this process's clock.
    pub report: Option<(Arc<LoadReport>, Instant)>,
    /// When the last message of any kind arrived from the agent.
    pub heard: Option<Instant>,
    /// Set when a turn couldn't connect to the agent's data port: the reason, and the number of
    /// further load reports for which the data port counts as unreachable.
    pub unreachable: Option<(String, u32)>,
    /// This router's in-flight counts, one per rank. Kept across reconnects.
    pub in_flight: Vec<Arc<InFlight>>,
    /// Values of `in_flight` at the moment the last load report arrived.
    pub in_flight_at_report: Vec<Counts>,
}

/// An agent's description of itself, and the address that takes its turns.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The description as the agent sent it.
    pub description: Arc<Description>,
    /// Host and port of the data port, which takes turns.
    pub data_authority: Arc<str>,
}

/// State of the connection to an agent's control port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// The agent was never heard, and no connection attempt has failed yet.
    Dialing,
    /// Description and session table have arrived, and the stream is open.
    Up,
    /// The last connection attempt failed, or the stream broke.
    Lost {
        /// When the loss was first noticed.
        since: Instant,
        /// The reason, for an operator.
        why: String,
        /// The agent answers but is rejected as a duplicate agent id: an agent at another address
        /// has the same id.
        twin: bool,
    },
}

/// What turns a worker may take now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    /// The agent was heard within `load_report_age_ms_max`: the worker takes all turns.
    Fresh,
    /// The agent is connected but was silent for too long, has sent no load report yet, or has a
    /// data port that turns can't reach. The worker takes no new sessions.
    Stale,
    /// The agent is not connected, or was never heard.
    Lost,
    /// The engine can't take turns.
    Unhealthy,
    /// The worker takes no new sessions and finishes running turns.
    Draining,
    /// The engine only prefills or only decodes: a turn sent to this worker alone would fail.
    Disaggregated,
}

impl WorkerState {
    /// All states, for metrics.
    pub const ALL: [Self; 6] = [
        Self::Fresh,
        Self::Stale,
        Self::Lost,
        Self::Unhealthy,
        Self::Draining,
        Self::Disaggregated,
    ];

    /// Returns the state's name in JSON and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Stale => "stale",
            Self::Lost => "lost",
            Self::Unhealthy => "unhealthy",
            Self::Draining => "draining",
            Self::Disaggregated => "disaggregated",
        }
    }

    /// Returns `Stale` if the agent was silent for longer than `report_age_max`, else the state
    /// itself. `Lost` and `Disaggregated` never become stale.
    pub(super) fn aged(
        self,
        heard: Option<Instant>,
        now: Instant,
        report_age_max: Duration,
    ) -> Self {
        let age = heard.map(|heard| now.saturating_duration_since(heard));
        let silent = age.is_none_or(|age| age > report_age_max);
        let ages = !matches!(self, Self::Lost | Self::Disaggregated);
        if silent && ages { Self::Stale } else { self }
    }
}

impl Agent {
    /// Returns the agent's id, or its control address while the id is unknown.
    #[must_use]
    pub fn name(&self) -> &str {
        self.facts.as_ref().map_or(&self.control, |facts| &facts.description.agent_id)
    }

    /// Returns the epoch of the agent process that was heard last, or `None` before the first.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.facts.as_ref().map(|facts| facts.description.epoch)
    }

    /// Whether the agent's stream is open.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.link == Link::Up
    }

    /// Returns the state that the agent's workers have at `now`, and the reason in words.
    #[must_use]
    pub fn state(&self, now: Instant, report_age_max: Duration) -> (WorkerState, String) {
        let state = self.state_heard().aged(self.heard, now, report_age_max);
        let age = self.heard.map_or(Duration::MAX, |heard| now.saturating_duration_since(heard));
        let reason = match (state, &self.link, &self.report) {
            (WorkerState::Lost, Link::Lost { why, .. }, _) => why.clone(),
            (WorkerState::Lost, ..) => "not heard yet".to_owned(),
            (WorkerState::Stale, _, None) => "no load report yet".to_owned(),
            (WorkerState::Stale, ..) => match &self.unreachable {
                Some((why, _)) => {
                    format!("turns don't reach its data port: {why}; is it open to this host?")
                }
                None => format!("silent for {} ms", age.as_millis()),
            },
            (WorkerState::Unhealthy, _, Some((report, _))) => {
                report.unhealthy.clone().unwrap_or_default()
            }
            (WorkerState::Draining, ..) => "draining".to_owned(),
            (WorkerState::Disaggregated, ..) => format!(
                "its engine runs in {} mode and takes no whole turns; start it without \
                 --disaggregation-mode, as pairs are not served yet",
                self.disaggregation().unwrap_or_default()
            ),
            (WorkerState::Fresh | WorkerState::Unhealthy, ..) => String::new(),
        };
        (state, reason)
    }

    /// Returns the state without regard to how long the agent has been silent.
    pub(super) fn state_heard(&self) -> WorkerState {
        match (&self.link, &self.report) {
            (Link::Dialing | Link::Lost { .. }, _) => WorkerState::Lost,
            (Link::Up, _) if self.disaggregation().is_some() => WorkerState::Disaggregated,
            (Link::Up, None) => WorkerState::Stale,
            (Link::Up, Some((report, _))) if report.unhealthy.is_some() => WorkerState::Unhealthy,
            (Link::Up, Some((report, _))) if report.draining => WorkerState::Draining,
            (Link::Up, Some(_)) if self.unreachable.is_some() => WorkerState::Stale,
            (Link::Up, Some(_)) => WorkerState::Fresh,
        }
    }

    /// Returns `prefill` or `decode` if the engine does only that.
    fn disaggregation(&self) -> Option<&str> {
        let mode = self.facts.as_ref()?.description.engine.disaggregation.as_str();
        matches!(mode, "prefill" | "decode").then_some(mode)
    }

    /// Returns how long the connection has been lost. `None` if it isn't lost, or if the agent was
    /// never heard.
    #[must_use]
    pub fn lost_for(&self, now: Instant) -> Option<Duration> {
        match &self.link {
            Link::Lost { since, .. } if self.facts.is_some() => {
                Some(now.saturating_duration_since(*since))
            }
            Link::Lost { .. } | Link::Dialing | Link::Up => None,
        }
    }

    /// Returns the last reported load of a rank.
    #[must_use]
    pub fn rank_load(&self, dp_rank: u32) -> Option<&RankLoad> {
        let (report, _) = self.report.as_ref()?;
        report.ranks.get(usize::try_from(dp_rank).ok()?)
    }
}

impl ClusterView {
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
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Returns what turns the worker may take at `now`.
    #[must_use]
    pub fn state(&self, worker: WorkerRef, now: Instant) -> WorkerState {
        let seen = self.roster.get(worker);
        seen.map_or(WorkerState::Lost, |seen| seen.state(now, self.report_age_max))
    }

    /// Returns the KV on the worker that sessions are expected to use again.
    #[must_use]
    pub fn wanted(&self, worker: WorkerRef) -> &Wanted {
        let ranks = self.wanted.get(worker.agent);
        let wanted = ranks.and_then(|ranks| ranks.get(worker.dp_rank as usize));
        wanted.unwrap_or(&Wanted::NOTHING)
    }

    /// Whether all agents serve the same models.
    #[must_use]
    pub fn is_one_fleet(&self) -> bool {
        self.one_fleet
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
    pub fn settled(&self) -> bool {
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
        if !self.settled() {
            return Err("waiting for the first load report of every agent".to_owned());
        }
        let usable = self.workers().any(|(worker, ..)| {
            matches!(self.state(worker, now), WorkerState::Fresh | WorkerState::Stale)
        });
        if usable { Ok(()) } else { Err("no worker can take turns; see /v1/workers".to_owned()) }
    }
}

//! What the router knows of its fleet, as one immutable snapshot per moment: agents, workers, their
//! last reports, and which session is where.
//!
//! [`State`] is the pure writer's side, owned by the one view task; everyone else loads a
//! [`ClusterView`] and keeps it for a whole decision. In-flight counts are the only thing that
//! request tasks write, and they are the same atomics in every snapshot. Nothing is kept on disk:
//! it is all relearned from the agents.

pub mod demand;
pub mod roster;
pub mod sessions;
mod state;
mod task;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::load::{Description, LoadReport, RankLoad};
use serde::Serialize;

pub use self::state::{State, Update};
pub(crate) use self::task::{MAILBOX, View, run};
use crate::lease::{Counts, InFlight};

/// Ranks of each agent that the overlap index has numbers for: a node has eight GPUs.
const RANKS_INDEXED: usize = crate::overlap::WORKERS_MAX / crate::config::WORKERS_MAX;

/// A worker by its place in the configuration: the same in every snapshot, whatever the agent's
/// name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct WorkerRef {
    /// Index of the agent in the configured list.
    pub agent: usize,
    /// The engine's data-parallel rank.
    pub dp_rank: u32,
}

impl WorkerRef {
    /// The worker's number in the overlap index; none for a rank beyond those that it has room for.
    #[must_use]
    pub fn number(self) -> Option<usize> {
        let rank = self.dp_rank as usize;
        (rank < RANKS_INDEXED).then_some(self.agent * RANKS_INDEXED + rank)
    }
}

/// One snapshot.
#[derive(Debug, Clone)]
pub struct ClusterView {
    /// In configured order.
    pub agents: Vec<Arc<Agent>>,
    /// By key.
    pub sessions: sessions::Sessions,
    /// What of the agents' workers every decision reads.
    roster: roster::Roster,
    /// What KV will be wanted again, by agent and rank.
    wanted: Arc<Vec<Vec<demand::Wanted>>>,
    /// All agents serve the same models: any name goes.
    one_fleet: bool,
    report_age_max: Duration,
    rebind_gain_min: Duration,
}

/// What is known of one agent.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Its control port as configured.
    pub control: String,
    /// The state of the connection to it.
    pub link: Link,
    /// None until it was heard for the first time; kept when it is lost.
    pub facts: Option<Facts>,
    /// Its last report and when that came, by this process's clock.
    pub report: Option<(Arc<LoadReport>, Instant)>,
    /// When anything came from it last.
    pub heard: Option<Instant>,
    /// A turn found no way to its data port: why, and for how many reports more that counts.
    pub unreachable: Option<(String, u32)>,
    /// One per rank, kept across reconnects.
    pub in_flight: Vec<Arc<InFlight>>,
    /// The counts of `in_flight` at the moment the last report came.
    pub in_flight_at_report: Vec<Counts>,
}

/// What an agent says of itself, with where its turns go.
#[derive(Debug, Clone)]
pub struct Facts {
    /// As described.
    pub description: Arc<Description>,
    /// Host and port that take turns.
    pub data_authority: Arc<str>,
}

/// The connection to an agent's control port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// Never heard and no attempt has failed yet.
    Dialing,
    /// Description and session table have come and the stream lives.
    Up,
    /// The last attempt failed or the stream broke.
    Lost {
        /// When it was first noticed.
        since: Instant,
        /// For an operator.
        why: String,
        /// It answers, and is turned away: another address says it is the same agent.
        twin: bool,
    },
}

/// What a worker may be used for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    /// Heard within the bound: takes everything.
    Fresh,
    /// Connected but silent for too long, without a first report, or with a data port that turns
    /// don't reach: takes no new session.
    Stale,
    /// No connection, or never heard.
    Lost,
    /// Its engine can't take turns.
    Unhealthy,
    /// Takes no new session and finishes what runs.
    Draining,
    /// Its engine computes prompts or answers, not both: a turn sent there alone would fail.
    Disaggregated,
}

impl WorkerState {
    /// All of them, for metrics.
    pub const ALL: [Self; 6] = [
        Self::Fresh,
        Self::Stale,
        Self::Lost,
        Self::Unhealthy,
        Self::Draining,
        Self::Disaggregated,
    ];

    /// The name used in JSON and metrics.
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

    /// What silence makes of it: whoever could take turns and was not heard for so long is stale.
    fn aged(self, heard: Option<Instant>, now: Instant, report_age_max: Duration) -> Self {
        let age = heard.map(|heard| now.saturating_duration_since(heard));
        let silent = age.is_none_or(|age| age > report_age_max);
        let ages = !matches!(self, Self::Lost | Self::Disaggregated);
        if silent && ages { Self::Stale } else { self }
    }
}

impl Agent {
    /// Its own name, or its address while it has not told one.
    #[must_use]
    pub fn name(&self) -> &str {
        self.facts.as_ref().map_or(&self.control, |facts| &facts.description.agent_id)
    }

    /// The process that was heard last; none before the first.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.facts.as_ref().map(|facts| facts.description.epoch)
    }

    /// Whether its stream lives.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.link == Link::Up
    }

    /// The state with its reason in words.
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

    /// The state as long as it is heard in time.
    fn state_heard(&self) -> WorkerState {
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

    /// `prefill` or `decode`, where the engine does only that.
    fn disaggregation(&self) -> Option<&str> {
        let mode = self.facts.as_ref()?.description.engine.disaggregation.as_str();
        matches!(mode, "prefill" | "decode").then_some(mode)
    }

    /// How long the connection to an agent that was heard before has been lost.
    #[must_use]
    pub fn lost_for(&self, now: Instant) -> Option<Duration> {
        match &self.link {
            Link::Lost { since, .. } if self.facts.is_some() => {
                Some(now.saturating_duration_since(*since))
            }
            Link::Lost { .. } | Link::Dialing | Link::Up => None,
        }
    }

    /// What a rank reported last.
    #[must_use]
    pub fn rank_load(&self, dp_rank: u32) -> Option<&RankLoad> {
        let (report, _) = self.report.as_ref()?;
        report.ranks.get(usize::try_from(dp_rank).ok()?)
    }
}

impl ClusterView {
    /// All workers that were ever heard, in order.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerRef, &Agent, &Facts)> {
        self.agents.iter().enumerate().flat_map(|(index, agent)| {
            agent.facts.iter().flat_map(move |facts| {
                facts.description.ranks.iter().map(move |rank| {
                    (WorkerRef { agent: index, dp_rank: rank.dp_rank }, &**agent, facts)
                })
            })
        })
    }

    /// The agent of a worker; an index from the configuration is always there.
    #[must_use]
    pub fn agent(&self, worker: WorkerRef) -> &Agent {
        &self.agents[worker.agent]
    }

    /// What decisions read of all workers that were ever heard.
    #[must_use]
    pub fn roster(&self) -> &roster::Roster {
        &self.roster
    }

    /// What the worker may be used for.
    #[must_use]
    pub fn state(&self, worker: WorkerRef, now: Instant) -> WorkerState {
        let seen = self.roster.get(worker);
        seen.map_or(WorkerState::Lost, |seen| seen.state(now, self.report_age_max))
    }

    /// What KV will be wanted again on a worker.
    #[must_use]
    pub fn wanted(&self, worker: WorkerRef) -> &demand::Wanted {
        let ranks = self.wanted.get(worker.agent);
        let wanted = ranks.and_then(|ranks| ranks.get(worker.dp_rank as usize));
        wanted.unwrap_or(&demand::Wanted::NOTHING)
    }

    /// Whether all agents serve the same models.
    #[must_use]
    pub fn is_one_fleet(&self) -> bool {
        self.one_fleet
    }

    /// How much better another worker must be for a session to move.
    #[must_use]
    pub fn rebind_gain_min(&self) -> Duration {
        self.rebind_gain_min
    }

    /// The bound beyond which silence makes a worker stale.
    #[must_use]
    pub fn report_age_max(&self) -> Duration {
        self.report_age_max
    }

    /// `agent/rank`, for people.
    #[must_use]
    pub fn name(&self, worker: WorkerRef) -> String {
        format!("{}/{}", self.agent(worker).name(), worker.dp_rank)
    }

    /// Every configured agent was heard with its table and load, or its first dial failed.
    #[must_use]
    pub fn settled(&self) -> bool {
        self.agents.iter().all(|agent| match agent.link {
            Link::Dialing => false,
            Link::Up => agent.report.is_some(),
            Link::Lost { .. } => true,
        })
    }

    /// Why no turn can be taken, or Ok.
    ///
    /// # Errors
    /// A sentence for the operator.
    pub fn ready(&self, now: Instant) -> Result<(), String> {
        if !self.settled() {
            return Err("waiting for the first word of every agent".to_owned());
        }
        let usable = self.workers().any(|(worker, ..)| {
            matches!(self.state(worker, now), WorkerState::Fresh | WorkerState::Stale)
        });
        if usable { Ok(()) } else { Err("no worker can take turns; see /v1/workers".to_owned()) }
    }
}

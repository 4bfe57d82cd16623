//! Keeps what the router knows about one agent, and derives the state of its workers. Pure.
//!
//! An *agent* runs beside an engine and reports its state. A *worker* is one data-parallel rank of
//! the engine. An agent has two ports: the *control port*, to which this router connects for load
//! reports, and the *data port*, to which it sends turns (one request and its answer each).
//!
//! `state` changes an [`Agent`] when a message arrives, and each snapshot of the fleet has all
//! agents. `worker_table` copies what placements read. Sessions are in `sessions`, not here.

use std::{
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, Instant},
};

use http::{
    Uri,
    uri::{PathAndQuery, Scheme},
};
use proto::load::{Description, EngineRole, LoadReport, RankLoad};

use super::{
    lease::{InFlight, InFlightCounts},
    membership::{Phase, Source},
    pairing::PairClass,
    worker::WorkerState,
};

/// How long after a planned end of an agent its successor may still take up its sessions. A restart
/// takes about a second; an engine that is slow to answer its new agent takes longer.
const HANDOVER_MAX: Duration = Duration::from_secs(30);

/// What the router knows about one agent.
#[derive(Debug, Clone)]
pub struct Agent {
    /// URL of the agent's control port, as its sources list it. Empty if the slot has no agent.
    pub control_url: String,
    /// Whether the agent is in the fleet, leaves it, or has left.
    pub phase: Phase,
    /// The sources that list the agent.
    pub sources: Vec<Source>,
    /// State of the connection to the control port.
    pub link: Link,
    /// The agent's description of itself. `None` until the agent is first heard. It is kept when
    /// the connection is lost.
    pub facts: Option<Facts>,
    /// The agent's last load report, and when it arrived by this process's clock.
    pub report: Option<(Arc<LoadReport>, Instant)>,
    /// Whether the newest load report said that the agent drains. Kept when the connection is lost.
    pub was_draining: bool,
    /// Since when the agent's workers can't take turns. `None` if they can, or if it was never
    /// heard.
    pub unusable_since: Option<Instant>,
    /// When the last message of any kind arrived from the agent.
    pub heard_at: Option<Instant>,
    /// The failure of a turn to connect to the agent's data port. `None` if there was none, or if
    /// it was long ago.
    pub data_port_failure: Option<DataPortFailure>,
    /// Counts of what this router has in flight on each rank. Kept across reconnects. While
    /// anything outside the fleet's state shares these counts, such as a snapshot or the lease of a
    /// turn, no other agent gets this agent's slot.
    pub in_flight: Vec<Arc<InFlight>>,
    /// The counts of `in_flight` when the last load report arrived.
    pub in_flight_at_report: Vec<InFlightCounts>,
}

/// An agent's description of itself, and the address to which this router sends its turns.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The description as the agent sent it.
    pub description: Arc<Description>,
    /// Host and port of the data port, which takes turns.
    pub data_authority: Arc<str>,
    /// Whether the data port speaks TLS. If the control port does, the data port must.
    pub data_tls: bool,
}

impl Facts {
    /// Returns the URI of a path on the data port.
    ///
    /// # Panics
    /// Never: the authority was parsed when the description arrived.
    #[must_use]
    pub fn data_uri(&self, path: PathAndQuery) -> Uri {
        let scheme = if self.data_tls { Scheme::HTTPS } else { Scheme::HTTP };
        let uri = Uri::builder().scheme(scheme).authority(&*self.data_authority);
        uri.path_and_query(path).build().expect("the authority was parsed before")
    }
}

/// The failure of a turn to connect to an agent's data port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataPortFailure {
    /// The reason, for an operator.
    pub why: String,
    /// For how many more load reports the data port counts as unreachable.
    pub reports_left: u32,
}

/// State of the connection to an agent's control port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// The agent was never heard, and no connection attempt has failed yet.
    Dialing,
    /// The agent's description and session table have arrived, and its load stream is open.
    Up,
    /// The last connection attempt failed, or the stream broke.
    Lost {
        /// When the loss was first noticed.
        since: Instant,
        /// The reason, for an operator.
        why: String,
        /// Whether the agent answers but is rejected: an agent at another address has the same id,
        /// or it isn't the announced one.
        is_rejected: bool,
    },
}

impl Agent {
    /// Creates an agent that was never heard.
    #[must_use]
    pub fn new(control_url: String, phase: Phase, sources: Vec<Source>) -> Self {
        Self {
            control_url,
            phase,
            sources,
            link: Link::Dialing,
            facts: None,
            report: None,
            was_draining: false,
            unusable_since: None,
            heard_at: None,
            data_port_failure: None,
            in_flight: vec![],
            in_flight_at_report: vec![],
        }
    }

    /// Returns the agent's id, or its control port's URL while the id is unknown.
    #[must_use]
    pub fn name(&self) -> &str {
        self.facts.as_ref().map_or(&self.control_url, |facts| &facts.description.agent_id)
    }

    /// Returns the epoch of the agent process that was last heard. Each process has its own epoch.
    /// `None` if the agent was never heard.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.facts.as_ref().map(|facts| facts.description.epoch)
    }

    /// Whether the agent's load stream is open and the agent is not rejected as a duplicate.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.link == Link::Up
    }

    /// Returns the state that the agent's workers have at `now`, and the reason for people to read.
    /// The state is `Stale` if the agent has been silent for longer than `report_age_max`. The
    /// reason is empty for `Fresh`.
    #[must_use]
    pub fn state(&self, now: Instant, report_age_max: Duration) -> (WorkerState, String) {
        let state =
            self.state_ignoring_silence().stale_if_silent(self.heard_at, now, report_age_max);
        let silence =
            self.heard_at.map_or(Duration::MAX, |heard_at| now.saturating_duration_since(heard_at));
        let reason = match (state, &self.link, &self.report) {
            (WorkerState::Lost, Link::Lost { why, .. }, _) => why.clone(),
            (WorkerState::Lost, ..) => "not heard yet".to_owned(),
            (WorkerState::Stale, _, None) => "no load report yet".to_owned(),
            (WorkerState::Stale, ..) => match &self.data_port_failure {
                Some(DataPortFailure { why, .. }) => {
                    format!("turns don't reach its data port: {why}; is it open to this host?")
                }
                None => format!("silent for {} ms", silence.as_millis()),
            },
            (WorkerState::Unhealthy, _, Some((report, _))) => {
                report.unhealthy.clone().unwrap_or_default()
            }
            (WorkerState::Held, _, Some((report, _))) => report.held.clone().unwrap_or_default(),
            (WorkerState::Draining, ..) if self.phase != Phase::Member => {
                "leaves the fleet: no source lists it as serving".to_owned()
            }
            (WorkerState::Draining, ..) => "draining".to_owned(),
            (WorkerState::Disaggregated, ..) => format!(
                "its engine runs in {} mode, and the agent doesn't say how it hands over KV; \
                 update the agent, or start the engine without --disaggregation-mode",
                self.role().as_str()
            ),
            (WorkerState::Fresh | WorkerState::Unhealthy | WorkerState::Held, ..) => String::new(),
        };
        (state, reason)
    }

    /// Returns the state of the agent's workers, without regard to how long the agent has been
    /// silent.
    pub(super) fn state_ignoring_silence(&self) -> WorkerState {
        match (&self.link, &self.report) {
            (Link::Dialing | Link::Lost { .. }, _) => WorkerState::Lost,
            (Link::Up, _) if self.is_unpairable() => WorkerState::Disaggregated,
            (Link::Up, _) if self.phase != Phase::Member => WorkerState::Draining,
            (Link::Up, None) => WorkerState::Stale,
            (Link::Up, Some((report, _))) if report.unhealthy.is_some() => WorkerState::Unhealthy,
            (Link::Up, Some((report, _))) if report.draining => WorkerState::Draining,
            (Link::Up, Some(_)) if self.data_port_failure.is_some() => WorkerState::Stale,
            (Link::Up, Some((report, _))) if report.held.is_some() => WorkerState::Held,
            (Link::Up, Some(_)) => WorkerState::Fresh,
        }
    }

    /// Notes since when the agent's workers can't take turns, after a change at `now`.
    pub(super) fn note_usability(&mut self, now: Instant) {
        let is_known = self.link != Link::Dialing;
        let is_unusable = is_known && !self.state_ignoring_silence().is_usable();
        self.unusable_since = is_unusable.then(|| self.unusable_since.unwrap_or(now));
    }

    /// Returns which part of a turn the engine runs. An agent that was never heard counts as one of
    /// an engine that runs whole turns.
    #[must_use]
    pub fn role(&self) -> EngineRole {
        let facts = self.facts.as_ref();
        facts.map_or(EngineRole::Aggregated, |facts| facts.description.engine.role())
    }

    /// Returns with which engines this one can form a pair; `None` if with none.
    pub(super) fn pair_class(&self) -> Option<PairClass> {
        PairClass::read(&self.facts.as_ref()?.description.engine)
    }

    /// Returns the bytes of KV per token of an engine that can form pairs, if they are known.
    pub(super) fn kv_bytes_per_token(&self) -> Option<NonZeroU32> {
        let transfer = self.facts.as_ref()?.description.engine.transfer.as_ref()?;
        NonZeroU32::new(u32::try_from(transfer.kv_bytes_per_token?).unwrap_or(u32::MAX))
    }

    /// Whether the engine runs only a part of each turn, and can form no pair.
    fn is_unpairable(&self) -> bool {
        self.role() != EngineRole::Aggregated && self.pair_class().is_none()
    }

    /// Returns for how long the connection to the agent has been lost. `None` if it isn't lost, if
    /// the agent was never heard, or if the agent is leaving, so that nothing waits for its return.
    #[must_use]
    pub fn lost_for(&self, now: Instant) -> Option<Duration> {
        match &self.link {
            Link::Lost { since, .. } if self.facts.is_some() && self.phase == Phase::Member => {
                Some(now.saturating_duration_since(*since))
            }
            Link::Lost { .. } | Link::Dialing | Link::Up => None,
        }
    }

    /// Returns the number of turns that this router has in flight on the agent's workers.
    #[must_use]
    pub fn turns_in_flight(&self) -> u32 {
        self.in_flight.iter().map(|count| count.turns()).sum()
    }

    /// Whether the agent ended as planned, so recently that its successor may take up its sessions.
    /// An agent that closes its sessions at its end has reported that each was closed.
    #[must_use]
    pub fn may_hand_over(&self, now: Instant) -> bool {
        self.was_draining && self.lost_for(now).is_some_and(|lost_for| lost_for < HANDOVER_MAX)
    }

    /// Returns the last reported load of a rank.
    #[must_use]
    pub fn rank_load(&self, dp_rank: u32) -> Option<&RankLoad> {
        let (report, _) = self.report.as_ref()?;
        report.ranks.get(usize::try_from(dp_rank).ok()?)
    }
}

//! Keeps what the router knows about one agent, and derives the state of its workers. Pure.

use std::{
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::load::{Description, EngineRole, LoadReport, RankLoad};
use http::{
    Uri,
    uri::{PathAndQuery, Scheme},
};

use super::{
    lease::{InFlight, InFlightCounts},
    membership::{Phase, Source},
    pairing::PairClass,
    worker::{AgentKey, WorkerState},
};

/// How long after a planned end of an agent its successor may still take up its sessions. A restart
/// takes about a second; an engine that is slow to answer its new agent takes longer.
const HANDOVER_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub struct Agent {
    pub key: AgentKey,
    /// As the sources list it. Empty if the slot has no agent.
    pub control_url: String,
    pub phase: Phase,
    pub sources: Vec<Source>,
    pub link: Link,
    /// `None` until the agent is first heard. Kept when the connection is lost.
    pub facts: Option<Facts>,
    /// With the time of arrival by this process's clock.
    pub report: Option<(Arc<LoadReport>, Instant)>,
    /// What the newest load report said. Kept when the connection is lost.
    pub was_draining: bool,
    /// `None` if the workers can take turns, or if the agent was never heard.
    pub unusable_since: Option<Instant>,
    /// The last message of any kind.
    pub heard_at: Option<Instant>,
    /// A turn's failure to connect. `None` if there was none, or if it was long ago.
    pub data_port_failure: Option<DataPortFailure>,
    /// By rank, kept across reconnects.
    pub in_flight: Vec<Arc<InFlight>>,
    pub in_flight_at_report: Vec<InFlightCounts>,
}

#[derive(Debug, Clone)]
pub struct Facts {
    pub description: Arc<Description>,
    /// Host and port.
    pub data_authority: Arc<str>,
    /// If the control port speaks TLS, the data port must.
    pub data_tls: bool,
}

impl Facts {
    #[must_use]
    pub fn data_uri(&self, path: PathAndQuery) -> Uri {
        let scheme = if self.data_tls { Scheme::HTTPS } else { Scheme::HTTP };
        let uri = Uri::builder().scheme(scheme).authority(&*self.data_authority);
        uri.path_and_query(path).build().expect("the authority was parsed before")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataPortFailure {
    pub why: String,
    /// For how many more load reports the data port counts as unreachable.
    pub reports_left: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// The agent was never heard, and no connection attempt has failed yet.
    Dialing,
    /// The agent's description and session table have arrived, and its load stream is open.
    Up,
    Lost {
        since: Instant,
        why: String,
        /// The agent answers, but an agent at another address has the same id, or it isn't the
        /// announced one.
        is_rejected: bool,
    },
}

impl Agent {
    /// Stands for every agent that has left the fleet: nothing is known of it, it takes no
    /// turns, and nothing waits for it.
    pub(super) const GONE: Self = Self::new(AgentKey::NOBODY, String::new(), Phase::Free, vec![]);

    #[must_use]
    pub const fn new(
        key: AgentKey,
        control_url: String,
        phase: Phase,
        sources: Vec<Source>,
    ) -> Self {
        Self {
            key,
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

    /// The agent's id, or its control port's URL while the id is unknown.
    #[must_use]
    pub fn name(&self) -> &str {
        self.facts.as_ref().map_or(&self.control_url, |facts| &facts.description.agent_id)
    }

    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.facts.as_ref().map(|facts| facts.description.epoch)
    }

    #[must_use]
    pub fn is_up(&self) -> bool {
        self.link == Link::Up
    }

    /// The reason is for people to read, and empty for `Fresh`.
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

    /// Call this after each change, at `now`.
    pub(super) fn note_usability(&mut self, now: Instant) {
        let is_known = self.link != Link::Dialing;
        let is_unusable = is_known && !self.state_ignoring_silence().is_usable();
        self.unusable_since = is_unusable.then(|| self.unusable_since.unwrap_or(now));
    }

    /// An agent that was never heard counts as one of an engine that runs whole turns.
    #[must_use]
    pub fn role(&self) -> EngineRole {
        let facts = self.facts.as_ref();
        facts.map_or(EngineRole::Aggregated, |facts| facts.description.engine.role())
    }

    pub(super) fn pair_class(&self) -> Option<PairClass> {
        PairClass::read(&self.facts.as_ref()?.description.engine)
    }

    pub(super) fn kv_bytes_per_token(&self) -> Option<NonZeroU32> {
        let transfer = self.facts.as_ref()?.description.engine.transfer.as_ref()?;
        NonZeroU32::new(u32::try_from(transfer.kv_bytes_per_token?).unwrap_or(u32::MAX))
    }

    fn is_unpairable(&self) -> bool {
        self.role() != EngineRole::Aggregated && self.pair_class().is_none()
    }

    /// `None` also if the agent was never heard or is leaving, so that nothing waits for its
    /// return.
    #[must_use]
    pub fn lost_for(&self, now: Instant) -> Option<Duration> {
        match &self.link {
            Link::Lost { since, .. } if self.facts.is_some() && self.phase == Phase::Member => {
                Some(now.saturating_duration_since(*since))
            }
            Link::Lost { .. } | Link::Dialing | Link::Up => None,
        }
    }

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

    #[must_use]
    pub fn rank_load(&self, dp_rank: u32) -> Option<&RankLoad> {
        let (report, _) = self.report.as_ref()?;
        report.ranks.get(usize::try_from(dp_rank).ok()?)
    }
}

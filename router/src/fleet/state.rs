//! Applies the agents' messages to the fleet's state and makes snapshots for readers. Pure.
//!
//! The *view task* of `view` owns the only [`State`].

mod identity;
mod members;

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    id::SessionKey,
    load::{Description, LoadReport, Session},
};
use parking_lot::Mutex;

use super::{
    agent::{Agent, DataPortFailure, Facts, Link},
    conversations::Conversations,
    lease::InFlight,
    membership::{AgentIds, Membership, Phase, Source, SourceList},
    prefill_rates::PrefillRates,
    reuse_forecast::ReuseForecast,
    sessions::Sessions,
    snapshot::Snapshot,
    worker::{AgentKey, WorkerRef},
    worker_table::WorkerTable,
};
use crate::config::{Config, control_authority};

#[derive(Debug)]
pub enum Update {
    /// Replaces what was known of the agent.
    StreamBegan {
        description: Description,
        sessions: Vec<Session>,
    },
    /// The engine restarted while the agent kept running.
    EngineRestarted(Description),
    Report(LoadReport),
    SessionChanged(Session),
    SessionRemoved(SessionKey),
    /// The connection to the agent broke or could not be made. The text is the reason.
    AgentLost(String),
    /// A turn couldn't connect to the agent's data port. The text is the reason.
    DataPortUnreachable(String),
    /// The tasks of an agent that has left the fleet have ended. They send no further updates, and
    /// nothing of the agent is left in tables by slot.
    TasksEnded,
}

#[derive(Debug)]
pub struct SourceNews {
    pub source: Source,
    /// `None` if the source failed: its last list stays in effect.
    pub list: Option<SourceList>,
    /// Empty for other sources than announcements.
    pub agent_ids: AgentIds,
}

/// Load reports for which a data port counts as unreachable after a turn couldn't connect to it.
/// They take about five seconds. After that, new sessions may try the port again.
const UNREACHABLE_REPORTS_MAX: u32 = 10;

/// Each takes about 400 bytes.
const CONVERSATIONS_MAX: usize = 16_384;

const LEAVING_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// After it, turns that still run on the leaving agent go on, and its sessions are forgotten.
const LEAVING_TIME_MAX: Duration = Duration::from_secs(600);

/// Number of workers whose in-flight counts are allocated side by side. A placement reads the
/// counts of all workers; allocated one by one, each lies on a page of memory of its own, among the
/// sessions of its agent.
const COUNTS_ALLOCATED: usize = 256;

#[derive(Debug)]
pub struct State {
    /// The part that readers get a copy of.
    view: Snapshot,
    forecast: ReuseForecast,
    /// Without a name. The turns' tasks record them.
    conversations: Arc<Mutex<Conversations>>,
    /// As of the newest forecast.
    prefill_rates: PrefillRates,
    /// The view's agents agree with it.
    membership: Membership,
    silent_sources: BTreeSet<Source>,
    leaving_max: Duration,
    /// Allocated ahead, for the workers that are heard next.
    spare_counts: Vec<Arc<InFlight>>,
}

impl State {
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let view = Snapshot {
            worker_table: WorkerTable::new(0),
            agents: vec![],
            agent_keys: Arc::default(),
            sessions: Sessions::new(0, config.limits.sessions_max),
            members_version: 0,
            has_silent_sources: false,
            reuse_demands: Arc::default(),
            serves_same_models: true,
            report_age_max: config.load_report_age_max(),
            rebind_gain_min: config.rebind_gain_min(),
            transfer_bytes_per_s: config.placement.transfer_bytes_per_s,
        };
        let mut state = Self {
            view,
            forecast: ReuseForecast::new(config.limits.sessions_max),
            conversations: Arc::new(Mutex::new(Conversations::new(CONVERSATIONS_MAX))),
            prefill_rates: PrefillRates::default(),
            membership: Membership::new(&config.workers),
            silent_sources: members::awaited_sources(config),
            leaving_max: LEAVING_TIME_MAX,
            spare_counts: vec![],
        };
        state.sync_members();
        state
    }

    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.view.clone()
    }

    #[must_use]
    pub fn conversations(&self) -> Arc<Mutex<Conversations>> {
        Arc::clone(&self.conversations)
    }

    /// See [`Snapshot::agent_with`].
    #[must_use]
    pub fn agent_with(&self, key: AgentKey) -> &Agent {
        self.view.agent_with(key)
    }

    /// When the next worker becomes stale, or the leaving agents must be looked at, if no further
    /// message arrives.
    #[must_use]
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let age_max = self.view.report_age_max;
        let stale_at = |agent: &Agent| {
            // One millisecond past the bound, because a worker at the bound is still fresh.
            let heard_at = agent.heard_at.filter(|_| agent.is_up())?;
            Some(heard_at + age_max + Duration::from_millis(1)).filter(|deadline| *deadline > now)
        };
        // The end of the last turn on a leaving agent is no update.
        let check_at = |agent: &Agent| {
            matches!(agent.phase, Phase::Leaving { .. }).then_some(now + LEAVING_CHECK_INTERVAL)
        };
        let agents = self.view.agents.iter();
        agents.flat_map(|agent| stale_at(agent).into_iter().chain(check_at(agent))).min()
    }

    /// Returns a warning for the log if the agent, or some of its sessions, had to be left out.
    /// An update of an agent that has left the fleet changes nothing.
    pub fn apply(&mut self, agent_key: AgentKey, update: Update, now: Instant) -> Option<String> {
        let slot = self.membership.slot_of(agent_key)?;
        let is_followed = self.membership.phase(slot).is_followed();
        let warning = match update {
            Update::TasksEnded => {
                self.forget(slot, now);
                return None;
            }
            // A late update of an agent that has ended.
            _ if !is_followed => return None,
            Update::StreamBegan { description, sessions } => {
                self.begin(slot, description, sessions, now)
            }
            Update::EngineRestarted(description) => self.describe(slot, description, now),
            // The agent was rejected; see `identity`.
            Update::Report(_) | Update::SessionChanged(_) | Update::SessionRemoved(_)
                if !self.view.agents[slot].is_up() =>
            {
                None
            }
            Update::Report(report) => {
                self.record_report(slot, report, now);
                None
            }
            Update::SessionChanged(session) => {
                let worker = WorkerRef { agent: agent_key, dp_rank: session.dp_rank };
                self.forecast.upsert(worker, &session, now);
                let has_room = self.view.sessions.upsert(agent_key, session, now);
                (!has_room).then(|| "sessions_max is reached, a session is left out".to_owned())
            }
            Update::SessionRemoved(key) => {
                self.forecast.remove(agent_key, &key, now);
                self.view.sessions.remove(agent_key, &key);
                None
            }
            Update::AgentLost(why) => {
                self.record_loss(slot, why, now);
                return None;
            }
            Update::DataPortUnreachable(why) => {
                let agent = self.agent_mut(slot);
                // If the agent isn't up, its workers take no turns anyway.
                let failure = DataPortFailure { why, reports_left: UNREACHABLE_REPORTS_MAX };
                agent.data_port_failure = agent.is_up().then_some(failure);
                self.update_rows(slot);
                return None;
            }
        };
        let agent = self.agent_mut(slot);
        agent.heard_at = Some(now);
        agent.note_usability(now);
        self.update_rows(slot);
        let demands = self.forecast.forecast_if_due(self.view.agents.len(), now);
        let is_due = demands.is_some();
        if let Some(mut demands) = demands {
            let is_known = |agent| self.view.has_agent(agent);
            self.conversations.lock().add_demand(&mut demands, is_known, now);
            self.view.reuse_demands = Arc::new(demands);
        }
        if is_due || self.prefill_rates.lack_kind_of(&self.view.agents[slot]) {
            self.prefill_rates = PrefillRates::collect(&self.view.agents);
            (0..self.view.agents.len()).for_each(|slot| self.update_rows(slot));
        }
        #[cfg(debug_assertions)]
        self.check_invariants();
        warning
    }

    fn record_report(&mut self, slot: usize, report: LoadReport, now: Instant) {
        let agent = self.agent_mut(slot);
        agent.in_flight_at_report = agent.in_flight.iter().map(|count| count.counts()).collect();
        agent.was_draining = report.draining;
        agent.report = Some((Arc::new(report), now));
        let failure = agent.data_port_failure.take().filter(|failure| failure.reports_left > 1);
        agent.data_port_failure = failure
            .map(|failure| DataPortFailure { reports_left: failure.reports_left - 1, ..failure });
    }

    fn record_loss(&mut self, slot: usize, why: String, now: Instant) {
        let agent = self.agent_mut(slot);
        let since = match agent.link {
            Link::Lost { since, .. } => since,
            Link::Dialing | Link::Up => now,
        };
        agent.link = Link::Lost { since, why, is_rejected: false };
        // The load report belongs to the stream that ended. A new stream brings a new one.
        agent.report = None;
        agent.data_port_failure = None;
        agent.note_usability(now);
        self.update_rows(slot);
        #[cfg(debug_assertions)]
        self.check_invariants();
    }

    fn update_rows(&mut self, slot: usize) {
        let view = &mut self.view;
        let demands = view.reuse_demands.get(slot).map_or(&[][..], Vec::as_slice);
        let agent = &view.agents[slot];
        view.worker_table.update(agent, demands, &self.prefill_rates);
    }

    fn begin(
        &mut self,
        slot: usize,
        description: Description,
        sessions: Vec<Session>,
        now: Instant,
    ) -> Option<String> {
        if let Some(why) = self.rejection(slot, &description) {
            return self.reject(slot, why, now);
        }
        let id_warning = self.take_id_back(slot, &description.agent_id, now);
        self.accept(slot, description);
        let agent = self.agent_mut(slot);
        agent.link = Link::Up;
        (agent.report, agent.data_port_failure) = (None, None);
        let agent_key = agent.key;
        if self.view.sessions.has_any(agent_key) {
            self.forecast.clear_agent(agent_key);
        }
        for session in &sessions {
            let worker = WorkerRef { agent: agent_key, dp_rank: session.dp_rank };
            self.forecast.upsert(worker, session, now);
        }
        let left_out_count = self.view.sessions.replace(agent_key, sessions, now);
        id_warning.or_else(|| {
            (left_out_count > 0)
                .then(|| format!("sessions_max is reached, {left_out_count} sessions are left out"))
        })
    }

    /// Returns a warning when the agent is rejected for the first time: it isn't the one that it
    /// should be.
    fn describe(&mut self, slot: usize, description: Description, now: Instant) -> Option<String> {
        if let Some(why) = self.rejection(slot, &description) {
            return self.reject(slot, why, now);
        }
        let warning = self.take_id_back(slot, &description.agent_id, now);
        self.accept(slot, description);
        warning
    }

    fn accept(&mut self, slot: usize, description: Description) {
        let known_ranks = self.view.agents[slot].in_flight.len();
        let new_ranks = description.ranks.len().saturating_sub(known_ranks);
        if self.spare_counts.len() < new_ranks {
            self.spare_counts.resize_with(new_ranks.max(COUNTS_ALLOCATED), Arc::default);
        }
        let new_counts = self.spare_counts.split_off(self.spare_counts.len() - new_ranks);
        let old = self.view.agents[slot].facts.as_ref();
        let old_engine = old.map(|facts| &facts.description.engine.instance);
        if old_engine.is_some_and(|instance| *instance != description.engine.instance) {
            // A new engine process has none of the KV.
            self.conversations.lock().forget_agent(self.membership.key(slot));
        }
        let agent = self.agent_mut(slot);
        agent.in_flight.extend(new_counts);
        agent.facts = Some(Facts {
            data_authority: data_authority(&agent.control_url, &description),
            // A plain data port beside an encrypted control port is refused: turns fail there.
            data_tls: description.data_tls || agent.control_url.starts_with("https:"),
            description: Arc::new(description),
        });
        self.compare_models();
    }

    fn compare_models(&mut self) {
        let mut all_facts = self.view.agents.iter().filter_map(|agent| agent.facts.as_ref());
        let served = |facts: &Facts| {
            let engine = &facts.description.engine;
            (engine.models.clone(), engine.adapters.clone())
        };
        let first_served = all_facts.next().map(served);
        self.view.serves_same_models = all_facts.all(|facts| Some(served(facts)) == first_served);
    }

    /// Copies the agent first if a snapshot shares it.
    fn agent_mut(&mut self, slot: usize) -> &mut Agent {
        Arc::make_mut(&mut self.view.agents[slot])
    }

    pub fn check_invariants(&self) {
        let demand = |worker| *self.view.reuse_demand(worker);
        let rates = &self.prefill_rates;
        self.view.worker_table.check_invariants(&self.view.agents, rates, demand);
        self.conversations.lock().check_invariants();
        assert_eq!(self.view.agents.len(), self.membership.slot_count());
        assert_eq!(self.view.agent_keys.len(), self.view.agents.len());
        let up = self.view.agents.iter().filter(|agent| agent.is_up());
        let mut ids = HashSet::new();
        let mut facts = up.filter_map(|agent| agent.facts.as_ref());
        assert!(facts.all(|facts| ids.insert(&facts.description.agent_id)), "an id is up twice");
        for (index, agent) in self.view.agents.iter().enumerate() {
            let (key, phase) = (self.membership.key(index), self.membership.phase(index));
            assert_eq!((agent.key, agent.phase), (key, phase));
            assert_eq!(self.view.agent_keys[index], key);
            assert_eq!(agent.control_url, self.membership.control_url(index));
            if !agent.phase.is_followed() {
                assert!(!agent.is_up(), "an agent that is not followed is up");
            }
            if agent.phase == Phase::Free {
                assert!(agent.facts.is_none() && agent.in_flight.is_empty());
                assert!(!self.view.sessions.has_any(key), "sessions of a forgotten agent");
            }
            if agent.is_up() {
                let facts = agent.facts.as_ref().expect("an agent that is up was described");
                assert!(agent.in_flight.len() >= facts.description.ranks.len());
                assert!(agent.heard_at.is_some(), "an agent that is up was heard");
                let problem = self.identity_problem(index, &facts.description);
                assert_eq!(problem, None, "an impostor is up");
            } else {
                assert!(agent.report.is_none(), "figures of an agent that is not heard");
            }
        }
    }
}

/// The address that the agent advertises, or else its port on the host of its control port.
fn data_authority(control: &str, description: &Description) -> Arc<str> {
    if let Some(advertised) = &description.data_address {
        return advertised.as_str().into();
    }
    let port = description.data_port;
    let authority = control_authority(control).expect("the settings were checked");
    format!("{}:{port}", authority.host()).into()
}

#[cfg(test)]
mod tests {
    use contract::load::{Retention, SessionState};

    use super::*;
    use crate::fleet::{
        testing::{description, fleet, replace_agent, report, start},
        worker::{WorkerRef, WorkerState},
    };

    fn session(id: &str) -> Session {
        Session {
            key: SessionKey::new("p", id).unwrap(),
            retention: Retention::Tagged,
            state: SessionState::Idle,
            dp_rank: 0,
            turns: 0,
            turns_running: 0,
            exclusive: false,
            resident_tokens: None,
            idle: Duration::ZERO,
            full_history: false,
            volatile_prefix: None,
            began_unix_ms: 0,
            parent: None,
        }
    }

    fn turns(state: &State) -> u32 {
        let worker = WorkerRef { agent: AgentKey::first(0), dp_rank: 0 };
        state.snapshot().worker_table().get(worker).expect("the worker was heard").turns()
    }

    fn state_of(state: &State, agent: usize, now: Instant) -> WorkerState {
        state.snapshot().state(WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }, now)
    }

    #[test]
    fn a_lost_agent_keeps_its_sessions_until_a_new_table_replaces_them() {
        let now = start();
        let mut state = fleet(&[(0, 0)], now);
        state.apply(AgentKey::first(0), Update::SessionChanged(session("s")), now);
        state.apply(AgentKey::first(0), Update::AgentLost("gone".to_owned()), now);
        assert_eq!(state_of(&state, 0, now), WorkerState::Lost);
        assert_eq!(state.snapshot().sessions.len(), 1);
        let sessions = vec![session("t")];
        let began = Update::StreamBegan { description: description("a0", 2, 1), sessions };
        state.apply(AgentKey::first(0), began, now);
        let view = state.snapshot();
        assert_eq!(view.sessions.len(), 1);
        assert!(view.sessions.locate(&SessionKey::new("p", "s").unwrap()).is_empty());
        assert_eq!(state_of(&state, 0, now), WorkerState::Stale, "no report yet");
    }

    #[test]
    fn in_flight_counts_survive_a_reconnect() {
        let now = start();
        let mut state = fleet(&[(0, 0)], now);
        let lease =
            crate::fleet::lease::LoadLease::acquire(&state.snapshot().agents[0].in_flight[0], 0);
        state.apply(AgentKey::first(0), Update::AgentLost("gone".to_owned()), now);
        let began = Update::StreamBegan { description: description("a0", 2, 2), sessions: vec![] };
        state.apply(AgentKey::first(0), began, now);
        assert_eq!(turns(&state), 1);
        // The turn is both reported by the agent and in flight here, and counts once.
        state.apply(AgentKey::first(0), Update::Report(report(&[(1, 0), (0, 0)])), now);
        assert_eq!(turns(&state), 1);
        drop(lease);
        assert_eq!(turns(&state), 0);
    }

    #[test]
    fn two_addresses_of_one_agent_count_once() {
        let now = start();
        let mut state = fleet(&[(0, 0), (0, 0)], now);
        let duplicate =
            Update::StreamBegan { description: description("a0", 1, 1), sessions: vec![] };
        assert!(state.apply(AgentKey::first(1), duplicate, now).is_some());
        assert_eq!(state_of(&state, 1, now), WorkerState::Lost);
        let turned_away = state.agent_with(AgentKey::first(1)).link.clone();
        let duplicate =
            Update::StreamBegan { description: description("a0", 1, 1), sessions: vec![] };
        let later = now + Duration::from_secs(1);
        assert_eq!(
            state.apply(AgentKey::first(1), duplicate, later),
            None,
            "the warning comes once"
        );
        assert_eq!(
            state.agent_with(AgentKey::first(1)).link,
            turned_away,
            "the first loss is kept"
        );
        state.apply(AgentKey::first(1), Update::Report(report(&[(0, 0)])), now);
        state.apply(AgentKey::first(1), Update::SessionChanged(session("s")), now);
        assert!(state.snapshot().sessions.is_empty());
        assert_eq!(state_of(&state, 0, now), WorkerState::Fresh);
    }

    #[test]
    fn a_data_port_that_turns_do_not_reach_gets_no_newcomers_for_some_reports() {
        let now = start();
        let mut state = fleet(&[(0, 0)], now);
        state.apply(AgentKey::first(0), Update::DataPortUnreachable("refused".to_owned()), now);
        let (shown, reason) =
            state.agent_with(AgentKey::first(0)).state(now, Duration::from_secs(3));
        assert!(shown == WorkerState::Stale && reason.contains("refused"), "{reason}");
        for _ in 0..UNREACHABLE_REPORTS_MAX {
            assert_eq!(state_of(&state, 0, now), WorkerState::Stale);
            state.apply(AgentKey::first(0), Update::Report(report(&[(0, 0)])), now);
        }
        assert_eq!(state_of(&state, 0, now), WorkerState::Fresh);
        // A turn that fails while the agent is lost says nothing about the agent that comes back.
        state.apply(AgentKey::first(0), Update::AgentLost("gone".to_owned()), now);
        state.apply(AgentKey::first(0), Update::DataPortUnreachable("refused".to_owned()), now);
        let began = Update::StreamBegan { description: description("a0", 2, 1), sessions: vec![] };
        state.apply(AgentKey::first(0), began, now);
        state.apply(AgentKey::first(0), Update::Report(report(&[(0, 0)])), now);
        assert_eq!(state_of(&state, 0, now), WorkerState::Fresh);
    }

    #[test]
    fn it_is_ready_when_every_agent_was_heard_or_failed_and_one_is_usable() {
        let now = start();
        let workers = vec!["http://a:1".to_owned(), "http://b:1".to_owned()];
        let mut state = State::new(&Config { workers, ..Config::default() });
        assert!(state.snapshot().check_ready(now).is_err());
        let began = Update::StreamBegan { description: description("a", 1, 1), sessions: vec![] };
        state.apply(AgentKey::first(0), began, now);
        state.apply(AgentKey::first(1), Update::AgentLost("refused".to_owned()), now);
        assert!(!state.snapshot().is_settled(), "its first report is missing");
        state.apply(AgentKey::first(0), Update::Report(report(&[(0, 0)])), now);
        assert_eq!(state.snapshot().check_ready(now), Ok(()));
        let deadline = state.next_deadline(now).unwrap();
        assert_eq!(state_of(&state, 0, deadline), WorkerState::Stale);
        state.apply(AgentKey::first(0), Update::AgentLost("gone".to_owned()), now);
        assert!(state.snapshot().check_ready(now).is_err());
    }

    #[test]
    fn the_bound_on_sessions_is_told() {
        let now = start();
        let workers = vec!["http://a:1".to_owned()];
        let mut config = Config { workers, ..Config::default() };
        config.limits.sessions_max = 1;
        let mut state = State::new(&config);
        let sessions = vec![session("s"), session("t")];
        let began = Update::StreamBegan { description: description("a", 1, 1), sessions };
        assert!(state.apply(AgentKey::first(0), began, now).is_some());
        assert!(
            state.apply(AgentKey::first(0), Update::SessionChanged(session("u")), now).is_some()
        );
        assert!(
            state.apply(AgentKey::first(0), Update::SessionChanged(session("s")), now).is_none()
        );
    }

    #[test]
    fn the_key_of_an_agent_that_has_left_reaches_nothing_of_the_next_one_in_its_slot() {
        let now = start();
        let mut state = fleet(&[(3, 500), (0, 0)], now);
        let old_view = state.snapshot();
        let old = WorkerRef { agent: AgentKey::first(0), dp_rank: 0 };
        let lease =
            crate::fleet::lease::LoadLease::acquire(&state.agent_with(old.agent).in_flight[0], 9);
        state.apply(old.agent, Update::SessionChanged(session("s")), now);
        let new = WorkerRef { agent: replace_agent(&mut state, old.agent, now), dp_rank: 0 };
        state.apply(new.agent, Update::SessionChanged(session("t")), now);
        let view = state.snapshot();
        assert_eq!([old, new].map(|it| view.has_agent(it.agent)), [false, true]);
        assert_eq!([old, new].map(|it| view.has_left(it.agent)), [true, false]);
        assert_eq!([old, new].map(|it| old_view.has_left(it.agent)), [false, false]);
        assert!(!view.agent(old).is_up() && view.agent(old).facts.is_none());
        assert_eq!((view.worker_id(old), view.agent(old).epoch()), (None, None));
        assert_eq!(view.state(old, now), WorkerState::Lost);
        assert_eq!(view.state(new, now), WorkerState::Fresh);
        assert!(view.worker_table().get(old).is_none());
        let stats = view.worker_table().get(new).expect("it was heard");
        assert_eq!((stats.worker(), stats.turns()), (new, 0), "the lease counts elsewhere");
        assert_eq!(view.worker_table().workers().next().map(|it| it.worker()), Some(new));
        assert_eq!(*view.reuse_demand(old), super::super::reuse_forecast::ReuseDemand::NOTHING);
        let tables = [old, new].map(|it| view.sessions.has_pinned(it.agent));
        assert_eq!(tables, [false; 2]);
        let t = SessionKey::new("p", "t").unwrap();
        let idle = [old, new].map(|it| view.sessions.idle(&t, it.agent, now).is_some());
        assert_eq!((view.sessions.len(), idle), (1, [false, true]));
        // Who has an old snapshot finds the old agent, and not the one that isn't there.
        assert_eq!([old, new].map(|it| old_view.has_agent(it.agent)), [true, false]);
        assert_eq!(old_view.agent(old).turns_in_flight(), 1);
        assert!(old_view.worker_table().get(new).is_none());
        drop(lease);
        // What still comes for the old one changes nothing.
        let late = [
            Update::SessionChanged(session("u")),
            Update::SessionRemoved(t),
            Update::DataPortUnreachable("refused".to_owned()),
            Update::AgentLost("gone".to_owned()),
            Update::TasksEnded,
        ];
        late.into_iter().for_each(|update| drop(state.apply(old.agent, update, now)));
        let after = state.snapshot();
        assert_eq!(after.sessions.len(), 1);
        assert!(Arc::ptr_eq(&after.agents[0], &view.agents[0]), "the next agent was changed");
    }
}

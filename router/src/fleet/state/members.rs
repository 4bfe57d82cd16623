//! Lets agents join and leave the fleet's state, as their sources say. Pure.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{SourceNews, State};
use crate::{
    config::Config,
    fleet::{
        agent::{Agent, Link},
        membership::{Phase, Source},
        worker::AgentKey,
    },
};

/// Least time for which an agent that is heard keeps its slot after it has left its sources. A file
/// that is written anew, or an answer of DNS without all addresses, is usually complete by then.
const LEAVING_TIME_MIN: Duration = Duration::from_secs(5);

/// Those that list agents soon after the start. Agents announce themselves later.
pub(super) fn awaited_sources(config: &Config) -> BTreeSet<Source> {
    let table = &config.discovery;
    let sources = [
        (Source::File, table.has_file()),
        (Source::Dns, !table.dns.names.is_empty()),
        (Source::Kubernetes, table.kubernetes.is_on()),
    ];
    sources.into_iter().filter(|(_, is_on)| *is_on).map(|(source, _)| source).collect()
}

impl State {
    /// Returns the agents that are rejected now, and why.
    pub fn apply_news(&mut self, news: SourceNews, now: Instant) -> Vec<(AgentKey, String)> {
        self.silent_sources.remove(&news.source);
        if let Some(list) = news.list {
            self.membership.replace_list(news.source, list, now);
            if news.source == Source::Announce {
                self.membership.replace_announced_ids(news.agent_ids);
            }
        }
        let rejected = self.reject_impostors(now);
        self.sync_members();
        rejected
    }

    /// Ends agents that leave and have nothing more to do, or that have been leaving for too long.
    /// Returns their names.
    pub fn end_leaving(&mut self, now: Instant) -> Vec<String> {
        let mut ended = vec![];
        for slot in 0..self.view.agents.len() {
            let agent = &self.view.agents[slot];
            let Phase::Leaving { since } = agent.phase else { continue };
            let leaving_for = now.saturating_duration_since(since);
            let has_sessions = agent.is_up()
                && (leaving_for < LEAVING_TIME_MIN || self.view.sessions.has_pinned(agent.key));
            let is_idle = agent.turns_in_flight() == 0 && !has_sessions;
            if is_idle || leaving_for >= self.leaving_max {
                ended.push(agent.name().to_owned());
                self.membership.end(slot);
                let agent = self.agent_mut(slot);
                let why = "it left the fleet".to_owned();
                agent.link = Link::Lost { since: now, why, is_rejected: false };
                (agent.report, agent.data_port_failure) = (None, None);
            }
        }
        if !ended.is_empty() {
            self.sync_members();
        }
        ended
    }

    /// Turns, bindings and old snapshots may go on to name the agent by its key, which from now on
    /// means no agent.
    pub(super) fn forget(&mut self, slot: usize, now: Instant) {
        let key = self.membership.key(slot);
        self.view.sessions.remove_all(key);
        self.forecast.clear_agent(key);
        self.conversations.lock().forget_agent(key);
        if let Some(demands) = Arc::make_mut(&mut self.view.reuse_demands).get_mut(slot) {
            demands.clear();
        }
        self.membership.free(slot, now);
        self.sync_members();
    }

    pub(super) fn sync_members(&mut self) {
        let has_silent_sources = !self.silent_sources.is_empty();
        let mut has_changed = self.view.has_silent_sources != has_silent_sources;
        self.view.has_silent_sources = has_silent_sources;
        for index in 0..self.membership.slot_count() {
            let (key, phase) = (self.membership.key(index), self.membership.phase(index));
            let control_url = self.membership.control_url(index);
            let sources = self.membership.sources(index);
            let known = self.view.agents.get(index);
            if known.is_some_and(|agent| {
                let shown = (agent.key, agent.phase, &*agent.control_url, &agent.sources);
                shown == (key, phase, control_url, &sources)
            }) {
                continue;
            }
            has_changed = true;
            // Another agent begins with nothing. The key of a free slot is that of the next one.
            match known.filter(|agent| agent.control_url == control_url && agent.key == key) {
                Some(_) => {
                    let agent = self.agent_mut(index);
                    (agent.phase, agent.sources) = (phase, sources);
                }
                None => {
                    let agent = Agent::new(key, control_url.to_owned(), phase, sources);
                    self.view.place_agent(agent);
                }
            }
            self.update_rows(index);
        }
        let keys = self.view.agents.iter().map(|agent| agent.key);
        if !keys.clone().eq(self.view.agent_keys.iter().copied()) {
            self.view.agent_keys = keys.collect();
        }
        self.view.members_version += u64::from(has_changed);
        self.compare_models();
        #[cfg(debug_assertions)]
        self.check_invariants();
    }
}

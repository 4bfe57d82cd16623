//! Rejects agents that aren't the ones that they should be. Pure.
//!
//! A rejected agent counts as lost, so it gets no turns. An agent is rejected while:
//!
//! - an agent at another address has the same id. One that another source than announcements lists
//!   keeps its id against announced agents, also while it is down: an announcement is worth less;
//! - only announcements list it, and none of them names the id that it describes;
//! - only announcements list it, and it wants its turns at another host than the announced one. The
//!   right to announce names hosts.

use std::time::Instant;

use contract::load::Description;
use http::uri::Authority;

use super::State;
use crate::{
    config::control_authority,
    fleet::{
        agent::Link,
        membership::{Phase, Source},
        worker::AgentKey,
    },
};

impl State {
    pub(super) fn rejection(&self, slot: usize, description: &Description) -> Option<String> {
        self.identity_problem(slot, description).or_else(|| self.duplicate(slot, description))
    }

    /// Returns the reason for the log at the first rejection.
    pub(super) fn reject(&mut self, slot: usize, why: String, now: Instant) -> Option<String> {
        let agent = self.agent_mut(slot);
        // The rejected agent reconnects again and again while the reason is there.
        let (since, is_first) = match &agent.link {
            Link::Lost { since, why: old_why, .. } => (*since, *old_why != why),
            Link::Dialing | Link::Up => (now, true),
        };
        agent.link = Link::Lost { since, why: why.clone(), is_rejected: true };
        (agent.report, agent.data_port_failure) = (None, None);
        is_first.then_some(why)
    }

    /// Rejects agents that are up but no longer as announced. Returns them, and why.
    pub(super) fn reject_impostors(&mut self, now: Instant) -> Vec<(AgentKey, String)> {
        let mut rejected = vec![];
        for slot in 0..self.view.agents.len() {
            let agent = &self.view.agents[slot];
            let facts = agent.facts.as_ref().filter(|_| agent.is_up());
            let Some(why) = facts.and_then(|facts| self.identity_problem(slot, &facts.description))
            else {
                continue;
            };
            let key = agent.key;
            rejected.extend(self.reject(slot, why, now).map(|why| (key, why)));
            self.update_rows(slot);
        }
        rejected
    }

    /// How an agent differs from its announcements. `None` also if another source lists it: that
    /// one names an address, and whoever listens there.
    pub(super) fn identity_problem(
        &self,
        slot: usize,
        description: &Description,
    ) -> Option<String> {
        let announced_ids = self.membership.announced_ids(slot)?;
        let agent_id = &description.agent_id;
        if !announced_ids.contains(agent_id) {
            let announced_ids: Vec<&str> = announced_ids.iter().map(String::as_str).collect();
            let announced_ids = announced_ids.join(" or ");
            return Some(format!(
                "announced as {announced_ids}, but it says that it is {agent_id}"
            ));
        }
        let data_address = description.data_address.as_deref()?;
        let control = control_authority(self.membership.control_url(slot)).ok()?;
        let is_same_host = data_address
            .parse::<Authority>()
            .is_ok_and(|data| data.host().eq_ignore_ascii_case(control.host()));
        (!is_same_host).then(|| {
            format!("announced at {}, but it wants its turns at {data_address}", control.host())
        })
    }

    fn duplicate(&self, slot: usize, description: &Description) -> Option<String> {
        let agent_id = &description.agent_id;
        let other = self.others_with_id(slot, agent_id).find(|&index| {
            let is_member = self.view.agents[index].phase == Phase::Member;
            if self.is_only_announced(slot) && self.is_listed(index) && is_member {
                true
            } else if self.is_listed(slot) && self.is_only_announced(index) {
                false
            } else {
                self.view.agents[index].is_up()
            }
        })?;
        // Both are probably one agent under two addresses, whose capacity would count twice.
        let control_url = &self.view.agents[other].control_url;
        Some(format!("{control_url} has the same agent id, {agent_id}"))
    }

    /// Rejects the announced agents that are up with the id of this one, if another source lists
    /// it. Returns a warning if there are any.
    pub(super) fn take_id_back(
        &mut self,
        slot: usize,
        agent_id: &str,
        now: Instant,
    ) -> Option<String> {
        if !self.is_listed(slot) {
            return None;
        }
        let is_impostor =
            |index: &usize| self.is_only_announced(*index) && self.view.agents[*index].is_up();
        let impostors = self.others_with_id(slot, agent_id).filter(is_impostor);
        let impostors = Vec::from_iter(impostors);
        let why = format!(
            "announced as {agent_id}, which is the id of the listed agent at {}",
            self.view.agents[slot].control_url
        );
        let mut urls = vec![];
        for index in impostors {
            self.reject(index, why.clone(), now);
            self.update_rows(index);
            urls.push(self.view.agents[index].control_url.clone());
        }
        (!urls.is_empty()).then(|| {
            let urls = urls.join(", ");
            format!("{agent_id} was announced at {urls}, which gets no more turns")
        })
    }

    /// By another source than announcements.
    fn is_listed(&self, slot: usize) -> bool {
        self.membership.sources(slot).iter().any(|source| *source != Source::Announce)
    }

    fn is_only_announced(&self, slot: usize) -> bool {
        self.membership.sources(slot) == [Source::Announce]
    }

    fn others_with_id(&self, slot: usize, agent_id: &str) -> impl Iterator<Item = usize> {
        let agents = self.view.agents.iter().enumerate();
        agents.filter_map(move |(index, agent)| {
            let has_id =
                agent.phase.is_followed() && agent.facts.as_ref()?.description.agent_id == agent_id;
            (has_id && index != slot).then_some(index)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::fleet::{
        membership::{AgentIds, Listing, SourceList},
        state::{SourceNews, Update},
        testing::{description, start},
        worker::{WorkerRef, WorkerState},
    };

    const URL: &str = "http://10.0.0.1:7";

    fn announced(ids: &[&str]) -> SourceNews {
        let ids: BTreeSet<String> = ids.iter().map(|id| (*id).to_owned()).collect();
        SourceNews {
            source: Source::Announce,
            list: Some(SourceList::from([(format!("{URL}/"), Listing::Serving)])),
            agent_ids: BTreeMap::from([(format!("{URL}/"), ids)]),
        }
    }

    fn state(news: SourceNews) -> State {
        let mut state = State::new(&crate::config::Config::default());
        state.apply_news(news, start());
        state
    }

    fn hear(state: &mut State, description: Description) -> Option<String> {
        state.apply(
            AgentKey::first(0),
            Update::StreamBegan { description, sessions: vec![] },
            start(),
        )
    }

    #[test]
    fn an_agent_with_another_id_than_announced_takes_no_traffic() {
        let mut state = state(announced(&["w1", "w2"]));
        let warning = hear(&mut state, description("w3", 1, 1)).unwrap();
        assert_eq!(warning, "announced as w1 or w2, but it says that it is w3");
        assert!(!state.agent_with(AgentKey::first(0)).is_up());
        assert_eq!(hear(&mut state, description("w3", 1, 1)), None, "it is told once");
        assert_eq!(hear(&mut state, description("w2", 1, 1)), None);
        assert!(state.agent_with(AgentKey::first(0)).is_up());
        // The announcement of its id ends, and another one of this address stays.
        let rejected = state.apply_news(announced(&["w1"]), start());
        assert_eq!(rejected.len(), 1, "{rejected:?}");
        assert!(!state.agent_with(AgentKey::first(0)).is_up());
        let worker = WorkerRef { agent: AgentKey::first(0), dp_rank: 0 };
        assert_eq!(state.snapshot().state(worker, start()), WorkerState::Lost);
    }

    #[test]
    fn a_listed_agent_keeps_its_id_against_an_announced_one() {
        let other_url = "http://10.0.0.2:7";
        let listed = |urls: &[&str]| SourceNews {
            source: Source::File,
            list: Some(urls.iter().map(|url| ((*url).to_owned(), Listing::Serving)).collect()),
            agent_ids: AgentIds::new(),
        };
        // Whichever comes first, and also while the listed one is down.
        let mut state = state(listed(&[other_url]));
        state.apply_news(announced(&["w1"]), start());
        let hear_at = |state: &mut State, index: usize| {
            let description = description("w1", 1, 1);
            state.apply(
                AgentKey::first(index),
                Update::StreamBegan { description, sessions: vec![] },
                start(),
            )
        };
        assert_eq!(hear_at(&mut state, 1), None);
        assert!(state.agent_with(AgentKey::first(1)).is_up());
        assert!(hear_at(&mut state, 0).unwrap().contains("gets no more turns"));
        assert!(
            state.agent_with(AgentKey::first(0)).is_up()
                && !state.agent_with(AgentKey::first(1)).is_up()
        );
        state.apply(AgentKey::first(0), Update::AgentLost("gone".to_owned()), start());
        hear_at(&mut state, 1);
        assert!(!state.agent_with(AgentKey::first(1)).is_up(), "the id is the listed agent's");
        // Of two listed ones the first keeps it.
        state.apply_news(listed(&[other_url, URL]), start());
        assert_eq!(hear_at(&mut state, 1), None);
        assert!(hear_at(&mut state, 0).unwrap().contains("has the same agent id"));
    }

    #[test]
    fn an_announced_agent_gets_its_turns_at_the_announced_host() {
        let mut state = state(announced(&["w1"]));
        let at = |address: &str| Description {
            data_address: Some(address.to_owned()),
            ..description("w1", 1, 1)
        };
        assert!(hear(&mut state, at("10.0.0.2:9")).is_some());
        assert!(!state.agent_with(AgentKey::first(0)).is_up());
        assert_eq!(hear(&mut state, at("10.0.0.1:9")), None);
        assert!(state.agent_with(AgentKey::first(0)).is_up());
    }

    #[test]
    fn an_announcement_can_not_take_away_what_another_source_lists() {
        let mut state = state(announced(&["rogue"]));
        let list = SourceList::from([(URL.to_owned(), Listing::Serving)]);
        let agent_ids = AgentIds::new();
        state.apply_news(SourceNews { source: Source::File, list: Some(list), agent_ids }, start());
        assert_eq!(hear(&mut state, description("w1", 1, 1)), None);
        assert!(state.apply_news(announced(&["other"]), start()).is_empty());
        assert!(state.agent_with(AgentKey::first(0)).is_up());
    }
}

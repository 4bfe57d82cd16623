//! Decides which agents are in the fleet, and which slot each of them has. Pure.
//!
//! An agent is a *member* while at least one source lists it as serving. A *slot* is an index of
//! the router's tables of agents. It goes from agent to agent, each with a [key](AgentKey) of its
//! own:
//!
//! | phase | the agent |
//! |---|---|
//! | `Free` | none |
//! | `Member` | is listed as serving |
//! | `Leaving` | is not listed as serving any more: takes no new sessions, finishes its turns |
//! | `Ending` | is not followed any more: its tasks are being stopped |
//!
//! An agent that returns while it is leaving is a member again, with all that is known of it. Later
//! it begins anew, under another key. What still names the old key, such as a turn or a binding,
//! finds no agent.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Instant,
};

use super::worker::AgentKey;
use crate::config::AGENTS_MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The setting `workers`.
    Static,
    File,
    Dns,
    /// `EndpointSlice` objects.
    Kubernetes,
    /// The agents themselves.
    Announce,
}

impl Source {
    /// In the order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::Static, Self::File, Self::Dns, Self::Kubernetes, Self::Announce];

    /// In JSON, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::File => "file",
            Self::Dns => "dns",
            Self::Kubernetes => "kubernetes",
            Self::Announce => "announce",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listing {
    /// The agent is about to end, so it gets nothing new.
    Terminating,
    Serving,
}

/// By the URL of the control port.
pub type SourceList = BTreeMap<String, Listing>;

/// The ids that announcements name, by the URL of the control port.
pub type AgentIds = BTreeMap<String, BTreeSet<String>>;

/// See the module's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Free,
    Member,
    Leaving { since: Instant },
    Ending,
}

impl Phase {
    #[must_use]
    pub fn is_followed(self) -> bool {
        matches!(self, Self::Member | Self::Leaving { .. })
    }
}

#[derive(Debug, Clone)]
struct Slot {
    /// Of a free slot, the key of the agent that gets it next.
    key: AgentKey,
    phase: Phase,
    /// Empty if the slot is free.
    control_url: Arc<str>,
}

#[derive(Debug)]
pub struct Membership {
    slots: Vec<Slot>,
    /// Slots of the agents that are followed, by the URL of the control port.
    followed: HashMap<Arc<str>, usize>,
    /// In the order in which they became free.
    free: VecDeque<usize>,
    /// The newest of each source, by its number.
    lists: [SourceList; Source::ALL.len()],
    announced_ids: AgentIds,
}

impl Membership {
    /// The order of the URLs is the order of the first slots.
    #[must_use]
    pub fn new(static_urls: &[String]) -> Self {
        let mut membership = Self {
            slots: vec![],
            followed: HashMap::new(),
            free: VecDeque::new(),
            lists: Default::default(),
            announced_ids: AgentIds::new(),
        };
        for url in static_urls {
            membership.list_mut(Source::Static).insert(normalize_url(url), Listing::Serving);
            membership.admit(&normalize_url(url));
        }
        membership.check_in_debug();
        membership
    }

    #[must_use]
    pub fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// Of a free slot, the key of the agent that gets it next.
    #[must_use]
    pub fn key(&self, slot: usize) -> AgentKey {
        self.slots[slot].key
    }

    /// `None` if the agent has left the fleet.
    #[must_use]
    pub fn slot_of(&self, agent: AgentKey) -> Option<usize> {
        let slot = self.slots.get(agent.slot())?;
        (slot.key == agent && slot.phase != Phase::Free).then_some(agent.slot())
    }

    #[must_use]
    pub fn phase(&self, slot: usize) -> Phase {
        self.slots[slot].phase
    }

    /// Empty if the slot is free.
    #[must_use]
    pub fn control_url(&self, slot: usize) -> &str {
        &self.slots[slot].control_url
    }

    #[must_use]
    pub fn sources(&self, slot: usize) -> Vec<Source> {
        let url = self.control_url(slot);
        let lists = Source::ALL.into_iter().zip(&self.lists);
        lists.filter(|(_, list)| list.contains_key(url)).map(|(source, _)| source).collect()
    }

    /// The ids that the agent of a slot may have. `None`: any, because nothing lists it, or a
    /// source that names only addresses.
    #[must_use]
    pub fn announced_ids(&self, slot: usize) -> Option<&BTreeSet<String>> {
        let is_listed_elsewhere = self.sources(slot).iter().any(|it| *it != Source::Announce);
        self.announced_ids.get(self.control_url(slot)).filter(|_| !is_listed_elsewhere)
    }

    /// Agents that should be members and wait for a free slot.
    #[must_use]
    pub fn waiting_count(&self) -> usize {
        let wanted = self.wanted();
        wanted.iter().filter(|url| !self.followed.contains_key(**url)).count()
    }

    pub fn replace_list(&mut self, source: Source, list: SourceList, now: Instant) {
        let urls = list.into_iter().map(|(url, listing)| (normalize_url(&url), listing));
        *self.list_mut(source) = urls.collect();
        self.reconcile(now);
        self.check_in_debug();
    }

    pub fn replace_announced_ids(&mut self, agent_ids: AgentIds) {
        let agent_ids = agent_ids.into_iter().map(|(url, ids)| (normalize_url(&url), ids));
        self.announced_ids = agent_ids.collect();
    }

    pub fn end(&mut self, slot: usize) {
        assert!(matches!(self.phase(slot), Phase::Leaving { .. }), "only who leaves can end");
        self.slots[slot].phase = Phase::Ending;
        self.followed.remove(&self.slots[slot].control_url);
        self.check_in_debug();
    }

    /// The agent's key means no agent from now on. An agent that waits for a slot gets this one.
    pub fn free(&mut self, slot: usize, now: Instant) {
        assert_eq!(self.phase(slot), Phase::Ending, "only an ended agent can be forgotten");
        let key = self.key(slot).next();
        self.slots[slot] = Slot { key, phase: Phase::Free, control_url: "".into() };
        self.free.push_back(slot);
        self.reconcile(now);
        self.check_in_debug();
    }

    pub fn check_invariants(&self) {
        assert!(self.slots.len() <= AGENTS_MAX, "more slots than allowed");
        let wanted = self.wanted();
        let mut free_count = 0;
        for (index, slot) in self.slots.iter().enumerate() {
            let is_followed = self.followed.get(&slot.control_url) == Some(&index);
            assert_eq!(slot.phase.is_followed(), is_followed, "slot {index} is indexed wrongly");
            assert_eq!(slot.phase == Phase::Free, slot.control_url.is_empty(), "slot {index}");
            assert_eq!(slot.key.slot(), index, "another slot's key");
            let is_wanted = wanted.contains(&*slot.control_url);
            match slot.phase {
                Phase::Member => assert!(is_wanted, "slot {index} stays though nothing lists it"),
                Phase::Leaving { .. } => assert!(!is_wanted, "slot {index} leaves though listed"),
                Phase::Free => free_count += 1,
                Phase::Ending => {}
            }
        }
        let followed = self.slots.iter().filter(|slot| slot.phase.is_followed()).count();
        assert_eq!(followed, self.followed.len(), "one slot for each agent");
        assert_eq!(free_count, self.free.len(), "free slots miscounted");
        assert!(self.free.iter().all(|slot| self.phase(*slot) == Phase::Free));
        let has_room = !self.free.is_empty() || self.slots.len() < AGENTS_MAX;
        assert!(!has_room || self.waiting_count() == 0, "an agent waits beside a free slot");
    }

    fn list_mut(&mut self, source: Source) -> &mut SourceList {
        &mut self.lists[source as usize]
    }

    fn wanted(&self) -> BTreeSet<&str> {
        let listed = self.lists.iter().flatten();
        listed
            .filter(|(_, listing)| **listing == Listing::Serving)
            .map(|(url, _)| url.as_str())
            .collect()
    }

    fn reconcile(&mut self, now: Instant) {
        let wanted: Vec<String> = self.wanted().into_iter().map(str::to_owned).collect();
        let wanted_set: HashSet<&str> = wanted.iter().map(String::as_str).collect();
        for slot in &mut self.slots {
            let is_wanted = wanted_set.contains(&*slot.control_url);
            slot.phase = match slot.phase {
                Phase::Member if !is_wanted => Phase::Leaving { since: now },
                Phase::Leaving { .. } if is_wanted => Phase::Member,
                phase => phase,
            };
        }
        for url in &wanted {
            if !self.followed.contains_key(url.as_str()) {
                self.admit(url);
            }
        }
    }

    /// The agent gets the slot that has been free for longest, or else a new one, or else it waits.
    fn admit(&mut self, control_url: &str) {
        let control_url: Arc<str> = control_url.into();
        let key = match self.free.pop_front() {
            Some(index) => self.key(index),
            None if self.slots.len() < AGENTS_MAX => AgentKey::first(self.slots.len()),
            None => return,
        };
        let slot = Slot { key, phase: Phase::Member, control_url: Arc::clone(&control_url) };
        let index = key.slot();
        if index == self.slots.len() {
            self.slots.push(slot);
        } else {
            self.slots[index] = slot;
        }
        self.followed.insert(control_url, index);
    }

    fn check_in_debug(&self) {
        #[cfg(debug_assertions)]
        self.check_invariants();
    }
}

/// URLs are compared without a slash at the end.
fn normalize_url(url: &str) -> String {
    url.trim_end_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::start;

    fn list(urls: &[(&str, Listing)]) -> SourceList {
        urls.iter().map(|(url, listing)| ((*url).to_owned(), *listing)).collect()
    }

    fn serving(urls: &[&str]) -> SourceList {
        urls.iter().map(|url| ((*url).to_owned(), Listing::Serving)).collect()
    }

    fn phases(membership: &Membership) -> Vec<Phase> {
        (0..membership.slot_count()).map(|slot| membership.phase(slot)).collect()
    }

    #[test]
    fn the_settings_order_is_the_order_of_the_first_slots() {
        let membership = Membership::new(&["http://b:1/".to_owned(), "http://a:1".to_owned()]);
        assert_eq!(membership.control_url(0), "http://b:1");
        assert_eq!(membership.control_url(1), "http://a:1");
        assert_eq!(membership.sources(0), [Source::Static]);
    }

    #[test]
    fn an_agent_of_two_sources_leaves_when_both_have_dropped_it() {
        let (mut membership, now) = (Membership::new(&[]), start());
        membership.replace_list(Source::File, serving(&["http://a:1"]), now);
        membership.replace_list(Source::Dns, serving(&["http://a:1/"]), now);
        assert_eq!(membership.slot_count(), 1);
        assert_eq!(membership.sources(0), [Source::File, Source::Dns]);
        membership.replace_list(Source::File, SourceList::new(), now);
        assert_eq!(membership.phase(0), Phase::Member);
        membership.replace_list(Source::Dns, SourceList::new(), now);
        assert_eq!(membership.phase(0), Phase::Leaving { since: now });
        membership.replace_list(Source::File, serving(&["http://a:1"]), now);
        assert_eq!(phases(&membership), [Phase::Member], "it returned to its slot");
    }

    #[test]
    fn a_terminating_agent_leaves_and_never_joins() {
        let (mut membership, now) = (Membership::new(&[]), start());
        let terminating = || list(&[("http://a:1", Listing::Terminating)]);
        membership.replace_list(Source::Kubernetes, terminating(), now);
        assert_eq!(membership.slot_count(), 0);
        membership.replace_list(Source::Kubernetes, serving(&["http://a:1"]), now);
        membership.replace_list(Source::Kubernetes, terminating(), now);
        assert_eq!(membership.phase(0), Phase::Leaving { since: now });
        assert_eq!(membership.sources(0), [Source::Kubernetes]);
    }

    #[test]
    fn a_slot_is_reused_only_when_it_was_freed_and_the_longest_free_first() {
        let (mut membership, now) = (Membership::new(&[]), start());
        membership.replace_list(Source::File, serving(&["http://a:1", "http://b:1"]), now);
        membership.replace_list(Source::File, SourceList::new(), now);
        membership.end(0);
        // The agent that returns after its end gets another slot.
        membership.replace_list(Source::File, serving(&["http://a:1"]), now);
        assert_eq!((membership.slot_count(), membership.control_url(2)), (3, "http://a:1"));
        membership.end(1);
        membership.free(1, now);
        membership.free(0, now);
        membership.replace_list(Source::Dns, serving(&["http://c:1"]), now);
        assert_eq!(membership.control_url(1), "http://c:1");
    }

    #[test]
    fn an_agent_beyond_the_bound_waits_for_a_slot() {
        let (mut membership, now) = (Membership::new(&[]), start());
        let urls = |range: std::ops::Range<usize>| -> SourceList {
            range.map(|host| (format!("http://h{host:04}:1"), Listing::Serving)).collect()
        };
        membership.replace_list(Source::File, urls(0..AGENTS_MAX + 1), now);
        assert_eq!((membership.slot_count(), membership.waiting_count()), (AGENTS_MAX, 1));
        membership.replace_list(Source::File, urls(1..AGENTS_MAX + 1), now);
        membership.end(0);
        assert_eq!(membership.waiting_count(), 1);
        membership.free(0, now);
        assert_eq!((membership.waiting_count(), membership.phase(0)), (0, Phase::Member));
    }

    #[test]
    fn the_key_of_an_agent_that_has_left_means_none_even_if_the_agent_comes_back() {
        let (mut membership, now) = (Membership::new(&[]), start());
        membership.replace_list(Source::File, serving(&["http://a:1"]), now);
        let key = membership.key(0);
        membership.replace_list(Source::File, SourceList::new(), now);
        assert_eq!(membership.slot_of(key), Some(0), "it leaves");
        membership.end(0);
        assert_eq!(membership.slot_of(key), Some(0), "its tasks end");
        membership.free(0, now);
        assert_eq!([key, membership.key(0)].map(|key| membership.slot_of(key)), [None; 2]);
        membership.replace_list(Source::File, serving(&["http://a:1"]), now);
        let new_key = membership.key(0);
        assert_eq!([key, new_key].map(|key| membership.slot_of(key)), [None, Some(0)]);
        assert_eq!(membership.slot_of(AgentKey::first(1)), None, "nobody had the slot");
    }
}

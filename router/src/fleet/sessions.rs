//! Merges the session tables of all agents, so that a session can be found by its key. Pure.
//!
//! An *entry* is one session of one agent. The same key is in the tables of several agents only
//! after a lost connection or a race between two routers.
//!
//! A clone for a snapshot is cheap: it copies 256 pointers. The next change copies 256 more, and
//! one shard.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    id::SessionKey,
    load::{Retention, Session, SessionState},
};

use super::worker::{AgentKey, WorkerRef};

/// Number of groups of shards, and of shards in a group. With a million sessions, a shard has 15
/// entries.
const FANOUT: usize = 256;

#[derive(Debug, Clone)]
pub struct ReportedSession {
    pub worker: WorkerRef,
    pub session: Arc<Session>,
    pub reported_at: Instant,
    /// When the KV was last demoted. `None` if this router has not seen that happen.
    pub demoted_at: Option<Instant>,
}

impl ReportedSession {
    /// Agents report changes, so an idle session's report is old.
    #[must_use]
    pub fn idle(&self, now: Instant) -> Duration {
        if self.session.turns_running > 0 {
            return Duration::ZERO;
        }
        self.session.idle.saturating_add(now.saturating_duration_since(self.reported_at))
    }
}

/// No key has an empty list.
type Shard = HashMap<Arc<SessionKey>, Vec<ReportedSession>>;

/// In groups. A group is made when a key comes to it, so a small table has few.
#[derive(Debug, Clone)]
struct Shards(Vec<Option<Arc<Vec<Arc<Shard>>>>>);

impl Shards {
    fn new() -> Self {
        Self(vec![None; FANOUT])
    }

    fn shard_of(&self, key: &SessionKey) -> Option<&Shard> {
        let (group, shard) = place_of(key);
        self.0[group].as_ref().map(|group| &*group[shard])
    }

    fn shard_of_mut(&mut self, key: &SessionKey) -> &mut Shard {
        let (group, shard) = place_of(key);
        let new_group = || Arc::new(vec![Arc::default(); FANOUT]);
        let group = self.0[group].get_or_insert_with(new_group);
        Arc::make_mut(&mut Arc::make_mut(group)[shard])
    }

    fn iter(&self) -> impl Iterator<Item = &Shard> {
        self.0.iter().flatten().flat_map(|group| group.iter().map(|shard| &**shard))
    }
}

#[derive(Debug, Clone)]
pub struct Sessions {
    shards: Shards,
    /// By slot. Of a slot's agents only the newest has entries.
    entry_counts: Vec<usize>,
    agent_sessions_max: usize,
    /// The keys with several entries. There are few, or none.
    splits: Arc<BTreeSet<SessionKey>>,
}

impl Sessions {
    #[must_use]
    pub fn new(agent_count: usize, agent_sessions_max: usize) -> Self {
        Self {
            shards: Shards::new(),
            entry_counts: vec![0; agent_count],
            agent_sessions_max,
            splits: Arc::default(),
        }
    }

    pub fn add_agent(&mut self) {
        self.entry_counts.push(0);
    }

    #[must_use]
    pub fn has_any(&self, agent: AgentKey) -> bool {
        self.entry_counts[agent.slot()] > 0
    }

    #[must_use]
    pub fn splits(&self) -> &BTreeSet<SessionKey> {
        &self.splits
    }

    /// The client of a pinned session may send only what is new, so the session can't move; others
    /// move with their next turns.
    #[must_use]
    pub fn has_pinned(&self, agent: AgentKey) -> bool {
        let is_pinned = |entry: &ReportedSession| {
            entry.worker.agent == agent && entry.session.retention == Retention::Pinned
        };
        self.has_any(agent) && self.iter().any(is_pinned)
    }

    #[must_use]
    pub fn locate(&self, key: &SessionKey) -> &[ReportedSession] {
        self.shards.shard_of(key).and_then(|shard| shard.get(key)).map_or(&[], Vec::as_slice)
    }

    #[must_use]
    pub fn idle(&self, key: &SessionKey, agent: AgentKey, now: Instant) -> Option<Duration> {
        let entry = self.locate(key).iter().find(|entry| entry.worker.agent == agent);
        entry.map(|entry| entry.idle(now))
    }

    pub fn iter(&self) -> impl Iterator<Item = &ReportedSession> {
        self.shards.iter().flat_map(|shard| shard.values().flatten())
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.entry_counts.iter().sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns false if the agent has as many entries as allowed and none for this session. The
    /// session is then left out.
    pub fn upsert(&mut self, agent: AgentKey, session: Session, now: Instant) -> bool {
        let is_full = self.entry_counts[agent.slot()] >= self.agent_sessions_max;
        let worker = WorkerRef { agent, dp_rank: session.dp_rank };
        let old = self.locate(&session.key).iter().find(|entry| entry.worker.agent == agent);
        let has_entry = old.is_some();
        if is_full && !has_entry {
            return false;
        }
        let is_demoted = |session: &Session| session.state == SessionState::Demoted;
        let demoted_at = old.and_then(|old| {
            let is_demoted_now = is_demoted(&session) && !is_demoted(&old.session);
            if is_demoted_now { Some(now) } else { old.demoted_at }
        });
        let shard = self.shards.shard_of_mut(&session.key);
        let session = Arc::new(session);
        let new_entry = ReportedSession { worker, session, reported_at: now, demoted_at };
        match shard.get_mut(&new_entry.session.key) {
            Some(entries) => match entries.iter_mut().find(|entry| entry.worker.agent == agent) {
                Some(entry) => *entry = new_entry,
                None => {
                    Arc::make_mut(&mut self.splits).insert(new_entry.session.key.clone());
                    entries.push(new_entry);
                }
            },
            None => {
                let key = Arc::new(new_entry.session.key.clone());
                shard.insert(key, vec![new_entry]);
            }
        }
        self.entry_counts[agent.slot()] += usize::from(!has_entry);
        true
    }

    pub fn remove(&mut self, agent: AgentKey, key: &SessionKey) {
        let has_entry = self.locate(key).iter().any(|entry| entry.worker.agent == agent);
        if !has_entry {
            return;
        }
        let shard = self.shards.shard_of_mut(key);
        if let Some(entries) = shard.get_mut(key) {
            entries.retain(|entry| entry.worker.agent != agent);
            if entries.len() == 1 {
                Arc::make_mut(&mut self.splits).remove(key);
            }
            if entries.is_empty() {
                shard.remove(key);
            }
        }
        self.entry_counts[agent.slot()] -= 1;
    }

    pub fn remove_all(&mut self, agent: AgentKey) {
        // A router that starts hears of each agent for the first time, and has nothing to look for.
        if self.has_any(agent) {
            let of_agent = |entry: &&ReportedSession| entry.worker.agent == agent;
            let old: Vec<SessionKey> =
                self.iter().filter(of_agent).map(|entry| entry.session.key.clone()).collect();
            old.iter().for_each(|key| self.remove(agent, key));
        }
    }

    /// Returns how many sessions didn't fit.
    pub fn replace(&mut self, agent: AgentKey, sessions: Vec<Session>, now: Instant) -> usize {
        self.remove_all(agent);
        sessions
            .into_iter()
            .map(|session| self.upsert(agent, session, now))
            .filter(|is_stored| !is_stored)
            .count()
    }

    pub fn check_invariants(&self) {
        let mut entry_counts = vec![0; self.entry_counts.len()];
        let mut split_count = 0;
        for shard in self.shards.iter() {
            for (key, entries) in shard {
                let is_its_shard =
                    self.shards.shard_of(key).is_some_and(|of| std::ptr::eq(of, shard));
                assert!(is_its_shard, "a key in the wrong shard");
                assert!(!entries.is_empty(), "a key without entries");
                assert_eq!(entries.len() > 1, self.splits.contains(&**key), "a split not known");
                split_count += usize::from(entries.len() > 1);
                for entry in entries {
                    assert_eq!(entry.session.key, **key, "an entry under the wrong key");
                    entry_counts[entry.worker.agent.slot()] += 1;
                }
            }
        }
        assert_eq!(entry_counts, self.entry_counts, "sessions miscounted");
        assert_eq!(split_count, self.splits.len(), "a split of a key that is gone");
    }
}

/// Two bytes of the key's digest.
fn place_of(key: &SessionKey) -> (usize, usize) {
    let [group, shard, ..] = key.digest().0.to_le_bytes();
    (group.into(), shard.into())
}

#[cfg(test)]
mod tests {
    use contract::load::{Retention, SessionState};
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::testing::start;

    const MINUTE: Duration = Duration::from_secs(60);

    pub(crate) fn session(id: &str, dp_rank: u32) -> Session {
        Session {
            key: SessionKey::new("p", id).unwrap(),
            retention: Retention::Tagged,
            state: SessionState::Idle,
            dp_rank,
            turns: 0,
            turns_running: 0,
            exclusive: false,
            resident_tokens: None,
            idle: std::time::Duration::ZERO,
            full_history: false,
            volatile_prefix: None,
            began_unix_ms: 0,
            parent: None,
        }
    }

    #[test]
    fn the_last_demotion_is_known_as_long_as_the_session_lives() {
        let (key, begin) = (SessionKey::new("p", "s").unwrap(), start());
        let mut sessions = Sessions::new(1, 4);
        let mut report = |state, minutes| {
            let session = Session { state, ..session("s", 0) };
            assert!(sessions.upsert(AgentKey::first(0), session, begin + minutes * MINUTE));
            sessions.locate(&key)[0].demoted_at
        };
        assert_eq!(report(SessionState::Demoted, 0), None, "it was so when it was first heard of");
        assert_eq!(report(SessionState::Running, 1), None);
        let demoted_at = Some(begin + 2 * MINUTE);
        assert_eq!(report(SessionState::Demoted, 2), demoted_at);
        assert_eq!(report(SessionState::Demoted, 3), demoted_at, "not demoted again");
        assert_eq!(report(SessionState::Running, 4), demoted_at);
        assert_eq!(report(SessionState::Demoted, 5), Some(begin + 5 * MINUTE));
    }

    #[test]
    fn an_idle_session_gets_older_after_its_report_and_a_running_one_does_not() {
        let (begin, mut sessions) = (start(), Sessions::new(1, 4));
        let mut idle = |turns_running| {
            let session = Session { turns_running, idle: MINUTE, ..session("s", 0) };
            assert!(sessions.upsert(AgentKey::first(0), session, begin));
            sessions.locate(&SessionKey::new("p", "s").unwrap())[0].idle(begin + 2 * MINUTE)
        };
        assert_eq!((idle(0), idle(1)), (3 * MINUTE, Duration::ZERO));
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_set(ops in prop::collection::vec((0..5_u8, 0..3_usize, 0..6_u8), 0..80)) {
            let mut sessions = Sessions::new(3, 4);
            let mut model: BTreeSet<(usize, String)> = BTreeSet::new();
            let (mut keys, mut gone) = ([0, 1, 2].map(AgentKey::first), vec![]);
            for (op, agent, id) in ops {
                let (key, id) = (keys[agent], format!("s{id}"));
                let of_agent = model.iter().filter(|(of, _)| *of == agent).count();
                match op {
                    0 | 1 => {
                        let fits = model.contains(&(agent, id.clone())) || of_agent < 4;
                        prop_assert_eq!(sessions.upsert(key, session(&id, 0), start()), fits);
                        if fits { model.insert((agent, id)); }
                    }
                    2 => {
                        sessions.remove(key, &SessionKey::new("p", id.as_str()).unwrap());
                        model.remove(&(agent, id));
                    }
                    // Another agent gets the slot.
                    3 => {
                        sessions.remove_all(key);
                        model.retain(|(of, _)| *of != agent);
                        keys[agent] = key.next();
                        gone.push((key, id));
                    }
                    _ => {
                        sessions.replace(key, vec![session(&id, 1)], start());
                        model.retain(|(of, _)| *of != agent);
                        model.insert((agent, id));
                    }
                }
                // What comes too late for an agent that has left changes nothing.
                for (key, id) in &gone {
                    sessions.remove(*key, &SessionKey::new("p", id.as_str()).unwrap());
                }
                sessions.check_invariants();
                prop_assert!(sessions.iter().all(|one| keys.contains(&one.worker.agent)));
                let held: BTreeSet<(usize, String)> = sessions
                    .iter()
                    .map(|one| (one.worker.agent.slot(), one.session.key.id().to_owned()))
                    .collect();
                prop_assert_eq!(&held, &model);
            }
        }
    }
}

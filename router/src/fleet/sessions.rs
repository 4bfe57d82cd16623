//! The session tables of all agents, merged by key. Pure.
//!
//! Sessions are spread over 256 shards behind `Arc`s: a change copies one shard, and a snapshot
//! copies 256 pointers.

use std::{collections::HashMap, sync::Arc};

use proto::{id::SessionKey, load::Session};

use super::worker::WorkerRef;

/// With 100,000 sessions a shard holds 400 of them, so a change copies 400 small entries.
const SHARDS: usize = 256;

/// A session and the worker whose agent reported it.
#[derive(Debug, Clone)]
pub struct ReportedSession {
    /// The worker that has the session.
    pub worker: WorkerRef,
    /// The session as last reported.
    pub session: Arc<Session>,
}

type Shard = HashMap<Arc<SessionKey>, Vec<ReportedSession>>;

/// All sessions by key. A key is on more than one agent only after a lost connection or a race
/// between two routers.
#[derive(Debug, Clone)]
pub struct Sessions {
    shards: Vec<Arc<Shard>>,
    /// Number of sessions of each agent.
    counts: Vec<usize>,
    agent_sessions_max: usize,
}

impl Sessions {
    /// Creates an empty table for `agents` agents with at most `agent_sessions_max` sessions each.
    #[must_use]
    pub fn new(agents: usize, agent_sessions_max: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Arc::default()).collect(),
            counts: vec![0; agents],
            agent_sessions_max,
        }
    }

    /// Returns the entries of all agents for the key.
    #[must_use]
    pub fn locate(&self, key: &SessionKey) -> &[ReportedSession] {
        self.shards[shard_of(key)].get(key).map_or(&[], Vec::as_slice)
    }

    /// Iterates over all entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &ReportedSession> {
        self.shards.iter().flat_map(|shard| shard.values().flatten())
    }

    /// Returns the number of entries of all agents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds or replaces the agent's entry. Returns false if the agent is at its bound.
    pub fn upsert(&mut self, agent: usize, session: Session) -> bool {
        let at = shard_of(&session.key);
        let full = self.counts[agent] >= self.agent_sessions_max;
        let worker = WorkerRef { agent, dp_rank: session.dp_rank };
        let held = self.shards[at]
            .get(&session.key)
            .is_some_and(|all| all.iter().any(|one| one.worker.agent == agent));
        if full && !held {
            return false;
        }
        let shard = Arc::make_mut(&mut self.shards[at]);
        let reported = ReportedSession { worker, session: Arc::new(session) };
        match shard.get_mut(&reported.session.key) {
            Some(all) => match all.iter_mut().find(|one| one.worker.agent == agent) {
                Some(one) => *one = reported,
                None => all.push(reported),
            },
            None => {
                let key = Arc::new(reported.session.key.clone());
                shard.insert(key, vec![reported]);
            }
        }
        self.counts[agent] += usize::from(!held);
        true
    }

    /// Removes the agent's entry for the key.
    pub fn remove(&mut self, agent: usize, key: &SessionKey) {
        let at = shard_of(key);
        let held = self.locate(key).iter().any(|one| one.worker.agent == agent);
        if !held {
            return;
        }
        let shard = Arc::make_mut(&mut self.shards[at]);
        if let Some(all) = shard.get_mut(key) {
            all.retain(|one| one.worker.agent != agent);
            if all.is_empty() {
                shard.remove(key);
            }
        }
        self.counts[agent] -= 1;
    }

    /// Replaces all entries of the agent. Returns how many sessions didn't fit.
    pub fn replace(&mut self, agent: usize, sessions: Vec<Session>) -> usize {
        for shard in &mut self.shards {
            if shard.values().flatten().any(|one| one.worker.agent == agent) {
                let shard = Arc::make_mut(shard);
                for all in shard.values_mut() {
                    all.retain(|one| one.worker.agent != agent);
                }
                shard.retain(|_, all| !all.is_empty());
            }
        }
        self.counts[agent] = 0;
        sessions.into_iter().map(|session| self.upsert(agent, session)).filter(|fit| !fit).count()
    }

    /// Panics if the counts and the shards disagree.
    pub fn check_invariants(&self) {
        let mut counts = vec![0; self.counts.len()];
        for (at, shard) in self.shards.iter().enumerate() {
            for (key, all) in &**shard {
                assert_eq!(shard_of(key), at, "a key in the wrong shard");
                assert!(!all.is_empty(), "a key without entries");
                for one in all {
                    assert_eq!(one.session.key, **key, "an entry under the wrong key");
                    counts[one.worker.agent] += 1;
                }
            }
        }
        assert_eq!(counts, self.counts, "sessions miscounted");
    }
}

fn shard_of(key: &SessionKey) -> usize {
    usize::from(key.digest().0.to_le_bytes()[0])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use proto::load::{Retention, SessionState};

    use super::*;

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
        }
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_set(ops in prop::collection::vec((0..4_u8, 0..3_usize, 0..6_u8), 0..80)) {
            let mut sessions = Sessions::new(3, 4);
            let mut model: BTreeSet<(usize, String)> = BTreeSet::new();
            for (op, agent, id) in ops {
                let id = format!("s{id}");
                let of_agent = model.iter().filter(|(of, _)| *of == agent).count();
                match op {
                    0 | 1 => {
                        let fits = model.contains(&(agent, id.clone())) || of_agent < 4;
                        prop_assert_eq!(sessions.upsert(agent, session(&id, 0)), fits);
                        if fits { model.insert((agent, id)); }
                    }
                    2 => {
                        sessions.remove(agent, &SessionKey::new("p", id.as_str()).unwrap());
                        model.remove(&(agent, id));
                    }
                    _ => {
                        sessions.replace(agent, vec![session(&id, 1)]);
                        model.retain(|(of, _)| *of != agent);
                        model.insert((agent, id));
                    }
                }
                sessions.check_invariants();
                let held: BTreeSet<(usize, String)> = sessions
                    .iter()
                    .map(|one| (one.worker.agent, one.session.key.id().to_owned()))
                    .collect();
                prop_assert_eq!(&held, &model);
            }
        }
    }
}

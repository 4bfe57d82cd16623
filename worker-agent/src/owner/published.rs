//! Keeps the published state of all sessions, so that a watcher gets it without copying. Pure.
//!
//! A [`SessionSnapshot`] costs the same however many sessions there are: it shares shards. The next
//! change to a shared shard copies that shard, but no session.

use std::{
    collections::BTreeMap,
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{id::SessionKey, load::Session};

/// With 16,384 sessions, a shard has 64, and the first change to it after a snapshot copies 64
/// pointers.
const SHARD_COUNT: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedSession {
    session: Session,
    published_at: Instant,
}

impl PublishedSession {
    #[must_use]
    pub fn new(session: Session, published_at: Instant) -> Self {
        Self { session, published_at }
    }

    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The idle time is that at `now`.
    #[must_use]
    pub fn at(&self, now: Instant) -> Session {
        let mut session = self.session.clone();
        if session.turns_running == 0 {
            let since = now.saturating_duration_since(self.published_at);
            session.idle = session.idle.checked_add(since).unwrap_or(Duration::MAX);
        }
        session
    }
}

/// Few digests have more than one session.
type Shard = BTreeMap<u64, Vec<Arc<PublishedSession>>>;

/// The order is that of the keys' digests.
#[derive(Debug, Clone)]
pub struct SessionSnapshot {
    shards: Vec<Arc<Shard>>,
}

/// Where a page of a list ends: the digest of its last sessions. Those with equal digests stay on
/// one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageEnd(pub u64);

impl Default for SessionSnapshot {
    fn default() -> Self {
        Self { shards: (0..SHARD_COUNT).map(|_| Arc::default()).collect() }
    }
}

impl SessionSnapshot {
    pub(super) fn insert(
        &mut self,
        published: Arc<PublishedSession>,
    ) -> Option<Arc<PublishedSession>> {
        let key = &published.session.key;
        let digest = key.digest().0;
        let sessions = Arc::make_mut(&mut self.shards[shard_index(digest)]);
        let sessions = sessions.entry(digest).or_default();
        match sessions.iter_mut().find(|other| other.session.key == *key) {
            Some(other) => Some(mem::replace(other, published)),
            None => {
                sessions.push(published);
                None
            }
        }
    }

    pub(super) fn remove(&mut self, key: &SessionKey) -> Option<Arc<PublishedSession>> {
        let digest = key.digest().0;
        let shard = &mut self.shards[shard_index(digest)];
        let index =
            shard.get(&digest)?.iter().position(|published| published.session.key == *key)?;
        let shard = Arc::make_mut(shard);
        let sessions = shard.get_mut(&digest)?;
        let removed = sessions.remove(index);
        if sessions.is_empty() {
            shard.remove(&digest);
        }
        Some(removed)
    }

    /// Returns `count_min` sessions or a few more, fewer only at the end, and where the page ends;
    /// `None` if no session is left after it.
    #[must_use]
    pub fn page(
        &self,
        after: Option<PageEnd>,
        count_min: usize,
    ) -> (Vec<Arc<PublishedSession>>, Option<PageEnd>) {
        let first_digest = match after {
            None => 0,
            Some(PageEnd(u64::MAX)) => return (vec![], None),
            Some(PageEnd(digest)) => digest + 1,
        };
        let shards = &self.shards[shard_index(first_digest)..];
        let mut rest = shards.iter().flat_map(|shard| shard.range(first_digest..)).peekable();
        let mut page = Vec::with_capacity(count_min);
        let mut end = None;
        while page.len() < count_min
            && let Some((&digest, sessions)) = rest.next()
        {
            page.extend(sessions.iter().cloned());
            end = Some(PageEnd(digest));
        }
        (page, end.filter(|_| rest.peek().is_some()))
    }
}

/// Keeps the order of the digests.
fn shard_index(digest: u64) -> usize {
    usize::from(digest.to_be_bytes()[0])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use contract::load::{Retention, SessionState};
    use proptest::prelude::*;
    use service::clock::now;

    use super::*;

    fn session(id: &str, turns_running: u32) -> Session {
        Session {
            key: SessionKey::new("p", id).unwrap(),
            retention: Retention::Tagged,
            state: SessionState::Idle,
            dp_rank: 0,
            turns: 0,
            turns_running,
            exclusive: false,
            resident_tokens: None,
            idle: Duration::from_secs(1),
            full_history: false,
            volatile_prefix: None,
            began_unix_ms: 0,
            parent: None,
        }
    }

    fn published(id: &str) -> Arc<PublishedSession> {
        Arc::new(PublishedSession::new(session(id, 0), now()))
    }

    fn ids(page: &[Arc<PublishedSession>]) -> BTreeSet<String> {
        page.iter().map(|one| one.session.key.id().to_owned()).collect()
    }

    #[test]
    fn an_idle_session_gets_older_and_a_running_one_does_not() {
        let begin = now();
        let idle_after = |turns_running| {
            let published = PublishedSession::new(session("s", turns_running), begin);
            published.at(begin + Duration::from_secs(5)).idle.as_secs()
        };
        assert_eq!((idle_after(0), idle_after(1)), (6, 1));
    }

    #[test]
    fn a_snapshot_does_not_change_with_what_it_was_taken_of() {
        let mut sessions = SessionSnapshot::default();
        sessions.insert(published("a"));
        let snapshot = sessions.clone();
        sessions.insert(published("b"));
        sessions.remove(&SessionKey::new("p", "a").unwrap());
        assert_eq!(ids(&snapshot.page(None, 10).0), BTreeSet::from(["a".to_owned()]));
        assert_eq!(ids(&sessions.page(None, 10).0), BTreeSet::from(["b".to_owned()]));
    }

    proptest! {
        #[test]
        fn pages_have_each_session_once(
            ops in prop::collection::vec((any::<bool>(), 0..200_u8), 0..300),
            count_min in 1..40_usize,
        ) {
            let mut sessions = SessionSnapshot::default();
            let mut model = BTreeSet::new();
            for (is_insert, id) in ops {
                let id = format!("s{id}");
                if is_insert {
                    sessions.insert(published(&id));
                    model.insert(id);
                } else {
                    sessions.remove(&SessionKey::new("p", id.as_str()).unwrap());
                    model.remove(&id);
                }
            }
            let (mut seen, mut count, mut after) = (BTreeSet::new(), 0, None);
            loop {
                let (page, end) = sessions.page(after, count_min);
                count += page.len();
                seen.extend(ids(&page));
                after = end;
                if end.is_none() {
                    break;
                }
                prop_assert!(page.len() >= count_min);
            }
            prop_assert_eq!(count, model.len());
            prop_assert_eq!(seen, model);
        }
    }
}

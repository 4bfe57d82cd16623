//! Keeps the agents that announce themselves to this router, and lists them as a source.
//!
//! An agent announces itself again and again, each time for a limited time. An agent that ends says
//! so, and one that falls silent is no longer listed once its time has passed. Who may announce
//! what is checked by `http` before.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use service::clock::now;
use tokio::sync::watch;

use super::Reporter;
use crate::{
    config::AGENTS_MAX,
    fleet::membership::{Listing, SourceList},
};

/// The longest time for which an announcement holds. An agent that is gone stays listed as long.
pub(crate) const TTL_MAX: Duration = Duration::from_secs(300);
/// The pause without announcements; the next one ends it.
const IDLE_WAIT: Duration = Duration::from_secs(3600);

/// An agent's announcement of itself.
#[derive(Debug, Clone)]
pub(crate) struct Announcement {
    /// URL of the agent's control port.
    pub(crate) control_url: String,
    /// How long the announcement holds.
    pub(crate) ttl: Duration,
    /// Whether the agent is about to end.
    pub(crate) is_leaving: bool,
}

/// There are as many announcements as agents that a router follows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// The announcements that hold, by URL. Pure.
#[derive(Debug, Default)]
struct Table {
    agents: BTreeMap<String, (Listing, Instant)>,
}

impl Table {
    fn put(&mut self, announcement: Announcement, now: Instant) -> Result<(), Full> {
        self.drop_expired(now);
        let Announcement { control_url, ttl, is_leaving } = announcement;
        if self.agents.len() >= AGENTS_MAX && !self.agents.contains_key(&control_url) {
            return Err(Full);
        }
        let listing = if is_leaving { Listing::Terminating } else { Listing::Serving };
        self.agents.insert(control_url, (listing, now + ttl.min(TTL_MAX)));
        Ok(())
    }

    fn drop_expired(&mut self, now: Instant) {
        self.agents.retain(|_, (_, expires_at)| *expires_at > now);
    }

    fn list(&self) -> SourceList {
        self.agents.iter().map(|(url, (listing, _))| (url.clone(), *listing)).collect()
    }

    fn next_expiry(&self) -> Option<Instant> {
        self.agents.values().map(|(_, expires_at)| *expires_at).min()
    }
}

/// The agents that announce themselves.
#[derive(Debug)]
pub(crate) struct Announcements {
    table: Mutex<Table>,
    changed: watch::Sender<()>,
}

impl Announcements {
    /// Creates a place without announcements.
    pub(crate) fn new() -> Self {
        Self { table: Mutex::default(), changed: watch::Sender::new(()) }
    }

    /// Takes an announcement.
    ///
    /// # Errors
    /// If too many agents are announced.
    pub(crate) fn put(&self, announcement: Announcement) -> Result<(), Full> {
        self.table.lock().put(announcement, now())?;
        self.changed.send_replace(());
        Ok(())
    }
}

/// Lists the agents until the task is dropped.
pub(super) async fn run(announcements: Arc<Announcements>, mut reporter: Reporter) {
    let mut changed = announcements.changed.subscribe();
    loop {
        changed.mark_unchanged();
        let (list, next_expiry) = {
            let mut table = announcements.table.lock();
            table.drop_expired(now());
            (table.list(), table.next_expiry())
        };
        reporter.list(list).await;
        let recheck_at = next_expiry.unwrap_or_else(|| now() + IDLE_WAIT);
        // Both a change and an expiry lead to a new list.
        let _ = tokio::time::timeout_at(recheck_at.into(), changed.changed()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::start;

    fn announcement(url: &str, is_leaving: bool) -> Announcement {
        let ttl = Duration::from_secs(10);
        Announcement { control_url: url.to_owned(), ttl, is_leaving }
    }

    #[test]
    fn an_agent_is_listed_until_its_time_has_passed() {
        let (mut table, now) = (Table::default(), start());
        table.put(announcement("http://a:1", false), now).unwrap();
        table.put(announcement("http://b:1", true), now + Duration::from_secs(5)).unwrap();
        let listed = SourceList::from([
            ("http://a:1".to_owned(), Listing::Serving),
            ("http://b:1".to_owned(), Listing::Terminating),
        ]);
        assert_eq!(table.list(), listed);
        assert_eq!(table.next_expiry(), Some(now + Duration::from_secs(10)));
        table.drop_expired(now + Duration::from_secs(10));
        assert_eq!(table.list().into_keys().collect::<Vec<_>>(), ["http://b:1"]);
    }

    #[test]
    fn announcements_have_a_bound_in_number_and_time() {
        let (mut table, now) = (Table::default(), start());
        for host in 0..AGENTS_MAX {
            table.put(announcement(&format!("http://h{host}:1"), false), now).unwrap();
        }
        assert_eq!(table.put(announcement("http://x:1", false), now), Err(Full));
        table.put(announcement("http://h0:1", true), now).unwrap();
        let year = Duration::from_secs(366 * 24 * 3600);
        let forever = Announcement { ttl: year, ..announcement("http://h1:1", false) };
        table.put(forever, now).unwrap();
        table.drop_expired(now + TTL_MAX);
        assert_eq!(table.list(), SourceList::new());
    }
}

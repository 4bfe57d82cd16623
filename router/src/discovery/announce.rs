//! Keeps the agents that announce themselves to this router, and lists them as a source.
//!
//! An announcement holds for a limited time. Who may announce what, `http` has checked before.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use http::HeaderMap;
use parking_lot::Mutex;
use service::{
    clock::now,
    proof::{self, announcement},
    reload::Reloaded,
    router_token::Tokens,
};
use tokio::sync::watch;

use super::Reporter;
use crate::{
    config::AGENTS_MAX,
    fleet::{
        dial::AgentCredentials,
        membership::{AgentIds, Listing, SourceList},
    },
};

/// An agent that is gone stays listed as long.
pub(crate) const TTL_MAX: Duration = Duration::from_secs(300);
/// The pause without announcements; the next one ends it.
const IDLE_WAIT: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone)]
pub(crate) struct Announcement {
    /// The key of this principal announces the agent.
    pub(crate) principal: Arc<str>,
    pub(crate) agent_id: String,
    pub(crate) control_url: String,
    pub(crate) ttl: Duration,
    /// Whether the agent is about to end.
    pub(crate) is_leaving: bool,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "this key has announced {0} agents, discovery.announced_per_key_max; withdraw those that \
         are gone, or raise the setting"
    )]
    KeyShare(usize),
    /// This router recognizes agents by their certificates.
    #[error(
        "this router sends prompts to agents with a certificate only (agents.ca); give the agent \
         one, and let it announce an https URL"
    )]
    Plain,
    #[error("{AGENTS_MAX} agents are announced; withdraw those that are gone")]
    Full,
}

#[derive(Debug)]
struct Entry {
    /// This principal announced the agent last: the agent counts against its share.
    principal: Arc<str>,
    listing: Listing,
    expires_at: Instant,
}

/// The announcements that hold. Pure.
#[derive(Debug)]
struct Table {
    /// By URL and id: a URL may have several ids, so that no key takes away what another one
    /// announced.
    agents: BTreeMap<(String, String), Entry>,
    per_key_max: usize,
    /// Whether only agents that speak TLS are taken.
    demands_tls: bool,
}

impl Table {
    fn put(&mut self, announcement: Announcement, now: Instant) -> Result<(), Error> {
        self.drop_expired(now);
        if self.demands_tls && !announcement.control_url.starts_with("https:") {
            return Err(Error::Plain);
        }
        let Announcement { principal, agent_id, control_url, ttl, is_leaving } = announcement;
        let key = (control_url, agent_id);
        let others = self.agents.iter().filter(|(other, _)| **other != key);
        let (mut count, mut count_of_key) = (0, 0);
        for (_, entry) in others {
            count += 1;
            count_of_key += usize::from(entry.principal == principal);
        }
        if count_of_key >= self.per_key_max {
            return Err(Error::KeyShare(count_of_key));
        }
        if count >= AGENTS_MAX {
            return Err(Error::Full);
        }
        let listing = if is_leaving { Listing::Terminating } else { Listing::Serving };
        let expires_at = now + ttl.min(TTL_MAX);
        self.agents.insert(key, Entry { principal, listing, expires_at });
        Ok(())
    }

    fn drop_expired(&mut self, now: Instant) {
        self.agents.retain(|_, entry| entry.expires_at > now);
    }

    fn list(&self) -> (SourceList, AgentIds) {
        let (mut list, mut agent_ids) = (SourceList::new(), AgentIds::new());
        for ((url, agent_id), entry) in &self.agents {
            let listing = list.entry(url.clone()).or_insert(entry.listing);
            *listing = (*listing).max(entry.listing);
            agent_ids.entry(url.clone()).or_default().insert(agent_id.clone());
        }
        (list, agent_ids)
    }

    fn next_expiry(&self) -> Option<Instant> {
        self.agents.values().map(|entry| entry.expires_at).min()
    }
}

#[derive(Debug)]
pub(crate) struct Announcements {
    table: Mutex<Table>,
    /// An agent must hold one of them; `None`: it needs none.
    tokens: Option<Reloaded<Tokens>>,
    changed: watch::Sender<()>,
}

impl Announcements {
    /// The agents must recognize this router by its `credentials`, and prove that they do.
    pub(crate) fn new(per_key_max: usize, credentials: &AgentCredentials) -> Self {
        let demands_tls = credentials.tls.is_some();
        let table = Table { agents: BTreeMap::new(), per_key_max, demands_tls };
        let tokens = credentials.tokens.clone();
        Self { table: Mutex::new(table), tokens, changed: watch::Sender::new(()) }
    }

    /// Checks that an agent that holds the token made this announcement.
    pub(crate) fn is_proven(
        &self,
        agent_id: &str,
        control_url: &str,
        headers: &HeaderMap,
    ) -> Result<(), proof::Error> {
        let Some(tokens) = &self.tokens else { return Ok(()) };
        announcement::check(&tokens.load(), agent_id, control_url, headers)
    }

    pub(crate) fn put(&self, announcement: Announcement) -> Result<(), Error> {
        self.table.lock().put(announcement, now())?;
        self.changed.send_replace(());
        Ok(())
    }
}

pub(super) async fn run(announcements: Arc<Announcements>, mut reporter: Reporter) {
    let mut changed = announcements.changed.subscribe();
    loop {
        changed.mark_unchanged();
        let ((list, agent_ids), next_expiry) = {
            let mut table = announcements.table.lock();
            table.drop_expired(now());
            (table.list(), table.next_expiry())
        };
        reporter.list_with_ids(list, agent_ids).await;
        let recheck_at = next_expiry.unwrap_or_else(|| now() + IDLE_WAIT);
        // Both a change and an expiry lead to a new list.
        let _ = tokio::time::timeout_at(recheck_at.into(), changed.changed()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::start;

    fn table(per_key_max: usize) -> Table {
        Table { agents: BTreeMap::new(), per_key_max, demands_tls: false }
    }

    fn announcement(url: &str, is_leaving: bool) -> Announcement {
        Announcement {
            principal: "agents".into(),
            agent_id: "w".to_owned(),
            control_url: url.to_owned(),
            ttl: Duration::from_secs(10),
            is_leaving,
        }
    }

    #[test]
    fn an_agent_is_listed_until_its_time_has_passed() {
        let (mut table, now) = (table(9), start());
        table.put(announcement("http://a:1", false), now).unwrap();
        table.put(announcement("http://b:1", true), now + Duration::from_secs(5)).unwrap();
        let listed = SourceList::from([
            ("http://a:1".to_owned(), Listing::Serving),
            ("http://b:1".to_owned(), Listing::Terminating),
        ]);
        assert_eq!(table.list().0, listed);
        assert_eq!(table.next_expiry(), Some(now + Duration::from_secs(10)));
        table.drop_expired(now + Duration::from_secs(10));
        assert_eq!(table.list().0.into_keys().collect::<Vec<_>>(), ["http://b:1"]);
    }

    #[test]
    fn another_id_takes_nothing_away_from_an_announced_agent() {
        let (mut table, now) = (table(9), start());
        table.put(announcement("http://a:1", false), now).unwrap();
        let other =
            Announcement { agent_id: "other".to_owned(), ..announcement("http://a:1", true) };
        table.put(other, now).unwrap();
        let (list, agent_ids) = table.list();
        assert_eq!(list["http://a:1"], Listing::Serving);
        assert!(agent_ids["http://a:1"].iter().eq(["other", "w"]));
    }

    #[test]
    fn a_key_has_a_share_and_can_not_fill_the_table() {
        let (mut table, now) = (table(2), start());
        table.put(announcement("http://a:1", false), now).unwrap();
        table.put(announcement("http://b:1", false), now).unwrap();
        assert_eq!(table.put(announcement("http://c:1", false), now), Err(Error::KeyShare(2)));
        table.put(announcement("http://b:1", true), now).unwrap();
        let other = Announcement { principal: "other".into(), ..announcement("http://c:1", false) };
        table.put(other, now).unwrap();
        // The share of an announcement goes with its last announcer, and ends with its time.
        assert_eq!(table.put(announcement("http://c:1", false), now), Err(Error::KeyShare(2)));
        let later = now + Duration::from_secs(10);
        table.put(announcement("http://c:1", false), later).unwrap();
    }

    #[test]
    fn a_router_with_certificates_takes_no_plain_agent() {
        let (mut table, now) = (Table { demands_tls: true, ..table(9) }, start());
        assert_eq!(table.put(announcement("http://a:1", false), now), Err(Error::Plain));
        table.put(announcement("https://a:1", false), now).unwrap();
    }

    #[test]
    fn announcements_have_a_bound_in_number_and_time() {
        let (mut table, now) = (table(usize::MAX), start());
        for host in 0..AGENTS_MAX {
            table.put(announcement(&format!("http://h{host}:1"), false), now).unwrap();
        }
        assert_eq!(table.put(announcement("http://x:1", false), now), Err(Error::Full));
        table.put(announcement("http://h0:1", true), now).unwrap();
        let year = Duration::from_secs(366 * 24 * 3600);
        let forever = Announcement { ttl: year, ..announcement("http://h1:1", false) };
        table.put(forever, now).unwrap();
        table.drop_expired(now + TTL_MAX);
        assert_eq!(table.list().0, SourceList::new());
    }
}

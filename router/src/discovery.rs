//! Learns which agents there are, from a file, DNS, Kubernetes, or the agents themselves.
//!
//! A source that fails keeps its last list, and the router stays ready.

pub(crate) mod announce;
#[cfg(feature = "dns")]
mod dns;
mod file;
#[cfg(feature = "kubernetes")]
mod kubernetes;

use std::sync::Arc;

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use service::{
    metrics::{By, to_i64},
    tasks::Tasks,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::announce::Announcements;
use crate::{
    config::Config,
    fleet::{
        dial::AgentCredentials,
        membership::{AgentIds, Source, SourceList},
        state::SourceNews,
    },
};

service::metrics! {
    pub(crate) struct Metrics {
        /// 1 while a source of agents fails and its last list is in effect
        failing: By<Gauge> = "source_failing", By::label("source");
        /// Agents that a source lists
        agents: By<Gauge> = "source_agents", By::label("source");
        /// Times that a source had forgotten its changes and was listed anew
        expiries: By<Counter> = "source_expiries", By::label("source");
    }
}

#[derive(Debug)]
struct Reporter {
    source: Source,
    news: mpsc::Sender<SourceNews>,
    metrics: Metrics,
    last_list: Option<(SourceList, AgentIds)>,
    failure: Option<String>,
}

impl Reporter {
    fn new(source: Source, news: &mpsc::Sender<SourceNews>, metrics: &Metrics) -> Self {
        let (news, metrics) = (news.clone(), metrics.clone());
        metrics.failing.get(source.as_str()).set(0);
        metrics.agents.get(source.as_str()).set(0);
        Self { source, news, metrics, last_list: None, failure: None }
    }

    async fn list(&mut self, list: SourceList) {
        self.list_with_ids(list, AgentIds::new()).await;
    }

    async fn list_with_ids(&mut self, list: SourceList, agent_ids: AgentIds) {
        let source = self.source.as_str();
        if self.failure.take().is_some() {
            info!(source, "source of agents answers again");
        }
        self.metrics.failing.get(source).set(0);
        let known = self.last_list.as_ref();
        if known.is_some_and(|(known, ids)| (known, ids) == (&list, &agent_ids)) {
            return;
        }
        self.metrics.agents.get(source).set(to_i64(list.len() as u64));
        self.last_list = Some((list.clone(), agent_ids.clone()));
        // The view task ends only with the process.
        drop(self.news.send(SourceNews { source: self.source, list: Some(list), agent_ids }).await);
    }

    /// Counts that the source had forgotten what has changed since its last answer.
    #[cfg(feature = "kubernetes")]
    fn count_expiry(&self) {
        self.metrics.expiries.get(self.source.as_str()).inc();
    }

    async fn fail(&mut self, why: String) {
        let source = self.source.as_str();
        self.metrics.failing.get(source).set(1);
        if self.failure.is_none() {
            warn!(source, why, "source of agents failed, its last list stays in effect");
        }
        if self.failure.is_none() && self.last_list.is_none() {
            drop(
                self.news
                    .send(SourceNews {
                        source: self.source,
                        list: None,
                        agent_ids: AgentIds::new(),
                    })
                    .await,
            );
        }
        self.failure = Some(why);
    }
}

/// Returns where agents announce themselves, if they may.
pub(crate) fn start(
    config: &Config,
    credentials: &AgentCredentials,
    news: &mpsc::Sender<SourceNews>,
    metrics: &Metrics,
    tasks: &Tasks,
) -> Option<Arc<Announcements>> {
    let table = &config.discovery;
    let reporter = |source| Reporter::new(source, news, metrics);
    if table.has_file() {
        let task = file::run(table.file.clone(), reporter(Source::File));
        tasks.spawn(until_cancelled(tasks.token(), task));
    }
    #[cfg(feature = "dns")]
    if !table.dns.names.is_empty() {
        let task = dns::run(table.dns.clone(), reporter(Source::Dns));
        tasks.spawn(until_cancelled(tasks.token(), task));
    }
    #[cfg(feature = "kubernetes")]
    if table.kubernetes.is_on() {
        let task = kubernetes::run(table.kubernetes.clone(), reporter(Source::Kubernetes));
        tasks.spawn(until_cancelled(tasks.token(), task));
    }
    table.announce.then(|| {
        let announcements = Announcements::new(table.announced_per_key_max, credentials);
        let announcements = Arc::new(announcements);
        let task = announce::run(Arc::clone(&announcements), reporter(Source::Announce));
        tasks.spawn(until_cancelled(tasks.token(), task));
        announcements
    })
}

async fn until_cancelled(token: CancellationToken, task: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = token.cancelled() => {}
        () = task => {}
    }
}

//! Measures the memory of an agent with many sessions, and with routers that watch it.

use std::fmt;

use anyhow::ensure;
use contract::v1::{self, worker_agent_client::WorkerAgentClient};
use serde::Serialize;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use crate::fleet::{Plan, Process, Worker};

/// How many sessions are opened at a time, each for another principal.
const OPENS: u32 = 64;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The number of sessions. An agent's default limit is as many
    #[arg(long, default_value_t = 16_384)]
    sessions: u32,
    /// The number of watchers. They read nothing, which costs the agent the most
    #[arg(long, default_value_t = 100)]
    watchers: u32,
}

/// The resident memory of the agent's process, in MiB.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    sessions: u32,
    watchers: u32,
    alone_mib: f64,
    with_sessions_mib: f64,
    with_watchers_mib: f64,
    most_mib: f64,
}

impl fmt::Display for Figures {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sessions, watchers, .. } = self;
        writeln!(out, "resident memory of the agent in MiB")?;
        for (name, mib) in [
            ("alone".to_owned(), self.alone_mib),
            (format!("with {sessions} sessions"), self.with_sessions_mib),
            (format!("and {watchers} watchers"), self.with_watchers_mib),
            ("the most at any time".to_owned(), self.most_mib),
        ] {
            writeln!(out, "{name:<24}{mib:>8.1}")?;
        }
        Ok(())
    }
}

/// Opens the sessions, then the watches, and reads the memory after each.
pub(crate) async fn measure(options: &Options) -> anyhow::Result<Figures> {
    let worker = Worker::start(&Plan::own()?).await?;
    let url = format!("http://{}", worker.control_addr());
    let client = WorkerAgentClient::new(connect(&url).await?);
    let (alone_mib, _) = resident_mib(&worker.agent)?;
    open_sessions(&client, options.sessions).await?;
    let (with_sessions_mib, _) = resident_mib(&worker.agent)?;
    let mut watchers = vec![];
    for _ in 0..options.watchers {
        let mut watcher = WorkerAgentClient::new(connect(&url).await?);
        let watch = watcher.watch_load(v1::WatchLoadRequest {}).await?;
        watchers.push((watcher, watch));
    }
    // When the agent has listed all sessions, it has sent each watcher what it sends unread.
    let listed = count_sessions(client).await?;
    ensure!(listed == options.sessions as usize, "the agent lists {listed} sessions");
    let (with_watchers_mib, most_mib) = resident_mib(&worker.agent)?;
    let Options { sessions, watchers, .. } = *options;
    Ok(Figures { sessions, watchers, alone_mib, with_sessions_mib, with_watchers_mib, most_mib })
}

async fn connect(url: &str) -> anyhow::Result<Channel> {
    Ok(Endpoint::from_shared(url.to_owned())?.connect().await?)
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn resident_mib(process: &Process) -> anyhow::Result<(f64, f64)> {
    let (now, most) = process.resident_bytes()?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    Ok((mib(now), mib(most)))
}

/// Opens sessions. Ids and names of principals are as long as UUIDs.
async fn open_sessions(client: &WorkerAgentClient<Channel>, count: u32) -> anyhow::Result<()> {
    let mut opens = JoinSet::new();
    for part in 0..OPENS {
        let mut client = client.clone();
        opens.spawn(async move {
            for number in (part..count).step_by(OPENS as usize) {
                let key = v1::SessionKey {
                    principal: format!("{part:036}"),
                    id: format!("{number:036}"),
                };
                let request = v1::OpenSessionRequest { key: Some(key), ..Default::default() };
                client.open_session(request).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(opened) = opens.join_next().await {
        opened??;
    }
    Ok(())
}

async fn count_sessions(mut client: WorkerAgentClient<Channel>) -> anyhow::Result<usize> {
    let mut request = v1::ListSessionsRequest { page_size: 500, ..Default::default() };
    let mut listed = 0;
    loop {
        let page = client.list_sessions(request.clone()).await?.into_inner();
        listed += page.sessions.len();
        if page.next_page_token.is_empty() {
            return Ok(listed);
        }
        request.page_token = page.next_page_token;
    }
}

//! What a hostile client does. Each attack returns once it is in force, and goes on until dropped.
//!
//! All attackers have one key and one address, which no user has.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use anyhow::{Context as _, ensure};
use harness::{
    fleet::{Processes, credential},
    web::{Answer, Web},
};
use http::Method;
use parking_lot::Mutex;
use rustix::{process::setpriority_process, thread::gettid};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    runtime::Runtime,
    task::{JoinHandle, JoinSet},
};

use crate::figures;

/// The scheduling priority of attackers.
const LOWEST_PRIORITY: i32 = 19;
/// The longest wait for one step of an attack. What Berth refuses or delays is no failure of the
/// attack.
const STEP_MAX: Duration = Duration::from_secs(10);

/// An attack in force. It ends on drop.
#[derive(Debug, Default)]
pub(crate) struct Attack {
    pub(crate) tasks: JoinSet<()>,
    /// The answers to the attacker.
    pub(crate) answers: Answers,
}

/// How often an attacker got which answer: `200`, or a status and a code, or `broken`. Clones share
/// the counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answers(Arc<Mutex<BTreeMap<String, usize>>>);

impl Answers {
    pub(crate) fn count(&self, answer: &anyhow::Result<Answer>) {
        let kind = match answer {
            Ok(answer) if answer.status.is_success() => "200".to_owned(),
            Ok(answer) => {
                let (status, code) = answer.refusal();
                format!("{status} {code}")
            }
            Err(_) => "broken".to_owned(),
        };
        *self.0.lock().entry(kind).or_default() += 1;
    }

    /// Returns how many answers `is_meant` takes.
    pub(crate) fn sum(&self, is_meant: impl Fn(&str) -> bool) -> usize {
        let counts = self.0.lock();
        counts.iter().filter(|(kind, _)| is_meant(kind)).map(|(_, count)| count).sum()
    }
}

impl fmt::Display for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<_> =
            self.0.lock().iter().map(|(kind, count)| format!("{count} × {kind}")).collect();
        f.write_str(if counts.is_empty() { "no answers" } else { "" })?;
        f.write_str(&counts.join(", "))
    }
}

/// The runtime of attacks. Its threads have the lowest priority: attackers have processors of their
/// own, and here they would take those of the processes under test.
#[derive(Debug)]
pub(crate) struct Attackers(Option<Runtime>);

impl Attackers {
    /// Starts the runtime.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub(crate) fn new() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .on_thread_start(|| {
                // A thread may always lower its own priority.
                let _ = setpriority_process(Some(gettid()), LOWEST_PRIORITY);
            })
            .build()?;
        Ok(Self(Some(runtime)))
    }

    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        attack: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.0.as_ref().expect("it is there until dropped").spawn(attack)
    }
}

impl Drop for Attackers {
    fn drop(&mut self) {
        // A runtime must not wait for its threads inside another one.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Returns the address of the first router's data port.
fn data_addr(fleet: &Processes) -> String {
    format!("{}:8080", fleet.router_hosts[0])
}

/// Waits until a metric of the first router is at least `least`.
async fn reach(fleet: &Processes, metric: (&str, &str), least: f64) -> anyhow::Result<()> {
    figures::reach(&fleet.web, &fleet.router_admin(0), metric, least).await
}

/// Opens 64 pinned sessions and runs one turn of one token in each.
pub(crate) async fn rows(fleet: &Processes) -> anyhow::Result<Attack> {
    let attack = Attack::default();
    let (mut turns, web) = (JoinSet::new(), Web::default());
    for number in 0..64 {
        let (web, key, answers) = (web.clone(), credential("mallory"), attack.answers.clone());
        let url = fleet.url(0, "/generate");
        turns.spawn(async move {
            let id = format!("row-{number}");
            let headers = [
                ("authorization", key.as_str()),
                ("x-berth-session-id", &id),
                ("x-berth-retention", "pinned"),
                ("x-berth-delta", "1"),
            ];
            let body = json!({
                "text": "x", "sampling_params": { "max_new_tokens": 1, "ignore_eos": true },
                "nvext": { "session_control": { "session_id": id, "action": "open" } },
            });
            let sent = tokio::time::timeout(STEP_MAX, web.post(&url, &headers, &body));
            if let Ok(answer) = sent.await {
                answers.count(&answer);
            }
        });
    }
    while turns.join_next().await.is_some() {}
    let answers = &attack.answers;
    ensure!(answers.sum(|kind| kind == "429 rows") > 0, "rows are left: {answers}");
    Ok(attack)
}

/// Opens as many sessions as the agent keeps for one client, and more.
pub(crate) async fn sessions(fleet: &Processes) -> anyhow::Result<Attack> {
    const CLIENTS: usize = 32;
    const SESSIONS: usize = 17_000;
    let attack = Attack::default();
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (web, key, answers) = (Web::default(), credential("mallory"), attack.answers.clone());
        let url = fleet.url(0, "/v1/sessions");
        clients.spawn(async move {
            for number in 0..SESSIONS / CLIENTS {
                let body =
                    json!({ "session_id": format!("s-{client}-{number}"), "retention": "tagged" });
                let headers = [("authorization", key.as_str())];
                let sent = tokio::time::timeout(STEP_MAX, web.post(&url, &headers, &body));
                if let Ok(answer) = sent.await {
                    answers.count(&answer);
                }
            }
        });
    }
    while clients.join_next().await.is_some() {}
    let answers = &attack.answers;
    let refused = answers.sum(|kind| kind == "429 principal_sessions");
    ensure!(refused > 0, "sessions are left: {answers}");
    Ok(attack)
}

/// Sends the heads of 4,200 requests, and never their bodies.
pub(crate) async fn turns(fleet: &Processes) -> anyhow::Result<Attack> {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {}\r\n\
         content-type: application/json\r\ncontent-length: 200\r\n\r\n{{",
        credential("mallory")
    );
    let attack = silent_connections(&data_addr(fleet), 4_200, &head);
    reach(fleet, DATA_CONNECTIONS, connections(fleet, 4_200)).await?;
    Ok(attack)
}

/// Opens 4,608 connections to the router and says nothing.
pub(crate) async fn idle_connections(fleet: &Processes) -> anyhow::Result<Attack> {
    let attack = silent_connections(&data_addr(fleet), 4_608, "");
    reach(fleet, DATA_CONNECTIONS, connections(fleet, 4_608)).await?;
    Ok(attack)
}

/// Sends two turns of 200 prompts and two of 16 at once, again and again.
pub(crate) async fn batches(fleet: &Processes) -> anyhow::Result<Attack> {
    let mut attack = Attack::default();
    for number in 0..4 {
        let (url, key) = (fleet.url(0, "/generate"), credential("mallory"));
        let answers = attack.answers.clone();
        attack.tasks.spawn(async move {
            let web = Web::default();
            let prompts: Vec<String> = (0..[200, 16][number % 2])
                .map(|prompt| format!("prompt {prompt} of batch {number}"))
                .collect();
            let body = json!({
                "text": prompts, "sampling_params": { "max_new_tokens": 50, "ignore_eos": true },
            });
            loop {
                answers.count(&web.post(&url, &[("authorization", key.as_str())], &body).await);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    // A fair agent refuses the large ones, and one without a bound takes seconds for the first.
    let answers = attack.answers.clone();
    figures::until("turns of 16 prompts are answered", || answers.sum(|kind| kind == "200") > 0)
        .await?;
    Ok(attack)
}

/// Sends the heads of 400 requests and never their bodies, from the address of the users.
pub(crate) async fn slow_bodies(fleet: &Processes) -> anyhow::Result<Attack> {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {}\r\n\
         content-type: application/json\r\ncontent-length: 200\r\n\r\n{{",
        credential("mallory")
    );
    let attack = silent_connections(&data_addr(fleet), 400, &head);
    // One client gets 88 % of the 308 that one address gets.
    reach(fleet, DATA_CONNECTIONS, 240.0).await?;
    Ok(attack)
}

/// Sends 400 requests to a route that asks for no key, with bodies that never come.
pub(crate) async fn open_routes(fleet: &Processes) -> anyhow::Result<Attack> {
    let head = "POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 200\r\n\r\n";
    // They are answered at once, so that no figure shows them: the rounds begin with them.
    Ok(silent_connections(&data_addr(fleet), 400, head))
}

/// The connections of a data port.
const DATA_CONNECTIONS: (&str, &str) = ("berth_router_connections", "port=\"data\"");

/// Returns how many of an attacker's connections a router has at once if the attack works: nine
/// tenths of those that one address may have. Some of them are just being replaced.
fn connections(fleet: &Processes, wanted: u32) -> f64 {
    // 352 connections with 1,024 descriptors, and one address gets all but an eighth.
    let most = if fleet.has_few_descriptors { 308 } else { 4_352 };
    f64::from(wanted.min(most)) * 0.9
}

/// Opens 1,100 connections to the agent's admin port and says nothing.
pub(crate) async fn idle_admin_connections(fleet: &Processes) -> anyhow::Result<Attack> {
    let attack = silent_connections(&format!("{}:31002", fleet.agent_hosts[0]), 1_100, "");
    // One address gets 48 of the 64.
    let connections = ("berth_agent_connections", "port=\"admin\"");
    figures::reach(&fleet.web, &fleet.agent_admin(0), connections, 48.0).await?;
    Ok(attack)
}

/// Opens connections and sends `text` on each. Opens a connection again when it is closed.
fn silent_connections(addr: &str, count: usize, text: &str) -> Attack {
    let mut attack = Attack::default();
    for _ in 0..count {
        let (addr, text) = (addr.to_owned(), text.to_owned());
        attack.tasks.spawn(async move {
            loop {
                let connected = tokio::time::timeout(STEP_MAX, TcpStream::connect(&addr)).await;
                if let Ok(Ok(mut stream)) = connected {
                    let _ = stream.write_all(text.as_bytes()).await;
                    let mut byte = [0];
                    let _ = stream.read(&mut byte).await;
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        });
    }
    attack
}

/// Sends eight turns with 60 MiB of padding each, and long answers.
pub(crate) async fn bodies(fleet: &Processes) -> anyhow::Result<Attack> {
    let mut attack = Attack::default();
    let padding = " ".repeat(60 << 20);
    for number in 0..8 {
        let (url, key, padding) =
            (fleet.url(0, "/generate"), credential("mallory"), padding.clone());
        let answers = attack.answers.clone();
        attack.tasks.spawn(async move {
            let web = Web::default();
            loop {
                let body = format!(
                    r#"{{{padding}"text": "body {number}", "stream": true,
                    "sampling_params": {{"max_new_tokens": 20000, "ignore_eos": true}}}}"#
                );
                let headers =
                    [("authorization", key.as_str()), ("content-type", "application/json")];
                answers.count(&web.request(Method::POST, &url, &headers, body).await);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
    }
    // A body of text alone is refused on its way, so that none shows among the router's figures.
    let answers = attack.answers.clone();
    figures::until("eight bodies are answered", || answers.sum(|_| true) >= 8).await?;
    Ok(attack)
}

/// Sends 700 streamed turns at once, again and again.
pub(crate) async fn streams(fleet: &Processes) -> anyhow::Result<Attack> {
    let mut attack = Attack::default();
    for number in 0..700 {
        let (url, key) = (fleet.url(0, "/generate"), credential("mallory"));
        let answers = attack.answers.clone();
        attack.tasks.spawn(async move {
            let web = Web::default();
            let body = json!({
                "text": format!("stream {number}"), "stream": true,
                "sampling_params": { "max_new_tokens": 400, "ignore_eos": true },
            });
            loop {
                answers.count(&web.post(&url, &[("authorization", key.as_str())], &body).await);
                // As `Retry-After` says.
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
    }
    // Of the 352 connections, the agent runs 32 turns and queues a quarter, 88.
    reach(fleet, STREAMS, 100.0).await?;
    Ok(attack)
}

/// The turns of a router that were placed and have not ended.
const STREAMS: (&str, &str) = ("berth_router_streams_in_flight", "");

/// Reads 24 long streams at 512 bytes a second.
pub(crate) async fn slow_readers(fleet: &Processes) -> anyhow::Result<Attack> {
    let mut attack = Attack::default();
    let body = json!({
        "text": "slow", "stream": true,
        "sampling_params": { "max_new_tokens": 4_000, "ignore_eos": true },
    })
    .to_string();
    let request = format!(
        "POST /generate HTTP/1.1\r\nhost: x\r\nauthorization: {}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        credential("mallory"),
        body.len()
    );
    for _ in 0..24 {
        let (addr, request) = (data_addr(fleet), request.clone());
        attack.tasks.spawn(async move {
            loop {
                if let Err(error) = read_slowly(&addr, &request).await {
                    drop(error);
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        });
    }
    // The users have up to four more.
    reach(fleet, STREAMS, 20.0).await?;
    Ok(attack)
}

async fn read_slowly(addr: &str, request: &str) -> anyhow::Result<()> {
    let socket = tokio::net::TcpSocket::new_v4()?;
    // A small window, as a client behind a slow line has.
    socket.set_recv_buffer_size(4096)?;
    let mut stream = socket.connect(addr.parse().context("an address")?).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = [0; 128];
    while stream.read(&mut bytes).await? > 0 {
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

/// Sends sixteen prompts of 1.9 MB at once, again and again.
pub(crate) async fn tokenizing(fleet: &Processes) -> anyhow::Result<Attack> {
    let mut attack = Attack::default();
    for number in 0..16 {
        let (url, key) = (fleet.url(0, "/v1/completions"), credential("mallory"));
        let answers = attack.answers.clone();
        attack.tasks.spawn(async move {
            let web = Web::default();
            for round in 0u64.. {
                let words = format!("w{number}x{round} zebra quilt {} ", round * 7);
                let prompt = words.repeat(1_900_000 / words.len());
                let body = json!({ "model": "tiny", "prompt": prompt, "max_tokens": 1 });
                answers.count(&web.post(&url, &[("authorization", key.as_str())], &body).await);
            }
        });
    }
    // A whole prompt is there. Whether it takes memory for tokenizing is the router's decision.
    let body_bytes = ("berth_router_share_largest_bytes", "pool=\"body_bytes\"");
    reach(fleet, body_bytes, 1_800_000.0).await?;
    Ok(attack)
}

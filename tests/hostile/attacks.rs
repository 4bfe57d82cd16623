//! What a hostile client does. Each attack returns once it is in force, and goes on until dropped.

use std::time::Duration;

use anyhow::Context as _;
use http::Method;
use rustix::{process::setpriority_process, thread::gettid};
use serde_json::json;
use tests::web::Web;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    runtime::Runtime,
    task::JoinSet,
};

use crate::fleet::{Fleet, credential};

/// The scheduling priority of attackers.
const LOWEST_PRIORITY: i32 = 19;

/// Tasks that hold an attack in force until they are dropped.
pub(crate) type Attack = JoinSet<()>;

/// Returns the runtime of attacks.
pub(crate) fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .on_thread_start(|| {
            // A thread may always lower its own priority.
            let _ = setpriority_process(Some(gettid()), LOWEST_PRIORITY);
        })
        .build()
}

/// The longest wait for one step of an attack. What Berth refuses or delays is no failure of the
/// attack.
const STEP_MAX: Duration = Duration::from_secs(10);

/// Returns the address of the first router's data port.
fn data_addr(fleet: &Fleet) -> String {
    format!("{}:8080", fleet.router_hosts[0])
}

/// Opens 64 pinned sessions and runs one turn of one token in each.
pub(crate) async fn rows(fleet: &Fleet) -> anyhow::Result<Attack> {
    let mut turns = JoinSet::new();
    for number in 0..64 {
        let (web, key) = (fleet.web.clone(), credential("mallory"));
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
            let _ = tokio::time::timeout(STEP_MAX, web.post(&url, &headers, &body)).await;
        });
    }
    while turns.join_next().await.is_some() {}
    Ok(Attack::new())
}

/// Opens as many sessions as the agent keeps, and more.
pub(crate) async fn sessions(fleet: &Fleet) -> anyhow::Result<Attack> {
    const CLIENTS: usize = 32;
    const SESSIONS: usize = 17_000;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (web, key) = (Web::default(), credential("mallory"));
        let url = fleet.url(0, "/v1/sessions");
        clients.spawn(async move {
            for number in 0..SESSIONS / CLIENTS {
                let body =
                    json!({ "session_id": format!("s-{client}-{number}"), "retention": "tagged" });
                let headers = [("authorization", key.as_str())];
                let _ = tokio::time::timeout(STEP_MAX, web.post(&url, &headers, &body)).await;
            }
        });
    }
    while clients.join_next().await.is_some() {}
    Ok(Attack::new())
}

/// Sends the heads of 4,200 requests, and never their bodies.
pub(crate) async fn turns(fleet: &Fleet) -> anyhow::Result<Attack> {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {}\r\n\
         content-type: application/json\r\ncontent-length: 200\r\n\r\n{{",
        credential("mallory")
    );
    silent_connections(&data_addr(fleet), 4_200, &head).await
}

/// Opens 4,608 connections to the router and says nothing.
pub(crate) async fn idle_connections(fleet: &Fleet) -> anyhow::Result<Attack> {
    silent_connections(&data_addr(fleet), 4_608, "").await
}

/// Opens 1,100 connections to the agent's admin port and says nothing.
pub(crate) async fn idle_admin_connections(fleet: &Fleet) -> anyhow::Result<Attack> {
    silent_connections(&format!("{}:31002", fleet.agent_hosts[0]), 1_100, "").await
}

/// Opens connections and sends `text` on each. Opens a connection again when it is closed.
async fn silent_connections(addr: &str, count: usize, text: &str) -> anyhow::Result<Attack> {
    let mut attack = Attack::new();
    let mut begun: Vec<tokio::sync::oneshot::Receiver<()>> = vec![];
    for _ in 0..count {
        let (addr, text) = (addr.to_owned(), text.to_owned());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        begun.push(receiver);
        attack.spawn(async move {
            let mut sender = Some(sender);
            loop {
                let connected = tokio::time::timeout(STEP_MAX, TcpStream::connect(&addr)).await;
                if let Ok(Ok(mut stream)) = connected {
                    let _ = stream.write_all(text.as_bytes()).await;
                    drop(sender.take());
                    let mut byte = [0];
                    let _ = stream.read(&mut byte).await;
                }
                drop(sender.take());
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        });
    }
    for receiver in begun {
        let _ = receiver.await;
    }
    Ok(attack)
}

/// Sends eight turns with 60 MiB of padding each, and long answers.
pub(crate) async fn bodies(fleet: &Fleet) -> anyhow::Result<Attack> {
    let mut attack = Attack::new();
    let padding = " ".repeat(60 << 20);
    for number in 0..8 {
        let (url, key, padding) =
            (fleet.url(0, "/generate"), credential("mallory"), padding.clone());
        attack.spawn(async move {
            let web = Web::default();
            loop {
                let body = format!(
                    r#"{{{padding}"text": "body {number}", "stream": true,
                    "sampling_params": {{"max_new_tokens": 20000, "ignore_eos": true}}}}"#
                );
                let headers =
                    [("authorization", key.as_str()), ("content-type", "application/json")];
                let _ = web.request(Method::POST, &url, &headers, body).await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    Ok(attack)
}

/// Reads 24 long streams at 512 bytes a second.
pub(crate) async fn slow_readers(fleet: &Fleet) -> anyhow::Result<Attack> {
    let mut attack = Attack::new();
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
        attack.spawn(async move {
            loop {
                if let Err(error) = read_slowly(&addr, &request).await {
                    drop(error);
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
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
pub(crate) async fn tokenizing(fleet: &Fleet) -> anyhow::Result<Attack> {
    let mut attack = Attack::new();
    for number in 0..16 {
        let (url, key) = (fleet.url(0, "/v1/completions"), credential("mallory"));
        attack.spawn(async move {
            let web = Web::default();
            for round in 0u64.. {
                let words = format!("w{number}x{round} zebra quilt {} ", round * 7);
                let prompt = words.repeat(1_900_000 / words.len());
                let body = json!({ "model": "tiny", "prompt": prompt, "max_tokens": 1 });
                let _ = web.post(&url, &[("authorization", key.as_str())], &body).await;
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(attack)
}

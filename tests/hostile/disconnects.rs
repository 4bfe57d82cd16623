//! Clients that go away at each step of a turn: nothing of theirs may stay behind.

use std::time::Duration;

use anyhow::ensure;
use harness::fleet::{FleetPlan, Place, Processes, credential};
use serde_json::json;
use service::clock::now;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
};

use crate::{figures::Figures, users::Users};

/// The clients of each step, half of them with a pinned session.
const CLIENTS: usize = 60;
/// The steps at which they go away.
const STEPS: usize = 14;
/// The fewest clients that must see the begin of an answer, of the 360 that wait for it. Others
/// find all rows of pinned sessions held, and are refused.
const ANSWERED_MIN: usize = 200;
/// The longest wait until nothing is left, and for one read of a client.
const PATIENCE: Duration = Duration::from_secs(30);

/// What must be zero afterwards, of the router and of the agent.
const ROUTER_FIGURES: [(&str, &str); 3] = [
    ("berth_router_streams_in_flight", ""),
    ("berth_router_share_used_turns", ""),
    ("berth_router_share_used_bytes", ""),
];
const AGENT_FIGURES: [(&str, &str); 4] = [
    ("berth_agent_turns_running", ""),
    ("berth_agent_turns_queued", ""),
    ("berth_agent_sessions_open", ""),
    ("berth_agent_rows_held", ""),
];

/// 840 clients go away, each at one of 14 steps of a streamed turn.
pub(crate) async fn disconnects(place: Place) -> anyhow::Result<String> {
    let flags = ["--max-running-requests=32", "--max-total-tokens=262144"];
    let engine_flags = flags.map(str::to_owned).into();
    let fleet =
        Processes::start(place, &FleetPlan { engine_flags, ..FleetPlan::default() }).await?;
    let addr = format!("{}:8080", fleet.router_hosts[0]);
    let (mut clients, mut answered) = (JoinSet::new(), 0);
    for number in 0..CLIENTS * STEPS {
        let (addr, request) = (addr.clone(), request(number));
        clients.spawn(async move { go_away(&addr, &request, number % STEPS).await });
        // As many at once as the engine runs turns.
        if clients.len() >= 32
            && let Some(ended) = clients.join_next().await
        {
            answered += usize::from(ended??);
        }
    }
    while let Some(ended) = clients.join_next().await {
        answered += usize::from(ended??);
    }
    ensure!(answered >= ANSWERED_MIN, "{answered} clients saw the begin of an answer");
    let began = now();
    loop {
        let left = left_behind(&fleet).await?;
        if left.is_empty() {
            break;
        }
        ensure!(began.elapsed() < PATIENCE, "left behind: {left:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let settled = began.elapsed().as_secs_f64();
    let seen = Users::new(&fleet, 4).work(Duration::from_secs(1)).await?;
    ensure!(seen.failures.is_empty(), "a turn of others failed: {}", seen.failures[0]);
    let clients = CLIENTS * STEPS;
    Ok(format!("{clients} disconnects, {answered} in answers, left nothing after {settled:.1} s"))
}

/// Returns a streamed turn of 20 tokens; every other one is the only turn of a pinned session.
fn request(number: usize) -> Vec<u8> {
    let body = json!({
        "text": format!("turn {number}"), "stream": true,
        "sampling_params": { "max_new_tokens": 20, "ignore_eos": true },
    })
    .to_string();
    let session = match number / STEPS % 2 {
        0 => String::new(),
        _ => format!(
            "x-berth-session-id: away-{number}\r\nx-berth-retention: pinned\r\n\
             x-berth-session-final: true\r\n"
        ),
    };
    let (key, length) = (credential("mallory"), body.len());
    format!(
        "POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: {key}\r\n\
         {session}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Sends as much of a request and reads as much of its answer as the step has, and goes away.
/// Returns whether the answer had begun.
async fn go_away(addr: &str, request: &[u8], step: usize) -> anyhow::Result<bool> {
    let mut stream = TcpStream::connect(addr).await?;
    let head = request.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or(0) + 4;
    let body = request.len() - head;
    let (sent, events) = match step {
        0 => (0, 0),
        1 => (head / 2, 0),
        2 => (head, 0),
        3 => (head + 1, 0),
        4 => (head + body / 2, 0),
        5 => (request.len() - 1, 0),
        6 | 7 => (request.len(), 0),
        step => (request.len(), [1, 2, 3, 5, 10, usize::MAX][step - 8]),
    };
    stream.write_all(&request[..sent]).await?;
    if step == 7 {
        stream.shutdown().await?;
    }
    let (mut answer, mut bytes) = (vec![], [0; 256]);
    while answer.windows(6).filter(|six| six == b"data: ").count() < events {
        let reading = tokio::time::timeout(PATIENCE, stream.read(&mut bytes));
        let read = reading.await??;
        answer.extend_from_slice(&bytes[..read]);
        if read == 0 {
            break;
        }
    }
    Ok(answer.starts_with(b"HTTP/1.1 200 "))
}

/// Returns the figures that aren't zero.
async fn left_behind(fleet: &Processes) -> anyhow::Result<Vec<(&'static str, f64)>> {
    let router = Figures::read(&fleet.web, &fleet.router_admin(0)).await?;
    for (name, _) in ROUTER_FIGURES {
        ensure!(router.has(name), "there is no figure {name}");
    }
    let agent = Figures::read(&fleet.web, &fleet.agent_admin(0)).await?;
    for (name, _) in AGENT_FIGURES {
        ensure!(agent.has(name), "there is no figure {name}");
    }
    let of_router = ROUTER_FIGURES.map(|(name, label)| (name, router.sum(name, label)));
    let of_agent = AGENT_FIGURES.map(|(name, label)| (name, agent.sum(name, label)));
    Ok(of_router.into_iter().chain(of_agent).filter(|(_, left)| *left != 0.0).collect())
}

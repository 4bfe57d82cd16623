//! Processes that are drained, stopped and replaced under load.

mod rolling;

use std::time::Duration;

use anyhow::{Context as _, ensure};
use axum::body::Body;
use harness::{
    case,
    cases::Case,
    fleet::{FleetPlan, Place, Processes, credential, program},
    web::Web,
};
use http::Method;
use http_body_util::BodyExt as _;
use rustix::process::Signal;
use serde_json::json;
use service::clock::now;

/// The cases, in the order in which they run.
pub(crate) const CASES: &[Case] = &[
    case!("drain: a router that leaves serves on", true, router_leaves),
    case!("drain: an agent that is drained", true, agent_drained),
    case!("drain: rolling restart", false, rolling::restart),
];

/// The longest time until all routers see that an agent drains.
const SEEN_MAX: Duration = Duration::from_millis(100);

/// After SIGTERM a router isn't ready, serves new connections and running streams, and then ends.
async fn router_leaves(place: Place) -> anyhow::Result<String> {
    let plan = FleetPlan {
        lame_duck_ms: 10_000,
        engine_flags: vec!["--decode-ms-per-step=20".to_owned()],
        ..FleetPlan::default()
    };
    let mut fleet = Processes::start(place, &plan).await?;
    let (key, url) = (credential("alice"), fleet.url(0, "/v1/completions"));
    let headers = [("authorization", key.as_str())];
    // Twelve seconds and a half.
    let long = json!({
        "model": "tiny", "prompt": "hello", "max_tokens": 625, "ignore_eos": true, "stream": true,
    });
    let stream = fleet.web.send(Method::POST, &url, &headers, long.to_string()).await?;
    let ready = fleet.url(0, "/ready");
    ensure!(fleet.web.get(&ready).await?.status == 200, "the router is not ready before");
    fleet.routers[0].signal(Signal::TERM)?;
    let left = now();
    while fleet.web.get(&ready).await?.status == 200 {
        ensure!(left.elapsed() < Duration::from_secs(8), "/ready doesn't fail");
    }
    let noticed = left.elapsed();
    ensure!(fleet.web.get(&fleet.url(0, "/live")).await?.status == 200, "/live fails");
    let admin = format!("{}/readyz", fleet.router_admin(0));
    ensure!(fleet.web.get(&admin).await?.status == 503, "/readyz doesn't fail");
    let short = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 2 });
    let other = fleet.origin.web();
    let answer = other.post(&url, &headers, &short).await?;
    ensure!(answer.status == 200, "a turn on a new connection got {}", answer.status);
    ensure!(answer.header("connection") == "close", "the connection is kept");
    let text = stream.into_body().collect().await?.to_bytes();
    let text = String::from_utf8_lossy(&text);
    ensure!(text.ends_with("data: [DONE]\n\n"), "the stream that ran was cut: {text}");
    fleet.routers[0].ended().await?;
    let ended = left.elapsed();
    ensure!(ended >= Duration::from_secs(10), "the router didn't wait for its balancers");
    Ok(format!("not ready after {:.0?}, ended after {:.1?}", noticed, ended))
}

/// What routers say of one agent's workers.
async fn state_at(web: &Web, router_url: &str, agent: &str) -> anyhow::Result<String> {
    let key = credential("ops");
    let headers = [("authorization", key.as_str())];
    let url = format!("{router_url}/v1/workers");
    let list = web.request(Method::GET, &url, &headers, Body::empty()).await?.json();
    let workers = list["workers"].as_array().context("no workers")?;
    let worker = workers.iter().find(|worker| worker["agent"] == agent);
    let state = worker.context("the agent is missing")?["state"].as_str().unwrap_or_default();
    Ok(state.to_owned())
}

/// Waits until all routers see the agent in a state.
async fn wait_state(fleet: &Processes, agent: &str, state: &str) -> anyhow::Result<Duration> {
    let began = now();
    for router in fleet.router_urls() {
        while state_at(&fleet.web, &router, agent).await? != state {
            ensure!(began.elapsed() < Duration::from_secs(10), "{agent} is never {state}");
        }
    }
    Ok(began.elapsed())
}

/// A turn of a session, with the whole history. Returns the worker that took it.
async fn turn(fleet: &Processes, router: usize, id: &str) -> anyhow::Result<String> {
    let key = credential("alice");
    let headers = [("authorization", key.as_str()), ("x-berth-session-id", id)];
    let body = json!({ "model": "tiny", "prompt": "hello, and more", "max_tokens": 2 });
    let answer = fleet.web.post(&fleet.url(router, "/v1/completions"), &headers, &body).await?;
    ensure!(answer.status == 200, "a turn of {id} got {}: {}", answer.status, answer.text());
    Ok(answer.header("x-berth-worker").to_owned())
}

/// Both routers see within 100 ms that an agent is drained; sessions move away, but for those that
/// only the agent has; and it takes new ones when the drain is undone.
async fn agent_drained(place: Place) -> anyhow::Result<String> {
    let plan = FleetPlan { engines: 2, routers: 2, ..FleetPlan::default() };
    let fleet = Processes::start(place, &plan).await?;
    let alice = credential("alice");
    let of_alice = [("authorization", alice.as_str())];
    // A session at each worker, whose turns are full histories, and a pinned one that takes deltas.
    let mut there = None;
    for number in 0..20 {
        let id = format!("moves-{number}");
        let worker = turn(&fleet, 0, &id).await?;
        there = Some((id, worker));
        if there.as_ref().is_some_and(|(_, worker)| worker.starts_with("w0")) {
            break;
        }
    }
    let (moves, worker) = there.context("no session")?;
    ensure!(worker.starts_with("w0"), "no session came to w0");
    let seen = time_to_see(&fleet).await?;
    for number in 0..10 {
        let worker = turn(&fleet, number % 2, &format!("new-{number}")).await?;
        ensure!(worker.starts_with("w1"), "a new session went to the drained {worker}");
    }
    let worker = turn(&fleet, 1, &moves).await?;
    ensure!(worker.starts_with("w1"), "the session stayed at the drained {worker}");
    undo_drain(&fleet).await?;
    // A client that sends only what is new can't go elsewhere.
    let open = json!({ "session_id": "stays", "retention": "pinned" });
    let opened = fleet.web.post(&fleet.url(0, "/v1/sessions"), &of_alice, &open).await?;
    ensure!(opened.status == 201, "the open got {}", opened.status);
    let home = turn_of_deltas(&fleet, "stays").await?;
    let number = usize::from(home.starts_with("w1"));
    drain(&fleet, number).await?;
    wait_state(&fleet, &format!("w{number}"), "draining").await?;
    let stayed = turn_of_deltas(&fleet, "stays").await?;
    ensure!(stayed == home, "a session of deltas went from {home} to {stayed}");
    ensure!(seen < SEEN_MAX, "the routers saw the drain after {seen:.0?}");
    Ok(format!("both routers saw it after {seen:.0?}"))
}

/// Drains the first agent. Returns the time until all routers see it: the least of some tries, of
/// which a machine that stops for a moment disturbs a few.
async fn time_to_see(fleet: &Processes) -> anyhow::Result<Duration> {
    let mut least = Duration::MAX;
    for tries_left in (0..8).rev() {
        let drained = now();
        drain(fleet, 0).await?;
        wait_state(fleet, "w0", "draining").await?;
        least = least.min(drained.elapsed());
        if least < SEEN_MAX || tries_left == 0 {
            break;
        }
        undo_drain(fleet).await?;
    }
    Ok(least)
}

/// Undoes the first agent's drain, by the command.
async fn undo_drain(fleet: &Processes) -> anyhow::Result<()> {
    let agent = format!("http://{}:31001", fleet.agent_hosts[0]);
    let undone = tokio::process::Command::new(program("berth"))
        .args(["drain", "--undo", "--agent", &agent])
        .output()
        .await?;
    let said = String::from_utf8_lossy(&undone.stdout).into_owned();
    ensure!(undone.status.success(), "drain --undo failed: {said}");
    ensure!(said.contains("takes new sessions"), "drain --undo said {said}");
    wait_state(fleet, "w0", "fresh").await?;
    Ok(())
}

/// Drains an agent by its admin port.
async fn drain(fleet: &Processes, agent: usize) -> anyhow::Result<()> {
    let (key, url) = (credential("ops"), format!("{}/drain", fleet.agent_admin(agent)));
    let headers = [("authorization", key.as_str())];
    let answer = fleet.web.post(&url, &headers, &json!({})).await?;
    ensure!(answer.status == 200, "POST /drain got {}", answer.status);
    Ok(())
}

async fn turn_of_deltas(fleet: &Processes, id: &str) -> anyhow::Result<String> {
    let key = credential("alice");
    let headers = [("authorization", key.as_str())];
    let body = json!({
        "text": " more", "session_params": { "id": id }, "sampling_params": { "max_new_tokens": 2 },
    });
    let answer = fleet.web.post(&fleet.url(0, "/generate"), &headers, &body).await?;
    ensure!(answer.status == 200, "a delta of {id} got {}", answer.status);
    Ok(answer.header("x-berth-worker").to_owned())
}

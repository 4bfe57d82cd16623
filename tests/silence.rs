//! Tests of an engine that hangs: its process runs, but its scheduler or all of it does nothing.
//!
//! Turns that were not sent get an answer that their clients can act on, running turns go on, and
//! everything is as before once the engine speaks again.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use harness::{
    cluster::{Agent, Cluster, agent_config, eventually, ids_turn, ready, text_turn},
    envelope::{ENVELOPE, envelope_of},
    web::{Answer, Web},
};
use http::StatusCode;
use http_body_util::BodyExt as _;
use serde_json::json;
use service::clock::now;
use worker_agent::config::Config;

/// More than the agent's other limits, so that a machine that stops for a moment is no silence.
const SILENT_MS_MAX: u64 = 5_000;

async fn start() -> Cluster {
    let started = Cluster::start_worker(|settings| {
        settings.agent.engine.silent_ms_max = SILENT_MS_MAX;
        settings.engine.core.decode_ms_per_step = 20.0;
    });
    started.await.unwrap()
}

async fn post(cluster: &Cluster, path: &str, body: &serde_json::Value) {
    let url = format!("{}{path}", cluster.engine().url());
    let answer = cluster.web.post(&url, &[], body).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
}

/// Waits until the agent is not ready, and returns the reason that it gives.
async fn unready(web: &Web, agent: &Agent) -> String {
    let url = agent.admin_url("/readyz");
    eventually("the silence", || async {
        let answer = web.get(&url).await.ok()?;
        (answer.status != StatusCode::OK).then(|| answer.text())
    })
    .await
}

fn assert_refused_for_now(answer: &Answer, code: &str) {
    assert_eq!(answer.refusal(), (503, code.to_owned()));
    assert!(!answer.header("retry-after").is_empty(), "the client may try again");
}

#[tokio::test]
async fn a_hung_scheduler_refuses_what_was_not_sent_and_running_turns_go_on() {
    let cluster = start().await;
    let opens = json!({"principal": "p", "id": "s", "retention": "pinned", "open": true});
    let opens = [(ENVELOPE, &*envelope_of(&opens))];
    cluster.turn("/generate", &opens, &text_turn("a", 1)).await;
    let mut running = cluster.stream("/generate", &[], text_turn("hello there", 60)).await;
    post(&cluster, "/hang", &json!({"hung": true})).await;
    let reason = unready(&cluster.web, cluster.agent()).await;
    assert!(reason.contains("scheduler of rank 0"), "{reason}");
    assert_refused_for_now(
        &cluster.post("/generate", &[], &ids_turn(&[1, 2], 1)).await,
        "engine_silent",
    );
    post(&cluster, "/hang", &json!({"hung": false})).await;
    let rest = running.body_mut().collect().await.unwrap().to_bytes();
    assert!(rest.ends_with(b"data: [DONE]\n\n"), "the turn that ran before");
    ready(&cluster.web, cluster.agent().admin).await;
    cluster.turn("/generate", &[], &ids_turn(&[1, 2], 1)).await;
    let delta = json!({"principal": "p", "id": "s", "delta": true});
    let turn = [(ENVELOPE, &*envelope_of(&delta))];
    let kept = cluster.turn("/generate", &turn, &text_turn("b", 1)).await;
    assert_ne!(kept.meta("cached_tokens"), Some(0), "the pinned session is still there");
}

#[tokio::test]
async fn an_engine_that_goes_on_with_an_answer_is_not_silent() {
    let started = Cluster::start_worker(|settings| {
        settings.agent.engine.silent_ms_max = SILENT_MS_MAX;
        settings.engine.core.decode_ms_per_step = 20.0;
        settings.engine.snapshots_stand_still = true;
    });
    let cluster = started.await.unwrap();
    let began_at = now();
    let steps = u32::try_from(SILENT_MS_MAX / 20 + 150).unwrap();
    let mut answer = cluster.stream("/generate", &[], text_turn("hello there", steps)).await;
    let url = cluster.agent().admin_url("/readyz");
    while answer.body_mut().frame().await.is_some() {
        let ready = cluster.web.get(&url).await.unwrap();
        assert_eq!(ready.status, StatusCode::OK, "{}", ready.text());
    }
    assert!(began_at.elapsed() > Duration::from_millis(SILENT_MS_MAX), "it was long enough");
    let reason = unready(&cluster.web, cluster.agent()).await;
    assert!(reason.contains("scheduler of rank 0"), "{reason}");
    let waiting = cluster.post("/generate", &[], &ids_turn(&[1, 2], 1)).await;
    assert_refused_for_now(&waiting, "engine_silent");
}

#[tokio::test]
async fn a_paused_engine_is_not_silent() {
    let cluster = start().await;
    let mut client = cluster.agent().control_client().await.unwrap();
    let watch = contract::v1::WatchLoadRequest {};
    let mut reports = client.watch_load(watch).await.unwrap().into_inner();
    post(&cluster, "/pause_generation", &json!({"mode": "in_place"})).await;
    let paused_at = now();
    while paused_at.elapsed() < Duration::from_millis(SILENT_MS_MAX + 2_000) {
        reports.message().await.unwrap().expect("reports go on");
        let answer = cluster.web.get(&cluster.agent().admin_url("/readyz")).await.unwrap();
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }
    let body = ids_turn(&[1, 2], 1);
    let turn = cluster.turn("/generate", &[], &body);
    let nothing = json!({});
    let go_on = post(&cluster, "/continue_generation", &nothing);
    tokio::join!(turn, go_on);
}

/// An engine simulator in a process of its own, which is killed when the value is dropped.
struct EngineProcess {
    child: Child,
    url: String,
}

impl EngineProcess {
    fn start() -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_engine-process"));
        let mut child = command
            .args(["--port", "0"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().rsplit(' ').next().unwrap().to_owned();
        Self { child, url }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([name, &pid]).status().unwrap();
        assert!(status.success(), "kill {name} {pid}");
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_stopped_engine_process_is_noticed_and_goes_on_where_it_stopped() {
    let (engine, web) = (EngineProcess::start(), Web::default());
    let mut config: Config = agent_config(&engine.url, "w0");
    config.engine.silent_ms_max = SILENT_MS_MAX;
    let agent = Agent::start(config).unwrap();
    ready(&web, agent.admin).await;
    engine.signal("-STOP");
    let reason = unready(&web, &agent).await;
    assert!(reason.contains("answered nothing"), "{reason}");
    let url = agent.url("/generate");
    assert_refused_for_now(
        &web.post(&url, &[], &ids_turn(&[1, 2], 1)).await.unwrap(),
        "engine_silent",
    );
    engine.signal("-CONT");
    ready(&web, agent.admin).await;
    let answer = web.post(&url, &[], &ids_turn(&[1, 2], 1)).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
}

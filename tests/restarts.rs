//! Tests of what survives the agent's process: restarts, kills, and a disk that is full.
//!
//! The agent is a process of its own, beside an engine simulator in this process.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{net::SocketAddr, sync::Arc};

use engine_sim::{Config, EngineSim, loopback::own_addr, shim::SimShim};
use harness::{
    cluster::{Cluster, Router, eventually, ready, router_config, text_turn as turn},
    envelope::{ENVELOPE, envelope_of},
    process::{AgentPlace, SpawnedAgent},
    web::{Answer, Web},
};
use http::StatusCode;
use serde_json::{Value, json};

const AGENT: &str = env!("CARGO_BIN_EXE_agent-process");

async fn start_engine(addr: SocketAddr) -> EngineSim {
    let mut config = Config::default();
    config.core.session_radix_cache = true;
    start_engine_with(config, addr).await
}

async fn start_engine_with(config: Config, addr: SocketAddr) -> EngineSim {
    let listener =
        eventually("the port", || async { tokio::net::TcpListener::bind(addr).await.ok() }).await;
    EngineSim::start(config, listener).unwrap()
}

fn pinned(id: &str) -> Value {
    json!({"principal": "p", "id": id, "retention": "pinned", "open": true})
}

/// Sends a turn with the claim that a router would send.
async fn generate(web: &Web, place: &AgentPlace, claim: Option<&Value>, body: &Value) -> Answer {
    let envelope = claim.map(envelope_of);
    let headers: Vec<(&str, &str)> =
        envelope.iter().map(|envelope| (ENVELOPE, envelope.as_str())).collect();
    web.post(&place.url("/generate"), &headers, body).await.unwrap()
}

async fn metric(web: &Web, place: &AgentPlace, name: &str) -> Option<f64> {
    let text = web.get(&format!("http://{}/metrics", place.admin)).await.ok()?.text();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.parse().ok()
}

async fn nothing_held(engine: &EngineSim) {
    eventually("an empty engine", || async {
        let facts = engine.pool(0).await?;
        (facts.sessions.is_empty() && facts.held_rows == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_full_disk_leaks_nothing_and_pins_nothing_and_says_why() {
    let (web, engine) = (Web::default(), start_engine(own_addr()).await);
    let addr = engine.addr();
    let place = AgentPlace::new(AGENT, &engine.url()).unwrap();
    let agent = place.start("", &[]).unwrap();
    ready(&web, place.admin).await;
    let opened = generate(&web, &place, Some(&pinned("before")), &turn("hello", 1)).await;
    assert_eq!(opened.status, StatusCode::OK, "{}", opened.text());

    // The disk is full when the engine's next process comes.
    agent.fill_disk(true).unwrap();
    engine.kill();
    engine.gone().await;
    let engine = start_engine(addr).await;
    eventually("the failure to write of it", || async {
        (metric(&web, &place, "berth_agent_journal_behind").await? == 1.0).then_some(())
    })
    .await;
    ready(&web, place.admin).await;
    let refused = generate(&web, &place, Some(&pinned("during")), &turn("hello", 1)).await;
    assert_eq!(refused.refusal(), (503, "journal_failed".to_owned()), "{}", refused.text());
    assert!(refused.text().contains("File too large"), "the reason: {}", refused.text());
    let plain = generate(&web, &place, None, &turn("hello", 1)).await;
    assert_eq!(plain.status, StatusCode::OK, "only pins need the journal: {}", plain.text());
    assert!(metric(&web, &place, "berth_agent_journal_failures_total").await.unwrap() >= 2.0);
    assert_eq!(engine.pool(0).await.unwrap().sessions.len(), 0, "nothing that no file names");

    agent.fill_disk(false).unwrap();
    eventually("the journal's recovery without a request", || async {
        (metric(&web, &place, "berth_agent_journal_behind").await? == 0.0).then_some(())
    })
    .await;
    let after = generate(&web, &place, Some(&pinned("after")), &turn("hello", 1)).await;
    assert_eq!(after.status, StatusCode::OK, "{}", after.text());
    assert_eq!(engine.pool(0).await.unwrap().held_rows, 1);
    agent.kill().unwrap();
    let _next = place.start("", &[]).unwrap();
    nothing_held(&engine).await;
}

/// Runs a turn of each of the tagged sessions "0", "1" and so on. Each leaves whole pages of KV.
async fn tag(web: &Web, place: &AgentPlace, count: usize) {
    for id in 0..count {
        let claim = json!({"principal": "p", "id": id.to_string(), "retention": "tagged"});
        let answer = generate(
            web,
            place,
            Some(&claim),
            &turn(&format!("{id:02} of them, with pages of KV"), 4),
        )
        .await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }
}

/// Waits until the engine has KV under so many tags.
async fn tagged(engine: &EngineSim, count: usize) {
    eventually("the number of tags in the engine", || async {
        (engine.pool(0).await?.tagged_tokens.len() == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn after_a_kill_the_next_agent_closes_every_tag() {
    let (web, engine) = (Web::default(), start_engine(own_addr()).await);
    let place = AgentPlace::new(AGENT, &engine.url()).unwrap();
    let agent = place.start("", &[]).unwrap();
    ready(&web, place.admin).await;
    tag(&web, &place, 20).await;
    tagged(&engine, 20).await;
    agent.kill().unwrap();
    engine.set_fails_closes(true);
    let agent = place.start("", &[]).unwrap();
    ready(&web, place.admin).await;
    eventually("closes that fail", || async {
        (engine.bodies_seen("/close_session").len() > 20).then_some(())
    })
    .await;
    tagged(&engine, 20).await;
    // The process after that one knows of them too.
    agent.kill().unwrap();
    engine.set_fails_closes(false);
    let _agent = place.start("", &[]).unwrap();
    tagged(&engine, 0).await;
}

#[tokio::test]
async fn a_tag_s_close_that_fails_is_repeated_and_an_agent_that_stops_waits_for_it() {
    let (web, engine) = (Web::default(), start_engine(own_addr()).await);
    let place = AgentPlace::new(AGENT, &engine.url()).unwrap();
    let agent = place.start("", &[]).unwrap();
    ready(&web, place.admin).await;
    tag(&web, &place, 3).await;
    engine.set_fails_closes(true);
    let last = json!({"principal": "p", "id": "0", "close": true});
    let answer = generate(&web, &place, Some(&last), &turn("00 of them", 1)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    eventually("a close that fails", || async {
        (!engine.bodies_seen("/close_session").is_empty()).then_some(())
    })
    .await;
    engine.set_fails_closes(false);
    tagged(&engine, 2).await;
    let ended = tokio::task::spawn_blocking(move || agent.terminate().unwrap());
    assert!(ended.await.unwrap().success());
    assert!(engine.pool(0).await.unwrap().tagged_tokens.is_empty(), "none is left");
}

#[tokio::test]
async fn while_the_journal_can_t_be_written_no_tag_begins() {
    let (web, engine) = (Web::default(), start_engine(own_addr()).await);
    let place = AgentPlace::new(AGENT, &engine.url()).unwrap();
    let agent = place.start("", &[]).unwrap();
    ready(&web, place.admin).await;
    agent.fill_disk(true).unwrap();
    tag(&web, &place, 1).await;
    tagged(&engine, 0).await;
    let tags = engine.bodies_seen("/generate");
    assert!(tags.iter().all(|body| !String::from_utf8_lossy(body).contains("session_id")));
    agent.fill_disk(false).unwrap();
    eventually("the journal's recovery", || async {
        (metric(&web, &place, "berth_agent_journal_behind").await? == 0.0).then_some(())
    })
    .await;
    tag(&web, &place, 1).await;
    tagged(&engine, 1).await;
    agent.kill().unwrap();
    let _agent = place.start("", &[]).unwrap();
    tagged(&engine, 0).await;
}

#[tokio::test]
async fn a_folder_that_others_may_write_to_is_refused_and_its_files_stay_whole() {
    use std::os::unix::fs::PermissionsExt;
    let engine = start_engine(own_addr()).await;
    let place = AgentPlace::new(AGENT, &engine.url()).unwrap();
    std::fs::create_dir(&place.state).unwrap();
    let victim = place.folder().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, place.journal().with_extension("lock")).unwrap();
    std::fs::set_permissions(&place.state, PermissionsExt::from_mode(0o777)).unwrap();
    let said = place.start_in_vain().unwrap();
    assert!(said.contains("chmod go-w"), "{said}");
    std::fs::set_permissions(&place.state, PermissionsExt::from_mode(0o700)).unwrap();
    let said = place.start_in_vain().unwrap();
    assert!(said.contains("not a plain file of this user"), "{said}");
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

/// An engine with its shim, and the place of its agents.
struct Upgrade {
    web: Web,
    engine: Arc<EngineSim>,
    place: AgentPlace,
    _shim: SimShim,
}

impl Upgrade {
    async fn new() -> Self {
        Self::with(start_engine(own_addr()).await)
    }

    fn with(engine: EngineSim) -> Self {
        let (web, engine) = (Web::default(), Arc::new(engine));
        let place = AgentPlace::new(AGENT, &engine.url()).unwrap();
        let shim = SimShim::start(Arc::clone(&engine), place.shim_socket());
        Self { web, engine, place, _shim: shim }
    }

    async fn start(&self) -> SpawnedAgent {
        self.start_with("").await
    }

    async fn start_with(&self, settings: &str) -> SpawnedAgent {
        let agent = self.place.start(settings, &["--handover"]).unwrap();
        ready(&self.web, self.place.admin).await;
        agent
    }

    async fn turn(&self, claim: &Value, text: &str) -> Answer {
        generate(&self.web, &self.place, Some(claim), &turn(text, 6)).await
    }
}

fn delta(id: &str) -> Value {
    json!({"principal": "p", "id": id, "delta": true})
}

#[tokio::test]
async fn a_planned_restart_keeps_pinned_sessions_and_their_kv() {
    let upgrade = Upgrade::new().await;
    let agent = upgrade.start().await;
    let first = upgrade.turn(&pinned("s"), "The quick brown fox jumps").await;
    assert_eq!(first.meta("prompt_tokens"), Some(25), "{}", first.text());
    let held = upgrade.engine.pool(0).await.unwrap();
    assert!(agent.terminate().unwrap().success());
    let left = upgrade.engine.pool(0).await.unwrap();
    assert_eq!(left.sessions, held.sessions, "the engine keeps the session");

    let agent = upgrade.start().await;
    let second = upgrade.turn(&delta("s"), " over the").await;
    assert_eq!(
        (second.meta("prompt_tokens"), second.meta("cached_tokens")),
        (Some(40), Some(30)),
        "{}",
        second.text()
    );
    assert!(agent.terminate().unwrap().success());
    let agent = upgrade.start().await;
    let third = upgrade.turn(&delta("s"), " lazy").await;
    assert_eq!(third.meta("cached_tokens"), Some(45), "a second restart: {}", third.text());
    let taken_up = r#"berth_agent_session_events_total{event="taken_over"}"#;
    assert_eq!(metric(&upgrade.web, &upgrade.place, taken_up).await, Some(1.0));
    let closing = json!({"principal": "p", "id": "s", "delta": true, "close": true});
    assert_eq!(upgrade.turn(&closing, " dog").await.status, StatusCode::OK);
    nothing_held(&upgrade.engine).await;
    drop(agent);
}

#[tokio::test]
async fn a_planned_restart_keeps_more_sessions_than_one_frame_of_the_shim_has() {
    // A frame of the shim has at most 512 sessions.
    const SESSIONS: usize = 520;
    // Sessions may pin half of the rows. Not many more, nor a large pool: the simulator checks its
    // invariants over all of them, which is slow on a busy machine.
    let mut config = Config::default();
    config.core.max_running_requests = 1100;
    config.core.max_total_tokens = 16 * 1024;
    let upgrade = Upgrade::with(start_engine_with(config, own_addr()).await);
    let agent = upgrade.start_with("silent_ms_max = 60000\n").await;
    for number in 0..SESSIONS {
        let first = upgrade.turn(&pinned(&format!("s{number}")), "abc").await;
        assert_eq!(first.status, StatusCode::OK, "{number}: {}", first.text());
    }
    assert!(agent.terminate().unwrap().success());
    let _agent = upgrade.start_with("silent_ms_max = 60000\n").await;
    for number in 0..SESSIONS {
        let second = upgrade.turn(&delta(&format!("s{number}")), "de").await;
        assert_eq!(second.status, StatusCode::OK, "{number}: {}", second.text());
    }
    let taken_up = r#"berth_agent_session_events_total{event="taken_over"}"#;
    assert_eq!(metric(&upgrade.web, &upgrade.place, taken_up).await, Some(SESSIONS as f64));
}

#[tokio::test]
async fn a_session_that_the_shim_contradicts_is_closed_and_its_client_told() {
    let upgrade = Upgrade::new().await;
    let agent = upgrade.start().await;
    for id in ["changed", "same"] {
        assert_eq!(upgrade.turn(&pinned(id), "The quick brown fox").await.status, StatusCode::OK);
    }
    assert!(agent.terminate().unwrap().success());
    // Somebody else runs a turn in the session while no agent is there.
    let sessions = upgrade.engine.pool(0).await.unwrap().sessions;
    let mut body = turn("!", 1);
    body["session_params"] = json!({"id": sessions[0].id});
    let url = format!("{}/generate", upgrade.engine.url());
    assert_eq!(upgrade.web.post(&url, &[], &body).await.unwrap().status, StatusCode::OK);

    let _agent = upgrade.start().await;
    let lost = upgrade.turn(&delta("changed"), " jumps").await;
    assert_eq!(lost.refusal(), (409, "session_lost".to_owned()), "{}", lost.text());
    let kept = upgrade.turn(&delta("same"), " jumps").await;
    assert_eq!(kept.status, StatusCode::OK, "{}", kept.text());
    eventually("the close", || async {
        (upgrade.engine.pool(0).await?.sessions.len() == 1).then_some(())
    })
    .await;
    let again = upgrade.turn(&pinned("changed"), "From the start").await;
    assert_eq!(again.status, StatusCode::OK, "{}", again.text());
}

#[tokio::test]
async fn after_a_kill_nothing_is_taken_up() {
    let upgrade = Upgrade::new().await;
    let agent = upgrade.start().await;
    assert_eq!(upgrade.turn(&pinned("s"), "The quick brown fox").await.status, StatusCode::OK);
    assert!(agent.terminate().unwrap().success());
    let agent = upgrade.start().await;
    assert_eq!(upgrade.turn(&delta("s"), " jumps").await.status, StatusCode::OK);
    agent.kill().unwrap();
    let _agent = upgrade.start().await;
    let unknown = upgrade.turn(&delta("s"), " over").await;
    assert_eq!(unknown.refusal(), (404, "session_unknown".to_owned()), "not from the old state");
    nothing_held(&upgrade.engine).await;
}

#[tokio::test]
async fn through_a_router_a_restart_costs_only_answers_to_try_again() {
    let upgrade = Upgrade::new().await;
    let agent = upgrade.start().await;
    let mut config = router_config(&[]);
    config.workers = vec![format!("http://{}", upgrade.place.control)];
    // Shorter than the restart, so that turns meet the missing agent.
    config.timeouts.connect_ms_max = 50;
    let routers = vec![Router::start(config).await.unwrap()];
    let web = upgrade.web.clone();
    let cluster = Cluster { engines: vec![], agents: vec![], routers, web };
    cluster.wait_for_worker(0, "the worker", |shown| shown["state"] == "fresh").await;
    cluster.open_pinned("s").await;
    let headers = [("x-berth-session-id", "s"), ("x-berth-delta", "1")];
    let first = cluster.turn("/generate", &headers, &turn("The quick brown fox jumps", 6)).await;
    assert_eq!(first.meta("prompt_tokens"), Some(25), "{}", first.text());

    let began = service::clock::now();
    let next = async {
        eventually("the session's next turn", || async {
            let answer = cluster.post("/generate", &headers, &turn(" over the", 6)).await;
            if answer.status == StatusCode::OK {
                return Some(answer);
            }
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{}", answer.text());
            let retry_s: u64 = answer.header("retry-after").parse().unwrap();
            // As long as the outage lasts, which is longer on a busy machine.
            let longest = began.elapsed().as_secs().max(2) + 1;
            assert!(retry_s <= longest, "{retry_s} s of {longest}");
            None
        })
        .await
    };
    let restart = async {
        let ended = tokio::task::spawn_blocking(move || agent.terminate().unwrap());
        assert!(ended.await.unwrap().success());
        let refused = cluster.post("/generate", &headers, &turn("x", 1)).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{}", refused.text());
        upgrade.start().await
    };
    let agent = restart.await;
    let next = next.await;
    assert_eq!((next.meta("prompt_tokens"), next.meta("cached_tokens")), (Some(40), Some(30)));
    drop(agent);
}

//! Tests of what survives the agent's process: restarts, kills, and a disk that is full.
//!
//! The agent is a process of its own, beside an engine simulator in this process.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::net::SocketAddr;

use http::StatusCode;
use serde_json::{Value, json};
use tests::{
    cluster::{eventually, own_addr, ready, text_turn as turn},
    engine_sim::{Config, EngineSim},
    process::AgentPlace,
    web::{Answer, Web},
};

const AGENT: &str = env!("CARGO_BIN_EXE_agent-process");

async fn start_engine(addr: SocketAddr) -> EngineSim {
    let listener =
        eventually("the port", || async { tokio::net::TcpListener::bind(addr).await.ok() }).await;
    let mut config = Config::default();
    config.core.session_radix_cache = true;
    EngineSim::start(config, listener).unwrap()
}

fn pinned(id: &str) -> Value {
    json!({"principal": "p", "id": id, "retention": "pinned", "open": true})
}

/// Sends a turn with the claim that a router would send.
async fn generate(web: &Web, place: &AgentPlace, claim: Option<&Value>, body: &Value) -> Answer {
    let claim = claim.map(Value::to_string);
    let headers: Vec<(&str, &str)> =
        claim.iter().map(|claim| ("x-berth-session", claim.as_str())).collect();
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

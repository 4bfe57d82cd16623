//! End-to-end tests of demotions on request: a pinned session gives its KV up and goes on.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::sync::Arc;

use axum::body::Body;
use engine_sim::{Config, EngineSim, shim::SimShim};
use harness::{
    cluster::{Agent, Cluster, agent_config, eventually, ready, router_config, text_turn},
    web::{Answer, Web},
};
use http::{Method, StatusCode};
use serde_json::{Value, json};

const DELTA: [(&str, &str); 2] = [("x-berth-session-id", "s"), ("x-berth-delta", "1")];

/// A router, an agent and an engine whose shim demotes sessions.
struct Fleet {
    cluster: Cluster,
    engine: Arc<EngineSim>,
    _shim: SimShim,
}

impl Fleet {
    async fn start() -> Self {
        let (web, mut config) = (Web::default(), Config::default());
        config.core.session_radix_cache = true;
        let engine = Arc::new(EngineSim::start_local(config).await.unwrap());
        let agent = Agent::start(agent_config(&engine.url(), "w0")).unwrap();
        ready(&web, agent.admin).await;
        let shim = SimShim::start_demoting(Arc::clone(&engine), agent.shim_socket.clone());
        let mut cluster = Cluster { engines: vec![], agents: vec![agent], routers: vec![], web };
        cluster.start_router(router_config(&[])).await.unwrap();
        cluster
            .wait_for_worker(0, "the shim's figures", |worker| {
                worker["load"]["pool_used_tokens"]["source"] == "shim"
            })
            .await;
        Self { cluster, engine, _shim: shim }
    }

    /// Opens the session "s" as a pinned one and runs a turn in it.
    async fn pin(&self) {
        self.cluster.open_pinned("s").await;
        let first = "a prompt of some pages ".repeat(20);
        self.cluster.turn("/generate", &DELTA, &text_turn(&first, 8)).await;
        self.wait_for_load("a row", |load| load["rows_held"]["value"] == 1).await;
    }

    async fn wait_for_load(&self, what: &str, fits: impl Fn(&Value) -> bool) {
        self.cluster.wait_for_worker(0, what, |worker| fits(&worker["load"])).await;
    }

    async fn session(&self) -> Value {
        self.cluster.get("/v1/sessions/s").await.json()
    }
}

async fn demote(cluster: &Cluster, path: &str) -> Answer {
    cluster.request(Method::POST, path, &[], Body::empty()).await
}

#[tokio::test]
async fn a_demoted_session_frees_its_row_and_goes_on_with_its_history() {
    let fleet = Fleet::start().await;
    fleet.pin().await;
    let held = fleet.engine.pool(0).await.unwrap();
    let history = held.sessions[0].history_tokens as u64;
    let demoted = demote(&fleet.cluster, "/v1/sessions/s/demote").await;
    assert_eq!(demoted.status, StatusCode::NO_CONTENT, "{}", demoted.text());
    let pool = fleet.engine.pool(0).await.unwrap();
    assert_eq!((pool.held_rows, pool.session_held), (0, 0), "when the answer comes, it is done");
    fleet
        .wait_for_load("nothing pinned", |load| {
            load["rows_held"]["value"] == 0 && load["pinned_tokens"]["value"] == 0
        })
        .await;
    eventually("the session's report", || async {
        let session = fleet.session().await;
        let is_pinned = session["retention"] == "pinned" && session["resident_tokens"] == 0;
        (session["state"] == "demoted" && is_pinned).then_some(())
    })
    .await;
    let again = demote(&fleet.cluster, "/v1/sessions/s/demote").await;
    assert_eq!(again.status, StatusCode::NO_CONTENT, "{}", again.text());

    let text = " and a second turn";
    let next = fleet.cluster.turn("/generate", &DELTA, &text_turn(text, 8)).await;
    let expected = history + text.len() as u64;
    assert_eq!(next.meta("prompt_tokens"), Some(expected), "the full history: {}", next.text());
    assert!(next.meta("cached_tokens").unwrap() >= 400, "from the tree: {}", next.text());
    fleet.wait_for_load("its row again", |load| load["rows_held"]["value"] == 1).await;
    let metrics = fleet.cluster.agent_metrics().await;
    let counted = "berth_agent_session_events_total{event=\"demoted\"} 1\n";
    assert!(metrics.contains(counted), "the second call demoted nothing: {metrics}");
}

#[tokio::test]
async fn an_operator_demotes_a_session_by_its_digest() {
    let fleet = Fleet::start().await;
    fleet.pin().await;
    let digest = eventually("the session in the list", || async {
        let listed = fleet.cluster.get("/v1/fleet/sessions").await.json();
        Some(listed["sessions"][0]["digest"].as_str()?.to_owned())
    })
    .await;
    let path = format!("/v1/fleet/sessions/{digest}/demote");
    let demoted = demote(&fleet.cluster, &path).await;
    assert_eq!(demoted.status, StatusCode::NO_CONTENT, "{}", demoted.text());
    assert_eq!(fleet.engine.pool(0).await.unwrap().held_rows, 0);
    fleet.cluster.turn("/generate", &DELTA, &text_turn(" more", 8)).await;
    assert_eq!(fleet.engine.pool(0).await.unwrap().held_rows, 1);
    // As the dashboard does.
    let admin = &fleet.cluster.routers[0];
    let url = admin.admin_url(&format!("/dashboard/api/sessions/{digest}/demote"));
    let demoted = fleet.cluster.web.request(Method::POST, &url, &[], Body::empty()).await.unwrap();
    assert_eq!(demoted.status, StatusCode::NO_CONTENT, "{}", demoted.text());
    assert_eq!(fleet.engine.pool(0).await.unwrap().held_rows, 0);
    let unknown = demote(&fleet.cluster, "/v1/fleet/sessions/0123456789abcdef/demote").await;
    assert_eq!(unknown.refusal(), (404, "session_unknown".to_owned()));
}

#[tokio::test]
async fn no_other_session_is_demoted() {
    let fleet = Fleet::start().await;
    let cluster = &fleet.cluster;
    let refusal = async |cluster: &Cluster, id: &str| {
        demote(cluster, &format!("/v1/sessions/{id}/demote")).await.refusal()
    };
    assert_eq!(refusal(cluster, "unknown").await, (404, "session_unknown".to_owned()));
    let tagged = [("x-berth-session-id", "tagged")];
    cluster.turn("/generate", &tagged, &text_turn("hi", 4)).await;
    assert_eq!(refusal(cluster, "tagged").await, (409, "session_not_pinned".to_owned()));

    fleet.pin().await;
    let url = format!("{}/slow_down", fleet.engine.url());
    let slow = async |seconds: f64| {
        let body = json!({ "forward_sleep_time": seconds });
        assert_eq!(cluster.web.post(&url, &[], &body).await.unwrap().status, StatusCode::OK);
    };
    slow(0.05).await;
    let running = cluster.stream("/generate", &DELTA, text_turn(" more", 64)).await;
    assert_eq!(refusal(cluster, "s").await, (409, "session_busy".to_owned()));
    slow(0.0).await;
    let ended = http_body_util::BodyExt::collect(running.into_body()).await.unwrap().to_bytes();
    assert!(ended.ends_with(b"data: [DONE]\n\n"), "the turn went on");

    let shimless = Cluster::start(1, |_| {}).await.unwrap();
    shimless.open_pinned("s").await;
    let refused = demote(&shimless, "/v1/sessions/s/demote").await;
    assert_eq!(refused.refusal(), (409, "demotion_unavailable".to_owned()), "{}", refused.text());
    assert!(refused.text().contains("shim"), "{}", refused.text());
    shimless.turn("/generate", &DELTA, &text_turn("hello", 4)).await;
}

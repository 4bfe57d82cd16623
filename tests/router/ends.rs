//! Tests that each way out of a turn gives back all that the turn held.

use std::sync::atomic::Ordering;

use harness::web::Headers;
use http::Method;
use http_body_util::BodyExt as _;

use crate::{
    agent::Agent,
    harness::{Router, config, wait_until},
};

const BODY: &str = "{\"a\":1}";
const SESSION: (&str, &str) = ("x-berth-session-id", "s");

/// Waits until the router holds nothing, and checks that the session's next turn runs: the router
/// has one place for turns, and the session takes one turn at a time.
async fn expect_nothing_held(router: &Router, agent: &Agent, outcome: &str, turns: u32) {
    let ended = format!("berth_router_turns_total{{outcome=\"{outcome}\"}} {turns}\n");
    wait_until(&format!("nothing is held: {outcome}"), async || {
        let text = router.metrics().await;
        let workers = router.call(Method::GET, "/v1/workers", &[], "").await.json();
        let worker = &workers["workers"][0];
        text.contains(&ended)
            && text.contains("berth_router_streams_in_flight 0\n")
            && text.contains("berth_router_share_used_turns{pool=\"turns\"} 0\n")
            && text.contains("berth_router_share_used_bytes{pool=\"body_bytes\"} 0\n")
            && worker["turns_in_flight_here"] == 0
    })
    .await;
    agent.inner.full.store(false, Ordering::Relaxed);
    // The agent may learn a moment later than the router that a turn has ended, and would refuse
    // another one of the session until then.
    wait_until(&format!("the agent runs no turn: {outcome}"), async || {
        agent.inner.turns_running() == 0
    })
    .await;
    let next = router.chat(&[SESSION], BODY).await;
    assert_eq!(next.status, 200, "the session's next turn after {outcome}: {next:?}");
}

#[tokio::test]
async fn an_abort_tells_agents_which_turns_may_still_be_on_their_way() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    let named: Headers<'_> = &[("x-request-id", "r"), ("x-test-wait", "head")];
    let turn = router.chat(named, BODY);
    tokio::pin!(turn);
    let abort = async {
        wait_until("the agent has the turn", async || !a.turns().is_empty()).await;
        router.call(Method::POST, "/abort_request", &[], r#"{"rid":"r"}"#).await
    };
    tokio::select! {
        _ = &mut turn => panic!("no answer was released"),
        _ = abort => {}
    }
    let received = a.turns();
    let abort = received.iter().find(|request| request.path == "/berth/abort").unwrap();
    let body: serde_json::Value = serde_json::from_slice(&abort.body).unwrap();
    let turn_id = received[0].envelope.turn.unwrap();
    assert_eq!(body["rids"], serde_json::json!(["r"]));
    assert_eq!(body["unanswered"], serde_json::json!([turn_id.to_string()]));
}

#[tokio::test]
async fn each_way_out_of_a_turn_gives_back_all_that_it_held() {
    let mut a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.limits.turns_in_flight_max = 1;
    settings.timeouts.turn_ms_max = 8_000;
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    let opened = router.call(Method::POST, "/v1/sessions", &[], r#"{"session_id":"s"}"#).await;
    assert_eq!(opened.status, 201, "{opened:?}");
    let waiting = |part| [SESSION, ("x-test-wait", part)];

    assert_eq!(router.chat(&[SESSION], BODY).await.status, 200, "the whole answer");
    expect_nothing_held(&router, &a, "ok", 1).await;

    let headers: Headers<'_> = &waiting("tail");
    let mut answer = router.begin(Method::POST, "/v1/completions", headers, BODY).await;
    answer.body_mut().frame().await.unwrap().unwrap();
    drop(answer);
    expect_nothing_held(&router, &a, "client_gone", 1).await;

    {
        let turns = a.turns().len();
        let headers = waiting("head");
        let turn = router.chat(&headers, BODY);
        tokio::pin!(turn);
        tokio::select! {
            _ = &mut turn => panic!("no answer was released"),
            () = wait_until("the agent has the turn", async || a.turns().len() > turns) => {}
        }
    }
    expect_nothing_held(&router, &a, "client_gone", 2).await;

    a.inner.full.store(true, Ordering::Relaxed);
    assert_eq!(router.chat(&[SESSION], BODY).await.status, 429, "refused");
    expect_nothing_held(&router, &a, "error_answer", 1).await;

    assert_eq!(router.chat(&waiting("head"), BODY).await.status, 504, "timed out");
    expect_nothing_held(&router, &a, "timed_out", 1).await;

    let headers: Headers<'_> = &waiting("tail");
    let late = router.begin(Method::POST, "/v1/completions", headers, BODY).await;
    assert!(late.into_body().collect().await.is_err(), "timed out within the answer");
    expect_nothing_held(&router, &a, "timed_out", 2).await;

    let headers: Headers<'_> = &waiting("tail");
    let lost = router.begin(Method::POST, "/v1/completions", headers, BODY).await;
    a.kill();
    assert!(lost.into_body().collect().await.is_err(), "the agent is lost");
    wait_until("nothing is held: the agent is lost", async || {
        let text = router.metrics().await;
        text.contains("berth_router_turns_total{outcome=\"worker_failed\"} 1\n")
            && text.contains("berth_router_streams_in_flight 0\n")
            && text.contains("berth_router_share_used_turns{pool=\"turns\"} 0\n")
            && text.contains("berth_router_share_used_bytes{pool=\"body_bytes\"} 0\n")
    })
    .await;
    let records = router.call(Method::GET, "/v1/turns", &[], "").await.json();
    let outcomes = records["turns"].as_array().unwrap().iter().map(|it| it["outcome"].clone());
    let failed: Vec<_> = outcomes.filter(|outcome| outcome != "ok").collect();
    let expected = ["client_gone", "client_gone", "error_answer", "timed_out", "timed_out"];
    assert_eq!(failed, [&expected[..], &["worker_failed"]].concat(), "each once");
}

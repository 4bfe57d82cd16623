//! Tests of the lists of recent turns and placements: what an operator sees of turns that are over.

use harness::web::Headers;
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::Value;

use crate::{
    agent::Agent,
    harness::{Router, collect, wait_until},
};

/// An agent of the tests answers with the request's own body.
const USAGE: &str = r#"{"usage":{"prompt_tokens":20,"prompt_tokens_details":{"cached_tokens":16},
    "completion_tokens":7}}"#;

/// Returns a list, by its path and the cursor of the last one.
async fn list(router: &Router, path: &str, cursor: Option<&str>) -> Value {
    let path = match cursor {
        None => format!("/v1/{path}"),
        Some(cursor) => format!("/v1/{path}?after={cursor}"),
    };
    let answer = router.call(Method::GET, &path, &[], "").await;
    assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text());
    answer.json()
}

#[tokio::test]
async fn a_turn_that_has_ended_is_listed_with_what_it_used() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let headers: Headers<'_> =
        &[("x-berth-session-id", "s"), ("x-berth-retention", "pinned"), ("x-test-wait", "tail")];
    let answer = router.begin(Method::POST, "/v1/chat/completions", headers, USAGE).await;
    let id = answer.headers()["x-berth-turn"].to_str().unwrap().to_owned();
    wait_until("the agent has reported the session", async || {
        let session = router.call(Method::GET, "/v1/sessions/s", &[], "").await;
        session.json()["retention"] == "pinned"
    })
    .await;
    assert_eq!(list(&router, "turns", None).await["turns"], Value::Array(vec![]), "it runs");
    a.inner.release.add_permits(1);
    collect(answer).await;
    let turns = list(&router, "turns", None).await;
    let turn = &turns["turns"][0];
    let expected: [(&str, Value); 10] = [
        ("turn", id.as_str().into()),
        ("session_id", "s".into()),
        ("worker", "a/0".into()),
        ("reason", "only_worker".into()),
        ("retention", "pinned".into()),
        ("outcome", "ok".into()),
        ("status", 200.into()),
        ("prompt_tokens", 20.into()),
        ("cached_tokens", 16.into()),
        ("output_tokens", 7.into()),
    ];
    for (member, expected) in expected {
        assert_eq!(turn[member], expected, "{member}: {turn}");
    }
    let placements = list(&router, "placements", None).await;
    let placement = &placements["placements"][0];
    assert_eq!((&placement["turn"], &placement["worker"]), (&turn["turn"], &turn["worker"]));
    assert_eq!(placement["session"], turn["session"], "both name the session by its digest");
    assert!(turn["ttft_ms"].as_u64().unwrap() <= turn["duration_ms"].as_u64().unwrap());
    let metrics = router.metrics().await;
    for line in [
        "berth_router_prompt_tokens_total 20",
        "berth_router_cached_tokens_total 16",
        "berth_router_computed_tokens_total 4",
        "berth_router_output_tokens_total 7",
        "berth_router_first_byte_seconds_count 1",
        "berth_router_decide_seconds_count 1",
        "berth_router_turn_seconds_count 1",
    ] {
        assert!(metrics.contains(&format!("{line}\n")), "{line} is not in {metrics}");
    }
}

#[tokio::test]
async fn turns_that_failed_or_were_left_are_listed_too_and_each_only_once() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let start = list(&router, "turns", None).await;
    let start = start["next"].as_str().unwrap();
    // The agent of the tests answers this route with an error.
    router.call(Method::POST, "/generate", &[("x-berth-session-id", "s")], "{\"a\":1}").await;
    let waiting: Headers<'_> = &[("x-test-wait", "tail")];
    drop(router.begin(Method::POST, "/v1/chat/completions", waiting, "{\"a\":1}").await);
    wait_until("both turns are over", async || {
        list(&router, "turns", Some(start)).await["turns"].as_array().unwrap().len() == 2
    })
    .await;
    let turns = list(&router, "turns", Some(start)).await;
    let ends = |turn: &Value| (turn["outcome"].clone(), turn["status"].clone());
    assert_eq!(ends(&turns["turns"][0]), ("error_answer".into(), 418.into()));
    assert_eq!(ends(&turns["turns"][1]), ("client_gone".into(), 200.into()));
    assert!(turns["turns"][0]["prompt_tokens"].is_null(), "an error has no usage: {turns}");
    let metrics = router.metrics().await;
    assert!(metrics.contains("berth_router_turn_seconds_count 0\n"), "none was good: {metrics}");
    let next = turns["next"].as_str().unwrap();
    assert_eq!(list(&router, "turns", Some(next)).await["turns"], Value::Array(vec![]));
    let of_session = router.call(Method::GET, "/v1/turns?session=s", &[], "").await.json();
    assert_eq!(of_session["turns"].as_array().unwrap().len(), 1, "{of_session}");
    let first = router.call(Method::GET, "/v1/placements?limit=1&after=00000000.0", &[], "").await;
    assert_eq!(first.json()["placements"][0]["turn"], turns["turns"][0]["turn"]);
}

/// The official libraries close the connection when they have read the closing event.
#[tokio::test]
async fn a_turn_is_whole_when_its_client_has_the_closing_event_and_not_when_the_body_ends() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let headers: Headers<'_> = &[("x-berth-session-id", "s"), ("x-test-wait", "end")];
    let mut answer = router.begin(Method::POST, "/v1/completions", headers, "{\"a\":1}").await;
    let mut text = vec![];
    while !text.ends_with(b"data: [DONE]\n\n") {
        let frame = answer.body_mut().frame().await.unwrap().unwrap();
        text.extend_from_slice(frame.data_ref().unwrap());
    }
    let metrics = router.metrics().await;
    assert!(metrics.contains("berth_router_streams_in_flight 0\n"), "{metrics}");
    assert!(metrics.contains("berth_router_turn_seconds_count 1\n"), "{metrics}");
    drop(answer);
    let next = router.chat(&[("x-berth-session-id", "s")], "{}").await;
    assert_eq!(next.status, StatusCode::OK);
    let metrics = router.metrics().await;
    assert!(metrics.contains("berth_router_turns_total{outcome=\"ok\"} 2\n"), "{metrics}");
    assert!(!metrics.contains("client_gone\"} 1"), "{metrics}");
}

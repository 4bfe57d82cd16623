//! Tests of refusals by the router: what a client is told, and whether it may send again.

use std::sync::atomic::Ordering;

use harness::web::Headers;
use http::{Method, StatusCode};

use crate::{
    agent::Agent,
    harness::{Answer, Router, wait_until},
};

#[tokio::test]
async fn a_malformed_body_is_refused_with_the_place_of_the_fault() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let text = router.chat(&[], "{\"a\":\n 1,}").await.json()["error"]["message"].to_string();
    assert!(text.contains("trailing comma at line 2, column 4 (byte 9)"), "{text}");
}

#[tokio::test]
async fn a_path_that_is_not_utf_8_is_refused_in_berths_form() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    for (method, path) in [
        (Method::GET, "/v1/sessions/%ff"),
        (Method::DELETE, "/v1/sessions/%ff"),
        (Method::GET, "/v1/placements/%c3%28"),
    ] {
        let wrong = router.call(method, path, &[], "").await;
        assert_eq!(wrong.refusal(), (400, "invalid_path".to_owned()), "{path}");
    }
}

#[tokio::test]
async fn no_get_opens_or_closes_a_session() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    // What opens or closes a session must not be a GET, which a browser sends for a mere link.
    for path in ["/open_session", "/close_session"] {
        let got = router.call(Method::GET, path, &[], r#"{"session_id":"got"}"#).await;
        assert_eq!(got.refusal(), (405, "method_not_allowed".to_owned()), "{path}");
        assert_eq!(got.header("allow"), "POST");
    }
    let opened = router.call(Method::GET, "/v1/sessions/got", &[], "").await;
    assert_eq!(opened.refusal(), (404, "session_unknown".to_owned()));
}

#[tokio::test]
async fn who_demotes_or_prefetches_a_session_of_an_agent_without_that_call_is_told_so() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let opens = r#"{"session_id":"s","retention":"pinned"}"#;
    let opened = router.call(Method::POST, "/v1/sessions", &[], opens).await;
    assert_eq!(opened.status, StatusCode::CREATED);
    let refused = router.call(Method::POST, "/v1/sessions/s/demote", &[], "").await;
    assert_eq!(refused.refusal(), (409, "demotion_unavailable".to_owned()));
    assert!(refused.text().contains("upgrade the agent"), "{}", refused.text());
    let refused = router.call(Method::POST, "/v1/sessions/s/prefetch", &[], "").await;
    assert_eq!(refused.refusal(), (501, "prefetch_unavailable".to_owned()));
    assert!(refused.text().contains("upgrade the agent"), "{}", refused.text());
    assert_eq!(a.session_count(), 1, "it goes on");
}

#[tokio::test]
async fn an_agent_that_dies_under_a_turn_is_no_reason_to_repeat_it_blindly() {
    let mut a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let closes = [("x-berth-session-id", "s"), ("x-berth-session-final", "1")];
    let answer = turn_at_an_ending_agent(&router, &mut a, Ending::Sudden, &closes).await;
    assert_eq!(answer.refusal(), (502, "worker_broke_off".to_owned()));
    let again = ["x-should-retry", "retry-after"].map(|name| answer.header(name));
    assert_eq!(again, ["false", ""], "it may have run, and have closed the session");
}

#[tokio::test]
async fn a_whole_history_under_which_the_agent_dies_may_be_sent_again() {
    let mut a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let in_session = [("x-berth-session-id", "s")];
    let answer = turn_at_an_ending_agent(&router, &mut a, Ending::Sudden, &in_session).await;
    assert_eq!(answer.refusal(), (502, "worker_broke_off".to_owned()));
    assert_eq!(answer.header("x-should-retry"), "true");
}

#[tokio::test]
async fn a_longer_outage_has_longer_waits() {
    let mut a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    a.kill();
    let killed = service::clock::now();
    let wait_ms = async || {
        let mut refused = router.chat(&[], "{}").await;
        if refused.status == StatusCode::BAD_GATEWAY {
            // The router had not yet heard that its kept connection is gone.
            refused = router.chat(&[], "{}").await;
        }
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{}", refused.text());
        refused.header("retry-after-ms").parse::<u64>().unwrap()
    };
    let first_ms = u128::from(wait_ms().await);
    assert!(first_ms < 2_000 + killed.elapsed().as_millis(), "a new outage may be short");
    wait_until("a client is told to wait longer", async || wait_ms().await > 2_000).await;
}

#[tokio::test]
async fn a_head_is_answered_as_the_get_is_and_the_probe_of_claude_code_too() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    for path in ["/v1/models", "/v1/sessions", "/", "/health"] {
        let [head, get] =
            [Method::HEAD, Method::GET].map(|method| router.call(method, path, &[], ""));
        let (head, get) = tokio::join!(head, get);
        assert_eq!((head.status, get.status), (StatusCode::OK, StatusCode::OK), "{path}");
        assert_eq!(head.text(), "", "{path}");
    }
    let absent = router.call(Method::HEAD, "/nothing", &[], "").await;
    assert_eq!(absent.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn functions_of_openai_s_that_no_engine_has_are_no_routes() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    for path in ["/v1/responses/compact", "/v1/responses/input_tokens"] {
        let absent = router.call(Method::POST, path, &[], "{}").await;
        assert_eq!(absent.refusal(), (404, "route_unknown".to_owned()), "{path}");
    }
    let body = r#"{"model":"m","input":"hi","previous_response_id":"resp_1"}"#;
    let unknown = router.call(Method::POST, "/v1/responses", &[], body).await;
    assert_eq!(unknown.refusal(), (404, "response_unknown".to_owned()));
    assert!(unknown.text().contains("--enable-response-store"), "{}", unknown.text());
}

#[derive(Debug, PartialEq, Eq)]
enum Ending {
    /// The agent reports that it ends, before it does.
    Planned,
    Sudden,
}

/// Sends a turn to the first of these agents, which ends without an answer. Returns the client's
/// answer.
async fn turn_at_an_ending_agent(
    router: &Router,
    agent: &mut Agent,
    ending: Ending,
    headers: Headers<'_>,
) -> Answer {
    let headers = [headers, &[("x-test-wait", "head")]].concat();
    let turn = router.chat(&headers, "{}");
    tokio::pin!(turn);
    let received = wait_until("the agent has the turn", async || agent.turns().len() == 1);
    tokio::select! {
        _ = &mut turn => panic!("no answer was released"),
        () = received => {}
    }
    if ending == Ending::Planned {
        agent.inner.draining.store(true, Ordering::Relaxed);
        let state = async || {
            let shown = router.call(Method::GET, "/v1/workers", &[], "").await.json();
            shown["workers"][0]["state"].clone()
        };
        wait_until("the router knows", async || state().await == "draining").await;
    }
    agent.kill();
    turn.await
}

#[tokio::test]
async fn a_turn_that_an_ending_agent_has_not_taken_may_be_sent_again() {
    let mut a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let answer = turn_at_an_ending_agent(&router, &mut a, Ending::Planned, &[]).await;
    assert_eq!(answer.refusal(), (503, "worker_unreachable".to_owned()));
    assert_ne!(answer.header("retry-after"), "");
}

#[tokio::test]
async fn a_turn_that_an_ending_agent_has_not_taken_goes_to_another() {
    let mut a = Agent::start("a");
    // Full, so that the first turn goes to the other.
    let b = Agent::start("b");
    b.inner.used_tokens.store(9_000, Ordering::Relaxed);
    b.inner.release.add_permits(1);
    let router = Router::start(&[&a, &b]).await;
    let answer = turn_at_an_ending_agent(&router, &mut a, Ending::Planned, &[]).await;
    assert_eq!((answer.status.as_u16(), b.turns().len()), (200, 1), "{}", answer.text());
}

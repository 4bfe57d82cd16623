//! Tests of sessions: opening, listing, closing, loss of a worker, restart of a router.

use std::sync::atomic::Ordering;

use contract::load::Retention;
use harness::keys::KeyFixture;
use http::{Method, StatusCode};
use serde_json::json;

use crate::{
    agent::Agent,
    harness::{Answer, Router, collect, config, wait_until},
};

const OPEN: &str = "/v1/sessions";

#[tokio::test]
async fn a_session_is_opened_used_listed_and_closed_by_its_owner_alone() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let keys = KeyFixture::new(&[("me", "mine", ""), ("you", "yours", "")]).unwrap();
    let mut settings = config(&[&a, &b]);
    settings.auth.keys_file = keys.path();
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    let (me, you) = (("authorization", "Bearer mine"), ("authorization", "Bearer yours"));
    for round in 0..20 {
        let id = format!("s{round}");
        let body = format!(r#"{{"session_id":"{id}","retention":"pinned","timeout":60}}"#);
        let opened = router.call(Method::POST, OPEN, &[me], body.clone()).await;
        assert_eq!(opened.status, StatusCode::CREATED, "{opened:?}");
        assert_eq!(opened.json()["retention"], "pinned");
        let worker = opened.json()["worker"].clone();
        let again = router.call(Method::POST, OPEN, &[me], body).await;
        assert_eq!((again.status, &again.json()["worker"]), (StatusCode::OK, &worker));
        let turn = router.chat(&[me], &format!(r#"{{"session_params":{{"id":"{id}"}}}}"#)).await;
        assert_eq!(turn.status, StatusCode::OK, "{turn:?}");
        assert_eq!(turn.header("x-berth-worker"), worker);
        let path = format!("/v1/sessions/{id}");
        let shown = router.call(Method::GET, &path, &[me], "").await;
        assert_eq!(shown.status, StatusCode::OK);
        let theirs = router.call(Method::GET, &path, &[you], "").await;
        assert_eq!(theirs.status, StatusCode::NOT_FOUND);
        let theirs = router.call(Method::DELETE, &path, &[you], "").await;
        assert_eq!(theirs.status, StatusCode::NOT_FOUND);
        let listed = router.call(Method::GET, OPEN, &[me], "").await.json();
        assert_eq!(listed["sessions"].as_array().unwrap().len(), 1, "{listed}");
        let closed = router.call(Method::DELETE, &path, &[me], "").await;
        assert_eq!(closed.status, StatusCode::NO_CONTENT);
        let shown = router.call(Method::GET, &path, &[me], "").await;
        assert_eq!(shown.status, StatusCode::NOT_FOUND);
    }
    assert_eq!(a.session_count() + b.session_count(), 0);
}

#[tokio::test]
async fn a_final_turn_closes_the_session_also_where_it_was_before() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    b.inner.used_tokens.store(9_000, Ordering::Relaxed);
    let router = Router::start(&[&a, &b]).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    let session = ("x-berth-session-id", "s");
    let first = router.chat(&[session], "{}").await;
    assert_eq!((first.status, first.header("x-berth-worker")), (StatusCode::OK, "a/0"));
    a.inner.draining.store(true, Ordering::Relaxed);
    wait_until("the router knows of the drain", async || {
        let workers = router.call(Method::GET, "/v1/workers", &[], "").await.json();
        workers["workers"][0]["state"] == "draining"
    })
    .await;
    let last = router.chat(&[session, ("x-berth-session-final", "true")], "{}").await;
    assert_eq!((last.status, last.header("x-berth-worker")), (StatusCode::OK, "b/0"));
    wait_until("both agents close it", async || a.session_count() + b.session_count() == 0).await;
}

#[tokio::test]
async fn an_id_of_any_characters_is_found_percent_encoded() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let ids = [
        ("a/b", "a%2Fb"),
        ("..", "%2E%2E"),
        ("50%?", "50%25%3F"),
        ("\u{a6} \u{1f600}", "%C2%A6%20%F0%9F%98%80"),
    ];
    for (id, encoded) in ids {
        let opened = router.call(Method::POST, OPEN, &[], json!({ "session_id": id }).to_string());
        assert_eq!(opened.await.status, StatusCode::CREATED, "{id}");
        let path = format!("{OPEN}/{encoded}");
        let shown = router.call(Method::GET, &path, &[], "").await;
        assert_eq!((shown.status, &shown.json()["session_id"]), (StatusCode::OK, &json!(id)));
        let closed = router.call(Method::DELETE, &path, &[], "").await;
        assert_eq!(closed.status, StatusCode::NO_CONTENT, "{id}");
    }
    assert_eq!(a.session_count(), 0);
}

#[tokio::test]
async fn of_two_deletes_one_closes_and_one_finds_nothing() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    for round in 0..20 {
        let body = format!(r#"{{"session_id":"s{round}"}}"#);
        router.call(Method::POST, OPEN, &[], body).await;
        let path = format!("/v1/sessions/s{round}");
        let (first, second) = tokio::join!(
            router.call(Method::DELETE, &path, &[], ""),
            router.call(Method::DELETE, &path, &[], ""),
        );
        let mut both = [first.status.as_u16(), second.status.as_u16()];
        both.sort_unstable();
        assert_eq!(both, [204, 404]);
    }
}

#[tokio::test]
async fn a_delete_does_not_wait_for_the_running_turn() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    router.call(Method::POST, OPEN, &[], r#"{"session_id":"s"}"#).await;
    let headers = [("x-berth-session-id", "s"), ("x-test-wait", "tail")];
    let turn = router.begin(Method::POST, "/v1/completions", &headers, "{\"a\":1}").await;
    let closed = router.call(Method::DELETE, "/v1/sessions/s", &[], "").await;
    assert_eq!(closed.status, StatusCode::NO_CONTENT);
    let next = router.chat(&[("x-berth-session-id", "s")], "{}").await;
    assert_eq!((next.status, next.code().as_str()), (StatusCode::CONFLICT, "session_closing"));
    a.inner.release.add_permits(1);
    assert_eq!(collect(turn).await.status, StatusCode::OK);
    wait_until("the agent has closed it", async || a.session_count() == 0).await;
    let shown = router.call(Method::GET, "/v1/sessions/s", &[], "").await;
    assert_eq!(shown.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_last_turn_closes_its_session() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let session = ("x-berth-session-id", "s");
    assert_eq!(router.chat(&[session], "{}").await.status, StatusCode::OK);
    let last = router.chat(&[session, ("x-berth-session-final", "true")], "{}").await;
    assert_eq!(last.status, StatusCode::OK);
    assert!(a.turns()[1].envelope.session.as_ref().unwrap().close);
    let shown = router.call(Method::GET, "/v1/sessions/s", &[], "").await;
    assert_eq!(shown.status, StatusCode::NOT_FOUND);
    assert_eq!(a.session_count(), 0);
}

#[tokio::test]
async fn bind_is_placement_without_a_claim() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    let body = r#"{"nvext":{"session_control":{"session_id":"s","action":"bind"}}}"#;
    let first = router.chat(&[], body).await;
    let second = router.chat(&[], body).await;
    assert_eq!(second.header("x-berth-placement"), "sticky");
    assert_eq!(second.header("x-berth-worker"), first.header("x-berth-worker"));
    for turn in a.turns().iter().chain(&b.turns()) {
        assert!(turn.envelope.session.is_none());
    }
    assert_eq!(a.session_count() + b.session_count(), 0);
}

#[tokio::test]
async fn sessions_of_a_lost_worker_move_and_pinned_ones_say_what_is_gone() {
    let (mut a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    // The load makes placement choose a for both sessions.
    b.inner.used_tokens.store(9_000, std::sync::atomic::Ordering::Relaxed);
    wait_until("b is known to be full", async || {
        let answer = router.call(Method::GET, "/v1/workers", &[], "").await.json();
        answer["workers"][1]["load"]["pool_used_tokens"]["value"] == 9_000
    })
    .await;
    let pinned = r#"{"session_id":"p","retention":"pinned"}"#;
    let opened = router.call(Method::POST, OPEN, &[], pinned).await;
    assert_eq!(opened.json()["worker"], "a/0");
    let tagged = router.chat(&[("x-berth-session-id", "t")], "{}").await;
    assert_eq!(tagged.header("x-berth-worker"), "a/0");
    a.kill();
    wait_until("a is lost", async || {
        let answer = router.call(Method::GET, "/v1/workers", &[], "").await.json();
        answer["workers"][0]["state"] == "lost"
    })
    .await;
    let moved = router.chat(&[("x-berth-session-id", "t")], "{}").await;
    assert_eq!(moved.status, StatusCode::OK);
    assert_eq!(moved.header("x-berth-worker"), "b/0");
    assert_eq!(moved.header("x-berth-placement"), "rebound");
    let delta = r#"{"session_params":{"id":"p"}}"#;
    let lost = router.chat(&[], delta).await;
    assert_eq!((lost.status, lost.code().as_str()), (StatusCode::CONFLICT, "session_lost"));
    let reopened = router.call(Method::POST, OPEN, &[], pinned).await;
    assert_eq!((reopened.status, &reopened.json()["worker"]), (StatusCode::CREATED, &"b/0".into()));
    assert_eq!(router.chat(&[], delta).await.status, StatusCode::OK);
}

/// An agent reports a session when a turn of it has ended, and not again while it is idle.
#[tokio::test]
async fn a_session_s_owner_sees_for_how_long_it_has_been_idle() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    router.chat(&[("x-berth-session-id", "s")], "{}").await;
    wait_until("it gets older", async || {
        let list = router.call(Method::GET, "/v1/sessions", &[], "").await.json();
        let session = &list["sessions"][0];
        session["idle_ms_at_report"] == 0 && session["idle_ms"].as_u64().is_some_and(|ms| ms > 20)
    })
    .await;
}

#[tokio::test]
async fn a_session_whose_engine_restarted_is_lost_until_it_is_opened_again() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    router.call(Method::POST, OPEN, &[], r#"{"session_id":"s","retention":"pinned"}"#).await;
    a.lose_sessions();
    let session = ("x-berth-session-id", "s");
    let path = "/v1/sessions/s";
    wait_until("the router knows the loss", async || {
        router.call(Method::GET, path, &[], "").await.json()["state"] == "lost"
    })
    .await;
    let lost = router.chat(&[session], "{}").await;
    assert_eq!((lost.status, lost.code().as_str()), (StatusCode::CONFLICT, "session_lost"));
    let open = r#"{"nvext":{"session_control":{"session_id":"s","action":"open"}}}"#;
    let opened = router.chat(&[], open).await;
    assert_eq!(opened.status, StatusCode::OK, "{opened:?}");
    assert_eq!(router.chat(&[session], "{}").await.status, StatusCode::OK, "right after opening");
    wait_until("its turns are counted", async || {
        router.call(Method::GET, path, &[], "").await.json()["turns"] == 2
    })
    .await;
}

#[tokio::test]
async fn a_restarted_router_knows_every_session_and_a_stream_with_a_gap_is_restarted() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    let mut placed = vec![];
    for turn in 0..10 {
        let id = format!("s{turn}");
        let answer = router.chat(&[("x-berth-session-id", &id)], "{}").await;
        placed.push((id, answer.header("x-berth-worker").to_owned()));
    }
    router.stop().await.unwrap();
    let router = Router::start(&[&a, &b]).await;
    for (id, worker) in &placed {
        let answer = router.chat(&[("x-berth-session-id", id)], "{}").await;
        assert_eq!(answer.header("x-berth-placement"), "sticky");
        assert_eq!(answer.header("x-berth-worker"), worker);
    }
    a.skip_sequence();
    b.skip_sequence();
    // While both streams restart, there may be no worker that can open the session.
    wait_until("one more session is open", async || {
        let opened = router.call(Method::POST, OPEN, &[], r#"{"session_id":"after"}"#).await;
        opened.status.is_success()
    })
    .await;
    wait_until("both streams have restarted", async || {
        let workers = router.call(Method::GET, "/v1/workers", &[], "").await.json();
        let listed = router.call(Method::GET, OPEN, &[], "").await.json();
        let fresh = |at: usize| workers["workers"][at]["state"] == "fresh";
        fresh(0) && fresh(1) && listed["sessions"].as_array().unwrap().len() == 11
    })
    .await;
}

/// Two agents have the same id: one was moved to another host before the old one was stopped.
#[tokio::test]
async fn an_agent_with_a_duplicate_id_is_used_once_the_other_agent_is_gone() {
    let mut duplicates = [Agent::start("a"), Agent::start("a")];
    let router = Router::start(&[&duplicates[0], &duplicates[1]]).await;
    let workers = router.call(Method::GET, "/v1/workers", &[], "").await.json();
    let control = workers["workers"][0]["control"].as_str().unwrap();
    let first = duplicates.iter().position(|agent| control.ends_with(&agent.control.to_string()));
    duplicates[first.unwrap()].kill();
    wait_until("the other agent takes turns", async || router.chat(&[], "{}").await.status == 200)
        .await;
    assert!(!duplicates[1 - first.unwrap()].turns().is_empty());
}

#[tokio::test]
async fn a_fleet_of_several_models_lists_those_that_it_can_serve_now() {
    let (a, mut b) = (Agent::serving("a", "x"), Agent::serving("b", "y"));
    let router = Router::start(&[&a, &b]).await;
    let listed = async || {
        let list = router.call(Method::GET, "/v1/models", &[], "").await.json();
        let models = list["data"].as_array().unwrap();
        models.iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(listed().await, ["x", "y"]);
    b.kill();
    wait_until("b's model is no longer listed", async || listed().await == ["x"]).await;
}

#[tokio::test]
async fn sglangs_own_routes_keep_its_shape() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let body = r#"{"capacity_of_str_len":1000,"session_id":"s","streaming":true}"#;
    let opened = router.call(Method::POST, "/open_session", &[], body).await;
    assert_eq!((opened.status, &opened.body[..]), (StatusCode::OK, &b"\"s\""[..]));
    let again = router.call(Method::POST, "/open_session", &[], body).await;
    assert_eq!(again.refusal(), (400, "session_exists".to_owned()));
    assert!(again.json()["error"]["message"].is_string());
    let shown = router.call(Method::GET, "/v1/sessions/s", &[], "").await;
    assert_eq!(shown.json()["retention"], "pinned");
    for _ in 0..2 {
        let closed =
            router.call(Method::POST, "/close_session", &[], r#"{"session_id":"s"}"#).await;
        assert_eq!((closed.status, closed.body.len()), (StatusCode::OK, 0));
    }
    let made = router.call(Method::POST, "/open_session", &[], "{}").await;
    assert_eq!(made.json().as_str().unwrap().len(), 32);
}

#[tokio::test]
async fn an_id_that_is_too_long_is_refused_with_the_bound_at_every_door() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let id = "i".repeat(257);
    let named = format!(r#"{{"session_id":"{id}"}}"#);
    let open = format!(r#"{{"session_id":"{id}","capacity_of_str_len":9}}"#);
    let path = format!("/v1/sessions/{id}");
    let answers = [
        router.call(Method::POST, OPEN, &[], named.clone()).await,
        router.call(Method::GET, &path, &[], "").await,
        router.call(Method::DELETE, &path, &[], "").await,
        router.call(Method::POST, "/open_session", &[], open).await,
        router.call(Method::POST, "/close_session", &[], named.clone()).await,
        router.chat(&[("x-berth-session-id", &id)], "{}").await,
        router.chat(&[], &named).await,
        router.chat(&[], &format!(r#"{{"session_params":{{"id":"{id}"}}}}"#)).await,
    ];
    for (door, answer) in answers.iter().enumerate() {
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "door {door}: {answer:?}");
        let message = String::from_utf8_lossy(&answer.body);
        assert!(message.contains("1 to 256 bytes, this one has 257"), "door {door}: {message}");
    }
    assert_eq!(a.session_count(), 0);
}

#[tokio::test]
async fn a_retention_nobody_offers_is_refused_with_what_is_offered() {
    let a = Agent::start_with("a", vec![Retention::None]);
    let router = Router::start(&[&a]).await;
    let refused = router.call(Method::POST, OPEN, &[], r#"{"retention":"pinned"}"#).await;
    let code = refused.code();
    assert_eq!((refused.status, code.as_str()), (StatusCode::CONFLICT, "retention_unavailable"));
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("ask for one of these: none"), "{message}");
    assert!(message.contains("--enable-streaming-session"), "{message}");
}

#[tokio::test]
async fn a_full_worker_opens_nothing_and_one_other_is_asked() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    a.inner.full.store(true, std::sync::atomic::Ordering::Relaxed);
    for _ in 0..6 {
        let opened = router.call(Method::POST, OPEN, &[], r#"{"retention":"pinned"}"#).await;
        assert_eq!(opened.json()["worker"], "b/0");
    }
    b.inner.full.store(true, std::sync::atomic::Ordering::Relaxed);
    let refused = router.call(Method::POST, OPEN, &[], "").await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.header("retry-after"), "1");
}

#[tokio::test]
async fn a_client_that_leaves_mid_delete_has_still_closed() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    for round in 0..10 {
        let body = format!(r#"{{"session_id":"s{round}"}}"#);
        router.call(Method::POST, OPEN, &[], body).await;
        let path = format!("/v1/sessions/s{round}");
        let mut tcp = tokio::net::TcpStream::connect(router.data()).await.unwrap();
        let request = format!("DELETE {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        tokio::io::AsyncWriteExt::write_all(&mut tcp, request.as_bytes()).await.unwrap();
        drop(tcp);
        wait_until("it is closed", async || a.session_count() == 0).await;
    }
}

#[tokio::test]
async fn an_open_without_an_answer_leaves_no_second_session_of_its_name() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    a.inner.loses_answers.store(true, Ordering::Relaxed);
    let router = Router::start(&[&a, &b]).await;
    for round in 0..8 {
        let body = format!(r#"{{"session_id":"s{round}","retention":"pinned"}}"#);
        let opened = router.call(Method::POST, OPEN, &[], body).await;
        assert_eq!((opened.status, &opened.json()["worker"]), (StatusCode::CREATED, &"b/0".into()));
    }
    wait_until("a has no session", async || a.session_count() == 0).await;
    assert_eq!(b.session_count(), 8);
    assert!(router.metrics().await.contains("retries_total{reason=\"open\"}"), "a was asked too");
}

/// Opens a session at the first of these agents, which dies before it answers. Returns the client's
/// answer.
async fn open_at_a_dying_agent(router: &Router, agent: &mut Agent) -> Answer {
    agent.inner.holds_answers.store(true, Ordering::Relaxed);
    let open = router.call(Method::POST, OPEN, &[], r#"{"session_id":"s"}"#);
    tokio::pin!(open);
    let received = wait_until("the agent has opened it", async || agent.session_count() == 1);
    tokio::select! {
        answer = &mut open => panic!("no answer was sent: {answer:?}"),
        () = received => {}
    }
    agent.kill();
    open.await
}

#[tokio::test]
async fn an_open_whose_agent_dies_goes_to_another_agent() {
    let (mut a, b) = (Agent::start("a"), Agent::start("b"));
    // So that the first open goes to the other.
    b.inner.used_tokens.store(9_000, Ordering::Relaxed);
    let router = Router::start(&[&a, &b]).await;
    let opened = open_at_a_dying_agent(&router, &mut a).await;
    assert_eq!(opened.status, StatusCode::CREATED, "{opened:?}");
    assert_eq!(opened.json()["worker"], "b/0");
}

#[tokio::test]
async fn an_open_whose_only_agent_dies_may_be_tried_again() {
    let mut a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let refused = open_at_a_dying_agent(&router, &mut a).await;
    assert_eq!(refused.refusal(), (503, "worker_unreachable".to_owned()));
    assert_ne!(refused.header("retry-after"), "");
}

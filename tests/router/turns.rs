//! Tests of turns: placement, bytes, headers, retry, cancellation, limits.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
};

use harness::{envelope::ENVELOPE, keys::KeyFixture, web::Headers};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use router::config::Config;
use tokio::task::JoinSet;

use crate::{
    agent::Agent,
    harness::{Answer, Router, collect, config, wait_until},
};

const BODY: &str = "{ \"messages\" : [ ] ,\"n\":1.50e0, \"u\":\"\\u00e9\" }\n";

#[tokio::test]
async fn turns_of_a_session_stay_and_bytes_pass_untouched() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    let first = router.chat(&[("x-berth-session-id", "s")], BODY).await;
    assert_eq!(first.status, StatusCode::OK);
    assert_eq!(first.body, BODY.as_bytes());
    assert_eq!(first.header("x-berth-placement"), "least_cost");
    assert_eq!(first.header("content-type"), "text/event-stream");
    assert_eq!(first.header("x-engine"), "yes");
    assert_eq!(first.header("x-secret"), "", "it was named in the connection header");
    assert_eq!(first.header("x-berth-turn").len(), 16);
    let worker = first.header("x-berth-worker").to_owned();
    for _ in 0..5 {
        let next = router.chat(&[("x-berth-session-id", "s")], BODY).await;
        assert_eq!(next.header("x-berth-placement"), "sticky");
        assert_eq!(next.header("x-berth-worker"), worker);
    }
    let received = if worker == "a/0" { a.turns() } else { b.turns() };
    assert_eq!(received.len(), 6);
    for turn in received {
        assert_eq!(turn.body, BODY.as_bytes());
        assert_eq!(turn.envelope.session.unwrap().key.id(), "s");
        assert_eq!(turn.envelope.rank, Some(0));
    }
    let error = router.call(Method::POST, "/generate?x=1", &[], "{}").await;
    assert_eq!(error.status.as_u16(), 418, "the engine's status is passed on");
    router.stop().await.unwrap();
}

#[tokio::test]
async fn what_a_client_may_not_say_never_reaches_an_agent() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let headers: Headers<'_> = &[
        (ENVELOPE, r#"{"principal":"root","session":{"id":"theirs"},"rank":7}"#),
        ("x-data-parallel-rank", "3"),
        ("x-override-priority", "9"),
        ("connection", "x-mine, keep-alive"),
        ("x-mine", "hop"),
        ("te", "trailers"),
        ("x-other", "passes"),
    ];
    assert_eq!(router.chat(headers, "{}").await.status, StatusCode::OK);
    let turn = a.turns().pop().unwrap();
    assert_eq!(turn.headers.get_all(ENVELOPE).iter().count(), 1);
    assert!(turn.envelope.session.is_none());
    assert!(turn.envelope.turn.is_some());
    assert_eq!((&*turn.envelope.principal, turn.envelope.rank), ("anonymous", Some(0)));
    for gone in ["x-data-parallel-rank", "x-override-priority", "x-mine", "te", "connection"] {
        assert!(!turn.headers.contains_key(gone), "{gone} passed");
    }
    assert_eq!(turn.headers["x-other"], "passes");
    let host = turn.headers["host"].to_str().unwrap();
    assert!(host.starts_with(&format!("{}:", a.control.ip())), "{host}");
}

#[tokio::test]
async fn a_credential_reaches_an_agent_only_if_neither_it_nor_the_router_needs_one() {
    let a = Agent::start("a");
    let keys = KeyFixture::new(&[("me", "mine", "")]).unwrap();
    let passed = async |router: &Router, name: &str, value: &str| {
        wait_until("the router is ready", async || router.is_ready().await).await;
        assert_eq!(router.chat(&[(name, value)], "{}").await.status, StatusCode::OK);
        a.turns().pop().unwrap().headers.get(name).is_some_and(|passed| passed == value)
    };
    let mut settings = config(&[&a]);
    settings.auth.keys_file = keys.path();
    let checks = Router::start_with(settings).await;
    let open = Router::start(&[&a]).await;
    for (name, value) in [("authorization", "Bearer mine"), ("x-api-key", "mine")] {
        assert!(!passed(&checks, name, value).await, "{name}: the router has checked it");
        assert!(passed(&open, name, value).await, "{name}: the engine may want it");
    }
}

#[tokio::test]
async fn concurrent_first_turns_of_a_session_get_one_worker() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Arc::new(Router::start(&[&a, &b]).await);
    for id in ["s0", "s1", "s2"] {
        let turn =
            async |router: Arc<Router>| router.chat(&[("x-berth-session-id", id)], "{}").await;
        let turns: JoinSet<Answer> = (0..20).map(|_| turn(Arc::clone(&router))).collect();
        let mut workers = BTreeSet::new();
        for answer in turns.join_all().await {
            assert_eq!(answer.status, StatusCode::OK);
            workers.insert(answer.header("x-berth-worker").to_owned());
        }
        assert_eq!(workers.len(), 1, "{workers:?}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_mid_answer_is_seen_by_the_agent_and_frees_the_session() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let headers: Headers<'_> = &[("x-berth-session-id", "s"), ("x-test-wait", "tail")];
    let mut answer = router.begin(Method::POST, "/v1/completions", headers, "{\"a\":1}").await;
    let part = answer.body_mut().frame().await.unwrap().unwrap();
    assert!(part.data_ref().is_some(), "the first part arrives while the second waits");
    drop(answer);
    wait_until("the agent sees the end", async || {
        a.inner.aborted_answers.load(Ordering::Relaxed) == 1
    })
    .await;
    wait_until("nothing is in flight", async || {
        router.metrics().await.contains("berth_router_streams_in_flight 0")
    })
    .await;
    let text = router.metrics().await;
    assert!(text.contains("berth_router_turns_total{outcome=\"client_gone\"} 1"), "{text}");
}

/// Returns the timers of this process's connections to an agent's data port. Timer 2 is keepalive,
/// which probes a silent peer.
fn timers(agent: &Agent) -> Vec<String> {
    let std::net::IpAddr::V4(ip) = agent.control.ip() else { unreachable!("agents have IPv4") };
    let there = format!("{:08X}:{:04X}", u32::from_le_bytes(ip.octets()), agent.inner.data_port);
    let rows = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let rows = rows.lines().map(|row| row.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[2] == there).map(|row| row[5][..2].to_owned()).collect()
}

/// Without probes, a turn on a host that died silently would wait until the turn's limit.
#[tokio::test]
async fn a_turn_that_waits_for_its_first_byte_is_in_flight_and_its_connection_probed() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let waits: Headers<'_> = &[("x-test-wait", "head")];
    let turn = router.begin(Method::POST, "/v1/messages", waits, "{\"a\":1}");
    let looks = async {
        wait_until("the turn is in flight", async || {
            router.metrics().await.contains("berth_router_streams_in_flight 1")
        })
        .await;
        wait_until("the connection is probed", async || timers(&a) == ["02"]).await;
        a.inner.release.add_permits(1);
    };
    let (turn, ()) = tokio::join!(turn, looks);
    assert_eq!(collect(turn).await.status, StatusCode::OK);
    a.inner.full.store(true, Ordering::Relaxed);
    assert_eq!(router.chat(&[], "{}").await.status, StatusCode::TOO_MANY_REQUESTS);
    let text = router.metrics().await;
    let timed = "berth_router_first_byte_seconds_count 1";
    assert!(text.contains(timed), "a refusal doesn't count as a first byte: {text}");
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_is_seen_by_the_agent() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let headers: Headers<'_> = &[("x-berth-session-id", "s"), ("x-test-wait", "head")];
    {
        let turn = router.chat(headers, "{}");
        tokio::pin!(turn);
        let received = wait_until("the agent has the turn", async || a.turns().len() == 1);
        tokio::select! {
            _ = &mut turn => panic!("no answer was released"),
            () = received => {}
        }
    }
    wait_until("the agent sees the end", async || {
        a.inner.aborted_answers.load(Ordering::Relaxed) == 1
    })
    .await;
}

#[tokio::test]
async fn an_exclusive_session_takes_one_turn_and_a_refused_one_frees_nothing() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let opened = router.call(Method::POST, "/v1/sessions", &[], r#"{"session_id":"s"}"#).await;
    assert_eq!(opened.status, StatusCode::CREATED);
    let waiting: Headers<'_> = &[("x-berth-session-id", "s"), ("x-test-wait", "tail")];
    let owner = router.begin(Method::POST, "/v1/completions", waiting, "{\"a\":1}").await;
    for _ in 0..3 {
        let second = router.chat(&[("x-berth-session-id", "s")], "{}").await;
        assert_eq!((second.status, second.code().as_str()), (StatusCode::CONFLICT, "session_busy"));
        let in_body = router.chat(&[], r#"{"session_id":"s"}"#).await;
        assert_eq!(in_body.status, StatusCode::CONFLICT);
    }
    assert_eq!(a.turns().len(), 1, "refused turns never reach the agent");
    let other = router.chat(&[("x-berth-session-id", "t")], "{}").await;
    assert_eq!(other.status, StatusCode::OK);
    a.inner.release.add_permits(1);
    assert_eq!(collect(owner).await.body, "{\"a\":1}");
    for _ in 0..20 {
        let next = router.chat(&[("x-berth-session-id", "s")], "{}").await;
        assert_eq!(next.status, StatusCode::OK, "{next:?}");
    }
}

#[tokio::test]
async fn a_full_worker_is_tried_once_elsewhere_and_then_the_answer_is_its_own() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    a.inner.full.store(true, Ordering::Relaxed);
    for turn in 0..8 {
        let id = format!("s{turn}");
        let answer = router.chat(&[("x-berth-session-id", &id)], "{}").await;
        assert_eq!((answer.status, answer.header("x-berth-worker")), (StatusCode::OK, "b/0"));
    }
    b.inner.full.store(true, Ordering::Relaxed);
    let answer = router.chat(&[], "{}").await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (StatusCode::TOO_MANY_REQUESTS, "queue_places")
    );
    assert_eq!(answer.header("retry-after"), "1");
    assert_eq!(answer.header("x-berth-refusal"), "queue_places");
}

#[tokio::test]
async fn load_decides_where_new_sessions_go() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    a.inner.used_tokens.store(9_000, Ordering::Relaxed);
    let router = Router::start(&[&a, &b]).await;
    for turn in 0..5 {
        let answer = router.chat(&[("x-berth-session-id", &format!("s{turn}"))], "{}").await;
        assert_eq!(answer.header("x-berth-worker"), "b/0");
    }
}

#[tokio::test]
async fn a_silent_worker_keeps_its_sessions_and_gets_none() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    a.inner.used_tokens.store(9_000, Ordering::Relaxed);
    let mut settings = config(&[&a, &b]);
    settings.timeouts.load_report_age_ms_max = 400;
    let router = Router::start_with(settings).await;
    let mut sessions = 0;
    let mut newcomer = async || {
        sessions += 1;
        let id = format!("s{sessions}");
        let answer = router.chat(&[("x-berth-session-id", &id)], "{}").await;
        let header = |name: &str| answer.header(name).to_owned();
        (id, header("x-berth-worker"), header("x-berth-placement"))
    };
    let mut at_b = String::new();
    wait_until("a session is on b, which has more room", async || {
        let (id, worker, _) = newcomer().await;
        at_b = id;
        worker == "b/0"
    })
    .await;
    b.fall_silent();
    wait_until("b is stale", async || state_of(&router, "b/0").await == "stale").await;
    wait_until("a session is placed while only b is stale", async || {
        // Where all workers are stale, b may get the session, which refreshes what is known of b.
        if state_of(&router, "b/0").await != "stale" {
            return false;
        }
        let (_, worker, placement) = newcomer().await;
        let seen = placement != "stale_view";
        assert!(!seen || worker == "a/0", "{placement} at {worker}");
        seen
    })
    .await;
    let answer = router.chat(&[("x-berth-session-id", &at_b)], "{}").await;
    assert_eq!(answer.header("x-berth-placement"), "sticky", "a stale worker keeps its sessions");
    assert_eq!(answer.header("x-berth-worker"), "b/0");
    a.fall_silent();
    // A turn is also reported as a session change, so wait until the agents are silent again.
    wait_until("a session is placed by a stale view", async || {
        state_of(&router, "b/0").await == "stale"
            && state_of(&router, "a/0").await == "stale"
            && newcomer().await.2 == "stale_view"
    })
    .await;
}

async fn state_of(router: &Router, worker: &str) -> String {
    let workers = router.call(Method::GET, "/v1/workers", &[], "").await.json();
    let all = workers["workers"].as_array().unwrap();
    let one = all.iter().find(|one| one["worker"] == worker);
    one.map_or(String::new(), |one| one["state"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn without_a_worker_the_answer_is_503_within_the_time_to_connect() {
    // Bound, so that no other process gets the port, but never listening.
    let held = tokio::net::TcpSocket::new_v4().unwrap();
    held.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let workers = vec![format!("http://{}", held.local_addr().unwrap())];
    let mut settings = Config { workers, ..config(&[]) };
    settings.timeouts.connect_ms_max = 300;
    let router = Router::start_with(settings).await;
    // The limit leaves some seconds for a machine that stalls.
    let soon =
        tokio::time::timeout(std::time::Duration::from_secs(20), router.chat(&[], "{}")).await;
    let answer = soon.expect("an answer in time");
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, "no_worker")
    );
    assert_eq!(answer.header("retry-after"), "1");
    for (path, status) in [("/health", 503), ("/ready", 503), ("/ping", 503), ("/live", 200)] {
        assert_eq!(router.call(Method::GET, path, &[], "").await.status, status, "{path}");
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_said() {
    let a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.limits.body_bytes_max = 1000;
    let router = Router::start_with(settings).await;
    let cases: [(Headers<'_>, &str, u16, &str); 9] = [
        (&[], "{\"a\":", 400, "invalid_json"),
        (&[], "[]", 400, "invalid_json"),
        (&[("x-berth-session-id", "")], "{}", 400, "invalid_session_id"),
        (&[], r#"{"nvext":{"session_control":{"session_id":7}}}"#, 400, "invalid_field"),
        (
            &[],
            r#"{"nvext":{"session_control":{"session_id":"s","action":"x"}}}"#,
            400,
            "invalid_field",
        ),
        (&[("x-berth-retention", "forever")], r#"{"session_id":"s"}"#, 400, "invalid_field"),
        (&[("x-berth-delta", "1")], "{}", 400, "delta_without_session"),
        (&[], r#"{"session_params":{"id":"nobody"}}"#, 404, "session_unknown"),
        (&[], &format!("{{\"a\":\"{}\"}}", "x".repeat(1000)), 413, "body_too_large"),
    ];
    for (headers, body, status, code) in cases {
        let answer = router.chat(headers, body).await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{body}");
    }
    assert_eq!(a.turns().len(), 0);
    let unknown = router.call(Method::GET, "/nowhere", &[], "").await;
    assert_eq!(unknown.refusal(), (404, "route_unknown".to_owned()));
    let models = router.call(Method::GET, "/v1/models", &[], "").await;
    assert_eq!(models.status, StatusCode::OK);
    assert_eq!(a.turns()[0].path, "/v1/models");
}

#[tokio::test]
async fn a_refused_connection_is_tried_elsewhere_unless_the_session_is_bound() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    b.inner.used_tokens.store(9_000, Ordering::Relaxed);
    let router = Router::start(&[&a, &b]).await;
    let pinned = r#"{"session_id":"p","retention":"pinned"}"#;
    let opened = router.call(Method::POST, "/v1/sessions", &[], pinned).await;
    assert_eq!(opened.json()["worker"], "a/0");
    a.close_data_port();
    let delta = r#"{"session_params":{"id":"p"}}"#;
    wait_until("a's data port is closed", async || {
        router.chat(&[], delta).await.status == StatusCode::SERVICE_UNAVAILABLE
    })
    .await;
    let bound = router.chat(&[], delta).await;
    assert_eq!(bound.code(), "worker_unreachable");
    assert_eq!(bound.header("retry-after"), "1");
    // An unreachable worker gets no new sessions, except one now and then.
    let mut turn = 0;
    wait_until("a new session is tried on a, then on b", async || {
        turn += 1;
        let answer = router.chat(&[("x-berth-session-id", &format!("s{turn}"))], "{}").await;
        assert_eq!((answer.status, answer.header("x-berth-worker")), (StatusCode::OK, "b/0"));
        router.metrics().await.contains("berth_router_retries_total{reason=\"connect\"}")
    })
    .await;
    wait_until("the view shows a as stale", async || {
        turn += 1;
        router.chat(&[("x-berth-session-id", &format!("s{turn}"))], "{}").await;
        let workers = router.call(Method::GET, "/v1/workers", &[], "").await.json();
        let reason = workers["workers"][0]["reason"].as_str().unwrap_or_default().to_owned();
        workers["workers"][0]["state"] == "stale" && reason.contains("data port")
    })
    .await;
    // A last turn that reached no agent still closes its session.
    let last = [("x-berth-session-id", "p"), ("x-berth-session-final", "1")];
    assert_eq!(router.chat(&last, "{}").await.status, StatusCode::SERVICE_UNAVAILABLE);
    wait_until("the session is closed", async || a.session_count() == 0).await;
}

#[tokio::test]
async fn a_turn_has_one_deadline() {
    let a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.timeouts.turn_ms_max = 300;
    let router = Router::start_with(settings).await;
    let aborted_answers = || a.inner.aborted_answers.load(Ordering::Relaxed);
    // If the machine stalls, the turn may time out before the agent has it. Then send another.
    wait_until("a turn is cut off at the agent", async || {
        let late = router.chat(&[("x-test-wait", "head")], "{}").await;
        let code = late.code();
        assert_eq!((late.status.as_u16(), code.as_str()), (504, "turn_timeout"));
        aborted_answers() > 0
    })
    .await;
    wait_until("the agent has seen every turn end", async || aborted_answers() >= a.turns().len())
        .await;
    wait_until("an answer is cut short", async || {
        let waiting: Headers<'_> = &[("x-test-wait", "tail")];
        let begun = router.begin(Method::POST, "/generate", waiting, "{\"a\":1}").await;
        let in_time = begun.status() == 418;
        let collected = begun.into_body().collect().await;
        assert!(!in_time || collected.is_err(), "a cut answer must not look whole: {collected:?}");
        in_time
    })
    .await;
    wait_until("the agent has seen every turn end", async || aborted_answers() >= a.turns().len())
        .await;
}

#[tokio::test]
async fn a_draining_router_lets_its_turns_end() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let turn = router.begin(Method::POST, "/v1/responses", &[("x-test-wait", "tail")], "{\"a\":1}");
    let turn = turn.await;
    let stopped = router.stop();
    let ends = async {
        a.inner.release.add_permits(1);
        collect(turn).await
    };
    let (stopped, turn) = tokio::join!(stopped, ends);
    stopped.unwrap();
    assert_eq!(turn.body, "{\"a\":1}");
}

#[tokio::test]
async fn turns_beyond_the_bound_are_refused_at_once() {
    let a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.limits.turns_in_flight_max = 1;
    let router = Router::start_with(settings).await;
    let waiting: Headers<'_> = &[("x-test-wait", "tail")];
    let turn = router.begin(Method::POST, "/v1/messages", waiting, "{\"a\":1}").await;
    let refused = router.chat(&[], "{}").await;
    let code = refused.code();
    assert_eq!((refused.status.as_u16(), code.as_str()), (429, "turns_in_flight"));
    a.inner.release.add_permits(1);
    assert_eq!(collect(turn).await.status, StatusCode::OK);
    assert_eq!(router.chat(&[], "{}").await.status, StatusCode::OK);
}

#[tokio::test]
async fn why_a_turn_went_where_it_went_can_be_asked_afterwards() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    let turn = router.chat(&[("x-berth-session-id", "s")], "{}").await;
    let id = turn.header("x-berth-turn");
    let why = router.call(Method::GET, &format!("/v1/placements/{id}"), &[], "").await;
    assert_eq!(why.status, StatusCode::OK, "{why:?}");
    let why = why.json();
    let placed = &why["placements"][0];
    assert_eq!(placed["worker"], turn.header("x-berth-worker"));
    assert_eq!(placed["reason"], turn.header("x-berth-placement"));
    let compared = placed["compared"].as_array().unwrap();
    assert_eq!(compared[0]["worker"], placed["worker"], "the best is first: {why}");
    assert_eq!(compared.len(), 2);
    assert!(placed["compared"][0]["cost_ms"].is_u64(), "{why}");
    // A client that has one turn's id must not be able to guess another's by counting.
    let next = router.chat(&[], "{}").await;
    let number = |id: &str| u64::from_str_radix(id, 16).unwrap();
    assert!(number(id).abs_diff(number(next.header("x-berth-turn"))) > 1 << 20);
    for unknown in ["0000000000000000", "not-a-turn"] {
        let none = router.call(Method::GET, &format!("/v1/placements/{unknown}"), &[], "").await;
        assert_eq!((none.status, &*none.code()), (StatusCode::NOT_FOUND, "placement_unknown"));
    }
}

//! End-to-end tests of an agent as a router sees it, against the engine simulator.
//!
//! They cover exact pinned turns, the session gate, ends of every kind, closes, refusals, and the
//! requests that reach the engine.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use axum::body::Body;
use engine_sim::{Config, EngineSim, hand_off::EngineMode, loopback::own_addr};
use harness::{
    cluster::{
        Agent, Cluster, ClusterSettings, PATIENCE, agent_config, eventually, ready,
        text_turn as turn,
    },
    envelope::{ENVELOPE, envelope_of},
    web::{Answer, Web},
};
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};

async fn start(change: impl FnOnce(&mut ClusterSettings)) -> Cluster {
    Cluster::start_worker(change).await.unwrap()
}

/// Makes decode steps slow, so that a test can act while a turn runs.
fn slow(settings: &mut ClusterSettings) {
    settings.engine.core.decode_ms_per_step = 20.0;
}

async fn generate(cluster: &Cluster, claim: Option<&Value>, body: &Value) -> Answer {
    post(cluster, "/generate", claim, body).await
}

/// Sends a request with the claim that a router would send.
async fn post(cluster: &Cluster, path: &str, claim: Option<&Value>, body: &Value) -> Answer {
    let envelope = claim.map(envelope_of);
    let headers: Vec<(&str, &str)> =
        envelope.iter().map(|envelope| (ENVELOPE, envelope.as_str())).collect();
    cluster.post(path, &headers, body).await
}

/// Starts a streamed turn; returns the answer after its first event has arrived.
async fn start_stream(cluster: &Cluster, claim: &Value, body: Value) -> http::Response<Incoming> {
    cluster.stream("/generate", &[(ENVELOPE, &envelope_of(claim))], body).await
}

fn claim(id: &str) -> Value {
    json!({"principal": "p", "id": id})
}

fn pinned(id: &str) -> Value {
    json!({"principal": "p", "id": id, "retention": "pinned", "open": true})
}

fn delta(id: &str) -> Value {
    json!({"principal": "p", "id": id, "delta": true})
}

fn streamed(text: &str, tokens: u32) -> Value {
    let mut body = turn(text, tokens);
    body["stream"] = true.into();
    body
}

#[tokio::test]
async fn a_turn_that_was_aborted_before_it_came_does_not_run() {
    let cluster = start(|_| {}).await;
    let id = "00000000000000ff";
    let abort = json!({"principal": "p", "rids": ["r"], "unanswered": [id]});
    let told = cluster.post("/berth/abort", &[], &abort).await;
    assert_eq!(told.status, StatusCode::NO_CONTENT, "{}", told.text());
    let of_turn = |id: &str| json!({"principal": "p", "turn": id}).to_string();
    let mut body = turn("hello", 4);
    body["rid"] = "r".into();
    let late = cluster.post("/generate", &[(ENVELOPE, &of_turn(id))], &body).await;
    assert_eq!(late.meta_value("finish_reason")["type"], "abort", "{}", late.text());
    assert_eq!(cluster.turns_seen("/generate"), [0], "the engine has not seen it");
    // Another turn by the same name was not meant.
    let next = cluster.post("/generate", &[(ENVELOPE, &of_turn("0000000000000100"))], &body).await;
    assert_eq!(next.meta_value("finish_reason")["type"], "length", "{}", next.text());
}

/// An agent that demands no proof serves every process of its host. A page that somebody on the
/// host opens is none.
#[tokio::test]
async fn an_agent_without_a_token_serves_no_page_in_a_browser() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    let url = cluster.agent().url("/flush_cache");
    for page in [
        ("origin", "https://evil.example"),
        ("sec-fetch-site", "cross-site"),
        ("host", "evil.example:30100"),
    ] {
        let page = [page];
        let asked = cluster.web.request(Method::GET, &url, &page, Body::empty());
        let refused = asked.await.unwrap();
        assert_eq!(refused.refusal(), (401, "not_a_router".to_owned()), "{page:?}");
    }
    // What a browser says to a router stays there.
    let page = [("origin", "http://own.example"), ("sec-fetch-mode", "cors"), ("cookie", "a=b")];
    let own = cluster.routers[0].data.to_string();
    let origin = format!("http://{own}");
    let headers = [("origin", origin.as_str()), page[1], page[2]];
    cluster.turn("/generate", &headers, &turn("hello", 2)).await;
    let seen = cluster.engine().headers_seen("/generate");
    for (name, _) in page {
        assert!(!seen[0].contains_key(name), "{seen:?}");
    }
}

#[tokio::test]
async fn pinned_turns_cost_only_their_new_tokens() {
    let mut cluster = start(|_| {}).await;
    let first = generate(&cluster, Some(&pinned("s")), &turn("The quick brown fox jumps", 6)).await;
    assert_eq!(first.meta("prompt_tokens"), Some(25), "{}", first.text());
    let second = generate(&cluster, Some(&delta("s")), &turn(" over the", 6)).await;
    assert_eq!((second.meta("prompt_tokens"), second.meta("cached_tokens")), (Some(40), Some(30)));
    let third = generate(&cluster, Some(&delta("s")), &streamed(" lazy", 4)).await;
    assert!(third.text().ends_with("data: [DONE]\n\n"), "{}", third.text());
    assert!(third.text().contains("\"cached_tokens\":45"), "{}", third.text());
    cluster.agents.remove(0).stop().await.unwrap();
    let facts = cluster.engine().pool(0).await.unwrap();
    assert_eq!((facts.used(), facts.sessions.len()), (0, 0), "the agent closed what it opened");
}

#[tokio::test]
async fn an_answer_with_an_absurd_usage_costs_no_more_than_its_session() {
    for said in [u64::MAX, 1 << 63] {
        let cluster = start(|settings| settings.engine.prompt_tokens_said = Some(said)).await;
        let answer = generate(&cluster, Some(&pinned("s")), &turn("hello there", 2)).await;
        assert_eq!(answer.meta("prompt_tokens"), Some(said), "{}", answer.text());
        let next = generate(&cluster, Some(&delta("s")), &turn(" you", 2)).await;
        assert_eq!(
            next.status,
            StatusCode::CONFLICT,
            "no shim proves the history: {}",
            next.text()
        );
        let tagged = json!({"principal": "p", "id": "t", "retention": "tagged", "open": true});
        for claim in [None, Some(&tagged), Some(&pinned("other"))] {
            let answer = generate(&cluster, claim, &turn("hello there", 2)).await;
            assert_eq!(answer.status, StatusCode::OK, "the agent lives on: {}", answer.text());
        }
    }
}

#[tokio::test]
async fn an_engine_whose_role_was_switched_is_described_anew() {
    let cluster = start(|settings| {
        settings.engine.hand_off.mode = EngineMode::Decode;
        settings.engine.can_switch_role = true;
    })
    .await;
    let client = cluster.agent().control_client().await.unwrap();
    let mut roles = vec![];
    for role in [EngineMode::Decode, EngineMode::Prefill] {
        cluster.engine().set_role(role);
        let described = eventually("the role", || {
            let mut client = client.clone();
            async move {
                let answer = client.describe(contract::v1::DescribeRequest {}).await.unwrap();
                let engine = answer.into_inner().engine.unwrap();
                (engine.disaggregation == role.as_str()).then_some(engine)
            }
        })
        .await;
        roles.push(described);
    }
    assert_ne!(roles[0].instance, roles[1].instance, "its sessions are not this engine's");
}

#[tokio::test]
async fn the_next_turn_may_follow_the_last_byte_at_once() {
    let cluster = start(|_| {}).await;
    for number in 0..60 {
        let claim = if number == 0 { pinned("s") } else { delta("s") };
        let body = if number % 2 == 0 { streamed("ab", 2) } else { turn("ab", 2) };
        let answer = generate(&cluster, Some(&claim), &body).await;
        assert_eq!(answer.status, StatusCode::OK, "turn {number}: {}", answer.text());
    }
}

#[tokio::test]
async fn a_second_turn_is_refused_at_once_and_harms_nothing() {
    let cluster = start(|_| {}).await;
    let alone = generate(&cluster, None, &turn("hello there", 40)).await;
    cluster.slow_down(1.0).await;
    let first = start_stream(&cluster, &pinned("s"), turn("hello there", 40)).await;
    for _ in 0..3 {
        let second = generate(&cluster, Some(&delta("s")), &turn("x", 1)).await;
        assert_eq!((second.status, second.code().as_str()), (StatusCode::CONFLICT, "session_busy"));
    }
    cluster.slow_down(0.0).await;
    let rest = first.into_body().collect().await.unwrap().to_bytes();
    let last = String::from_utf8_lossy(&rest);
    let ids = alone.json()["output_ids"].to_string();
    assert!(last.contains(&ids), "the first turn's tokens changed: {last}");
    assert_eq!(
        cluster.engine().bodies_seen("/generate").len(),
        2,
        "no refused turn reached the engine"
    );
}

#[tokio::test]
async fn a_vanished_client_s_turn_blocks_its_session_until_the_engine_ends_it() {
    let cluster = start(slow).await;
    generate(&cluster, Some(&pinned("s")), &turn("hello there", 2)).await;
    drop(start_stream(&cluster, &delta("s"), turn(" you", 500)).await);
    let next = eventually("the end of the aborted turn", || async {
        let answer = generate(&cluster, Some(&delta("s")), &turn(" me", 2)).await;
        let running = cluster.engine().pool(0).await.unwrap().running;
        match answer.status {
            StatusCode::OK => Some(answer),
            StatusCode::CONFLICT => None,
            other => panic!("{other}: {}, {running} running", answer.text()),
        }
    })
    .await;
    assert_eq!(next.meta("prompt_tokens"), Some(11 + 2 + 3), "the aborted turn left no trace");
}

#[tokio::test]
async fn the_turn_of_a_vanished_client_without_streaming_is_aborted_too() {
    let cluster = start(slow).await;
    generate(&cluster, Some(&pinned("s")), &turn("hello there", 2)).await;
    let url = cluster.agent().url("/generate");
    let envelope = envelope_of(&delta("s"));
    let headers = [("content-type", "application/json"), (ENVELOPE, envelope.as_str())];
    let body = turn(" you", 500).to_string();
    let answer = cluster.web.send(Method::POST, &url, &headers, body);
    let running = eventually("the turn inside the engine", || async {
        (cluster.engine().pool(0).await.unwrap().running == 1).then_some(())
    });
    // The client disconnects as soon as the turn runs.
    tokio::select! {
        biased;
        answer = answer => panic!("500 tokens at 20 ms take ten seconds: {answer:?}"),
        () = running => {}
    }
    eventually("a free engine", || async {
        (cluster.engine().pool(0).await.unwrap().running == 0).then_some(())
    })
    .await;
    let next = eventually("the gate", || async {
        let answer = generate(&cluster, Some(&delta("s")), &turn(" me", 2)).await;
        (answer.status == StatusCode::OK).then_some(answer)
    })
    .await;
    assert_eq!(next.meta("prompt_tokens"), Some(11 + 2 + 3));
}

#[tokio::test]
async fn a_close_with_a_turn_takes_effect_at_its_end() {
    let cluster = start(slow).await;
    let mut closing = pinned("s");
    closing["close"] = true.into();
    let stream = start_stream(&cluster, &closing, turn("hello there", 30)).await;
    let other = generate(&cluster, Some(&delta("s")), &turn("x", 1)).await;
    assert_eq!(other.refusal(), (409, "session_closing".to_owned()), "closing beats busy");
    let rest = stream.into_body().collect().await.unwrap().to_bytes();
    assert!(rest.ends_with(b"data: [DONE]\n\n"));
    cluster.nothing_held().await;
}

#[tokio::test]
async fn a_close_with_a_turn_takes_effect_when_its_client_vanishes() {
    let cluster = start(slow).await;
    let mut closing = pinned("s");
    closing["close"] = true.into();
    drop(start_stream(&cluster, &closing, turn("hello there", 500)).await);
    cluster.nothing_held().await;
}

#[tokio::test]
async fn a_close_with_a_refused_turn_still_closes() {
    let cluster = start(|_| {}).await;
    generate(&cluster, Some(&pinned("s")), &turn("hello there", 2)).await;
    let mut closing = delta("s");
    closing["close"] = true.into();
    let refused = generate(&cluster, Some(&closing), &json!({"text": ["a", "b"]})).await;
    assert_eq!(refused.code(), "batch_in_session");
    cluster.nothing_held().await;
}

#[tokio::test]
async fn tagged_turns_are_tagged_by_incarnation_and_pass_untouched() {
    let cluster = start(|_| {}).await;
    let body = json!({"model": "tiny", "max_tokens": 4, "session_id": "evil", "rid": "evil",
        "messages": [{"role": "user", "content": "hello \u{e9}"}]});
    let answer = post(&cluster, "/v1/chat/completions", Some(&claim("s")), &body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let seen = cluster.engine().bodies_seen("/v1/chat/completions").pop().unwrap();
    let seen: Value = serde_json::from_slice(&seen).unwrap();
    let tag = seen["session_id"].as_str().unwrap();
    assert!(tag.starts_with("berth-w0-"), "{tag}");
    assert_eq!(seen["messages"], body["messages"]);
    assert_eq!(seen["rid"].as_str().unwrap().len(), contract::turn_rid::TURN_RID_BYTES);
    assert_eq!(seen["routed_dp_rank"], 0);
    let again = post(&cluster, "/v1/chat/completions", Some(&claim("s")), &body).await;
    let usage = &again.json()["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= 16, "the same prompt again hits whole pages: {usage}");
}

#[tokio::test]
async fn refusals_come_from_the_agent_and_never_reach_the_engine() {
    let cluster = start(|_| {}).await;
    let cases = [
        (
            None,
            json!({"input_ids": [1, 320], "sampling_params": {}}),
            400,
            "token_out_of_vocabulary",
        ),
        (None, json!(["a"]), 400, "invalid_json"),
        (Some(pinned("s")), json!({"text": ["a", "b"]}), 400, "batch_in_session"),
        (
            Some(pinned("s")),
            json!({"text": "a", "sampling_params": {"n": 2}}),
            400,
            "batch_in_session",
        ),
        (
            None,
            json!({"text": "a", "session_params": {"id": "x", "offset": 1}}),
            400,
            "session_params",
        ),
        (Some(delta("unknown")), turn("a", 1), 404, "session_unknown"),
    ];
    for (claim, body, status, code) in cases {
        let answer = generate(&cluster, claim.as_ref(), &body).await;
        assert_eq!(answer.refusal(), (status, code.to_owned()), "{body}");
        assert_eq!(answer.headers["x-berth-refusal"], code);
    }
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "a"}]});
    generate(&cluster, Some(&pinned("s")), &turn("hello", 1)).await;
    let whole = post(&cluster, "/v1/chat/completions", Some(&pinned("s")), &chat).await;
    assert_eq!(whole.refusal(), (409, "whole_history".to_owned()));
    assert_eq!(cluster.engine().bodies_seen("/generate").len(), 1);
    let weights = post(&cluster, "/update_weights_from_disk", None, &json!({})).await;
    assert_eq!(weights.refusal(), (403, "admin_only".to_owned()));
    let forged = generate(&cluster, Some(&json!({"id": "no principal"})), &turn("a", 1)).await;
    assert_eq!(forged.refusal(), (400, "claim".to_owned()));
    let packed = cluster.post("/generate", &[("content-encoding", "gzip")], &turn("a", 1)).await;
    assert_eq!(packed.refusal(), (415, "content_encoding".to_owned()));
    let got = cluster.get("/generate").await;
    assert_eq!(got.refusal(), (405, "method_not_allowed".to_owned()));
    assert_eq!(cluster.engine().bodies_seen("/generate").len(), 1);
}

#[tokio::test]
async fn bodies_have_a_limit() {
    let cluster = start(|settings| settings.agent.limits.body_bytes_max = 2000).await;
    let fits = generate(&cluster, None, &turn(&"a".repeat(500), 1)).await;
    assert_eq!(fits.status, StatusCode::OK, "{}", fits.text());
    let large = generate(&cluster, None, &turn(&"a".repeat(3000), 1)).await;
    assert_eq!(large.refusal(), (413, "body_too_large".to_owned()));
}

/// Asserts a refusal with status 429 and a time to retry.
fn assert_full(refused: &Answer, code: &str) {
    assert_eq!(refused.refusal(), (429, code.to_owned()));
    assert_eq!(refused.headers["retry-after"], "1");
}

#[tokio::test]
async fn a_full_worker_lets_a_turn_wait_for_room_and_refuses_the_next_at_once() {
    let cluster = start(|settings| {
        slow(settings);
        settings.agent.limits.turns_in_flight_max = 1;
        settings.agent.limits.turns_queued_max = 1;
    })
    .await;
    let running = start_stream(&cluster, &claim("a"), turn("hello", 1000)).await;
    let bodies = [turn("x", 1), turn("y", 1)];
    let [one, two] = bodies.each_ref().map(|body| Box::pin(generate(&cluster, None, body)));
    let (refused, waiting) = race(one, two).await;
    assert_full(&refused, "queue_places");
    drop(running);
    assert_eq!(waiting.await.status, StatusCode::OK, "room came while it waited");
}

/// Returns the output of the future that ends first, and the other future.
async fn race<F: Future + Unpin>(mut one: F, mut two: F) -> (F::Output, F) {
    tokio::select! {
        first = &mut one => (first, two),
        first = &mut two => (first, one),
    }
}

#[tokio::test]
async fn a_turn_that_waited_too_long_for_room_is_refused_with_retry_after() {
    let cluster = start(|settings| {
        slow(settings);
        settings.agent.limits.turns_in_flight_max = 1;
        settings.agent.limits.queue_wait_ms_max = 300;
    })
    .await;
    let _running = start_stream(&cluster, &claim("a"), turn("hello", 1000)).await;
    assert_full(&generate(&cluster, None, &turn("x", 1)).await, "queue_time");
}

#[tokio::test]
async fn pinned_sessions_never_take_the_last_row() {
    let cluster = start(|_| {}).await;
    for number in 0..7 {
        let answer =
            generate(&cluster, Some(&pinned(&format!("s{number}"))), &turn("hello", 1)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }
    let full = generate(&cluster, Some(&pinned("s7")), &turn("hello", 1)).await;
    assert_eq!(full.refusal(), (429, "rows".to_owned()));
    let plain = generate(&cluster, None, &turn("hello", 1)).await;
    assert_eq!(plain.status, StatusCode::OK, "the engine still runs");
}

#[tokio::test]
async fn a_whole_history_under_which_the_engine_dies_may_be_sent_again() {
    let cluster = start(slow).await;
    let body = turn("hello there", 300);
    let mut sent = std::pin::pin!(generate(&cluster, None, &body));
    let seen = eventually("the engine has the turn", || async {
        (cluster.engine().bodies_seen("/generate").len() == 1).then_some(())
    });
    tokio::select! {
        answer = &mut sent => panic!("answered too soon: {}", answer.text()),
        () = seen => cluster.engine().kill(),
    }
    let answer = sent.await;
    assert_eq!(answer.refusal(), (502, "engine_broke_off".to_owned()));
    assert_eq!(answer.header("x-should-retry"), "true", "it has its whole history");
}

#[tokio::test]
async fn a_delta_under_which_the_engine_dies_is_no_reason_to_repeat_it_blindly() {
    let cluster = start(slow).await;
    generate(&cluster, Some(&pinned("s")), &turn("hello", 1)).await;
    let (claim, body) = (delta("s"), turn("hello there", 300));
    let mut sent = std::pin::pin!(generate(&cluster, Some(&claim), &body));
    let seen = eventually("the engine has the turn", || async {
        (cluster.engine().bodies_seen("/generate").len() == 2).then_some(())
    });
    tokio::select! {
        answer = &mut sent => panic!("answered too soon: {}", answer.text()),
        () = seen => cluster.engine().kill(),
    }
    let answer = sent.await;
    assert_eq!(answer.refusal(), (502, "engine_broke_off".to_owned()));
    let again = ["x-should-retry", "retry-after"].map(|name| answer.header(name));
    assert_eq!(again, ["false", ""], "it may have run");
}

#[tokio::test]
async fn an_engine_that_is_down_is_503_and_its_return_is_noticed() {
    let listener = tokio::net::TcpListener::bind(own_addr()).await.unwrap();
    let engine = EngineSim::start(Config::default(), listener).unwrap();
    let addr = engine.addr();
    let agent = Agent::start(agent_config(&engine.url(), "w0")).unwrap();
    let (engines, agents, web) = (vec![engine], vec![agent], Web::default());
    let cluster = Cluster { engines, agents, routers: vec![], web };
    ready(&cluster.web, cluster.agent().admin).await;
    generate(&cluster, Some(&pinned("s")), &turn("hello", 1)).await;
    cluster.engine().kill();
    cluster.engine().gone().await;
    let down = eventually("a refusal", || async {
        let answer = generate(&cluster, None, &turn("hello", 1)).await;
        (answer.status == StatusCode::SERVICE_UNAVAILABLE).then_some(answer)
    })
    .await;
    assert_eq!(down.code(), "engine_down");
    let listener =
        eventually("the port", || async { tokio::net::TcpListener::bind(addr).await.ok() }).await;
    let _engine = EngineSim::start(Config::default(), listener).unwrap();
    let lost = eventually("the new engine", || async {
        let answer = generate(&cluster, Some(&delta("s")), &turn("hello", 1)).await;
        (answer.status != StatusCode::SERVICE_UNAVAILABLE).then_some(answer)
    })
    .await;
    assert_eq!(lost.refusal(), (409, "session_lost".to_owned()));
}

#[tokio::test]
async fn an_agent_starts_before_its_engine() {
    let free = tokio::net::TcpListener::bind(own_addr()).await.unwrap();
    let url = format!("http://{}", free.local_addr().unwrap());
    let agent = Agent::start(agent_config(&url, "w0")).unwrap();
    let web = Web::default();
    let early = eventually("an answer", || async {
        web.post(&agent.url("/generate"), &[], &turn("a", 1)).await.ok()
    })
    .await;
    assert_eq!(early.refusal(), (503, "engine_down".to_owned()));
    let engine = EngineSim::start(Config::default(), free).unwrap();
    eventually("the engine", || async {
        let answer = web.post(&agent.url("/generate"), &[], &turn("a", 1)).await.unwrap();
        (answer.status == StatusCode::OK).then_some(())
    })
    .await;
    drop(engine);
}

#[tokio::test]
async fn idle_sessions_expire_and_leave_the_engine() {
    let cluster = start(|settings| settings.agent.sessions.idle_ms_max = 50).await;
    generate(&cluster, Some(&pinned("s")), &turn("hello", 1)).await;
    cluster.nothing_held().await;
    let late = generate(&cluster, Some(&delta("s")), &turn("hello", 1)).await;
    assert_eq!(late.code(), "session_unknown");
}

#[tokio::test]
async fn a_turn_over_its_time_is_cut_off_and_its_session_goes_on() {
    let cluster = start(|settings| {
        slow(settings);
        settings.agent.limits.turn_ms_max = 2_000;
    })
    .await;
    // On a stalled machine, the short turns may time out as well, before they begin.
    let in_time = async |claim: Value, body: Value| {
        eventually("a turn in time", || async {
            let answer = generate(&cluster, Some(&claim), &body).await;
            match (answer.status, answer.code().as_str()) {
                (StatusCode::OK, _) => Some(answer),
                (StatusCode::CONFLICT, "session_busy")
                | (StatusCode::GATEWAY_TIMEOUT, "turn_timeout") => None,
                _ => panic!("{}: {}", answer.status, answer.text()),
            }
        })
        .await
    };
    in_time(pinned("s"), turn("hello there", 2)).await;
    let late = generate(&cluster, Some(&delta("s")), &turn(" you", 400)).await;
    assert_eq!(late.refusal(), (504, "turn_timeout".to_owned()));
    let next = in_time(delta("s"), turn(" me", 2)).await;
    assert_eq!(next.meta("prompt_tokens"), Some(11 + 2 + 3), "{}", next.text());
}

#[tokio::test]
async fn a_dp_rank_is_chosen_once_and_kept() {
    let cluster = start(|settings| settings.engine.dp_size = 2).await;
    for id in ["a", "b"] {
        generate(&cluster, Some(&pinned(id)), &turn("hello there", 2)).await;
        let next = generate(&cluster, Some(&delta(id)), &turn(" you", 2)).await;
        assert_eq!(next.meta("prompt_tokens"), Some(11 + 2 + 4), "another rank has no history");
    }
    let held = [cluster.engine().pool(0).await.unwrap(), cluster.engine().pool(1).await.unwrap()];
    assert_eq!(held.map(|facts| facts.held_rows), [1, 1], "the second session took the free rank");
}

#[tokio::test]
async fn the_control_stream_sends_the_table_then_reports_and_changes_in_order() {
    use contract::v1::{self, load_event::Event};
    let cluster = start(|_| {}).await;
    generate(&cluster, Some(&pinned("before")), &turn("hello", 1)).await;
    let mut client = cluster.agent().control_client().await.unwrap();
    let mut events = client.watch_load(v1::WatchLoadRequest {}).await.unwrap().into_inner();
    let mut sequence = 0;
    let mut next = async || {
        let event = events.message().await.unwrap().expect("the stream goes on");
        assert_eq!(event.sequence, sequence, "a gap");
        sequence += 1;
        event.event.unwrap()
    };
    let Event::Description(description) = next().await else { panic!("description first") };
    let description = contract::load::Description::try_from(description).unwrap();
    assert_eq!((description.agent_id.as_str(), description.ranks[0].rows), ("w0", 8));
    let device = &description.ranks[0].devices[0];
    assert_eq!((device.uuid.as_str(), device.memory_used_bytes), ("cpu", None), "absent, not zero");
    let Event::Sessions(table) = next().await else { panic!("the table second") };
    assert!(table.last);
    assert_eq!(table.sessions[0].key.as_ref().unwrap().id, "before");
    generate(&cluster, Some(&pinned("after")), &turn("hello", 1)).await;
    let (mut opened, mut counted) = (false, false);
    while !(opened && counted) {
        match next().await {
            Event::Change(v1::SessionChange {
                change: Some(v1::session_change::Change::Upsert(session)),
            }) => opened |= session.key.unwrap().id == "after" && session.turns == 1,
            Event::Report(report) => {
                let report = contract::load::LoadReport::try_from(report).unwrap();
                let rank = &report.ranks[0];
                counted |= rank.rows_held.unwrap().value == 2 && rank.turns_running == 0;
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn grpc_opens_and_closes_name_the_missing_resource() {
    use contract::v1;
    let cluster = start(|_| {}).await;
    let mut client = cluster.agent().control_client().await.unwrap();
    let key = |id: &str| Some(v1::SessionKey { principal: "p".into(), id: id.into() });
    let open = |id: &str| v1::OpenSessionRequest {
        key: key(id),
        retention: v1::Retention::Pinned as i32,
        ..Default::default()
    };
    for number in 0..7 {
        client.open_session(open(&format!("s{number}"))).await.unwrap();
    }
    let full = client.open_session(open("s7")).await.unwrap_err();
    assert_eq!(full.code(), tonic::Code::ResourceExhausted);
    assert!(full.message().contains("rows"), "{}", full.message());
    let listed =
        client.list_sessions(v1::ListSessionsRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.sessions.len(), 7);
    let close = v1::CloseSessionRequest { key: key("s0"), ..Default::default() };
    let mut other = client.clone();
    let (first, second) =
        tokio::join!(client.close_session(close.clone()), other.close_session(close));
    assert_ne!(first.is_ok(), second.is_ok(), "exactly one close is too late");
    eventually("room", || async {
        let mut client = client.clone();
        client.open_session(open("s7")).await.ok()
    })
    .await;
}

#[tokio::test]
async fn a_wedge_caused_by_foreign_sessions_makes_the_worker_unhealthy_with_a_reason() {
    let cluster = start(|settings| settings.agent.engine.stall_ms_max = 300).await;
    let engine = |path: &str| format!("{}{path}", cluster.engine().url());
    // Another client opens sessions directly on the engine, until they hold all of its rows.
    for number in 0..8 {
        let id = format!("someone-{number}");
        let open = json!({"capacity_of_str_len": 1, "session_id": id, "streaming": true});
        cluster.web.post(&engine("/open_session"), &[], &open).await.unwrap();
        let mut first = turn("hello", 1);
        first["session_params"] = json!({"id": id});
        let answer = cluster.web.post(&engine("/generate"), &[], &first).await.unwrap();
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }
    let ready_now =
        || async { cluster.web.get(&cluster.agent().admin_url("/readyz")).await.unwrap() };
    assert_eq!(ready_now().await.status, StatusCode::OK, "nothing waits yet");
    let body = turn("hello", 1);
    let stuck = generate(&cluster, None, &body);
    let unwedged = async {
        let reason = eventually("the worker's complaint", || async {
            let answer = ready_now().await;
            (answer.status == StatusCode::SERVICE_UNAVAILABLE).then(|| answer.text())
        })
        .await;
        assert!(reason.contains("1 requests wait") && reason.contains("close them"), "{reason}");
        let close = json!({"session_id": "someone-0"});
        cluster.web.post(&engine("/close_session"), &[], &close).await.unwrap();
    };
    let (answer, ()) = tokio::join!(stuck, unwedged);
    assert_eq!(answer.status, StatusCode::OK, "one close lets it run");
    eventually("health", || async { (ready_now().await.status == 200).then_some(()) }).await;
}

#[tokio::test]
async fn tokens_of_foreign_sessions_count_as_pinned() {
    let cluster = start(|_| {}).await;
    let engine = |path: &str| format!("{}{path}", cluster.engine().url());
    let open = json!({"capacity_of_str_len": 1, "session_id": "someone", "streaming": true});
    cluster.web.post(&engine("/open_session"), &[], &open).await.unwrap();
    let mut first = turn(&"x".repeat(900), 1);
    first["session_params"] = json!({"id": "someone"});
    cluster.web.post(&engine("/generate"), &[], &first).await.unwrap();
    let metrics = || cluster.agent_metrics();
    eventually("the foreign tokens", || async {
        let line = "berth_agent_foreign_tokens{dp_rank=\"0\"} 912";
        metrics().await.contains(line).then_some(())
    })
    .await;
    let refused = generate(&cluster, Some(&pinned("s")), &turn(&"y".repeat(500), 100)).await;
    assert_eq!(refused.refusal(), (429, "pin_tokens".to_owned()));
}

#[tokio::test]
async fn sessions_are_counted_by_retention_and_state_while_they_live_and_when_they_end() {
    let cluster = start(|_| {}).await;
    let first = generate(&cluster, Some(&pinned("s")), &turn("hello", 1)).await;
    assert_eq!(first.status, StatusCode::OK, "{}", first.text());
    let has = |line: &'static str| {
        let cluster = &cluster;
        eventually(line, move || async move {
            cluster.agent_metrics().await.contains(&format!("{line}\n")).then_some(())
        })
    };
    has("berth_agent_sessions{dp_rank=\"0\",retention=\"pinned\",state=\"idle\"} 1").await;
    has("berth_agent_sessions_begun_total{retention=\"pinned\"} 1").await;
    has("berth_agent_sessions_open{dp_rank=\"0\"} 1").await;
    let text = cluster.agent_metrics().await;
    assert!(!text.contains("berth_agent_sessions_ended_total{"), "{text}");
    assert!(text.contains("berth_agent_queue_seconds_count 1\n"), "{text}");
    let figure = |name: &str| -> f64 {
        let line = format!("berth_agent_{name}{{dp_rank=\"0\"}} ");
        text.lines().find_map(|shown| shown.strip_prefix(&line)).expect(name).parse().unwrap()
    };
    let (budget, pool) = (figure("pin_budget_tokens"), figure("pool_total_tokens"));
    assert!((budget - 0.7 * pool).abs() <= 1.0, "{budget} of {pool}");
    assert!(figure("pinned_tokens") > 0.0, "{text}");
    let mut closing = delta("s");
    closing["close"] = true.into();
    assert_eq!(generate(&cluster, Some(&closing), &turn(" you", 1)).await.status, StatusCode::OK);
    has("berth_agent_sessions_ended_total{retention=\"pinned\"} 1").await;
    has("berth_agent_sessions{dp_rank=\"0\",retention=\"pinned\",state=\"idle\"} 0").await;
}

#[tokio::test]
async fn the_prefill_speed_is_measured() {
    let cluster = start(|_| {}).await;
    let figure = |text: &str, name: &str| -> Option<u64> {
        let line = format!("berth_agent_{name}{{dp_rank=\"0\"}} ");
        text.lines().find_map(|shown| shown.strip_prefix(&line))?.parse().ok()
    };
    let prompts = std::cell::Cell::new(b'a');
    let rate = eventually("a rate", || async {
        let byte = char::from(prompts.replace(prompts.get() % b'z' + 1));
        generate(&cluster, None, &turn(&byte.to_string().repeat(900), 1)).await;
        let text = cluster.agent_metrics().await;
        figure(&text, "prefill_rate_tokens_per_second").zip(figure(&text, "prefill_backlog_tokens"))
    })
    .await;
    // The simulator computes one token in 10 us.
    assert!((95_000..=105_000).contains(&rate.0), "{rate:?}");
    assert!(rate.1 <= 900, "{rate:?}");
}

#[tokio::test]
async fn the_next_agent_closes_the_sessions_of_a_killed_one() {
    let state = tempfile::tempdir().unwrap();
    let engine = EngineSim::start_local(Config::default()).await.unwrap();
    let settings = || {
        let mut config = agent_config(&engine.url(), "w0");
        config.files.state_dir = state.path().to_owned();
        config
    };
    let web = Web::default();
    let first = tokio::task::spawn_blocking({
        let config = settings();
        let web = web.clone();
        // The agent runs on its own runtime, which can be ended between two polls, as a kill ends a
        // process.
        move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let agent = Agent::start(config.clone()).unwrap();
                ready(&web, agent.admin).await;
                let headers = [(ENVELOPE, &*envelope_of(&pinned("s")))];
                let answer = web.post(&agent.url("/generate"), &headers, &turn("hello", 2)).await;
                assert_eq!(answer.unwrap().status, StatusCode::OK);
                let second = Agent::start(config).unwrap().stop().await.unwrap_err();
                assert!(second.to_string().contains("another agent"), "{second}");
            });
            // Returns when the whole agent is gone, its lock included.
            runtime.shutdown_timeout(PATIENCE);
        }
    });
    first.await.unwrap();
    let left = engine.pool(0).await.unwrap();
    assert_eq!((left.sessions.len(), left.held_rows), (1, 1), "what the kill left");
    let next = Agent::start(settings()).unwrap();
    ready(&web, next.admin).await;
    eventually("an empty engine", || async {
        let facts = engine.pool(0).await.unwrap();
        (facts.sessions.is_empty() && facts.held_rows == 0).then_some(())
    })
    .await;
    next.stop().await.unwrap();
}

#[tokio::test]
async fn a_client_that_pins_all_that_it_can_leaves_rows_to_others_and_takes_no_more_sessions() {
    let cluster = start(|settings| {
        settings.engine.core.max_running_requests = 32;
        settings.engine.core.max_total_tokens = 1 << 16;
        settings.agent.sessions.pin_rows_ratio = 0.5;
        settings.agent.limits.principal_sessions_max = 20;
    })
    .await;
    let mut codes = vec![];
    for number in 0..31 {
        let claim = json!({
            "principal": "hostile", "id": number.to_string(), "retention": "pinned", "open": true,
            "idle_ms_max": u64::MAX,
        });
        codes.push(generate(&cluster, Some(&claim), &turn("a", 1)).await.code());
    }
    let count = |wanted: &str| codes.iter().filter(|code| *code == wanted).count();
    assert_eq!((count(""), count("rows")), (16, 15), "half of the rows: {codes:?}");
    let mut tagged = String::new();
    for number in 0..5 {
        let claim = json!({"principal": "hostile", "id": format!("t{number}"), "open": true});
        tagged = generate(&cluster, Some(&claim), &turn("a", 1)).await.code();
    }
    assert_eq!(tagged, "principal_sessions");
    // Turns of another client run at once; before, one row was left to all of them.
    cluster.slow_down(0.1).await;
    let mut streams = vec![];
    for _ in 0..16 {
        let headers = [(ENVELOPE, r#"{"principal":"other"}"#)];
        streams.push(cluster.stream("/generate", &headers, turn("hello there", 400)).await);
    }
    let facts = cluster.engine().pool(0).await.unwrap();
    assert_eq!(facts.running, 16);
    cluster.slow_down(0.0).await;
    drop(streams);
    let shares = cluster.agent_metrics().await;
    assert!(shares.contains("berth_agent_principal_pinned_rows_max 16"), "{shares}");
}

//! End-to-end tests of turns that clients abort, of stored responses, and of streams that wait.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use axum::body::Body;
use harness::{
    cluster::{Cluster, ClusterSettings, eventually, router_config, text_turn},
    keys::{KeyFixture, TestKey},
    web::{Answer, Headers},
};
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::task::JoinSet;

const KEYS: [TestKey<'_>; 3] =
    [("alice", "sk-alice", ""), ("bob", "sk-bob", ""), ("ops", "sk-ops", "admin = true")];
const ALICE: (&str, &str) = ("x-api-key", "sk-alice");
const BOB: (&str, &str) = ("x-api-key", "sk-bob");
const OPS: (&str, &str) = ("x-api-key", "sk-ops");

/// An answer of so many tokens doesn't end by itself during a test.
const ENDLESS: u32 = 100_000;

async fn start(
    workers: usize,
    keys: &KeyFixture,
    change: impl FnOnce(&mut ClusterSettings),
) -> Cluster {
    let cluster = Cluster::start(workers, |settings| {
        settings.engine.enable_response_store = true;
        settings.engine.core.max_total_tokens = 1 << 20;
        settings.engine.core.context_len = 1 << 19;
        settings.router.as_mut().unwrap().auth.keys_file = keys.path();
        change(settings);
    });
    cluster.await.unwrap()
}

fn keys() -> KeyFixture {
    KeyFixture::new(&KEYS).unwrap()
}

fn endless(rid: &str) -> Value {
    let mut body = text_turn("hello there", ENDLESS);
    body["rid"] = rid.into();
    body
}

/// Sends a turn in the background of the test. `label` names it in the set.
fn spawn(
    turns: &mut JoinSet<(&'static str, Answer)>,
    cluster: &Cluster,
    label: &'static str,
    (path, headers, body): (&'static str, Vec<(&'static str, &'static str)>, Value),
) {
    let (web, url) = (cluster.web.clone(), cluster.url(path));
    turns.spawn(async move { (label, web.post(&url, &headers, &body).await.unwrap()) });
}

async fn abort(cluster: &Cluster, key: (&str, &str), body: Value) -> Answer {
    cluster.post("/abort_request", &[key], &body).await
}

async fn wait_for_turns(cluster: &Cluster, path: &str, turns: usize) {
    eventually("the turns at the engines", || async {
        (cluster.turns_seen(path).iter().sum::<usize>() >= turns).then_some(())
    })
    .await;
}

/// Reads the data of a stream's next frame.
async fn next_data(answer: &mut Response<Incoming>) -> Option<String> {
    let frame = answer.body_mut().frame().await?.unwrap();
    Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
}

async fn send_stream(
    cluster: &Cluster,
    path: &str,
    headers: Headers<'_>,
    mut body: Value,
) -> Response<Incoming> {
    body["stream"] = true.into();
    let headers = [&[("content-type", "application/json")], headers].concat();
    let url = cluster.url(path);
    cluster.web.send(Method::POST, &url, &headers, body.to_string()).await.unwrap()
}

fn ended_by_abort(answer: &Answer) -> bool {
    answer.meta_value("finish_reason")["type"] == "abort"
}

#[tokio::test]
async fn a_client_aborts_its_turns_by_its_own_names_and_nobody_elses() {
    let keys = keys();
    let cluster = start(2, &keys, |_| {}).await;
    let mut turns = JoinSet::new();
    for (label, key) in [("alice's", ALICE), ("bob's", BOB)] {
        spawn(&mut turns, &cluster, label, ("/generate", vec![key], endless("r")));
    }
    wait_for_turns(&cluster, "/generate", 2).await;
    // None of these aborts names a turn that its sender may abort, so no turn ends.
    for (key, body) in [(BOB, json!({"rid": "s"})), (BOB, json!({"rid": ""})), (BOB, json!({}))] {
        assert_eq!(abort(&cluster, key, body).await.status, StatusCode::OK);
    }
    assert_eq!(abort(&cluster, BOB, json!({"rid": "r"})).await.status, StatusCode::OK);
    let (label, answer) = turns.join_next().await.unwrap().unwrap();
    assert_eq!((label, answer.status), ("bob's", StatusCode::OK), "{}", answer.text());
    assert!(ended_by_abort(&answer), "{}", answer.text());
    // Alice aborts hers through another router, which has never seen it.
    let mut config = router_config(&[]);
    config.auth.keys_file = keys.path();
    let mut cluster = cluster;
    cluster.start_router(config).await.unwrap();
    let url = cluster.routers[1].url("/abort_request");
    let body = json!({"rid": ["unknown", "r"]});
    assert_eq!(cluster.web.post(&url, &[ALICE], &body).await.unwrap().status, StatusCode::OK);
    let (_, answer) = turns.join_next().await.unwrap().unwrap();
    assert!(ended_by_abort(&answer), "{}", answer.text());
    cluster.nothing_held().await;
}

#[tokio::test]
async fn abort_all_ends_the_callers_turns_and_an_admins_everybodys() {
    let keys = keys();
    let cluster = start(1, &keys, |_| {}).await;
    let mut turns = JoinSet::new();
    spawn(&mut turns, &cluster, "alice's", ("/generate", vec![ALICE], endless("a")));
    spawn(&mut turns, &cluster, "bob's", ("/generate", vec![BOB], endless("b")));
    let chat = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": ENDLESS, "ignore_eos": true,
    });
    spawn(&mut turns, &cluster, "bob's chat", ("/v1/chat/completions", vec![BOB], chat));
    wait_for_turns(&cluster, "/generate", 2).await;
    wait_for_turns(&cluster, "/v1/chat/completions", 1).await;
    abort(&cluster, ALICE, json!({"abort_all": true})).await;
    let (label, answer) = turns.join_next().await.unwrap().unwrap();
    assert!(label == "alice's" && ended_by_abort(&answer), "{label}: {}", answer.text());
    abort(&cluster, OPS, json!({"abort_all": true})).await;
    for _ in 0..2 {
        let (label, answer) = turns.join_next().await.unwrap().unwrap();
        let is_aborted = match label {
            "bob's" => ended_by_abort(&answer),
            _ => answer.json()["choices"][0]["finish_reason"] == "abort",
        };
        assert!(is_aborted, "{label}: {}", answer.text());
    }
}

#[tokio::test]
async fn a_session_goes_on_after_an_abort() {
    let keys = keys();
    let cluster = start(1, &keys, |settings| {
        settings.engine.core.streaming_sessions = true;
    })
    .await;
    let body = json!({"session_id": "s", "retention": "pinned"});
    cluster.post("/v1/sessions", &[ALICE], &body).await;
    let headers = [ALICE, ("x-berth-session-id", "s"), ("x-berth-delta", "1")];
    let first = cluster.turn("/generate", &headers, &text_turn("hello there", 4)).await;
    let mut turns = JoinSet::new();
    let turn = ("/generate", headers.to_vec(), endless("r"));
    spawn(&mut turns, &cluster, "endless", turn);
    wait_for_turns(&cluster, "/generate", 2).await;
    abort(&cluster, ALICE, json!({"rid": "r"})).await;
    let (_, aborted) = turns.join_next().await.unwrap().unwrap();
    assert!(ended_by_abort(&aborted), "{}", aborted.text());
    let next = cluster.turn("/generate", &headers, &text_turn(" you", 4)).await;
    let history = first.meta("prompt_tokens").unwrap() + first.meta("completion_tokens").unwrap();
    let prompt = next.meta("prompt_tokens").unwrap();
    assert!(prompt > history && prompt < history + 20, "{prompt} after {history}: rolled back");
}

#[tokio::test]
async fn the_next_message_after_a_stop_runs_in_a_session_that_the_client_opened() {
    let cluster = Cluster::start(1, |settings| {
        settings.engine.core.max_total_tokens = 1 << 20;
        settings.engine.core.context_len = 1 << 19;
    });
    let cluster = cluster.await.unwrap();
    for retention in ["pinned", "tagged"] {
        let opens = json!({"session_id": retention, "retention": retention});
        let opened = cluster.post("/v1/sessions", &[], &opens).await;
        assert_eq!(opened.status, StatusCode::CREATED, "{}", opened.text());
        // Without a shim, a pinned session takes deltas alone.
        let headers = [("x-berth-session-id", retention), ("x-berth-delta", "1")];
        let headers = if retention == "pinned" { &headers[..] } else { &headers[..1] };
        for round in 0..10 {
            let stream = cluster.stream("/generate", headers, text_turn("hello", ENDLESS)).await;
            // The client stops the answer, and its user's next message comes at once.
            drop(stream);
            let next = cluster.post("/generate", headers, &text_turn("hello you", 1)).await;
            assert_eq!(next.status, StatusCode::OK, "{retention}, round {round}: {}", next.text());
        }
    }
}

#[tokio::test]
async fn one_prompt_of_a_list_is_aborted_by_its_own_name() {
    let keys = keys();
    let cluster = start(1, &keys, |_| {}).await;
    let sampling = text_turn("", ENDLESS)["sampling_params"].clone();
    let runs = async |count: u64| {
        let url = format!("{}/v1/loads", cluster.engine().url());
        let loads = cluster.web.get(&url).await.unwrap().json();
        (loads["loads"][0]["num_running_reqs"] == count).then_some(())
    };
    for (rid, names) in [(json!(["a", "b"]), ["a", "b"]), (json!("r"), ["r_0", "r_1"])] {
        let body = json!({"text": ["hello", "there"], "rid": rid, "sampling_params": sampling});
        let mut turns = JoinSet::new();
        spawn(&mut turns, &cluster, "list", ("/generate", vec![ALICE], body));
        eventually("both prompts", || runs(2)).await;
        abort(&cluster, ALICE, json!({"rid": names[1]})).await;
        eventually("one prompt", || runs(1)).await;
        assert!(turns.try_join_next().is_none(), "{rid}: the other prompt runs on");
        abort(&cluster, ALICE, json!({"rid": names[0]})).await;
        let (_, answer) = turns.join_next().await.unwrap().unwrap();
        let answers = answer.json();
        let ends = answers.as_array().unwrap().iter();
        let ends: Vec<&Value> =
            ends.map(|end| &end["meta_info"]["finish_reason"]["type"]).collect();
        assert_eq!(ends, ["abort", "abort"], "{rid}");
    }
}

#[tokio::test]
async fn a_turn_that_waits_for_room_ends_at_once() {
    let keys = keys();
    let cluster = start(1, &keys, |settings| {
        settings.agent.limits.turns_in_flight_max = 1;
        settings.agent.limits.turns_queued_max = 8;
    })
    .await;
    let mut turns = JoinSet::new();
    spawn(&mut turns, &cluster, "runs", ("/generate", vec![BOB], endless("r")));
    wait_for_turns(&cluster, "/generate", 1).await;
    spawn(&mut turns, &cluster, "waits", ("/generate", vec![ALICE], endless("w")));
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "model": "tiny"});
    let named = vec![ALICE, ("x-request-id", "c")];
    spawn(&mut turns, &cluster, "chat", ("/v1/chat/completions", named, chat));
    eventually("two that wait", || async {
        let line = "berth_agent_turns_queued{dp_rank=\"0\"} 2\n";
        cluster.agent_metrics().await.contains(line).then_some(())
    })
    .await;
    abort(&cluster, ALICE, json!({"rid": "w"})).await;
    let (label, answer) = turns.join_next().await.unwrap().unwrap();
    assert_eq!((label, answer.status), ("waits", StatusCode::OK), "{}", answer.text());
    let reason = answer.meta_value("finish_reason");
    assert_eq!(reason, json!({"type": "abort", "message": "Abort in waiting queue"}));
    assert_eq!(answer.meta_value("id"), "w");
    abort(&cluster, ALICE, json!({"rid": "c"})).await;
    let (_, answer) = turns.join_next().await.unwrap().unwrap();
    assert_eq!(answer.refusal(), (409, "turn_aborted".to_owned()));
    assert_eq!(answer.header("x-should-retry"), "false");
    assert_eq!(cluster.turns_seen("/v1/chat/completions"), [0], "it never ran");
}

#[tokio::test]
async fn a_turn_without_an_id_in_the_engine_is_cut_off() {
    let keys = keys();
    let cluster = start(1, &keys, |_| {}).await;
    let body = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": ENDLESS,
    });
    let headers = [ALICE, ("x-request-id", "m")];
    // The simulated model may end a message early, so that there is nothing to abort.
    cluster.slow_down(0.5).await;
    let mut answer = send_stream(&cluster, "/v1/messages", &headers, body).await;
    next_data(&mut answer).await.unwrap();
    assert_eq!(abort(&cluster, ALICE, json!({"rid": "m"})).await.status, StatusCode::OK);
    while let Some(frame) = answer.body_mut().frame().await {
        let Ok(frame) = frame else {
            cluster.slow_down(0.0).await;
            return cluster.nothing_held().await;
        };
        let text = String::from_utf8_lossy(frame.data_ref().unwrap()).into_owned();
        assert!(!text.contains("message_stop"), "it was not cut off: {text}");
    }
    panic!("the answer ended as if it were whole");
}

fn response(input: &str) -> Value {
    json!({"model": "tiny", "input": input, "max_output_tokens": 8, "temperature": 0})
}

async fn ask(cluster: &Cluster, router: usize, key: (&str, &str), path: &str) -> Answer {
    let url = cluster.routers[router].url(path);
    cluster.web.request(Method::GET, &url, &[key], Body::empty()).await.unwrap()
}

#[tokio::test]
async fn a_stored_response_is_found_by_every_router_and_by_nobody_else() {
    let keys = keys();
    let mut cluster = start(2, &keys, |_| {}).await;
    let mut config = router_config(&[]);
    config.auth.keys_file = keys.path();
    cluster.start_router(config).await.unwrap();
    for streams in [false, true] {
        let id = if streams {
            let mut answer = send_stream(&cluster, "/v1/responses", &[ALICE], response("hi")).await;
            let mut events = String::new();
            while let Some(data) = next_data(&mut answer).await {
                events.push_str(&data);
            }
            let id = events.split("\"id\":\"").find(|text| text.starts_with("resp_")).unwrap();
            id.split('"').next().unwrap().to_owned()
        } else {
            let answer = cluster.turn("/v1/responses", &[ALICE], &response("hi")).await;
            answer.json()["id"].as_str().unwrap().to_owned()
        };
        let path = format!("/v1/responses/{id}");
        for router in [0, 1] {
            let found = ask(&cluster, router, ALICE, &path).await;
            assert_eq!((found.status.as_u16(), &found.json()["id"]), (200, &json!(id)));
            assert_eq!(found.json()["status"], "completed");
            for other in [BOB, OPS] {
                let refused = ask(&cluster, router, other, &path).await;
                assert_eq!(refused.refusal(), (404, "response_unknown".to_owned()));
            }
        }
        let cancelled = cluster.post(&format!("{path}/cancel"), &[ALICE], &json!({})).await;
        assert_eq!(cancelled.json()["status"], "completed", "as the engine answers it");
        let refused = cluster.post(&format!("{path}/cancel"), &[BOB], &json!({})).await;
        assert_eq!(refused.refusal(), (404, "response_unknown".to_owned()));
    }
    for id in ["resp_1", "x", "%20"] {
        let refused = ask(&cluster, 0, ALICE, &format!("/v1/responses/{id}")).await;
        assert_eq!(refused.refusal(), (404, "response_unknown".to_owned()), "{id}");
    }
}

/// Waits until the router shows a worker in this state.
async fn wait_for_state(cluster: &Cluster, worker: &str, state: &str) {
    eventually(state, || async {
        let shown = cluster.request(Method::GET, "/v1/workers", &[OPS], Body::empty()).await.json();
        let mut workers = shown["workers"].as_array()?.iter();
        workers.find(|it| it["worker"] == worker && it["state"] == state).map(drop)
    })
    .await;
}

#[tokio::test]
async fn a_turn_goes_where_its_previous_response_is() {
    let keys = keys();
    let cluster = start(2, &keys, |settings| {
        settings.engine.core.streaming_sessions = true;
    })
    .await;
    let first = cluster.turn("/v1/responses", &[ALICE], &response("hello there")).await;
    let worker = first.header("x-berth-worker").to_owned();
    let mut id = first.json()["id"].clone();
    let mut tokens = first.json()["usage"]["input_tokens"].as_u64().unwrap();
    for turn in 0..6 {
        let mut body = response("and now");
        body["previous_response_id"] = id;
        let next = cluster.turn("/v1/responses", &[ALICE], &body).await;
        assert_eq!(next.header("x-berth-worker"), worker, "turn {turn}");
        assert_eq!(next.header("x-berth-placement"), "response");
        id = next.json()["id"].clone();
        let grown = next.json()["usage"]["input_tokens"].as_u64().unwrap();
        assert!(grown > tokens, "the engine has put the conversation before it");
        tokens = grown;
    }
    let mut body = response("and now");
    body["previous_response_id"] = id.clone();
    let refused = cluster.post("/v1/responses", &[BOB], &body).await;
    assert_eq!(refused.refusal(), (404, "response_unknown".to_owned()));
    // No other worker has the response, so the turn goes there while that one drains.
    let drained = usize::from(worker.starts_with("w1"));
    let drain = cluster.agents[drained].admin_url("/drain");
    cluster.web.post(&drain, &[], &json!({})).await.unwrap();
    wait_for_state(&cluster, &worker, "draining").await;
    body["previous_response_id"] = id.clone();
    let next = cluster.turn("/v1/responses", &[ALICE], &body).await;
    assert_eq!(next.header("x-berth-worker"), worker);
    let undrain = cluster.agents[drained].admin_url("/undrain");
    cluster.web.post(&undrain, &[], &json!({})).await.unwrap();
    wait_for_state(&cluster, &worker, "fresh").await;
    // A pinned session on the other worker can't follow.
    let mut elsewhere = None;
    for number in 0..16 {
        let session = format!("s{number}");
        let open = json!({"session_id": session, "retention": "pinned"});
        let opened = cluster.post("/v1/sessions", &[ALICE], &open).await.json();
        if opened["worker"] != worker.as_str() {
            elsewhere = Some(session);
            break;
        }
    }
    let session = elsewhere.expect("sessions are spread");
    let headers = [ALICE, ("x-berth-session-id", session.as_str())];
    let refused = cluster.post("/v1/responses", &headers, &body).await;
    assert_eq!(refused.refusal(), (409, "response_elsewhere".to_owned()));
}

#[tokio::test]
async fn what_the_engine_can_not_do_with_a_response_is_refused() {
    let keys = keys();
    let cluster = start(1, &keys, |settings| settings.engine.enable_response_store = false).await;
    let made = cluster.turn("/v1/responses", &[ALICE], &response("hello")).await;
    let path = format!("/v1/responses/{}", made.json()["id"].as_str().unwrap());
    let (deleted, items, streamed) = (
        cluster.request(Method::DELETE, &path, &[ALICE], Body::empty()).await,
        ask(&cluster, 0, ALICE, &format!("{path}/input_items")).await,
        ask(&cluster, 0, ALICE, &format!("{path}?stream=true")).await,
    );
    for refused in [deleted, items, streamed] {
        assert_eq!(refused.refusal(), (501, "engine_lacks".to_owned()));
        assert_eq!(refused.header("x-should-retry"), "false");
    }
    let mut later = response("hello");
    later["background"] = true.into();
    let refused = cluster.post("/v1/responses", &[ALICE], &later).await;
    assert_eq!(refused.refusal(), (400, "background_unsupported".to_owned()));
    // Without a store, the engine itself says what is missing.
    let mut next = response("and now");
    next["previous_response_id"] = made.json()["id"].clone();
    let refused = cluster.post("/v1/responses", &[ALICE], &next).await;
    let retrieved = ask(&cluster, 0, ALICE, &path).await;
    for (answer, param) in [(refused, "previous_response_id"), (retrieved, "response_id")] {
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let error = answer.json()["error"].clone();
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains("--enable-response-store"), "{error}");
    }
}

/// Starts a worker that runs one turn at a time, and a turn of Bob's on it.
async fn start_full(
    keys: &KeyFixture,
    queue_wait_ms_max: u64,
) -> (Cluster, JoinSet<(&'static str, Answer)>) {
    let cluster = start(1, keys, |settings| {
        settings.agent.limits.turns_in_flight_max = 1;
        settings.agent.limits.queue_wait_ms_max = queue_wait_ms_max;
        settings.router.as_mut().unwrap().timeouts.waiting_comment_ms = 20;
    })
    .await;
    let mut turns = JoinSet::new();
    spawn(&mut turns, &cluster, "runs", ("/generate", vec![BOB], endless("r")));
    wait_for_turns(&cluster, "/generate", 1).await;
    (cluster, turns)
}

#[tokio::test]
async fn a_stream_that_waits_shows_comments_and_then_the_engines_bytes() {
    let keys = keys();
    let (cluster, _turns) = start_full(&keys, 60_000).await;
    let mut answer = send_stream(&cluster, "/generate", &[ALICE], text_turn("hello", 3)).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    assert!(answer.headers().contains_key("x-request-id"));
    // Some libraries take each empty line for the end of an event, also of one without data.
    for _ in 0..3 {
        assert_eq!(next_data(&mut answer).await.unwrap(), ": waiting\n");
    }
    let metrics = async || {
        let url = cluster.routers[0].admin_url("/metrics");
        cluster.web.request(Method::GET, &url, &[OPS], Body::empty()).await.unwrap().text()
    };
    let first_bytes = |metrics: String| {
        let line =
            metrics.lines().find(|line| line.contains("first_byte") && line.contains("_count"));
        line.unwrap().split(' ').next_back().unwrap().to_owned()
    };
    let before = first_bytes(metrics().await);
    abort(&cluster, BOB, json!({"rid": "r"})).await;
    let mut stream = String::new();
    while let Some(text) = next_data(&mut answer).await {
        stream.push_str(&text);
    }
    let data = stream.trim_start_matches(": waiting\n");
    assert!(data.starts_with("data: {") && data.ends_with("data: [DONE]\n\n"), "{data}");
    assert!(!data.contains(": waiting"), "no comment after the first event: {data}");
    // Neither Bob's turn, which isn't streamed, nor a comment had counted before.
    assert_ne!(before, first_bytes(metrics().await), "the first event counts");
}

#[tokio::test]
async fn a_refusal_after_comments_is_an_error_event_of_the_clients_api() {
    let keys = keys();
    let (cluster, _turns) = start_full(&keys, 200).await;
    let messages = json!([{"role": "user", "content": "a"}]);
    let chat = json!({"model": "tiny", "messages": messages, "max_tokens": 1});
    for (path, body, begins) in [
        ("/generate", text_turn("hello", 3), "data: {\"error\":{"),
        ("/v1/chat/completions", chat.clone(), "data: {\"error\":{"),
        ("/v1/messages", chat, "event: error\ndata: {"),
    ] {
        let mut answer = send_stream(&cluster, path, &[ALICE], body).await;
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        let mut events = vec![];
        while let Some(data) = next_data(&mut answer).await {
            events.push(data);
        }
        let (last, comments) = events.split_last().unwrap();
        assert!(comments.iter().all(|data| data == ": waiting\n"), "{path}: {comments:?}");
        assert!(!comments.is_empty() && last.starts_with(begins), "{path}: {last}");
        let is_anthropic = path == "/v1/messages";
        assert_eq!(last.contains("\"code\":\"queue_time\""), !is_anthropic, "{path}: {last}");
        assert!(last.contains("rate_limit_error"), "{path}: {last}");
    }
}

/// What counts the ends of turns must not depend on who closes the connection first.
#[tokio::test]
async fn clients_that_leave_at_the_closing_event_have_had_whole_turns_at_router_and_agent() {
    let keys = keys();
    let cluster = start(1, &keys, |_| {}).await;
    let messages = json!([{"role": "user", "content": "a"}]);
    let chat = json!({"model": "tiny", "messages": messages, "max_tokens": 2});
    let response = json!({"model": "tiny", "input": "a", "max_output_tokens": 16});
    let cases = [
        ("/generate", text_turn("hello", 3), "data: [DONE]\n\n"),
        ("/v1/chat/completions", chat.clone(), "data: [DONE]\n\n"),
        ("/v1/messages", chat, "event: message_stop\n"),
        ("/v1/responses", response, "event: response.completed\n"),
    ];
    let turns = cases.len() * 5;
    for (path, body, closing) in cases.iter().cycle().take(turns) {
        let mut answer = send_stream(&cluster, path, &[ALICE], body.clone()).await;
        let mut stream = String::new();
        while !(stream.contains(closing) && stream.ends_with("\n\n")) {
            stream.push_str(&next_data(&mut answer).await.unwrap());
        }
    }
    let url = cluster.routers[0].admin_url("/metrics");
    let answer = cluster.web.request(Method::GET, &url, &[OPS], Body::empty()).await.unwrap();
    let (router, agent) = (answer.text(), cluster.agent_metrics().await);
    assert!(router.contains(&format!("turns_total{{outcome=\"ok\"}} {turns}\n")), "{router}");
    assert!(agent.contains(&format!("turns_total{{outcome=\"finished\"}} {turns}\n")), "{agent}");
}

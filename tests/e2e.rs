//! End-to-end tests over loopback: client → router → agents → simulated engines.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{path::PathBuf, sync::Arc};

use demo::{WORKERS, WorkerLine};
use engine_sim::{Config, EngineSim, shim::SimShim};
use harness::{
    cluster::{
        Agent, Cluster, ClusterSettings, PATIENCE, Router, agent_config, eventually, router_config,
        text_turn as turn,
    },
    envelope::ENVELOPE,
    trace_path,
    web::{Answer, Web},
};
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use replay::{
    Api, ReplayControl, ReplayOptions, Report, SessionHeaders, Workload, drive, load, shape::Shape,
};
use serde_json::{Value, json};

async fn start(workers: usize) -> Cluster {
    start_with(workers, |_| {}).await
}

async fn start_with(workers: usize, change: impl FnOnce(&mut ClusterSettings)) -> Cluster {
    Cluster::start(workers, change).await.unwrap()
}

fn chat(messages: &[(&str, &str)]) -> Value {
    let messages: Vec<Value> =
        messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    json!({"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": messages})
}

const DELTA: (&str, &str) = ("x-berth-delta", "1");

#[tokio::test]
async fn a_pinned_session_lives_from_open_to_delete() {
    let cluster = start(3).await;
    cluster.open_pinned("s").await;
    let session = ("x-berth-session-id", "s");
    let first =
        cluster.post("/generate", &[session, DELTA], &turn("The quick brown fox jumps", 6)).await;
    assert_eq!(first.meta("prompt_tokens"), Some(25), "{}", first.text());
    let by_body = json!({"session_params": {"id": "s"}, "text": " over the",
        "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": true}});
    let second = cluster.post("/generate", &[], &by_body).await;
    assert_eq!((second.meta("prompt_tokens"), second.meta("cached_tokens")), (Some(40), Some(30)));
    let shown = eventually("two turns in the table", || async {
        let shown = cluster.get("/v1/sessions/s").await.json();
        (shown["turns"] == 2).then_some(shown)
    })
    .await;
    assert_eq!(shown["state"], "idle", "{shown}");
    assert_eq!(cluster.delete("/v1/sessions/s").await.status, StatusCode::NO_CONTENT);
    assert_eq!(cluster.delete("/v1/sessions/s").await.status, StatusCode::NOT_FOUND);
    cluster.nothing_held().await;
}

/// Clients disconnect or continue after the last event, without waiting for the connection's end.
#[tokio::test]
async fn the_next_turn_may_follow_the_last_event_at_once() {
    let cluster = start(1).await;
    cluster.open_pinned("s").await;
    let headers = [("content-type", "application/json"), ("x-berth-session-id", "s"), DELTA];
    let url = cluster.url("/generate");
    let mut body = turn("ab", 2);
    body["stream"] = true.into();
    let mut kept = vec![];
    for number in 0..60 {
        let sent = cluster.web.send(Method::POST, &url, &headers, body.to_string()).await;
        let mut answer = sent.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "turn {number}");
        let mut seen = vec![];
        while !seen.ends_with(b"data: [DONE]\n\n") {
            let frame = answer.body_mut().frame().await.expect("it ends with [DONE]").unwrap();
            seen.extend_from_slice(frame.data_ref().expect("no trailers"));
        }
        // Half of the clients keep the connection; the other half disconnect.
        kept.extend((number % 2 == 0).then_some(answer));
    }
}

#[tokio::test]
async fn a_conversation_stays_where_its_kv_is() {
    let cluster = start(3).await;
    let mut messages = vec![("user".to_owned(), "hello there, how are you today?".to_owned())];
    let mut cached = vec![];
    for _ in 0..4 {
        let pairs: Vec<(&str, &str)> =
            messages.iter().map(|(role, text)| (role.as_str(), text.as_str())).collect();
        let headers = [("x-claude-code-session-id", "c1")];
        let answer = cluster.turn("/v1/chat/completions", &headers, &chat(&pairs)).await;
        let usage = answer.json()["usage"].clone();
        cached.push(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0));
        let said = answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        messages.push(("assistant".to_owned(), said));
        messages.push(("user".to_owned(), "and what do you think of that?".to_owned()));
    }
    assert!(cached.windows(2).all(|pair| pair[0] < pair[1]), "the prefix is resident: {cached:?}");
    let turns = cluster.turns_seen("/v1/chat/completions");
    assert_eq!(turns.iter().max(), Some(&4), "all on one worker: {turns:?}");
}

/// Sends seven turns of a growing chat. `edit` changes some of its messages before each turn.
async fn chat_of_turns(cluster: &Cluster, id: &str, edit: fn(&mut [(String, String)], usize)) {
    let message = |role: &str, text: &str| (role.to_owned(), text.to_owned());
    let mut messages = vec![message("system", "secret words"), message("user", "hello there")];
    for turn in 0..7 {
        edit(&mut messages, turn);
        let pairs: Vec<(&str, &str)> =
            messages.iter().map(|(role, text)| (role.as_str(), text.as_str())).collect();
        let headers = [("x-claude-code-session-id", id)];
        cluster.turn("/v1/chat/completions", &headers, &chat(&pairs)).await;
        messages.push(message("assistant", &format!("answer {turn}")));
        messages.push(message("user", &format!("question {turn}")));
    }
}

#[tokio::test]
async fn a_changing_system_block_is_reported_by_its_position() {
    let cluster = start(1).await;
    let mut messages = vec![json!({"role": "user", "content": "hello there"})];
    for turn in 0..4 {
        let moved = json!({"type": "ephemeral"});
        let last = messages.last_mut().unwrap();
        last["content"] =
            json!([{"type": "text", "text": format!("question {turn}"), "cache_control": moved}]);
        let system = json!([
            {"type": "text", "text": "You help."},
            {"type": "text", "text": format!("secret words {turn}")},
            {"type": "text", "text": "Be brief.", "cache_control": moved},
        ]);
        let body =
            json!({"model": "tiny", "max_tokens": 4, "system": system, "messages": messages});
        cluster.turn("/v1/messages", &[("x-claude-code-session-id", "s")], &body).await;
        // Clients send every message except the newest as a plain string.
        let last = messages.last_mut().unwrap();
        last["content"] = format!("question {turn}").into();
        messages.push(json!({"role": "assistant", "content": format!("answer {turn}")}));
        messages.push(json!({"role": "user", "content": ""}));
    }
    let found = json!({
        "token_index": null, "role": "system", "message": 0, "block": 1, "turns": 3,
    });
    eventually("the changing block", || async {
        let shown = cluster.get("/v1/sessions/s").await;
        assert!(!shown.text().contains("secret"), "{}", shown.text());
        (shown.json()["volatile_prefix"] == found).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_volatile_prefix_is_reported_by_position_without_its_text() {
    let cluster = start(1).await;
    chat_of_turns(&cluster, "good", |_, _| {}).await;
    let late = |messages: &mut [(String, String)], turn: usize| {
        let last = messages.len() - 1;
        messages[last].1 = format!("another question {turn}");
    };
    chat_of_turns(&cluster, "late", late).await;
    let early = |messages: &mut [(String, String)], turn: usize| {
        messages[0].1 = format!("secret words {turn}");
    };
    chat_of_turns(&cluster, "bad", early).await;
    let shown = eventually("every turn in the table", || async {
        let shown = cluster.get("/v1/sessions/bad").await.json();
        (shown["turns"] == 7).then_some(shown)
    })
    .await;
    let found = json!({
        "token_index": null, "role": "system", "message": 0, "block": 0, "turns": 6,
    });
    assert_eq!(shown["volatile_prefix"], found, "{shown}");
    let list = cluster.get("/v1/sessions").await.text();
    assert!(!list.contains("secret") && list.contains("volatile_prefix"), "{list}");
    for id in ["good", "late"] {
        let shown = cluster.get(&format!("/v1/sessions/{id}")).await.json();
        assert_eq!(shown["turns"], 7, "{shown}");
        assert_eq!(shown.get("volatile_prefix"), None, "{shown}");
    }
    let metrics = cluster.agent_metrics().await;
    let counted = r#"berth_agent_volatile_prefixes_total{role="system"} 1"#;
    assert!(metrics.contains(counted), "{metrics}");
    let alerts = include_str!("../deploy/prometheus/sessions.yaml");
    assert!(alerts.contains("increase(berth_agent_volatile_prefixes_total["), "{alerts}");
}

#[tokio::test]
async fn a_chat_is_placed_by_its_engine_s_own_tokens() {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data");
    let truth: Value =
        serde_json::from_slice(&std::fs::read(data.join("prompts.json")).unwrap()).unwrap();
    let cases = truth["cases"].as_array().unwrap();
    let case = cases.iter().find(|case| case["case"] == "chatml/system").unwrap();
    let mut body = case["body"].clone();
    body["max_tokens"] = 2.into();
    let model_path = data.join("model").to_str().unwrap().to_owned();
    let cluster = start_with(2, |settings| settings.engine.model_path = model_path).await;
    // The router knows its agents before it has their model files.
    eventually("SGLang's own count of the chat's tokens", || async {
        let answer = cluster.turn("/v1/chat/completions", &[], &body).await;
        let tokens = cluster.placement_record(&answer).await["uncached_tokens"].as_u64();
        (tokens == Some(case["ids"].as_array()?.len() as u64)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn new_sessions_spread_over_the_workers() {
    let cluster = start(4).await;
    for number in 0..8 {
        cluster.open_pinned(&format!("s{number}")).await;
    }
    let mut held = vec![];
    for engine in &cluster.engines {
        held.push(engine.pool(0).await.unwrap().sessions.len());
    }
    // Each worker gets two sessions, unless a load report crosses an open. Placement's own tests
    // check exact counts.
    assert!(held.iter().all(|count| (1..=3).contains(count)), "eight on four workers: {held:?}");
}

#[tokio::test]
async fn the_answer_s_bytes_are_the_engine_s() {
    let cluster = start(1).await;
    for stream in [false, true] {
        let mut body = chat(&[("user", "hello")]);
        body["stream"] = stream.into();
        let through = cluster.post("/v1/chat/completions", &[], &body).await;
        let url = format!("{}/v1/chat/completions", cluster.engine().url());
        let direct = cluster.web.post(&url, &[], &body).await.unwrap();
        assert_eq!(through.headers["content-type"], direct.headers["content-type"]);
        assert_eq!(shape(&through), shape(&direct), "stream: {stream}");
    }
}

/// Returns an answer's bytes, with the values that differ between turns masked.
fn shape(answer: &Answer) -> String {
    let mut text = answer.text();
    for key in ["\"id\":", "\"created\":", "\"cached_tokens\":"] {
        let mut parts = text.split(key);
        let first = parts.next().unwrap_or_default().to_owned();
        text = parts.fold(first, |so_far, part| {
            let end = part.find([',', '}']).unwrap_or(part.len());
            so_far + key + "…" + &part[end..]
        });
    }
    text
}

#[tokio::test]
async fn owned_keys_are_the_agent_s_however_they_are_written() {
    let cluster = start(1).await;
    cluster.open_pinned("s").await;
    let body = concat!(
        r#"{ "rid":"evil", "text" : "a", "\u0072id":["evil"],"session_params":{"id":"evil"},"#,
        r#""routed_dp_rank":7,"nested":{"rid":"kept","session_id":"kept"},"session_id":"evil","#,
        r#""\u0073ession_id":"evil2","data_parallel_rank":9,"bootstrap_room":3,"#,
        r#""sampling_params":{"max_new_tokens":1}  }"#
    );
    let headers = [
        ("content-type", "application/json"),
        ("x-berth-session-id", "s"),
        (ENVELOPE, r#"{"principal":"evil","session":{"id":"evil"},"rank":7}"#),
        ("x-data-parallel-rank", "7"),
    ];
    let answer = cluster.request(Method::POST, "/generate", &headers, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let seen = cluster.engine().bodies_seen("/generate").pop().unwrap();
    let seen = String::from_utf8(seen.to_vec()).unwrap();
    let kept = r#"{ "text" : "a","nested":{"rid":"kept","session_id":"kept"},"sampling_params":{"max_new_tokens":1},"rid":""#;
    assert!(seen.starts_with(kept), "{seen}");
    assert!(seen.contains(r#""session_params":{"id":"berth-w0-"#), "{seen}");
    assert!(seen.ends_with("\"routed_dp_rank\":0  }"), "{seen}");
    assert!(!seen.contains("evil"), "{seen}");
}

#[tokio::test]
async fn bad_input_is_answered_with_what_to_do() {
    let cluster = start(1).await;
    let json = [("content-type", "application/json")];
    let path = "/v1/chat/completions";
    let malformed = cluster.request(Method::POST, path, &json, "{\"a\":").await;
    assert_eq!(malformed.status, StatusCode::BAD_REQUEST, "{}", malformed.text());
    assert_eq!(cluster.get("/v1/sessions/nobody").await.status, StatusCode::NOT_FOUND);
    let long = "x".repeat(257);
    let headers = [("x-berth-session-id", long.as_str())];
    let refused = cluster.post("/v1/chat/completions", &headers, &chat(&[("user", "a")])).await;
    assert_eq!(refused.refusal(), (400, "invalid_session_id".to_owned()));
    let unknown = json!({"session_params": {"id": "nobody"}, "text": "a"});
    let refused = cluster.post("/generate", &[], &unknown).await;
    assert_eq!(refused.refusal(), (404, "session_unknown".to_owned()));
    cluster.open_pinned("s").await;
    let headers = [("x-berth-session-id", "s")];
    let refused = cluster.post("/v1/chat/completions", &headers, &chat(&[("user", "a")])).await;
    assert_eq!(refused.refusal(), (409, "whole_history".to_owned()));
}

#[tokio::test]
async fn a_retention_the_engine_cannot_give_is_409_with_the_reason() {
    let cluster = start_with(1, |settings| settings.engine.core.streaming_sessions = false).await;
    let body = json!({"session_id": "s", "retention": "pinned"});
    let refused = cluster.post("/v1/sessions", &[], &body).await;
    assert_eq!(refused.refusal(), (409, "retention_unavailable".to_owned()));
    assert!(refused.text().contains("tagged"), "it says what is offered: {}", refused.text());
}

#[tokio::test]
async fn the_client_receives_the_agent_s_reason_for_a_refused_open() {
    let cluster = start(1).await;
    cluster.open_pinned("s").await;
    let body = json!({"session_id": "s", "retention": "tagged"});
    let refused = cluster.post("/v1/sessions", &[], &body).await;
    assert_eq!(refused.refusal(), (409, "session_open_otherwise".to_owned()));
}

#[tokio::test]
async fn a_second_turn_waits_if_the_agent_allows_it() {
    let cluster =
        start_with(1, |settings| settings.agent.sessions.turns_queued_per_session_max = 1).await;
    cluster.open_pinned("s").await;
    cluster.slow_down(1.0).await;
    let mut turns = tokio::task::JoinSet::new();
    for text in ["a", "bc", "def"] {
        let (web, url) = (cluster.web.clone(), cluster.url("/generate"));
        let headers = [("x-berth-session-id", "s"), DELTA];
        turns.spawn(async move { web.post(&url, &headers, &turn(text, 20)).await.unwrap() });
    }
    let refused = turns.join_next().await.unwrap().unwrap();
    assert_eq!(refused.status, StatusCode::CONFLICT, "one runs, one waits, one is too many");
    cluster.slow_down(0.0).await;
    let mut prompts = vec![];
    for answer in turns.join_all().await {
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        prompts.push(answer.meta("prompt_tokens").unwrap());
    }
    prompts.sort_unstable();
    assert!(prompts[1] > prompts[0] + 20, "the second was appended to the first: {prompts:?}");
}

#[tokio::test]
async fn a_restarted_router_and_a_second_one_know_every_session() {
    let mut cluster = start(2).await;
    cluster.open_pinned("s").await;
    let session = ("x-berth-session-id", "s");
    cluster.post("/generate", &[session, DELTA], &turn("hello there", 2)).await;
    cluster.start_router(router_config(&[])).await.unwrap();
    let second = &cluster.routers[1];
    let shown = cluster.web.get(&second.url("/v1/sessions/s")).await.unwrap();
    assert_eq!(shown.status, StatusCode::OK, "the agents' tables told it");
    cluster.slow_down(1.0).await;
    let running = cluster.stream("/generate", &[session, DELTA], turn(" you", 60)).await;
    let url = second.url("/generate");
    let overlap = cluster.web.post(&url, &[session, DELTA], &turn("x", 1)).await.unwrap();
    assert_eq!(overlap.status, StatusCode::CONFLICT, "the agent checks turns of all routers");
    cluster.slow_down(0.0).await;
    running.into_body().collect().await.unwrap();
    cluster.routers.remove(0).stop().await.unwrap();
    let next = cluster.post("/generate", &[session, DELTA], &turn(" me", 2)).await;
    assert_eq!(next.meta("prompt_tokens"), Some(11 + 2 + 4 + 60 + 3), "{}", next.text());
}

#[tokio::test]
async fn sessions_of_a_lost_worker_move_or_are_refused() {
    let mut cluster = start(2).await;
    let headers = [("x-session-id", "t")];
    cluster.post("/v1/chat/completions", &headers, &chat(&[("user", "hello")])).await;
    for id in ["p0", "p1"] {
        cluster.open_pinned(id).await;
        let session = ("x-berth-session-id", id);
        cluster.turn("/generate", &[session, DELTA], &turn("a", 1)).await;
    }
    let turns = cluster.turns_seen("/v1/chat/completions");
    let home = turns.iter().position(|turns| *turns == 1).unwrap();
    let homed = cluster.engines[home].pool(0).await.unwrap().sessions.len();
    cluster.agents.remove(home).stop().await.unwrap();
    cluster.engines.remove(home).shutdown().await;
    let moved = eventually("the conversation's move", || async {
        let answer =
            cluster.post("/v1/chat/completions", &headers, &chat(&[("user", "hello")])).await;
        (answer.status == StatusCode::OK).then_some(answer)
    })
    .await;
    assert_eq!(moved.headers["x-berth-worker"], format!("w{}/0", 1 - home));
    let mut lost = 0;
    for id in ["p0", "p1"] {
        let session = ("x-berth-session-id", id);
        let answer = eventually("word of the session", || async {
            let answer = cluster.post("/generate", &[session, DELTA], &turn("a", 1)).await;
            (answer.code() != "worker_unreachable").then_some(answer)
        })
        .await;
        match (answer.status.as_u16(), answer.code().as_str()) {
            (200, _) => {}
            // A stopped agent closes its sessions, so they are unknown; a killed agent's sessions
            // are lost.
            (409, "session_lost") | (404, "session_unknown") => lost += 1,
            other => panic!("{other:?}: {}", answer.text()),
        }
    }
    assert_eq!(lost, homed, "those that lived there");
}

#[tokio::test]
async fn after_an_engine_restart_tagged_sessions_continue_and_pinned_ones_are_refused() {
    let mut cluster = start(1).await;
    let headers = [("x-session-id", "t")];
    cluster.post("/v1/chat/completions", &headers, &chat(&[("user", "hello")])).await;
    cluster.open_pinned("p").await;
    let engine = cluster.engines.remove(0);
    let addr = engine.addr();
    engine.shutdown().await;
    let listener =
        eventually("the port", || async { tokio::net::TcpListener::bind(addr).await.ok() }).await;
    cluster.engines.push(EngineSim::start(Config::default(), listener).unwrap());
    eventually("the conversation", || async {
        let answer =
            cluster.post("/v1/chat/completions", &headers, &chat(&[("user", "hello")])).await;
        assert_ne!(answer.status, StatusCode::CONFLICT, "{}", answer.text());
        (answer.status == StatusCode::OK).then_some(())
    })
    .await;
    let session = ("x-berth-session-id", "p");
    eventually("the loss to be known", || async {
        let lost = cluster.post("/generate", &[session, DELTA], &turn("a", 1)).await;
        // Until the agent notices the restart, the new engine itself refuses the unknown session.
        assert_ne!(lost.status, StatusCode::OK, "{}", lost.text());
        (lost.refusal() == (409, "session_lost".to_owned())).then_some(())
    })
    .await;
}

#[tokio::test]
async fn sglang_s_own_session_calls_work_unchanged() {
    let cluster = start(2).await;
    let open = json!({"capacity_of_str_len": 1000, "session_id": "s1", "streaming": true});
    let opened = cluster.post("/open_session", &[], &open).await;
    assert_eq!((opened.status.as_u16(), opened.text().as_str()), (200, "\"s1\""));
    assert_eq!(cluster.post("/open_session", &[], &open).await.status, StatusCode::BAD_REQUEST);
    let body = json!({"text": "hello", "session_params": {"id": "s1"},
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": true}});
    let first = cluster.post("/generate", &[], &body).await;
    assert_eq!(first.meta("prompt_tokens"), Some(5), "{}", first.text());
    let second = cluster.post("/generate", &[], &body).await;
    assert_eq!(second.meta("prompt_tokens"), Some(13));
    let close = json!({"session_id": "s1"});
    for _ in 0..2 {
        let closed = cluster.post("/close_session", &[], &close).await;
        assert_eq!((closed.status.as_u16(), closed.body.len()), (200, 0));
    }
    cluster.nothing_held().await;
}

#[tokio::test]
async fn a_final_turn_closes_however_it_ends() {
    let cluster = start_with(1, |settings| settings.engine.core.decode_ms_per_step = 20.0).await;
    let last = [("x-berth-session-final", "true"), DELTA];
    cluster.open_pinned("ends").await;
    let headers = [("x-berth-session-id", "ends"), last[0], last[1]];
    cluster.turn("/generate", &headers, &turn("hello", 2)).await;
    cluster.nothing_held().await;
    cluster.open_pinned("refused").await;
    let headers = [("x-berth-session-id", "refused"), last[0], last[1]];
    let batch = json!({"text": ["a", "b"]});
    cluster.post("/generate", &headers, &batch).await;
    cluster.nothing_held().await;
    cluster.open_pinned("vanishes").await;
    let headers = [("x-berth-session-id", "vanishes"), last[0], last[1]];
    drop(cluster.stream("/generate", &headers, turn("hello", 500)).await);
    cluster.nothing_held().await;
}

#[tokio::test]
async fn the_demo_keeps_its_promises() {
    let stop = tokio_util::sync::CancellationToken::new();
    let enough = stop.clone();
    // Stops after a number of turns, not after a time: on a slow machine few turns run, and most of
    // them are first turns without cached tokens.
    let until_enough = move |_: &[WorkerLine], so_far: &Report| {
        if so_far.turns >= 150 {
            enough.cancel();
        }
    };
    let summary = demo::run(WORKERS, PATIENCE, stop, |_| {}, until_enough).await.unwrap();
    assert!(summary.is_good(), "{summary:?}");
    assert!(summary.cached_ratio > 0.5, "{summary:?}");
}

#[tokio::test]
async fn the_workers_say_which_functions_of_their_shim_are_off() {
    let engine = Arc::new(EngineSim::start_local(Config::default()).await.unwrap());
    let agent = Agent::start(agent_config(&engine.url(), "w")).unwrap();
    let router = Router::start(router_config(&[&agent])).await.unwrap();
    let web = Web::default();
    let shown = async |wanted: Value| {
        eventually("the functions", async || {
            let answer = web.get(&router.url("/v1/workers")).await.unwrap();
            (answer.json()["workers"][0]["shim_functions_off"] == wanted).then_some(())
        })
        .await;
    };
    shown(json!([])).await;
    let shim = SimShim::start(Arc::clone(&engine), agent.shim_socket.clone());
    let off = |function: &str| json!({ "function": function, "reason": "a simulator" });
    shown(json!([off("audit"), off("demotion"), off("republishing")])).await;
    drop(shim);
    shown(json!([])).await;
}

#[tokio::test]
async fn an_engine_that_pins_would_end_offers_them_only_under_its_shim_s_guard() {
    let storage = Some("file".to_owned());
    let mut config = Config { hicache_storage_backend: storage, ..Config::default() };
    config.core.session_radix_cache = true;
    let engine = Arc::new(EngineSim::start_local(config).await.unwrap());
    let agent = Agent::start(agent_config(&engine.url(), "w")).unwrap();
    let router = Router::start(router_config(&[&agent])).await.unwrap();
    let web = Web::default();
    let shown = async |retentions: Value, reason: &str| {
        eventually("the retentions", async || {
            let answer = web.get(&router.url("/v1/workers")).await.unwrap();
            let worker = answer.json()["workers"][0].clone();
            let off = worker["retentions_off"].to_string();
            (worker["retentions"] == retentions && off.contains(reason)).then_some(())
        })
        .await;
    };
    let open = async |id: &str| {
        let body = json!({"session_id": id, "retention": "pinned"});
        web.post(&router.url("/v1/sessions"), &[], &body).await.unwrap()
    };
    shown(json!(["tagged", "none"]), "no shim has connected").await;
    let refused = open("early").await;
    assert_eq!(refused.refusal(), (409, "retention_unavailable".to_owned()));
    assert!(refused.text().contains("--hicache-storage-backend"), "{}", refused.text());
    let shim = SimShim::start(Arc::clone(&engine), agent.shim_socket.clone());
    shown(json!(["pinned", "tagged", "none"]), "[]").await;
    // The agent takes no turn until it knows what the engine holds, by its shim.
    eventually("a pinned session", async || {
        (open("guarded").await.status == StatusCode::CREATED).then_some(())
    })
    .await;
    drop(shim);
    eventually("the shim's end", async || {
        let answer = web.get(&router.url("/v1/workers")).await.unwrap();
        let used = &answer.json()["workers"][0]["load"]["pool_used_tokens"]["source"];
        (used != "shim").then_some(())
    })
    .await;
    // The hook stays in the engine, whose process is the same.
    assert_eq!(open("later").await.status, StatusCode::CREATED);
}

/// Replays real conversations, if a trace is available.
#[tokio::test]
async fn real_conversations_replay_without_an_error() {
    let Some(path) = trace_path("claude_code.jsonl.gz") else { return };
    let cluster = start_with(2, |settings| {
        settings.engine.core.max_total_tokens = 32_768;
        settings.engine.core.context_len = 8192;
        settings.engine.core.decode_ms_per_step = 0.2;
    })
    .await;
    let trace =
        tokio::task::spawn_blocking(move || load::read_trace(&path)).await.unwrap().unwrap();
    let options = ReplayOptions {
        url: cluster.url(""),
        api: Api::Chat,
        model: "tiny".into(),
        shape: Shape { scale: 0.02, context_tokens_max: Some(8000), output_tokens_max: Some(8) },
        sessions: SessionHeaders::Final,
        time_scale: Some(0.0),
        turns_max: Some(200),
        ..ReplayOptions::default()
    };
    let report =
        drive(options, Workload::Trace(trace), ReplayControl::default(), |_| {}).await.unwrap();
    assert_eq!((report.turns, report.errors), (200, 0), "{:?}", report.errors_by_kind);
    assert!(report.cached_ratio > Some(0.5), "agents' prompts grow: {:?}", report.cached_ratio);
}

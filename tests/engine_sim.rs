//! Tests of the engine simulator from outside, against answers that the real engine gave.
//!
//! The tests use real sockets and bounded waits.

use serde_json::{Value, json};
use std::time::Duration;
use tests::{
    cluster::{PATIENCE as WAIT, eventually},
    engine_sim::{Config, EngineSim, core::CoreConfig, core::PoolFacts},
    web::{Answer, Web},
};
use tokio::{net::TcpStream, time::timeout};

struct Caller {
    sim: EngineSim,
    web: Web,
}

/// Returns the JSON of each event, and whether the stream ended with `[DONE]`.
fn events_of(answer: &Answer) -> (Vec<Value>, bool) {
    let text = answer.text();
    let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let done = data.last() == Some(&"[DONE]");
    let json = data.iter().filter(|data| **data != "[DONE]");
    (json.map(|data| serde_json::from_str(data).expect("a JSON event")).collect(), done)
}

fn quick(core: CoreConfig) -> Config {
    let short = Duration::from_millis(50);
    Config { core, health_wait: short, crash_linger: short, ..Config::default() }
}

impl Caller {
    async fn new(config: Config) -> Caller {
        let sim = EngineSim::start_local(config).await.expect("a free port");
        Caller { sim, web: Web::default() }
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        let url = format!("{}{path}", self.sim.url());
        timeout(WAIT, self.web.post(&url, &[], &body)).await.expect(path).expect(path)
    }

    async fn get(&self, path: &str) -> Answer {
        self.web.get(&format!("{}{path}", self.sim.url())).await.expect(path)
    }

    async fn open(&self, id: &str) {
        let body = json!({ "capacity_of_str_len": 1000, "session_id": id, "streaming": true });
        let answer = self.post("/open_session", body).await;
        assert_eq!((answer.status.as_u16(), answer.json()), (200, json!(id)));
    }

    async fn close(&self, id: &str) {
        let answer = self.post("/close_session", json!({ "session_id": id })).await;
        assert_eq!((answer.status.as_u16(), answer.body.len()), (200, 0));
    }

    async fn turn(&self, session: &str, text: &str, max_new: usize) -> Answer {
        self.post("/generate", turn(session, text, max_new)).await
    }

    async fn pool(&self) -> PoolFacts {
        self.sim.pool(0).await.expect("the engine lives")
    }

    async fn wait_until(&self, what: &str, reached: impl Fn(&PoolFacts) -> bool) -> PoolFacts {
        eventually(what, || async { Some(self.pool().await).filter(|facts| reached(facts)) }).await
    }
}

fn sampling(max_new: usize) -> Value {
    json!({ "max_new_tokens": max_new, "temperature": 0, "ignore_eos": true })
}

fn turn(session: &str, text: &str, max_new: usize) -> Value {
    json!({
        "text": text, "session_params": { "id": session }, "sampling_params": sampling(max_new)
    })
}

#[tokio::test]
async fn three_pinned_turns() {
    let engine = Caller::new(quick(CoreConfig { page_size: 1, ..CoreConfig::default() })).await;
    engine.open("s1").await;
    let first = engine.turn("s1", "The quick brown fox jumps", 6).await;
    assert_eq!(
        (first.meta_value("prompt_tokens"), first.meta_value("cached_tokens")),
        (json!(25), json!(0))
    );
    assert_eq!(first.meta_value("finish_reason"), json!({ "type": "length", "length": 6 }));
    assert_eq!(first.json()["output_ids"].as_array().unwrap().len(), 6);
    let second = engine.turn("s1", " over the", 6).await;
    assert_eq!(
        (second.meta_value("prompt_tokens"), second.meta_value("cached_tokens")),
        (json!(40), json!(30))
    );
    let mut body = turn("s1", " lazy", 4);
    body["stream"] = json!(true);
    let third = engine.post("/generate", body).await;
    let (events, done) = events_of(&third);
    assert!(done && !events.is_empty());
    let last = &events[events.len() - 1]["meta_info"];
    assert_eq!((&last["prompt_tokens"], &last["cached_tokens"]), (&json!(51), &json!(45)));
    let mut shown = 0;
    for event in &events {
        let ids = event["output_ids"].as_array().unwrap().len();
        assert!(ids > shown, "chunks are cumulative");
        assert_eq!(event["meta_info"]["completion_tokens"], json!(ids));
        shown = ids;
    }
    assert_eq!(shown, 4);
    engine.close("s1").await;
    assert_eq!(engine.pool().await.session_held, 0);
    assert_eq!(engine.sim.bodies_seen("/generate").len(), 3);
    engine.sim.shutdown().await;
}

#[tokio::test]
async fn tagged_turns_and_chat() {
    let core = CoreConfig { session_radix_cache: true, ..CoreConfig::default() };
    let engine = Caller::new(quick(core)).await;
    let mut cached = Vec::new();
    for length in [100, 124, 148] {
        let body = json!({
            "text": "abcdefghij".repeat(20)[..length], "session_id": "t",
            "sampling_params": sampling(4)
        });
        cached.push(engine.post("/generate", body).await.meta_value("cached_tokens"));
    }
    assert_eq!(cached, [json!(0), json!(96), json!(112)]);

    let mut chat = json!({
        "model": "tiny", "messages": [{ "role": "user", "content": "hello there, engine" }],
        "max_tokens": 9, "temperature": 0, "session_params": { "id": "nope", "bogus": 1 },
    });
    let answer = engine.post("/v1/chat/completions", chat.clone()).await;
    assert_eq!(answer.status.as_u16(), 200, "session_params are dropped");
    let whole = answer.json();
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], json!(9));
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], json!(0));
    assert_eq!(whole["choices"][0]["finish_reason"], json!("length"));

    chat["stream"] = json!(true);
    chat["stream_options"] = json!({ "include_usage": true });
    let (events, done) = events_of(&engine.post("/v1/chat/completions", chat).await);
    assert!(done);
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(json!(text), whole["choices"][0]["message"]["content"]);
    let last = events.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(9)));
    assert!(last["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0);
}

#[tokio::test]
async fn errors_are_the_engines_own() {
    let engine = Caller::new(quick(CoreConfig::default())).await;
    let text = |answer: &Answer| answer.json()["error"]["message"].as_str().unwrap().to_owned();
    engine.open("s").await;
    let body = json!({ "capacity_of_str_len": 1, "session_id": "s", "streaming": true });
    let twice = engine.post("/open_session", body).await;
    assert_eq!(
        (twice.status.as_u16(), text(&twice).as_str()),
        (400, "Failed to open the session. Check if a session with the same id is still open.")
    );
    let lacking = engine.post("/open_session", json!({ "session_id": "s2" })).await;
    assert_eq!((lacking.status.as_u16(), &lacking.json()["object"]), (400, &json!("error")));
    assert_eq!(engine.post("/close_session", json!({})).await.status.as_u16(), 400);
    engine.close("never-opened").await;

    let unknown = engine.turn("nope", "hi", 4).await;
    assert_eq!(unknown.status.as_u16(), 400);
    assert_eq!(text(&unknown), "Invalid request: session id nope does not exist");
    let mut streamed = turn("nope", "hi", 4);
    streamed["stream"] = json!(true);
    let streamed = engine.post("/generate", streamed).await;
    let (events, done) = events_of(&streamed);
    assert_eq!((streamed.status.as_u16(), events.len(), done), (200, 1, true));
    assert_eq!((&events[0]["output_ids"], &events[0]["text"]), (&json!([296]), &json!("!")));
    assert_eq!(
        events[0]["meta_info"]["finish_reason"],
        json!({
            "type": "abort", "message": "Invalid request: session id nope does not exist",
            "status_code": 400, "err_type": "BadRequestError"
        })
    );

    let mut bogus = turn("s", "hi", 4);
    bogus["session_params"]["bogus"] = json!(1);
    let bogus = engine.post("/generate", bogus).await;
    assert_eq!((bogus.status.as_u16(), bogus.text().as_str()), (500, "Internal Server Error"));
    let mut both = turn("s", "hi", 4);
    both["session_id"] = json!("t");
    let both = engine.post("/generate", both).await;
    assert_eq!(text(&both), "session_id and session_params cannot both be set.");
    let mut replace = turn("s", "hi", 4);
    replace["session_params"]["replace"] = json!(true);
    let replace = engine.post("/generate", replace).await;
    assert_eq!(text(&replace), "Streaming sessions do not support replace.");

    assert_eq!(engine.turn("s", &"x".repeat(600), 4).await.status.as_u16(), 200);
    let long = engine.turn("s", &"x".repeat(609), 4).await;
    assert_eq!(
        text(&long),
        "Input length (1213 tokens) exceeds the maximum allowed length (1018 tokens). Use a \
         shorter input or enable --allow-auto-truncate."
    );
    let longer = engine.turn("s", &"x".repeat(1200), 4).await;
    assert_eq!(
        text(&longer),
        "The input (1200 tokens) is longer than the model's context length (1024 tokens)."
    );
    let after = engine.turn("s", "y", 4).await;
    assert_eq!(
        (after.meta_value("prompt_tokens"), after.meta_value("cached_tokens")),
        (json!(605), json!(603))
    );
    assert_eq!(engine.post("/v1/embeddings", json!({ "input": "x" })).await.status.as_u16(), 400);
}

#[tokio::test]
async fn idle_sessions_on_all_rows_wedge_the_engine() {
    let core = CoreConfig { max_running_requests: 2, ..CoreConfig::default() };
    let engine = Caller::new(quick(core)).await;
    for id in ["a", "b"] {
        engine.open(id).await;
        engine.turn(id, "first", 4).await;
    }
    let mut own = turn("a", "second", 4);
    own["rid"] = json!("rid-0001");
    let waiting = async { engine.post("/generate", own).await };
    let rescue = async {
        engine.wait_until("queued", |facts| facts.waiting == 1).await;
        assert_eq!(engine.get("/health").await.status.as_u16(), 200);
        assert_eq!(engine.get("/ready").await.status.as_u16(), 200);
        let loads = engine.get("/v1/loads").await.json();
        let load = &loads["loads"][0];
        assert_eq!(
            (&load["num_running_reqs"], &load["num_waiting_reqs"], &load["num_used_tokens"]),
            (&json!(0), &json!(1), &json!(32))
        );
        assert_eq!(engine.get("/flush_cache").await.status.as_u16(), 400);
        engine.close("a").await;
        assert!(engine.pool().await.session("a").unwrap().closing);
        engine.close("b").await;
    };
    let (answer, ()) = tokio::join!(waiting, rescue);
    assert_eq!((answer.status.as_u16(), answer.meta_value("cached_tokens")), (200, json!(8)));
    engine.wait_until("reaped", |facts| facts.sessions.is_empty()).await;
    assert_eq!(engine.get("/flush_cache").await.status.as_u16(), 200);
    let facts = engine.pool().await;
    assert_eq!(facts.available, facts.total);
}

#[tokio::test]
async fn aborts_of_running_and_queued_turns() {
    let core = CoreConfig { max_running_requests: 2, ..CoreConfig::default() };
    let engine = Caller::new(quick(core)).await;
    engine.open("s").await;
    engine.turn("s", "some words to start with", 8).await;
    engine.post("/slow_down", json!({ "forward_sleep_time": 0.01 })).await;
    let mut long = turn("s", "go on", 900);
    long["rid"] = json!("rid-running");
    let run = async { engine.post("/generate", long).await };
    let queued = async {
        engine.wait_until("running", |facts| facts.running == 1).await;
        let fill = json!({ "text": "x", "rid": "rid-fill", "sampling_params": sampling(900) });
        let blocked = json!({ "text": "y", "rid": "rid-queue", "sampling_params": sampling(9) });
        let fill = async { engine.post("/generate", fill).await };
        let blocked = async {
            engine.wait_until("filled", |facts| facts.running == 2).await;
            engine.post("/generate", blocked).await
        };
        let abort = async {
            engine.wait_until("queued", |facts| facts.waiting == 1).await;
            let unknown = engine.post("/abort_request", json!({ "rid": "rid-q" })).await;
            assert_eq!((unknown.status.as_u16(), unknown.body.len()), (200, 0));
            for rid in ["rid-queue", "rid-running", "rid-fill"] {
                engine.post("/abort_request", json!({ "rid": rid })).await;
            }
        };
        let (_, blocked, ()) = tokio::join!(fill, blocked, abort);
        blocked
    };
    let (running, queued) = tokio::join!(run, queued);
    assert_eq!(
        (queued.status.as_u16(), queued.meta_value("finish_reason"), &queued.json()["output_ids"]),
        (200, json!({ "type": "abort", "message": "Abort in waiting queue" }), &json!([]))
    );
    assert_eq!(running.status.as_u16(), 200);
    assert_eq!(
        running.meta_value("finish_reason"),
        json!({ "type": "abort", "message": "Aborted", "status_code": null, "err_type": null })
    );
    let facts = engine.pool().await;
    assert_eq!((facts.used(), facts.free_rows), (0, 2));
    let next = engine.turn("s", "!", 4).await;
    assert_eq!(next.meta_value("prompt_tokens"), json!(24 + 8 + 1));
    assert_eq!(next.meta_value("cached_tokens"), json!(32));
}

/// Sends a request on a new connection and returns the connection.
async fn raw(engine: &Caller, body: &Value) -> TcpStream {
    let stream = TcpStream::connect(engine.sim.addr()).await.expect("it listens");
    let body = body.to_string();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: e\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.writable().await.expect("connected");
    assert_eq!(stream.try_write(head.as_bytes()).expect("a small write"), head.len());
    stream
}

/// Reads everything until the connection ends, whether properly or not.
async fn read_all(stream: &TcpStream) -> String {
    read_until(stream, |_| false).await
}

/// Reads until `is_enough` accepts the text, or the connection ends.
async fn read_until(stream: &TcpStream, is_enough: impl Fn(&str) -> bool) -> String {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&all);
        if is_enough(&text) {
            return text.into_owned();
        }
        stream.readable().await.expect("connected");
        match stream.try_read(&mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Ok(0) | Err(_) => return text.into_owned(),
            Ok(count) => all.extend_from_slice(&buffer[..count]),
        }
    }
}

#[tokio::test]
async fn a_vanished_client_aborts_its_turn() {
    let mut config = quick(CoreConfig::default());
    config.disconnect_poll = Duration::from_secs(1);
    let engine = Caller::new(config).await;
    engine.post("/slow_down", json!({ "forward_sleep_time": 0.01 })).await;
    for stream in [true, false] {
        engine.open("s").await;
        let mut body = turn("s", "hello", 500);
        body["stream"] = json!(stream);
        let connection = raw(&engine, &body).await;
        engine.wait_until("running", |facts| facts.running == 1).await;
        drop(connection);
        let facts = engine.wait_until("aborted", |facts| facts.running == 0).await;
        let session = facts.session("s").unwrap();
        assert_eq!((session.inflight, session.row, session.history_tokens), (false, None, 0));
        engine.close("s").await;
    }
}

#[tokio::test]
async fn a_turn_that_ends_before_the_engine_checks_its_client_is_committed() {
    let mut config = quick(CoreConfig::default());
    config.disconnect_poll = Duration::from_secs(3600);
    let engine = Caller::new(config).await;
    engine.post("/slow_down", json!({ "forward_sleep_time": 1.0 })).await;
    engine.open("short").await;
    let connection = raw(&engine, &turn("short", "hello", 10)).await;
    engine.wait_until("running", |facts| facts.running == 1).await;
    drop(connection);
    engine.post("/slow_down", json!({ "forward_sleep_time": 0 })).await;
    let facts = engine.wait_until("ended", |facts| facts.running == 0).await;
    assert_eq!(facts.session("short").unwrap().history_tokens, 15);
}

#[tokio::test]
async fn a_crash_ends_streams_without_done() {
    let engine = Caller::new(quick(CoreConfig::default())).await;
    engine.post("/slow_down", json!({ "forward_sleep_time": 0.01 })).await;
    let body = json!({ "text": "x", "stream": true, "sampling_params": sampling(500) });
    let stream = raw(&engine, &body).await;
    let begun = read_until(&stream, |text| text.contains("output_ids"));
    let begun = timeout(WAIT, begun).await.expect("the stream begins");
    assert!(begun.contains("output_ids"), "{begun}");
    let killer = raw(&engine, &json!({ "input_ids": [5000] })).await;
    let rest = timeout(WAIT, read_all(&stream)).await.expect("the stream ends");
    assert!(!begun.contains("[DONE]") && !rest.contains("[DONE]"));
    assert_eq!(timeout(WAIT, read_all(&killer)).await.expect("connections end"), "");
    timeout(WAIT, engine.sim.gone()).await.expect("all tasks end");
    assert!(TcpStream::connect(engine.sim.addr()).await.is_err());
}

#[tokio::test]
async fn ranks_have_sessions_of_their_own() {
    let mut config = quick(CoreConfig::default());
    config.dp_size = 2;
    let engine = Caller::new(config).await;
    engine.open("s").await;
    let mut body = turn("s", "hello there", 4);
    body["routed_dp_rank"] = json!(1);
    let first = engine.post("/generate", body.clone()).await;
    assert_eq!(
        (first.meta_value("dp_rank"), first.meta_value("prompt_tokens")),
        (json!(1), json!(11))
    );
    body["routed_dp_rank"] = json!(0);
    let other = engine.post("/generate", body.clone()).await;
    assert_eq!(other.meta_value("prompt_tokens"), json!(11), "the other rank knows nothing");
    body["routed_dp_rank"] = json!(1);
    assert_eq!(engine.post("/generate", body.clone()).await.meta_value("prompt_tokens"), json!(26));
    body["routed_dp_rank"] = json!(2);
    assert_eq!(engine.post("/generate", body).await.status.as_u16(), 400);
    assert_eq!(engine.get("/v1/loads").await.json()["loads"].as_array().unwrap().len(), 2);
    engine.close("s").await;
    for rank in 0..2 {
        assert_eq!(engine.sim.pool(rank).await.unwrap().held_rows, 0);
    }
}

#[tokio::test]
async fn timeouts_close_sessions() {
    let engine = Caller::new(quick(CoreConfig::default())).await;
    let body = json!({
        "capacity_of_str_len": 1, "session_id": "s", "streaming": true, "timeout": 0.2
    });
    assert_eq!(engine.post("/open_session", body).await.status.as_u16(), 200);
    engine.turn("s", "hello", 4).await;
    let facts = engine.wait_until("reaped", |facts| facts.sessions.is_empty()).await;
    assert_eq!((facts.session_held, facts.free_rows), (0, 8));
}

#[tokio::test]
async fn gauges_are_late_and_loads_are_not() {
    let engine = Caller::new(quick(CoreConfig { page_size: 1, ..CoreConfig::default() })).await;
    engine.open("s").await;
    engine.turn("s", "0123456789", 5).await;
    let metrics = engine.get("/metrics").await.text();
    let gauge = |name: &str| {
        let line = metrics.lines().find(|l| l.starts_with(&format!("sglang:{name}{{")));
        line.and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    assert_eq!(gauge("kv_used_tokens").as_deref(), Some("10.0"), "as of the prefill");
    assert_eq!(gauge("num_streaming_sessions").as_deref(), Some("0.0"), "not set at a prefill");
    assert_eq!(gauge("max_total_num_tokens").as_deref(), Some("2048.0"));
    let loads = engine.get("/v1/loads").await.json();
    assert_eq!(loads["loads"][0]["num_used_tokens"], json!(14));
    let info = engine.get("/server_info").await.json();
    assert_eq!(
        (&info["version"], &info["max_req_input_len"], &info["max_total_num_tokens"]),
        (&json!("0.5.23"), &json!(1018), &json!(2048))
    );
    let state = &info["internal_states"][0];
    assert_eq!(state["effective_max_running_requests_per_dp"], json!(8));
    assert_eq!(engine.get("/v1/models").await.json()["data"][0]["id"], json!("tiny"));
    let tokens = engine.post("/tokenize", json!({ "prompt": "!0h" })).await.json();
    assert_eq!(tokens["tokens"], json!([0, 15, 71]));
    let text = engine.post("/detokenize", json!({ "tokens": [71, 15, 0] })).await.json();
    assert_eq!(text["text"], json!("h0!"));
}

#[tokio::test]
async fn stop_text_is_cut_off_and_bodies_keep_the_engines_order() {
    let engine = Caller::new(quick(CoreConfig::default())).await;
    let mut body = json!({ "text": "tell me", "sampling_params": sampling(40) });
    let whole = engine.post("/generate", body.clone()).await;
    assert!(whole.text().starts_with("{\"text\":\""));
    assert!(
        whole.text().contains("\"finish_reason\":{\"type\":\"length\",\"length\":40},\"prompt")
    );
    let text = whole.json()["text"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(10).take(3).collect();
    let before = &text[..text.find(&stop).unwrap()];
    body["sampling_params"]["stop"] = json!([stop]);
    let cut = engine.post("/generate", body).await;
    assert_eq!(cut.json()["text"], json!(before));
    assert_eq!(cut.meta_value("finish_reason"), json!({ "type": "stop", "matched": stop }));
    let batch = json!({ "text": ["a", "b"], "sampling_params": sampling(3) });
    assert_eq!(engine.post("/generate", batch).await.json().as_array().unwrap().len(), 2);
}

/// Runs eight sessions and plain requests concurrently, with prompts longer than a chunk; some
/// clients disconnect.
#[tokio::test]
async fn a_busy_engine_loses_nothing() {
    let core = CoreConfig {
        max_total_tokens: 8192,
        max_running_requests: 12,
        chunked_prefill_size: 128,
        decode_ms_per_step: 0.2,
        ..CoreConfig::default()
    };
    let mut config = quick(core);
    config.disconnect_poll = Duration::from_millis(20);
    let engine = std::sync::Arc::new(Caller::new(config).await);
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..8 {
        let engine = std::sync::Arc::clone(&engine);
        clients.spawn(async move {
            let id = format!("session-{client}");
            engine.open(&id).await;
            for round in 0..6usize {
                let text = format!("{client}{round}").repeat(40 + round);
                let answer = engine.turn(&id, &text, 12).await;
                assert_eq!(answer.status.as_u16(), 200, "{}", answer.text());
                let leaver = json!({ "text": text, "sampling_params": sampling(400) });
                drop(raw(&engine, &leaver).await);
            }
            engine.close(&id).await;
        });
    }
    while let Some(client) = timeout(WAIT, clients.join_next()).await.expect("all end") {
        client.unwrap();
    }
    engine
        .wait_until("quiet", |facts| facts.running + facts.waiting + facts.sessions.len() == 0)
        .await;
    assert_eq!(engine.get("/flush_cache").await.status.as_u16(), 200);
    let facts = engine.pool().await;
    assert_eq!((facts.available, facts.free_rows), (facts.total, facts.rows));
}

#[tokio::test]
async fn other_dialects_have_their_shape() {
    let engine = Caller::new(quick(CoreConfig::default())).await;
    let body = json!({ "model": "tiny", "input": "hello", "max_output_tokens": 6 });
    let whole = engine.post("/v1/responses", body.clone()).await.json();
    assert_eq!(
        (&whole["status"], &whole["usage"]["output_tokens"]),
        (&json!("completed"), &json!(6))
    );
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let (events, _) = events_of(&engine.post("/v1/responses", streamed).await);
    assert_eq!(events[0]["type"], json!("response.created"));
    assert_eq!(events.last().unwrap()["type"], json!("response.completed"));

    let messages = json!([{ "role": "user", "content": [{ "type": "text", "text": "hello" }] }]);
    let mut body = json!({ "model": "tiny", "messages": messages, "max_tokens": 6 });
    let whole = engine.post("/v1/messages", body.clone()).await.json();
    assert_eq!((&whole["type"], &whole["stop_reason"]), (&json!("message"), &json!("max_tokens")));
    body["stream"] = json!(true);
    let (events, _) = events_of(&engine.post("/v1/messages", body).await);
    assert_eq!(events[0]["type"], json!("message_start"));
    assert_eq!(events.last().unwrap()["type"], json!("message_stop"));
}

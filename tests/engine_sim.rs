//! Tests of what the engine simulator answers besides what the conformance suite asks.
//!
//! The suite, `tests/sglang/conformance`, holds the simulator to the engine; `conformance.rs` runs
//! it.

use engine_sim::{Config, EngineSim, core::CoreConfig};
use harness::web::{Answer, Web};
use serde_json::{Value, json};

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

impl Caller {
    async fn new(config: Config) -> Caller {
        let sim = EngineSim::start_local(config).await.expect("a free port");
        Caller { sim, web: Web::default() }
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        let url = format!("{}{path}", self.sim.url());
        self.web.post(&url, &[], &body).await.expect(path)
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
async fn tagged_turns_and_chat() {
    let core = CoreConfig { session_radix_cache: true, ..CoreConfig::default() };
    let engine = Caller::new(Config { core, ..Config::default() }).await;
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
async fn ranks_have_sessions_of_their_own() {
    let engine = Caller::new(Config { dp_size: 2, ..Config::default() }).await;
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
async fn the_tokenizer_can_be_asked_both_ways() {
    let engine = Caller::new(Config::default()).await;
    assert_eq!(engine.get("/v1/models").await.json()["data"][0]["id"], json!("tiny"));
    let tokens = engine.post("/tokenize", json!({ "prompt": "!0h" })).await.json();
    assert_eq!(tokens["tokens"], json!([0, 15, 71]));
    let text = engine.post("/detokenize", json!({ "tokens": [71, 15, 0] })).await.json();
    assert_eq!(text["text"], json!("h0!"));
}

#[tokio::test]
async fn stop_text_is_cut_off_and_bodies_keep_the_engines_order() {
    let engine = Caller::new(Config::default()).await;
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

#[tokio::test]
async fn other_dialects_have_their_shape() {
    let engine = Caller::new(Config::default()).await;
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

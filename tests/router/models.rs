//! Tests of models that clients call by other names than their engines.

use std::sync::atomic::Ordering;

use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{
    agent::Agent,
    harness::{Answer, Router, config, wait_until},
};

/// Starts a router whose settings give models other names.
pub(crate) async fn router(agents: &[&Agent], aliases: &[(&str, &str)], default: &str) -> Router {
    let mut settings = config(agents);
    let owned = |(name, model): &(&str, &str)| ((*name).to_owned(), (*model).to_owned());
    settings.models.aliases = aliases.iter().map(owned).collect();
    settings.models.default = default.to_owned();
    assert_eq!(settings.problems(), Vec::<String>::new());
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    router
}

async fn chat(router: &Router, model: &str) -> Answer {
    router.chat(&[], &format!(r#"{{ "model" : "{model}", "messages":[] }}"#)).await
}

fn worker(answer: &Answer) -> &str {
    answer.header("x-berth-worker")
}

#[tokio::test]
async fn a_program_that_asks_for_its_own_models_is_answered_by_the_one_it_should_get() {
    let (qwen, llama) = (Agent::serving("q", "qwen"), Agent::serving("l", "llama"));
    for agent in [&qwen, &llama] {
        agent.inner.set_adapters(&[]);
    }
    let aliases = [("claude-*", "qwen"), ("claude-haiku-*", "llama"), ("qwen", "llama")];
    let named = router(&[&qwen, &llama], &aliases, "").await;
    for (model, place) in [
        ("claude-opus-5-5", "q/0"),
        ("claude-haiku-4-5-20251001", "l/0"),
        ("llama", "l/0"),
        ("qwen", "q/0"),
    ] {
        for _ in 0..4 {
            let answer = chat(&named, model).await;
            assert_eq!((answer.status, worker(&answer)), (StatusCode::OK, place), "{model}");
        }
        let agent = if place == "q/0" { &qwen } else { &llama };
        let sent = format!(r#"{{ "model" : "{model}", "messages":[] }}"#);
        assert_eq!(agent.turns().pop().unwrap().body, sent, "no byte of the body changes");
    }
    let path = "/v1/messages/count_tokens";
    let counted = named.call(Method::POST, path, &[], r#"{"model":"claude-haiku-x"}"#).await;
    assert_eq!((counted.status, worker(&counted)), (StatusCode::OK, "l/0"));
    let unknown = chat(&named, "gpt-5").await;
    assert_eq!(unknown.refusal(), (404, "model_not_found".to_owned()));
    assert!(unknown.text().contains("served are: llama, qwen"), "{}", unknown.text());
    let with_default = router(&[&qwen, &llama], &aliases, "llama").await;
    for (model, place) in [("gpt-5", "l/0"), ("gpt-oss:20b", "l/0"), ("claude-opus", "q/0")] {
        assert_eq!(worker(&chat(&with_default, model).await), place, "{model}");
    }
    let missing = chat(&with_default, "qwen:sql").await;
    assert_eq!(missing.refusal(), (404, "model_not_found".to_owned()), "it is a real model");
}

#[tokio::test]
async fn an_alias_gets_the_adapter_of_its_model() {
    let (a, b) = (Agent::serving("a", "m"), Agent::serving("b", "m"));
    a.inner.set_adapters(&[]);
    b.inner.set_adapters(&["sql"]);
    let named = router(&[&a, &b], &[("claude-*", "m"), ("database", "m:sql")], "").await;
    for (body, model) in [
        (r#"{"model":"database","n":1}"#, "m:sql"),
        (r#"{"model":"claude-x:sql"}"#, "m:sql"),
        (r#"{"model":"claude-x","lora_path":"sql"}"#, "claude-x"),
    ] {
        a.inner.used_tokens.store(1, Ordering::Relaxed);
        let answer = named.chat(&[], body).await;
        assert_eq!((answer.status, worker(&answer)), (StatusCode::OK, "b/0"), "{body}");
        let sent: Value = serde_json::from_slice(&b.turns().pop().unwrap().body).unwrap();
        assert_eq!(sent["model"], model, "{body}: the engine finds the adapter in it");
    }
    let missing = named.chat(&[], r#"{"model":"claude-x:go"}"#).await;
    assert_eq!(missing.refusal(), (404, "model_not_found".to_owned()));
}

#[tokio::test]
async fn the_list_of_models_has_the_aliases_that_a_client_can_write() {
    let mut agents = [Agent::serving("a", "qwen"), Agent::serving("b", "llama")];
    let aliases = [("claude-*", "qwen"), ("fast", "llama"), ("gone", "nowhere")];
    let [qwen, llama] = &agents;
    let named = router(&[qwen, llama], &aliases, "").await;
    let listed = async || {
        let list = named.call(Method::GET, "/v1/models", &[], "").await.json();
        let models = list["data"].as_array().unwrap().clone();
        models.iter().map(|model| format!("{}={}", model["id"], model["root"])).collect::<Vec<_>>()
    };
    assert_eq!(listed().await, [r#""fast"="llama""#, r#""llama"="llama""#, r#""qwen"="qwen""#]);
    for (id, root) in [("fast", "llama"), ("claude-opus-5-5", "qwen"), ("qwen", "qwen")] {
        let model = named.call(Method::GET, &format!("/v1/models/{id}"), &[], "").await.json();
        assert_eq!((&model["id"], &model["root"]), (&json!(id), &json!(root)));
    }
    for id in ["gone", "gpt-5"] {
        let missing = named.call(Method::GET, &format!("/v1/models/{id}"), &[], "").await;
        assert_eq!(missing.refusal(), (404, "model_not_found".to_owned()), "{id}");
        assert!(missing.text().contains("fast, llama, qwen"), "{}", missing.text());
    }
    agents[1].kill();
    wait_until("what none serves is no longer listed", async || {
        listed().await == [r#""qwen"="qwen""#]
    })
    .await;
}

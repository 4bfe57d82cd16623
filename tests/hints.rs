//! End-to-end tests of hints: sessions that clients name on their own, priorities, adapters.

use harness::cluster::{Cluster, eventually, text_turn};
use http::StatusCode;
use serde_json::{Value, json};

fn chat(model: &str, text: &str) -> Value {
    json!({"model": model, "max_tokens": 4, "temperature": 0,
        "messages": [{"role": "user", "content": text}]})
}

#[tokio::test]
async fn a_conversation_without_a_name_stays_by_its_prompt_and_is_no_session() {
    // The prompts are so long that computing one again costs more than any load here.
    let cluster = Cluster::start(3, |settings| {
        let core = &mut settings.engine.core;
        (core.context_len, core.max_total_tokens) = (32_768, 131_072);
        core.prefill_tokens_per_s = 10_000.0;
    })
    .await
    .unwrap();
    let beginnings: Vec<String> =
        (0..6).map(|one| format!("{one} of six conversations about this: ").repeat(320)).collect();
    for beginning in beginnings {
        let mut text = beginning;
        let mut home = String::new();
        for turn in 0..4 {
            let answer = cluster.turn("/generate", &[], &text_turn(&text, 2)).await;
            let worker = answer.header("x-berth-worker").to_owned();
            let placed = cluster.placement_record(&answer).await;
            assert!(turn == 0 || worker == home, "turn {turn}, from {home} to {worker}: {placed}");
            assert_eq!(answer.header("x-berth-session-turn"), "", "it is no session's turn");
            let uncached_tokens = placed["uncached_tokens"].as_u64().unwrap();
            assert_eq!(turn > 0, uncached_tokens < 500, "turn {turn} has the rest: {placed}");
            home = worker;
            text.push_str(" And what follows from all of that, one may ask?");
        }
    }
    let sessions = cluster.get("/v1/sessions").await.json();
    assert_eq!(sessions["sessions"].as_array().unwrap().len(), 0, "{sessions}");
    for engine in &cluster.engines {
        assert!(engine.pool(0).await.unwrap().sessions.is_empty(), "nothing is pinned");
    }
}

#[tokio::test]
async fn what_the_engine_takes_is_not_refused_for_a_hinted_session_s_sake() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    let session = ("x-claude-code-session-id", "s");
    let mut several = chat("tiny", "hello");
    several["n"] = 2.into();
    // The simulator gives one answer whatever `n` is. Only the session counts here.
    let answer = cluster.turn("/v1/chat/completions", &[session], &several).await;
    assert_eq!(answer.header("x-berth-session-turn"), "");
    let next = cluster.turn("/v1/chat/completions", &[session], &chat("tiny", "hello")).await;
    assert_eq!(next.header("x-berth-session-turn"), "tagged");
    let named = [("x-berth-session-id", "s")];
    let refused = cluster.post("/v1/chat/completions", &named, &several).await;
    assert_eq!(refused.refusal(), (400, "batch_in_session".to_owned()));
}

#[tokio::test]
async fn an_agent_without_room_for_sessions_runs_hinted_turns_without_them() {
    let cluster = Cluster::start(1, |settings| settings.agent.limits.principal_sessions_max = 1)
        .await
        .unwrap();
    let turn = async |headers: &[(&str, &str)]| {
        cluster.post("/v1/chat/completions", headers, &chat("tiny", "hello")).await
    };
    let opened = cluster.post("/v1/sessions", &[], &json!({"session_id": "opened"})).await;
    assert_eq!(opened.status, StatusCode::CREATED, "{}", opened.text());
    let hinted = turn(&[("thread-id", "t")]).await;
    assert_eq!((hinted.status, hinted.header("x-berth-session-turn")), (StatusCode::OK, ""));
    let named = turn(&[("x-berth-session-id", "t")]).await;
    assert_eq!(named.refusal(), (429, "principal_sessions".to_owned()));
    let metrics = cluster.agent_metrics().await;
    let counted = "berth_agent_sessions_left_out_total{code=\"principal_sessions\"} 1\n";
    assert!(metrics.contains(counted), "{metrics}");
}

#[tokio::test]
async fn header_and_metric_agree_how_a_turn_ran() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    let message = json!({"model": "tiny", "max_tokens": 4,
        "messages": [{"role": "user", "content": "hello"}]});
    for (path, body, mode) in [
        ("/v1/messages", message, "none"),
        ("/v1/chat/completions", chat("tiny", "hello"), "tagged"),
    ] {
        let answer = cluster.turn(path, &[("thread-id", mode)], &body).await;
        assert_eq!(answer.header("x-berth-session-turn"), mode, "{path}");
        let counted = format!("berth_agent_session_turns_total{{kind=\"{mode}\"}} 1\n");
        let metrics = cluster.agent_metrics().await;
        assert!(metrics.contains(&counted), "{path}: {metrics}");
    }
}

#[tokio::test]
async fn a_hinted_priority_reaches_an_engine_that_takes_priorities() {
    for takes in [false, true] {
        let cluster =
            Cluster::start(1, |settings| settings.engine.enable_priority_scheduling = takes)
                .await
                .unwrap();
        let mut body = text_turn("hello", 1);
        body["nvext"] = json!({"agent_hints": {"priority": -4}});
        cluster.turn("/generate", &[], &body).await;
        let seen = cluster.engine().bodies_seen("/generate").pop().unwrap();
        let seen: Value = serde_json::from_slice(&seen).unwrap();
        assert_eq!(seen["priority"].as_i64(), takes.then_some(-4), "{seen}");
        assert_eq!(seen["nvext"], body["nvext"], "the hint itself stays");
    }
}

#[tokio::test]
async fn adapters_are_known_by_worker_as_their_engine_lists_them() {
    let mut cluster =
        Cluster::start(2, |settings| settings.engine.enable_lora = true).await.unwrap();
    cluster.engines[0].set_adapters(&["sql"]);
    cluster.engines[1].set_adapters(&["chess"]);
    // Agents look every ten seconds.
    for number in 0..2 {
        let adapter = ["sql", "chess"][number];
        let loaded = |shown: &Value| shown["engine"]["adapters"] == json!([adapter]);
        cluster.wait_for_worker(number, "its adapter", loaded).await;
    }
    for (adapter, worker) in [("sql", "w0/0"), ("chess", "w1/0")] {
        let turn = cluster
            .turn("/v1/chat/completions", &[], &chat(&format!("tiny:{adapter}"), "hello"))
            .await;
        assert_eq!(turn.header("x-berth-worker"), worker);
    }
    let none = cluster.post("/v1/chat/completions", &[], &chat("tiny:go", "hello")).await;
    assert_eq!(none.refusal(), (404, "model_not_found".to_owned()));
    assert!(none.text().contains("chess, sql, tiny"), "{}", none.text());
    // What a restarted engine no longer has is forgotten.
    let engine = cluster.engines.remove(0).restart().await.unwrap();
    cluster.engines.insert(0, engine);
    eventually("the adapter is gone", || async {
        let gone = cluster.post("/v1/chat/completions", &[], &chat("tiny:sql", "hello")).await;
        (gone.refusal().1 == "model_not_found").then_some(())
    })
    .await;
}

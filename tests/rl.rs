//! End-to-end tests of what trainers do: pauses, flushes, updates of the weights, and their fence.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use harness::{
    cluster::{Cluster, ClusterSettings, eventually, text_turn},
    web::Answer,
};
use serde_json::{Value, json};

async fn start(workers: usize, change: impl FnOnce(&mut ClusterSettings)) -> Cluster {
    Cluster::start(workers, change).await.unwrap()
}

async fn control(cluster: &Cluster, path: &str, body: &Value) -> Answer {
    cluster.post(path, &[], body).await
}

async fn delta(cluster: &Cluster, id: &str, text: &str) -> Answer {
    let mut body = text_turn(text, 3);
    body["session_params"] = json!({ "id": id });
    cluster.post("/generate", &[], &body).await
}

fn refusal(answer: &Answer) -> (u16, String) {
    (answer.status.as_u16(), answer.code())
}

fn epoch(answer: &Answer) -> u64 {
    let header = answer.header("x-berth-weights");
    header.split('/').next().unwrap().parse().unwrap_or_else(|_| panic!("{header}"))
}

/// Waits until the router knows that a worker has these weights.
async fn has_weights(cluster: &Cluster, number: usize, weights: &str) {
    let shows = |worker: &Value| worker["weights"].as_str().is_some_and(|text| text == weights);
    cluster.wait_for_worker(number, weights, shows).await;
}

#[tokio::test]
async fn no_turn_continues_a_session_over_a_change_of_the_weights() {
    let cluster = start(1, |_| {}).await;
    cluster.open_pinned("s").await;
    let before = delta(&cluster, "s", "one").await;
    assert_eq!(before.status, 200, "{}", before.text());
    let update = json!({"model_path": "tiny-2", "weight_version": "step-1"});
    let updated = control(&cluster, "/update_weights_from_disk", &update).await;
    assert_eq!(updated.status, 200, "{}", updated.text());
    assert_eq!(updated.json()["success"], true, "the engine's own answer");
    let refused = delta(&cluster, "s", " two").await;
    assert_eq!(refusal(&refused), (409, "weights_changed".to_owned()));
    let pinned = json!({"session_id": "s", "retention": "pinned"});
    let opened = cluster.post("/v1/sessions", &[], &pinned).await;
    assert_eq!((opened.status.as_u16(), &opened.json()["turns"]), (200, &json!(0)));
    let again = delta(&cluster, "s", "one and two").await;
    assert_eq!(again.status, 200, "{}", again.text());
    assert_eq!(epoch(&again), epoch(&before) + 1, "counted once");
    assert!(again.header("x-berth-weights").ends_with("/step-1"));
}

#[tokio::test]
async fn a_refused_update_costs_no_session() {
    let cluster = start(1, |_| {}).await;
    cluster.open_pinned("s").await;
    let before = delta(&cluster, "s", "one").await;
    let update = json!({"model_path": "/missing"});
    let failed = control(&cluster, "/update_weights_from_disk", &update).await;
    assert_eq!(failed.status, 400, "{}", failed.text());
    let outside = control(&cluster, "/update_weights_from_tensor", &json!({})).await;
    assert_eq!(outside.status, 400, "{}", outside.text());
    let after = delta(&cluster, "s", " two").await;
    assert_eq!((after.status.as_u16(), epoch(&after)), (200, epoch(&before)), "{}", after.text());
}

#[tokio::test]
async fn a_partial_failure_names_the_worker_and_the_others_have_the_new_weights() {
    let cluster = start(3, |_| {}).await;
    let bodies = json!({
        "w0": {"model_path": "tiny-2", "weight_version": "a"},
        "w1": {"model_path": "/missing"},
        "w2/0": {"model_path": "tiny-2", "weight_version": "a"},
    });
    let partial = control(&cluster, "/update_weights_from_disk?per_worker=1", &bodies).await;
    assert_eq!(partial.status, 502, "{}", partial.text());
    let shown = partial.json();
    assert_eq!(shown["success"], false);
    let statuses = ["w0", "w1", "w2"].map(|name| shown["workers"][name]["status"].clone());
    assert_eq!(statuses, [200, 400, 200].map(Value::from));
    for (number, weights) in [(0, "2/a"), (1, "1/default"), (2, "2/a")] {
        has_weights(&cluster, number, weights).await;
    }
    let asked = [("x-berth-weights", "1/default")];
    for _ in 0..4 {
        let turn = cluster.turn("/generate", &asked, &text_turn("hello", 2)).await;
        assert_eq!(turn.header("x-berth-worker"), "w1/0");
    }
    let none = [("x-berth-weights", "/b")];
    let refused = cluster.post("/generate", &none, &text_turn("hello", 2)).await;
    assert_eq!(refusal(&refused), (503, "weights_unavailable".to_owned()));
    assert!(refused.text().contains("2/a"), "{}", refused.text());
    let unknown = control(&cluster, "/flush_cache?workers=w9", &json!({})).await;
    assert_eq!(refusal(&unknown), (404, "worker_unknown".to_owned()));
    let invalid = [("x-berth-weights", "new")];
    let refused = cluster.post("/generate", &invalid, &text_turn("hello", 2)).await;
    assert_eq!(refusal(&refused), (400, "invalid_field".to_owned()));
}

#[tokio::test]
async fn a_paused_engine_gets_no_turns_and_new_sessions_go_elsewhere() {
    let cluster = start(2, |settings| settings.agent.limits.queue_wait_ms_max = 300).await;
    let paused = control(&cluster, "/pause_generation?workers=w0", &json!({})).await;
    assert_eq!(
        paused.json(),
        json!({"message": "Generation paused successfully.", "status": "ok"})
    );
    assert_eq!(paused.header("x-berth-worker"), "w0");
    cluster.wait_for_worker(0, "the pause", |worker| worker["state"] == "held").await;
    for _ in 0..6 {
        let turn = cluster.turn("/generate", &[], &text_turn("hello", 1)).await;
        assert_eq!(turn.header("x-berth-worker"), "w1/0");
    }
    control(&cluster, "/pause_generation", &json!({"mode": "in_place"})).await;
    cluster.wait_for_worker(1, "the pause", |worker| worker["state"] == "held").await;
    let refused = cluster.post("/generate", &[], &text_turn("hello", 1)).await;
    assert_eq!(refusal(&refused), (503, "engine_held".to_owned()));
    assert!(!refused.header("retry-after").is_empty());
    let goes_on = control(&cluster, "/continue_generation", &json!({})).await;
    assert_eq!(goes_on.status, 200, "{}", goes_on.text());
    cluster.turn("/generate", &[], &text_turn("hello", 1)).await;
}

#[tokio::test]
async fn a_flush_frees_the_sessions_and_says_so() {
    let cluster = start(1, |_| {}).await;
    cluster.open_pinned("s").await;
    delta(&cluster, "s", "one").await;
    let flushed = eventually("the flush", || async {
        let answer = control(&cluster, "/flush_cache", &json!({})).await;
        (answer.status == 200).then_some(answer)
    })
    .await;
    assert!(flushed.text().starts_with("Cache flushed."), "{}", flushed.text());
    let refused = delta(&cluster, "s", " two").await;
    assert_eq!(refusal(&refused), (409, "session_reclaimed".to_owned()));
    cluster.nothing_held().await;
}

#[tokio::test]
async fn a_cache_of_older_weights_takes_no_pinned_session_before_it_is_flushed() {
    let cluster = start(1, |_| {}).await;
    cluster.turn("/generate", &[], &text_turn("in the cache", 4)).await;
    let update = json!({"model_path": "tiny-2", "flush_cache": false});
    let updated = control(&cluster, "/update_weights_from_disk", &update).await;
    assert_eq!(updated.status, 200, "{}", updated.text());
    let pinned = json!({"session_id": "s", "retention": "pinned"});
    let refused = cluster.post("/v1/sessions", &[], &pinned).await;
    assert_eq!(refused.code(), "weights_changed", "{}", refused.text());
    cluster.turn("/generate", &[], &text_turn("in the cache", 4)).await;
    eventually("the flush", || async {
        let answer = control(&cluster, "/flush_cache", &json!({})).await;
        (answer.status == 200).then_some(())
    })
    .await;
    cluster.open_pinned("s").await;
}

#[tokio::test]
async fn memory_is_released_only_while_nothing_runs() {
    let cluster = start(1, |settings| {
        settings.engine.core.decode_ms_per_step = 20.0;
        settings.agent.limits.queue_wait_ms_max = 300;
    })
    .await;
    let running = cluster.stream("/generate", &[], text_turn("hello", 400)).await;
    let refused = control(&cluster, "/release_memory_occupation", &json!({})).await;
    assert_eq!(refusal(&refused), (503, "engine_busy".to_owned()));
    drop(running);
    let released = eventually("an idle engine", || async {
        let answer = control(&cluster, "/release_memory_occupation", &json!({})).await;
        (answer.status == 200).then_some(answer)
    })
    .await;
    assert_eq!(released.text(), "null", "the engine's own answer");
    let waits = cluster.post("/generate", &[], &text_turn("hello", 1)).await;
    assert_eq!(refusal(&waits), (503, "engine_held".to_owned()));
    control(&cluster, "/resume_memory_occupation", &json!({})).await;
    cluster.turn("/generate", &[], &text_turn("hello", 1)).await;
}

#[tokio::test]
async fn a_change_behind_the_agents_back_is_seen_by_its_label() {
    let cluster = start(1, |_| {}).await;
    has_weights(&cluster, 0, "1/default").await;
    let url = format!("{}/update_weight_version", cluster.engine().url());
    let version = json!({"new_version": "other"});
    assert_eq!(cluster.web.post(&url, &[], &version).await.unwrap().status, 200);
    has_weights(&cluster, 0, "2/other").await;
}

#[tokio::test]
async fn a_trainer_updates_in_buckets_between_begin_and_end() {
    let cluster = start(2, |_| {}).await;
    for (path, body) in [
        ("/pause_generation", json!({"mode": "abort"})),
        ("/flush_cache", json!({})),
        ("/begin_weight_update", json!({})),
        ("/update_weights_from_distributed", json!({"flush_cache": false})),
        ("/update_weights_from_tensor", json!({"flush_cache": false})),
        ("/end_weight_update", json!({})),
        ("/update_weight_version", json!({"new_version": "step-9"})),
        ("/continue_generation", json!({})),
    ] {
        let answer = control(&cluster, path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    }
    cluster.open_pinned("s").await;
    let turn = delta(&cluster, "s", "one").await;
    assert_eq!(turn.status, 200, "nothing old is left: {}", turn.text());
    assert!(turn.header("x-berth-weights").ends_with("/step-9"));
}

/// Sends a delta with further members.
async fn delta_with(cluster: &Cluster, id: &str, text: &str, more: &Value) -> Answer {
    let mut body = text_turn(text, 3);
    body["session_params"] = json!({ "id": id });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    cluster.post("/generate", &[], &body).await
}

/// Loads or unloads the adapter `sql`, and waits until the router knows that.
async fn change_adapter(cluster: &Cluster, path: &str, then: Value) {
    let body = json!({"lora_name": "sql", "lora_path": "/models/sql"});
    let changed = control(cluster, path, &body).await;
    assert_eq!(changed.status, 200, "{}", changed.text());
    let is_known = |worker: &Value| worker["engine"]["adapters"] == then;
    cluster.wait_for_worker(0, "the adapters", is_known).await;
}

#[tokio::test]
async fn a_delta_under_another_salt_or_adapter_is_refused_and_the_session_goes_on() {
    let cluster = start(1, |settings| settings.engine.enable_lora = true).await;
    change_adapter(&cluster, "/load_lora_adapter", json!(["sql"])).await;
    cluster.open_pinned("s").await;
    let own = json!({"lora_path": "sql", "cache_salt": "a"});
    let first = delta_with(&cluster, "s", "one", &own).await;
    assert_eq!(first.status, 200, "{}", first.text());
    for other in [
        json!({}),
        json!({"lora_path": "sql"}),
        json!({"cache_salt": "a"}),
        json!({"lora_path": "sql", "cache_salt": "b"}),
        json!({"lora_path": "sql", "cache_salt": "a", "extra_key": "k"}),
    ] {
        let refused = delta_with(&cluster, "s", " two", &other).await;
        assert_eq!(refusal(&refused), (409, "other_kv".to_owned()), "{other}");
    }
    let second = delta_with(&cluster, "s", " two", &own).await;
    assert_eq!(second.status, 200, "{}", second.text());
    let prompt_tokens = |answer: &Answer| answer.json()["meta_info"]["prompt_tokens"].as_u64();
    let grown = prompt_tokens(&first).unwrap() + 3 + 4;
    assert_eq!(prompt_tokens(&second), Some(grown), "nothing else was appended");
}

#[tokio::test]
async fn a_session_of_an_adapter_that_is_loaded_anew_says_so_and_goes_on_anew() {
    let cluster = start(1, |settings| settings.engine.enable_lora = true).await;
    change_adapter(&cluster, "/load_lora_adapter", json!(["sql"])).await;
    let sql = json!({"lora_path": "sql"});
    for (id, more) in [("s", &sql), ("plain", &json!({}))] {
        cluster.open_pinned(id).await;
        let turn = delta_with(&cluster, id, "one", more).await;
        assert_eq!(turn.status, 200, "{}", turn.text());
    }
    change_adapter(&cluster, "/unload_lora_adapter", json!([])).await;
    change_adapter(&cluster, "/load_lora_adapter", json!(["sql"])).await;
    let refused = delta_with(&cluster, "s", " two", &sql).await;
    assert_eq!(refusal(&refused), (409, "adapter_changed".to_owned()));
    let plain = delta_with(&cluster, "plain", " two", &json!({})).await;
    assert_eq!(plain.status, 200, "no KV of the adapter: {}", plain.text());
    let pinned = json!({"session_id": "s", "retention": "pinned"});
    let opened = cluster.post("/v1/sessions", &[], &pinned).await;
    assert_eq!((opened.status.as_u16(), &opened.json()["turns"]), (200, &json!(0)));
    let again = delta_with(&cluster, "s", "one and two", &sql).await;
    assert_eq!(again.status, 200, "{}", again.text());
}

//! Tests of caches that are kept apart by client: what a guess shows, and what still works.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::collections::BTreeSet;

use axum::body::Body;
use engine_sim::kv::KvEventsConfig;
use harness::{
    cluster::{Cluster, eventually, ids_turn},
    keys::{KeyFixture, TestKey},
    web::Answer,
};
use http::{Method, StatusCode};
use router::config::auth::CacheIsolation;
use serde_json::{Value, json};

type Header = (&'static str, &'static str);

const KEYS: [TestKey<'_>; 3] =
    [("alice", "sk-alice", ""), ("bob", "sk-bob", ""), ("ops", "sk-ops", "admin = true")];
const ALICE: Header = ("x-api-key", "sk-alice");
const BOB: Header = ("x-api-key", "sk-bob");
const OPS: Header = ("x-api-key", "sk-ops");
const DELTA: Header = ("x-berth-delta", "1");
const PAGE_TOKENS: usize = 16;

/// Starts workers whose routers keep the caches of clients apart.
async fn start(workers: usize, keys: &KeyFixture) -> Cluster {
    start_as(workers, keys, CacheIsolation::Principal).await
}

async fn start_as(workers: usize, keys: &KeyFixture, isolation: CacheIsolation) -> Cluster {
    let cluster = Cluster::start(workers, |settings| {
        settings.agent.engine.prefill_stage_ms = 600;
        settings.engine.kv_events = Some(KvEventsConfig::local());
        let core = &mut settings.engine.core;
        core.page_size = PAGE_TOKENS;
        core.max_total_tokens = 1 << 17;
        core.context_len = 1 << 16;
        core.prefill_tokens_per_s = 2_000.into();
        let router = settings.router.as_mut().unwrap();
        router.auth.keys_file = keys.path();
        router.auth.cache_isolation = isolation;
    });
    let cluster = cluster.await.unwrap();
    wait_for_workers(&cluster, "the engines' blocks are told", |worker| {
        worker["kv"]["state"] == "live"
    })
    .await;
    cluster
}

/// Waits until the router shows all workers like this.
async fn wait_for_workers(cluster: &Cluster, what: &str, fits: impl Fn(&Value) -> bool) {
    eventually(what, || async {
        let answer = cluster.request(Method::GET, "/v1/workers", &[OPS], Body::empty()).await;
        let shown = answer.json();
        let workers = shown["workers"].as_array()?;
        (workers.len() == cluster.agents.len() && workers.iter().all(&fits)).then_some(())
    })
    .await;
}

fn prompt(kind: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| (kind * 37 + at * 7 + at / 250) % 250).collect()
}

async fn cached(cluster: &Cluster, key: Header, body: &Value) -> Option<u64> {
    cluster.turn("/generate", &[key], body).await.meta("cached_tokens")
}

/// Returns the salts of the bodies that the first engine got at `path`.
fn salts(cluster: &Cluster, path: &str) -> Vec<Value> {
    let bodies = cluster.engine().bodies_seen(path);
    bodies
        .iter()
        .map(|body| serde_json::from_slice::<Value>(body).unwrap()["cache_salt"].clone())
        .collect()
}

#[tokio::test]
async fn a_right_guess_shows_nothing_of_other_clients() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let (shared, isolated) =
        (start_as(1, &keys, CacheIsolation::None).await, start(1, &keys).await);
    let secret = ids_turn(&prompt(1, 240), 1);
    for (cluster, guessed) in [(&shared, 224), (&isolated, 0)] {
        assert_eq!(cached(cluster, ALICE, &secret).await, Some(0));
        assert_eq!(cached(cluster, BOB, &secret).await, Some(guessed), "the guess");
        assert_eq!(cached(cluster, ALICE, &secret).await, Some(224), "her own prompt is cached");
    }
    // Neither does a guess with the salt that the engine got of the other client.
    let mut stolen = secret.clone();
    stolen["cache_salt"] = salts(&isolated, "/generate")[0].clone();
    assert!(stolen["cache_salt"].is_string());
    stolen["input_ids"] = json!(prompt(1, 239));
    assert_eq!(cached(&isolated, BOB, &stolen).await, Some(0));
    // A client's own salts keep its own requests apart.
    let mut own = secret.clone();
    own["cache_salt"] = "project".into();
    assert_eq!(cached(&isolated, ALICE, &own).await, Some(0));
    assert_eq!(cached(&isolated, ALICE, &own).await, Some(224));
}

#[tokio::test]
async fn every_route_is_isolated_or_refused() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(1, &keys).await;
    let messages = json!([{"role": "user", "content": "What is it?"}]);
    for (path, body) in [
        ("/generate", json!({"text": "a"})),
        ("/v1/completions", json!({"model": "tiny", "prompt": "a", "max_tokens": 1})),
        ("/v1/chat/completions", json!({"model": "tiny", "messages": messages, "max_tokens": 1})),
        ("/v1/responses", json!({"model": "tiny", "input": "a", "max_output_tokens": 1})),
    ] {
        for key in [ALICE, BOB, ALICE] {
            let answer = cluster.post(path, &[key], &body).await;
            assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text());
        }
        let salts = salts(&cluster, path);
        assert!(salts.iter().all(Value::is_string), "{path}: {salts:?}");
        let [alice, bob, again] = &salts[..] else { panic!("{path}: {salts:?}") };
        assert!(alice == again && alice != bob, "{path}: {salts:?}");
    }
    for path in ["/v1/messages", "/v1/embeddings"] {
        let body = json!({"model": "tiny", "messages": messages, "input": "a", "max_tokens": 1});
        let refused = cluster.post(path, &[ALICE], &body).await;
        assert_eq!(refused.refusal(), (400, "not_isolated".to_owned()));
        assert_eq!(cluster.turns_seen(path), [0]);
    }
    let refused =
        cluster.post("/generate", &[ALICE], &json!({"text": ["a"], "cache_salt": ["x"]})).await;
    assert_eq!(refused.refusal(), (400, "invalid_field".to_owned()));
}

#[tokio::test]
async fn a_pinned_session_goes_on_and_its_full_history_is_not_found_by_others() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(1, &keys).await;
    let open = json!({"session_id": "s", "retention": "pinned"});
    let opened = cluster.post("/v1/sessions", &[ALICE], &open).await;
    assert_eq!(opened.json()["retention"], "pinned", "{}", opened.text());
    let headers = [ALICE, DELTA, ("x-berth-session-id", "s")];
    let first = cluster.turn("/generate", &headers, &ids_turn(&prompt(1, 200), 8)).await;
    let second = cluster.turn("/generate", &headers, &ids_turn(&prompt(2, 20), 8)).await;
    let history = first.meta("prompt_tokens").unwrap() + 8;
    // The last token of an answer has no KV yet.
    assert!(second.meta("cached_tokens").unwrap() >= history - 1, "{}", second.text());
    let salts: BTreeSet<String> =
        salts(&cluster, "/generate").iter().map(ToString::to_string).collect();
    assert_eq!(salts.len(), 1, "{salts:?}");
    let closed = cluster.request(Method::DELETE, "/v1/sessions/s", &[ALICE], Body::empty()).await;
    assert_eq!(closed.status, StatusCode::NO_CONTENT);
    assert_eq!(cached(&cluster, BOB, &ids_turn(&prompt(1, 200), 1)).await, Some(0));
}

#[tokio::test]
async fn a_long_prompt_is_staged_under_its_client_s_salt() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(1, &keys).await;
    let long = ids_turn(&prompt(1, 10_000), 8);
    let answer = cluster.turn("/generate", &[ALICE], &long).await;
    let sent = salts(&cluster, "/generate");
    assert!(sent.len() > 1, "nothing was computed before");
    assert!(sent.iter().all(|salt| salt.is_string() && *salt == sent[0]), "{sent:?}");
    assert!(answer.meta("cached_tokens").unwrap() >= 4_000, "its stages were not found");
    let guess = cached(&cluster, BOB, &ids_turn(&prompt(1, 240), 1)).await;
    assert_eq!(guess, Some(0), "a stage is found by others");
}

#[tokio::test]
async fn a_client_s_prompt_goes_where_its_own_blocks_are() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(2, &keys).await;
    let body = ids_turn(&prompt(1, 1_000), 1);
    let worker = |answer: &Answer| answer.header("x-berth-worker").to_owned();
    let first = cluster.turn("/generate", &[ALICE], &body).await;
    eventually("her blocks are told", || async {
        let answer = cluster.request(Method::GET, "/v1/workers", &[OPS], Body::empty()).await;
        let shown = answer.json();
        let workers = shown["workers"].as_array()?.clone();
        workers.iter().any(|worker| worker["kv"]["resident_blocks"] == 1_000 / 64).then_some(())
    })
    .await;
    let uncached = async |answer: &Answer| {
        let path = format!("/v1/placements/{}", answer.header("x-berth-turn"));
        let record = cluster.request(Method::GET, &path, &[OPS], Body::empty()).await.json();
        record["placements"][0]["uncached_tokens"].as_u64().unwrap()
    };
    let bobs = cluster.turn("/generate", &[BOB], &body).await;
    assert_eq!(uncached(&bobs).await, 1_000, "her blocks count for him");
    let again = cluster.turn("/generate", &[ALICE], &body).await;
    assert_eq!(worker(&again), worker(&first));
    assert!(uncached(&again).await < 64, "her blocks don't count for her");
}

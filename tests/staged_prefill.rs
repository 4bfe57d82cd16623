//! End-to-end tests of staged prefill: a long prompt is computed in stages before its turn.
//!
//! Short prompts overtake the long prompt, and the answer is the same as without stages.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use bytes::Bytes;
use contract::staged_prefill::{PATH, encode};
use engine_sim::{core::CoreConfig, kv::KvEventsConfig};
use harness::{
    cluster::{Cluster, eventually, ids_turn},
    envelope::ENVELOPE,
    web::{Answer, Headers},
};
use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use worker_agent::staged_prefill_queue::PROMPTS_MAX;

/// The simulated engine's prefill speed. A stage takes 3 s before the speed has been measured, and
/// 0.6 s after.
const TOKENS_PER_S: u32 = 2_000;
const PAGE_TOKENS: usize = 16;

async fn start(prefill_stage_ms: u64, core: impl FnOnce(&mut CoreConfig)) -> Cluster {
    let started = Cluster::start(1, |settings| {
        settings.agent.engine.prefill_stage_ms = prefill_stage_ms;
        settings.engine.kv_events = Some(KvEventsConfig::local());
        let config = &mut settings.engine.core;
        config.page_size = PAGE_TOKENS;
        config.max_total_tokens = 1 << 17;
        config.context_len = 1 << 16;
        config.prefill_tokens_per_s = TOKENS_PER_S.into();
        core(config);
    });
    let cluster = started.await.unwrap();
    let live = |worker: &Value| worker["kv"]["state"] == "live";
    cluster.wait_for_worker(0, "the engine's blocks are told", live).await;
    cluster
}

async fn turn(cluster: &Cluster, prompt: &[u32]) -> Answer {
    cluster.turn("/generate", &[], &body(prompt)).await
}

/// Starts a turn whose prompt is staged, and returns when the engine has a stage of it.
async fn start_long(
    cluster: &Cluster,
    headers: Headers<'static>,
    prompt: &[u32],
) -> JoinSet<Answer> {
    let (web, url, sent) = (cluster.web.clone(), cluster.url("/generate"), body(prompt));
    let mut waiting = JoinSet::new();
    waiting.spawn(async move { web.post(&url, headers, &sent).await.unwrap() });
    eventually("a stage of it", || async { (!prompts_seen(cluster).is_empty()).then_some(()) })
        .await;
    waiting
}

/// Returns the prompts sent to the engine, in order.
fn prompts_seen(cluster: &Cluster) -> Vec<Vec<u32>> {
    cluster.engine().bodies_seen("/generate").iter().map(prompt_of).collect()
}

/// Sends a staging request directly to the agent.
async fn stage(cluster: &Cluster, headers: Headers<'_>, body: Bytes) -> Answer {
    cluster.web.request(Method::POST, &cluster.agent().url(PATH), headers, body).await.unwrap()
}

fn prompts_staged(worker: &Value) -> &Value {
    &worker["load"]["staged_prefill"]["prompts"]
}

fn body(prompt: &[u32]) -> Value {
    ids_turn(prompt, 8)
}

fn prompt_of(body: &Bytes) -> Vec<u32> {
    let body: Value = serde_json::from_slice(body).unwrap();
    serde_json::from_value(body["input_ids"].clone()).unwrap()
}

fn prompt(kind: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| (kind * 37 + at * 7 + at / 250) % 250).collect()
}

#[tokio::test]
async fn a_long_prompt_is_computed_in_stages_and_answered_as_if_it_were_not() {
    let (staged, whole) = (start(600, |_| {}).await, start(0, |_| {}).await);
    let long = prompt(1, 10_000);
    let (answer, plain) = tokio::join!(turn(&staged, &long), turn(&whole, &long));
    assert_eq!(answer.json()["output_ids"], plain.json()["output_ids"]);
    let seen = prompts_seen(&staged);
    let (sent, stages) = seen.split_last().unwrap();
    assert_eq!((sent, prompts_seen(&whole)), (&long, vec![long.clone()]));
    assert!(!stages.is_empty(), "nothing was computed before");
    assert!(stages.iter().all(|stage| long.starts_with(stage)));
    assert!(stages.is_sorted_by(|one, next| one.len() < next.len()));
    // Everything except the turn's own part was resident, in whole pages.
    let before = stages.last().unwrap().len();
    assert_eq!((answer.meta("cached_tokens"), before % PAGE_TOKENS), (Some(before as u64), 0));
    assert!(long.len() - before <= 6_000, "{before} is more than a stage from the end");

    // Resident tokens aren't computed again: the next turn needs no stage, although its prompt is
    // long.
    let mut next = long.clone();
    next.extend(prompt(2, 100));
    let told = |worker: &Value| worker["kv"]["resident_blocks"] == 10_000 / 64;
    staged.wait_for_worker(0, "its blocks are told", told).await;
    turn(&staged, &next).await;
    assert_eq!(prompts_seen(&staged).len(), seen.len() + 1);
}

#[tokio::test]
async fn a_session_that_has_just_spoken_is_staged_when_its_prompt_is_long() {
    let cluster = start(600, |_| {}).await;
    let headers = [("x-berth-session-id", "grows")];
    let mut history = prompt(1, 200);
    let turn = async |history: &[u32]| {
        let answer = cluster.turn("/generate", &headers, &body(history)).await;
        let before = prompts_seen(&cluster).len();
        (answer.headers["x-berth-placement"].clone(), before)
    };
    turn(&history).await;
    history.extend(prompt(2, 100));
    assert_eq!(turn(&history).await, ("sticky".parse().unwrap(), 2), "small talk");
    history.extend(prompt(3, 9_000));
    let (placement, seen) = turn(&history).await;
    assert_eq!(placement, "sticky");
    assert!(seen > 3, "its prompt went whole");
}

#[tokio::test]
async fn a_session_closed_while_its_turn_is_staged_ends_with_the_turn() {
    let cluster = start(600, |_| {}).await;
    let headers = &[("x-berth-session-id", "closed")];
    let mut waiting = start_long(&cluster, headers, &prompt(1, 14_000)).await;
    cluster.delete("/v1/sessions/closed").await;
    let answer = waiting.join_next().await.unwrap().unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    let ended = |worker: &Value| worker["load"]["sessions"] == 0;
    cluster.wait_for_worker(0, "the session's end", ended).await;
    assert_eq!(cluster.get("/v1/sessions/closed").await.status, 404);
}

#[tokio::test]
async fn a_short_prompt_passes_a_long_one_and_a_client_that_hangs_up_leaves_the_queue() {
    let cluster = start(600, |_| {}).await;
    // Half a minute of prefill.
    let long = prompt(1, 60_000);
    let mut waiting = start_long(&cluster, &[], &long).await;
    let short = turn(&cluster, &prompt(2, 100)).await;
    assert_eq!(short.meta("cached_tokens"), Some(0));
    assert!(!prompts_seen(&cluster).contains(&long), "the short one waited for the long one");
    let heard = |worker: &Value| prompts_staged(worker) == 1;
    cluster.wait_for_worker(0, "the router to hear of it", heard).await;
    waiting.abort_all();
    let left = |worker: &Value| prompts_staged(worker) == 0;
    cluster.wait_for_worker(0, "no prompt in staged prefill", left).await;
    // The client has disconnected, so the long prompt must not reach the engine.
    turn(&cluster, &prompt(3, 100)).await;
    assert!(!prompts_seen(&cluster).contains(&long));
}

#[tokio::test]
async fn a_long_prompt_is_answered_once_where_others_fill_the_pool_meanwhile() {
    let cluster = start(600, |core| core.max_total_tokens = 12_288).await;
    let long = prompt(1, 10_000);
    let mut waiting = start_long(&cluster, &[], &long).await;
    for kind in 2..8 {
        turn(&cluster, &prompt(kind, 2_000)).await;
    }
    let answer = waiting.join_next().await.unwrap().unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(prompts_seen(&cluster).iter().filter(|seen| **seen == long).count(), 1);
}

#[tokio::test]
async fn an_agent_takes_prompts_that_its_engine_can_compute_and_no_others() {
    let cluster = start(600, |_| {}).await;
    let refused = async |headers, ids| stage(&cluster, headers, ids).await.refusal();
    let unusable = (400, "staged_prefill".to_owned());
    let ids = encode(&prompt(1, 9_000));
    assert_eq!(refused(&[], ids.slice(1..)).await, unusable);
    assert_eq!(
        refused(&[(ENVELOPE, r#"{"resident_tokens":"many"}"#)], ids.clone()).await,
        unusable
    );
    let no_rank = (400, "no_rank".to_owned());
    assert_eq!(refused(&[(ENVELOPE, r#"{"rank":1}"#)], ids.clone()).await, no_rank);
    let outside = encode(&[vec![320], vec![0; 9_000]].concat());
    let code = "token_out_of_vocabulary".to_owned();
    assert_eq!(refused(&[], outside).await, (400, code));
    let long = encode(&prompt(1, (1 << 16) + 1));
    assert_eq!(refused(&[], long).await, unusable);
    assert!(prompts_seen(&cluster).is_empty(), "none of these reached the engine");

    // Short prompts, and tokens that the router reports as resident, need no stage.
    assert_eq!(stage(&cluster, &[], encode(&prompt(1, 200))).await.status, 204);
    let headers = [(ENVELOPE, r#"{"resident_tokens":8900}"#)];
    assert_eq!(stage(&cluster, &headers, ids.clone()).await.status, 204);
    assert!(prompts_seen(&cluster).is_empty());
    assert_eq!(stage(&cluster, &[], ids.clone()).await.status, 204);
    assert!(!prompts_seen(&cluster).is_empty());

    cluster.engine().kill();
    eventually("the engine's end to be known", || async {
        let answer = stage(&cluster, &[], encode(&prompt(2, 9_000))).await;
        (answer.code() == "engine_down").then_some(())
    })
    .await;
}

/// Lets the engine take requests and run none.
async fn pause_engine(cluster: &Cluster) {
    let url = format!("{}/pause_generation", cluster.engine().url());
    let paused = cluster.web.post(&url, &[], &json!({"mode": "in_place"})).await.unwrap();
    assert_eq!(paused.status, 200, "{}", paused.text());
}

#[tokio::test]
async fn a_stage_that_takes_too_long_is_given_up() {
    let cluster = start(600, |_| {}).await;
    pause_engine(&cluster).await;
    let late = stage(&cluster, &[], encode(&prompt(1, 9_000))).await;
    assert_eq!(late.refusal(), (503, "staged_prefill_late".to_owned()));
    assert_eq!(late.header("retry-after"), "", "the router sends the turn itself");
}

#[tokio::test]
async fn a_prompt_beyond_the_queue_is_not_staged() {
    service::descriptors::raise_limit();
    let cluster = start(10, |_| {}).await;
    pause_engine(&cluster).await;
    let ids = encode(&prompt(1, 3_000));
    let requests = (0..=PROMPTS_MAX).map(|_| {
        let (web, url, ids) = (cluster.web.clone(), cluster.agent().url(PATH), ids.clone());
        async move { web.request(Method::POST, &url, &[], ids).await.unwrap() }
    });
    let mut requests: JoinSet<Answer> = requests.collect();
    // On a slow machine, the first stage may have been given up before the last prompt comes.
    while let Some(answer) = requests.join_next().await {
        let answer = answer.unwrap();
        if answer.code() != "staged_prefill_late" {
            assert_eq!(answer.refusal(), (429, "staged_prefill_full".to_owned()));
            return;
        }
    }
    panic!("all prompts had a place");
}

#[tokio::test]
async fn a_stage_that_the_engine_refuses_fails() {
    let cluster = start(600, |core| core.max_total_tokens = 4_096).await;
    let failed = stage(&cluster, &[], encode(&prompt(1, 9_000))).await;
    assert_eq!(failed.refusal(), (502, "staged_prefill_failed".to_owned()));
}

#[tokio::test]
async fn without_a_stage_time_nothing_is_staged() {
    let cluster = start(0, |_| {}).await;
    assert_eq!(prompts_staged(&cluster.worker(0).await), &Value::Null);
    let answer = stage(&cluster, &[], encode(&prompt(1, 6_000))).await;
    assert_eq!(answer.refusal(), (404, "route_unknown".to_owned()));
}

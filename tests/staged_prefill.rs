//! End-to-end tests of staged prefill: a long prompt is computed in stages before its turn.
//!
//! Short prompts overtake the long prompt, and the answer is the same as without stages.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use bytes::Bytes;
use http::Method;
use proto::staged_prefill::{PATH, encode};
use serde_json::{Value, json};
use tests::{
    cluster::{Agent, Router, agent_config, eventually, ready, router_config},
    engine_sim::{Config, EngineSim, core::CoreConfig, kv::KvEventsConfig},
    web::{Answer, Web},
};
use tokio::task::JoinSet;

/// The simulated engine's prefill speed. A stage takes 3 s before the speed has been measured, and
/// 0.6 s after.
const TOKENS_PER_S: u32 = 2_000;
const PAGE_TOKENS: usize = 16;

struct Cluster {
    engine: EngineSim,
    agent: Agent,
    router: Router,
    web: Web,
}

impl Cluster {
    async fn new(prefill_stage_ms: u64, core: impl FnOnce(&mut CoreConfig)) -> Cluster {
        let mut config = Config { kv_events: Some(KvEventsConfig::local()), ..Config::default() };
        config.core.page_size = PAGE_TOKENS;
        config.core.max_total_tokens = 1 << 17;
        config.core.context_len = 1 << 16;
        config.core.prefill_tokens_per_s = TOKENS_PER_S.into();
        core(&mut config.core);
        let web = Web::default();
        let engine = EngineSim::start_local(config).await.unwrap();
        let settings = agent_config(&engine.url(), "w0");
        let agent =
            Agent::start(worker_agent::config::Config { prefill_stage_ms, ..settings }).unwrap();
        ready(&web, agent.admin).await;
        let router = Router::start(router_config(&[&agent])).await.unwrap();
        ready(&web, router.admin).await;
        let cluster = Cluster { engine, agent, router, web };
        eventually("the engine's blocks are told", || async {
            let workers = cluster.web.get(&cluster.router.url("/v1/workers")).await.unwrap().json();
            (workers["workers"][0]["kv"]["state"] == "live").then_some(())
        })
        .await;
        cluster
    }

    async fn turn(&self, prompt: &[u32]) -> Answer {
        let answer = turn(&self.web, &self.router.url("/generate"), prompt).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer
    }

    /// Returns the prompts sent to the engine, in order.
    fn seen(&self) -> Vec<Vec<u32>> {
        let bodies = self.engine.bodies_seen("/generate");
        bodies.iter().map(prompt_of).collect()
    }

    /// Sends a staging request directly to the agent.
    async fn stage(&self, headers: &[(&str, &str)], body: Bytes) -> Answer {
        self.web.request(Method::POST, &self.agent.url(PATH), headers, body).await.unwrap()
    }

    async fn prompts_staged(&self) -> Value {
        let workers = self.web.get(&self.router.url("/v1/workers")).await.unwrap().json();
        workers["workers"][0]["load"]["staged_prefill"]["prompts"].clone()
    }
}

async fn turn(web: &Web, url: &str, prompt: &[u32]) -> Answer {
    web.post(url, &[], &body(prompt)).await.unwrap()
}

fn body(prompt: &[u32]) -> Value {
    let sampling = json!({"max_new_tokens": 8, "temperature": 0, "ignore_eos": true});
    json!({"input_ids": prompt, "sampling_params": sampling})
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
    let (staged, whole) = (Cluster::new(600, |_| {}).await, Cluster::new(0, |_| {}).await);
    let long = prompt(1, 10_000);
    let (answer, plain) = tokio::join!(staged.turn(&long), whole.turn(&long));
    assert_eq!(answer.json()["output_ids"], plain.json()["output_ids"]);
    let seen = staged.seen();
    let (sent, stages) = seen.split_last().unwrap();
    assert_eq!((sent, whole.seen()), (&long, vec![long.clone()]));
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
    eventually("its blocks are told", || async {
        let workers = staged.web.get(&staged.router.url("/v1/workers")).await.unwrap().json();
        let blocks = workers["workers"][0]["kv"]["resident_blocks"].as_u64();
        (blocks == Some(10_000 / 64)).then_some(())
    })
    .await;
    staged.turn(&next).await;
    assert_eq!(staged.seen().len(), seen.len() + 1);
}

#[tokio::test]
async fn a_session_that_has_just_spoken_is_staged_when_its_prompt_is_long() {
    let cluster = Cluster::new(600, |_| {}).await;
    let headers = [("x-berth-session-id", "grows")];
    let url = cluster.router.url("/generate");
    let mut history = prompt(1, 200);
    let turn = async |history: &[u32]| {
        let answer = cluster.web.post(&url, &headers, &body(history)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        let before = cluster.seen().len();
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
    let cluster = Cluster::new(600, |_| {}).await;
    let (web, url) = (cluster.web.clone(), cluster.router.url("/generate"));
    let sent = body(&prompt(1, 14_000));
    let mut waiting = JoinSet::new();
    waiting.spawn(async move {
        web.post(&url, &[("x-berth-session-id", "closed")], &sent).await.unwrap()
    });
    eventually("a stage of it", || async { (!cluster.seen().is_empty()).then_some(()) }).await;
    let session = cluster.router.url("/v1/sessions/closed");
    cluster.web.request(Method::DELETE, &session, &[], "").await.unwrap();
    let answer = waiting.join_next().await.unwrap().unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    eventually("the session's end", || async {
        let workers = cluster.web.get(&cluster.router.url("/v1/workers")).await.unwrap().json();
        (workers["workers"][0]["load"]["sessions"] == 0).then_some(())
    })
    .await;
    assert_eq!(cluster.web.get(&session).await.unwrap().status, 404);
}

#[tokio::test]
async fn a_short_prompt_passes_a_long_one_and_a_client_that_hangs_up_leaves_the_queue() {
    let cluster = Cluster::new(600, |_| {}).await;
    // Half a minute of prefill.
    let long = prompt(1, 60_000);
    let (web, url, sent) = (cluster.web.clone(), cluster.router.url("/generate"), long.clone());
    let mut waiting = JoinSet::new();
    waiting.spawn(async move { turn(&web, &url, &sent).await });
    eventually("a stage of it", || async { (!cluster.seen().is_empty()).then_some(()) }).await;
    let short = cluster.turn(&prompt(2, 100)).await;
    assert_eq!(short.meta("cached_tokens"), Some(0));
    assert!(!cluster.seen().contains(&long), "the short one waited for the long one");
    eventually("the router to hear of it", || async {
        (cluster.prompts_staged().await == 1).then_some(())
    })
    .await;
    waiting.abort_all();
    eventually("no prompt in staged prefill", || async {
        (cluster.prompts_staged().await == 0).then_some(())
    })
    .await;
    // The client has disconnected, so the long prompt must not reach the engine.
    cluster.turn(&prompt(3, 100)).await;
    assert!(!cluster.seen().contains(&long));
}

#[tokio::test]
async fn a_long_prompt_is_answered_once_where_others_fill_the_pool_meanwhile() {
    let cluster = Cluster::new(600, |core| core.max_total_tokens = 12_288).await;
    let long = prompt(1, 10_000);
    let (web, url, sent) = (cluster.web.clone(), cluster.router.url("/generate"), long.clone());
    let mut waiting = JoinSet::new();
    waiting.spawn(async move { turn(&web, &url, &sent).await });
    eventually("a stage of it", || async { (!cluster.seen().is_empty()).then_some(()) }).await;
    for kind in 2..8 {
        cluster.turn(&prompt(kind, 2_000)).await;
    }
    let answer = waiting.join_next().await.unwrap().unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(cluster.seen().iter().filter(|seen| **seen == long).count(), 1);
}

#[tokio::test]
async fn an_agent_takes_prompts_that_its_engine_can_compute_and_no_others() {
    let cluster = Cluster::new(600, |_| {}).await;
    let refused = |answer: Answer| (answer.status.as_u16(), answer.code());
    let ids = encode(&prompt(1, 9_000));
    assert_eq!(
        refused(cluster.stage(&[], ids.slice(1..)).await),
        (400, "staged_prefill".to_owned())
    );
    let headers = [("x-berth-resident-tokens", "many")];
    assert_eq!(
        refused(cluster.stage(&headers, ids.clone()).await),
        (400, "staged_prefill".to_owned())
    );
    let headers = [("x-berth-rank", "1")];
    assert_eq!(refused(cluster.stage(&headers, ids.clone()).await), (400, "no_rank".to_owned()));
    let outside = encode(&[vec![320], vec![0; 9_000]].concat());
    let code = "token_out_of_vocabulary".to_owned();
    assert_eq!(refused(cluster.stage(&[], outside).await), (400, code));
    let long = encode(&prompt(1, (1 << 16) + 1));
    assert_eq!(refused(cluster.stage(&[], long).await), (400, "staged_prefill".to_owned()));
    assert!(cluster.seen().is_empty(), "none of these reached the engine");

    // Short prompts, and tokens that the router reports as resident, need no stage.
    assert_eq!(cluster.stage(&[], encode(&prompt(1, 200))).await.status, 204);
    let headers = [("x-berth-resident-tokens", "8900")];
    assert_eq!(cluster.stage(&headers, ids.clone()).await.status, 204);
    assert!(cluster.seen().is_empty());
    assert_eq!(cluster.stage(&[], ids.clone()).await.status, 204);
    assert!(!cluster.seen().is_empty());

    cluster.engine.kill();
    eventually("the engine's end to be known", || async {
        let answer = cluster.stage(&[], encode(&prompt(2, 9_000))).await;
        (answer.code() == "engine_down").then_some(())
    })
    .await;
}

#[tokio::test]
async fn without_a_stage_time_nothing_is_staged() {
    let cluster = Cluster::new(0, |_| {}).await;
    assert_eq!(cluster.prompts_staged().await, Value::Null);
    let answer = cluster.stage(&[], encode(&prompt(1, 6_000))).await;
    assert_eq!((answer.status.as_u16(), answer.code()), (404, "unknown_route".to_owned()));
}

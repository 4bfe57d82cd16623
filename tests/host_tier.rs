//! End-to-end tests of a host tier, which placement counts, and of loads ahead of turns.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use engine_sim::{Config, EngineSim, core::WritePolicy, kv::KvEventsConfig, shim::SimShim};
use harness::{
    cluster::{Agent, Cluster, agent_config, eventually, ids_turn, ready, router_config},
    web::{Answer, Web},
};
use http::{Method, StatusCode};
use serde_json::{Value, json};

const WORKERS: usize = 2;
/// Tokens of each pool. Seven prompts fit into one with their answers.
const POOL_TOKENS: usize = 4096;
const PROMPT_TOKENS: u32 = 560;
/// Nearly three times as many as fit into the pools.
const PROMPTS: u32 = 40;
/// The time in which an agent looks after a session that is expected for the first time.
const LOOKED_WITHIN: Duration = Duration::from_secs(3);

struct Fleet {
    cluster: Cluster,
    engine_urls: Vec<String>,
    _shims: Vec<SimShim>,
}

impl Fleet {
    async fn start(has_host_tier: bool) -> Self {
        Self::start_of(WORKERS, has_host_tier, WritePolicy::WriteBack).await
    }

    async fn start_of(workers: usize, has_host_tier: bool, policy: WritePolicy) -> Self {
        let web = Web::default();
        let mut cluster = Cluster { engines: vec![], agents: vec![], routers: vec![], web };
        let (mut engine_urls, mut shims) = (vec![], vec![]);
        for number in 0..workers {
            let mut config =
                Config { kv_events: Some(KvEventsConfig::local()), ..Config::default() };
            config.core.session_radix_cache = true;
            config.core.max_total_tokens = POOL_TOKENS;
            config.core.context_len = POOL_TOKENS;
            config.core.prefill_tokens_per_s = 20_000.0;
            config.core.has_host_tier = has_host_tier;
            // Room for some prompts on both workers too.
            config.core.hicache_ratio = 8.0;
            config.core.hicache_write_policy = policy;
            let engine = Arc::new(EngineSim::start_local(config).await.unwrap());
            let agent = Agent::start(agent_config(&engine.url(), &format!("w{number}"))).unwrap();
            ready(&cluster.web, agent.admin).await;
            engine_urls.push(engine.url());
            shims.push(SimShim::start_demoting(engine, agent.shim_socket.clone()));
            cluster.agents.push(agent);
        }
        cluster.start_router(router_config(&[])).await.unwrap();
        for number in 0..workers {
            cluster
                .wait_for_worker(number, "the shim's figures and events", |worker| {
                    let load = &worker["load"];
                    load["pool_used_tokens"]["source"] == "shim"
                        && load["host"].is_object() == has_host_tier
                        && worker["kv"]["state"] == "live"
                })
                .await;
        }
        Self { cluster, engine_urls, _shims: shims }
    }

    async fn ask(&self, number: u32) -> Answer {
        let token = |at| if at == 0 { number } else { (number + 7 * at + at / 256) % 256 };
        let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(token).collect();
        let answer = self.cluster.turn("/generate", &[], &ids_turn(&prompt, 1)).await;
        assert!(answer.status.is_success(), "{answer:?}");
        answer
    }

    /// Asks all prompts in turn. Returns the tokens that were computed, and those that were loaded
    /// from the host.
    async fn ask_all(&self) -> (u64, u64) {
        let (mut computed, mut loaded) = (0, 0);
        for number in 0..PROMPTS {
            let meta = self.ask(number).await.json()["meta_info"].clone();
            let tokens = |value: &Value| value.as_u64().unwrap();
            computed += tokens(&meta["prompt_tokens"]) - tokens(&meta["cached_tokens"]);
            loaded += tokens(&meta["cached_tokens_details"]["host"]);
            self.settle(number).await;
        }
        (computed, loaded)
    }

    /// Waits until the router knows the prompt's blocks. On a busy machine KV events may come after
    /// the next prompt.
    async fn settle(&self, number: u32) {
        eventually("the prompt's blocks", async || {
            let answer = self.ask(number).await;
            let turn = answer.headers["x-berth-turn"].to_str().unwrap().to_owned();
            let shown = self.cluster.get(&format!("/v1/placements/{turn}")).await.json();
            let placement = shown["placements"].as_array()?.last()?;
            let workers = placement["compared"].as_array()?;
            let chosen = &placement["worker"];
            let figures = workers.iter().find(|figures| figures["worker"] == *chosen)?;
            (figures["resident_tokens"].as_u64()? > 500).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_device_evicts_is_loaded_back_where_it_is() {
    let with_tier = Fleet::start(true).await;
    with_tier.ask_all().await;
    let (computed, loaded) = with_tier.ask_all().await;
    let without_tier = Fleet::start(false).await;
    without_tier.ask_all().await;
    let (all_computed, none_loaded) = without_tier.ask_all().await;
    assert_eq!(none_loaded, 0);
    assert!(loaded > u64::from(PROMPTS * PROMPT_TOKENS / 2), "{loaded} tokens were loaded");
    // The last page of each prompt is computed in any case.
    let least = u64::from(PROMPTS) * 16;
    // A few prompts go elsewhere where a busy machine's engine computes more slowly than it says.
    assert!(computed <= least + all_computed / 5, "{computed} of {all_computed} tokens again");

    let workers = with_tier.cluster.get("/v1/workers").await.json();
    let tokens = |worker: &Value| worker["load"]["host"]["used_tokens"]["value"].as_u64().unwrap();
    let used: u64 = workers["workers"].as_array().unwrap().iter().map(tokens).sum();
    let evicted = u64::from(PROMPTS * PROMPT_TOKENS) - (WORKERS * POOL_TOKENS) as u64;
    assert!(used >= evicted, "{used} of {evicted} tokens are on the hosts");
    let page = with_tier.cluster.agents[0].admin_url("/metrics");
    let metrics = with_tier.cluster.web.get(&page).await.unwrap().text();
    assert!(metrics.contains("berth_agent_host_used_tokens{dp_rank=\"0\"}"), "{metrics}");
}

/// The prompt of a session, with a first token of its own.
fn prompt(number: usize, tokens: usize) -> Vec<u32> {
    let token = |at| u32::try_from((number + 3 * at + at / 256) % 256).unwrap();
    (0..tokens).map(token).collect()
}

/// One worker, and tagged sessions on it that need more than its pool.
struct Sessions {
    fleet: Fleet,
}

impl Sessions {
    async fn start(has_host_tier: bool) -> Self {
        Self { fleet: Fleet::start_of(1, has_host_tier, WritePolicy::WriteThrough).await }
    }

    /// Runs a turn of the session. Returns what the engine had of its prompt, on the device and on
    /// the host.
    async fn turn(&self, number: usize, tokens: usize) -> (u64, u64) {
        self.turn_with(number, ids_turn(&prompt(number, tokens), 1)).await
    }

    async fn turn_with(&self, number: usize, body: Value) -> (u64, u64) {
        let id = format!("s{number}");
        let headers = [("x-berth-session-id", id.as_str()), ("x-berth-retention", "tagged")];
        let answer = self.fleet.cluster.turn("/generate", &headers, &body).await;
        assert!(answer.status.is_success(), "{answer:?}");
        let details = answer.json()["meta_info"]["cached_tokens_details"].clone();
        let tokens = |tier: &str| details[tier].as_u64().unwrap_or(0);
        (tokens("device"), tokens("host"))
    }

    async fn prefetch(&self, number: usize) -> Answer {
        let path = format!("/v1/sessions/s{number}/prefetch");
        self.fleet.cluster.request(Method::POST, &path, &[], Body::empty()).await
    }

    /// Loads the session's KV. Returns how many tokens that are.
    async fn tokens_prefetched(&self, number: usize) -> u64 {
        let answer = self.prefetch(number).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer.json()["tokens"].as_u64().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefetched_session_finds_its_kv_on_the_device() {
    let sessions = Sessions::start(true).await;
    for number in 0..12 {
        sessions.turn(number, 560).await;
    }
    // The pool has room for seven of them.
    assert_eq!(sessions.turn(0, 560).await, (0, 544), "what an evicted session costs");
    assert_eq!(sessions.tokens_prefetched(1).await, 560);
    assert_eq!(sessions.tokens_prefetched(1).await, 0, "it is on its way");
    assert_eq!(sessions.turn(1, 560).await, (544, 0));
    assert_eq!(sessions.tokens_prefetched(1).await, 0, "the device has it");
    eventually("the count of what was of use", async || {
        let counted = |fate: &str, tokens: u32| {
            format!("berth_agent_prefetched_tokens_total{{use=\"{fate}\"}} {tokens}\n")
        };
        let metrics = sessions.fleet.cluster.agent_metrics().await;
        (metrics.contains(&counted("loaded", 560)) && metrics.contains(&counted("used", 560)))
            .then_some(())
    })
    .await;

    // A session that is closed before it returned was loaded in vain.
    assert_eq!(sessions.tokens_prefetched(2).await, 560);
    sessions.fleet.cluster.delete("/v1/sessions/s2").await;
    eventually("the count of what was wasted", async || {
        let metrics = sessions.fleet.cluster.agent_metrics().await;
        metrics.contains("tokens_total{use=\"wasted\"} 560\n").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_its_client_expects_back_is_loaded_before_it_returns() {
    let sessions = Sessions::start(true).await;
    let loaded = async || {
        let metrics = sessions.fleet.cluster.agent_metrics().await;
        let (_, after) = metrics.split_once("tokens_total{use=\"loaded\"} ").unwrap_or_default();
        after.lines().next().and_then(|count| count.parse().ok()).unwrap_or(0_u64)
    };
    // The agent may look before the session is evicted, and then loads nothing. The next time it
    // looks later, by the time of the last rest.
    eventually("the load", async || {
        let before = loaded().await;
        let mut body = ids_turn(&prompt(0, 560), 1);
        body["nvext"] = json!({"agent_hints": {"speculative_prefill": true}});
        sessions.turn_with(0, body).await;
        // The pool has room for seven sessions.
        for number in 1..10 {
            sessions.turn(number, 560).await;
        }
        let looked = tokio::time::timeout(
            LOOKED_WITHIN,
            eventually("it", async || (loaded().await > before).then_some(())),
        );
        looked.await.ok()
    })
    .await;
    assert_eq!(sessions.turn(0, 560).await, (544, 0), "it was expected");
    assert_eq!(sessions.turn(1, 560).await, (0, 544), "nobody expected it");
}

#[tokio::test(flavor = "multi_thread")]
async fn prefetches_are_refused_where_they_would_be_in_the_way() {
    let sessions = Sessions::start(true).await;
    assert_eq!(sessions.prefetch(0).await.refusal(), (404, "session_unknown".to_owned()));
    // More than half of the pool.
    sessions.turn(100, 2400).await;
    for number in 0..18 {
        sessions.turn(number, 560).await;
    }
    let too_long = sessions.prefetch(100).await;
    assert_eq!(too_long.refusal(), (501, "prefetch_unavailable".to_owned()), "{}", too_long.text());
    for number in 0..8 {
        assert!(sessions.tokens_prefetched(number).await > 0, "{number}");
    }
    let over_share = sessions.prefetch(8).await;
    assert_eq!(over_share.refusal(), (429, "prefetch_share".to_owned()), "{}", over_share.text());
    assert_eq!(over_share.headers["retry-after"], "1");
    // A place is free when a session returns.
    sessions.turn(0, 560).await;
    assert!(sessions.tokens_prefetched(8).await > 0);
    // Not idle: a flush would fail, and to release the memory would end the engine.
    let flush = sessions.fleet.cluster.post("/flush_cache", &[], &Value::Null).await;
    assert_eq!(flush.refusal(), (503, "engine_busy".to_owned()), "{}", flush.text());
    // Who prefetches on can't keep the operator off.
    let refused = sessions.prefetch(9).await;
    assert_eq!(refused.refusal(), (429, "prefetch_no_room".to_owned()), "{}", refused.text());
    eventually("the flush", async || {
        let flush = sessions.fleet.cluster.post("/flush_cache", &[], &Value::Null).await;
        flush.status.is_success().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_load_begins_while_a_control_call_may_be_on_its_way() {
    let sessions = Sessions::start(true).await;
    sessions.turn(0, 560).await;
    let flush = sessions.fleet.cluster.post("/flush_cache", &[], &Value::Null).await;
    assert_eq!(flush.status, StatusCode::OK, "{}", flush.text());
    let refused = sessions.prefetch(0).await;
    assert_eq!(refused.refusal(), (429, "prefetch_no_room".to_owned()), "{}", refused.text());
    assert!(refused.text().contains("an operator"), "{}", refused.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefetch_takes_no_room_from_a_running_turn() {
    let sessions = Sessions::start(true).await;
    for number in 0..12 {
        sessions.turn(number, 560).await;
    }
    let fleet = &sessions.fleet;
    let slow = json!({"forward_sleep_time": 0.05});
    let url = format!("{}/slow_down", fleet.engine_urls[0]);
    let slowed = fleet.cluster.web.post(&url, &[], &slow).await.unwrap();
    assert_eq!(slowed.status, StatusCode::OK, "so that the turn lasts");
    let body = ids_turn(&prompt(200, 3600), 400);
    let running = sessions.fleet.cluster.stream("/generate", &[], body).await;
    let refused = sessions.prefetch(0).await;
    assert_eq!(refused.refusal(), (429, "prefetch_no_room".to_owned()), "{}", refused.text());
    drop(running);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_a_host_tier_prefetches_nothing() {
    let sessions = Sessions::start(false).await;
    sessions.turn(0, 560).await;
    let refused = sessions.prefetch(0).await;
    assert_eq!(refused.refusal(), (501, "prefetch_unavailable".to_owned()));
    assert!(refused.text().contains("no host memory"), "{}", refused.text());
}

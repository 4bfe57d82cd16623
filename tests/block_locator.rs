//! End-to-end tests of placement by resident blocks, which the router knows from KV events.
//!
//! The prompts that fill the caches bypass the router, so the router knows them only from events.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::collections::BTreeSet;

use proto::block::{BlockHash, BlockTokens, Chain, Scheme};
use serde_json::{Value, json};
use tests::{
    cluster::{Agent, Router, agent_config, eventually, ready, router_config},
    engine_sim::{
        Config, EngineSim,
        kv::{Fault, KvEventsConfig},
    },
    web::{Answer, Web},
};

/// The leading tokens that prompts of one kind share.
const SYSTEM: u32 = 512;
/// The tokens of a pool that a few prompts fill.
const SMALL: usize = 2048;
/// The tokens of a pool that has room for a prompt while, by the last report, another still runs.
const ROOMY: usize = 16_384;

struct Cluster {
    engines: Vec<EngineSim>,
    agents: Vec<Agent>,
    router: Router,
    web: Web,
    page_tokens: u32,
}

impl Cluster {
    async fn new(count: usize, page_tokens: u32, pool_tokens: usize) -> Cluster {
        let mut config = Config { kv_events: Some(KvEventsConfig::local()), ..Config::default() };
        config.core.page_size = page_tokens as usize;
        config.core.max_total_tokens = pool_tokens;
        let (web, mut engines, mut agents) = (Web::default(), vec![], vec![]);
        for number in 0..count {
            let engine = EngineSim::start_local(config.clone()).await.unwrap();
            let agent = Agent::start(agent_config(&engine.url(), &format!("w{number}"))).unwrap();
            ready(&web, agent.admin).await;
            engines.push(engine);
            agents.push(agent);
        }
        let router =
            Router::start(router_config(&agents.iter().collect::<Vec<_>>())).await.unwrap();
        ready(&web, router.admin).await;
        let cluster = Cluster { engines, agents, router, web, page_tokens };
        for number in 0..count {
            cluster.wait_for_report(number, 0).await;
        }
        cluster
    }

    /// Runs a turn of one token directly on an agent, past the router.
    async fn fill_cache(&self, number: usize, prompt: &[u32]) {
        let url = self.agents[number].url("/generate");
        let answer = self.web.post(&url, &[], &body(prompt)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    async fn turn(&self, prompt: &[u32], headers: &[(&str, &str)]) -> Answer {
        let url = self.router.url("/generate");
        let answer = self.web.post(&url, headers, &body(prompt)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer
    }

    /// Returns what the router knows of a worker's blocks.
    async fn reported_kv(&self, number: usize) -> Value {
        let workers = self.web.get(&self.router.url("/v1/workers")).await.unwrap().json();
        let name = format!("w{number}");
        let mut all = workers["workers"].as_array().unwrap().iter();
        all.find(|worker| worker["agent"] == name).map_or(Value::Null, |its| its["kv"].clone())
    }

    async fn wait_for_report(&self, number: usize, blocks: usize) {
        eventually(&format!("{blocks} blocks of worker {number}"), || async {
            let known = self.reported_kv(number).await;
            (known["state"] == "live" && known["resident_blocks"] == blocks).then_some(())
        })
        .await;
    }

    /// Returns the blocks of everything in an engine's cache.
    async fn resident(&self, number: usize) -> BTreeSet<BlockHash> {
        let chains = self.engines[number].cached(0).await.unwrap();
        chains.iter().flat_map(|(_, tokens)| self.blocks(tokens)).collect()
    }

    fn blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let scheme = Scheme::plain(BlockTokens::for_page(self.page_tokens).unwrap());
        let mut blocks = vec![];
        Chain::new(&scheme).push(tokens, &mut blocks);
        blocks
    }

    /// Returns the router's record of a turn's placement.
    async fn placement_record(&self, turn: &Answer) -> Value {
        let number = turn.headers["x-berth-turn"].to_str().unwrap();
        let url = self.router.url(&format!("/v1/placements/{number}"));
        self.web.get(&url).await.unwrap().json()["placements"][0].clone()
    }

    /// Returns the resident tokens, as placement saw them, of the worker that got the turn.
    async fn overlap(&self, turn: &Answer) -> u64 {
        let (record, worker) =
            (self.placement_record(turn).await, turn.headers["x-berth-worker"].to_str().unwrap());
        let mut compared = record["compared"].as_array().unwrap().iter();
        let own = compared.find(|one| one["worker"] == worker).unwrap();
        own["resident_tokens"].as_u64().unwrap_or_else(|| panic!("no overlap in {record}"))
    }
}

fn body(prompt: &[u32]) -> Value {
    json!({"input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": true}})
}

/// Returns a prompt. Prompts of different kinds share no block; prompts of one kind share the first
/// [`SYSTEM`] tokens.
fn prompt(kind: u32, own: u32, tokens: u32) -> Vec<u32> {
    let token = |at| if at < SYSTEM { kind * 37 + at * 7 } else { kind + own * 11 + at * 3 };
    (0..tokens).map(|at| token(at) % 250).collect()
}

async fn a_conversation_lands_where_its_system_prompt_is(page_tokens: u32) {
    let cluster = Cluster::new(3, page_tokens, ROOMY).await;
    for (kind, number) in [(1, 2), (2, 0), (3, 1)] {
        cluster.fill_cache(number, &prompt(kind, 0, SYSTEM + 64)).await;
        cluster.wait_for_report(number, SYSTEM as usize / 64 + 1).await;
    }
    for (kind, number) in [(2, 0), (3, 1), (1, 2)] {
        let id = format!("s{kind}");
        let headers = [("x-berth-session-id", id.as_str())];
        let turn = cluster.turn(&prompt(kind, 1, SYSTEM + 100), &headers).await;
        let record = cluster.placement_record(&turn).await;
        assert_eq!(turn.headers["x-berth-worker"], format!("w{number}/0"), "kind {kind}: {record}");
        assert_eq!(turn.meta("cached_tokens"), Some(u64::from(SYSTEM)), "kind {kind}");
    }
}

#[tokio::test]
async fn a_conversation_lands_where_its_system_prompt_is_in_pages_of_sixteen_tokens() {
    a_conversation_lands_where_its_system_prompt_is(16).await;
}

#[tokio::test]
async fn a_conversation_lands_where_its_system_prompt_is_in_pages_of_one_token() {
    a_conversation_lands_where_its_system_prompt_is(1).await;
}

/// Checks the router's state after batches that stored and evicted chains were lost.
#[tokio::test]
async fn after_a_gap_the_router_knows_what_the_engine_has() {
    let cluster = Cluster::new(1, 16, SMALL).await;
    // Four of these chains fill the pool.
    let chain = |kind| prompt(kind, 0, 480);
    for kind in 1..=3 {
        cluster.fill_cache(0, &chain(kind)).await;
    }
    cluster.wait_for_report(0, 3 * (480 / 64)).await;
    cluster.engines[0].kv_fault(0, Fault::Drop(3)).await;
    for kind in 4..=7 {
        cluster.fill_cache(0, &chain(kind)).await;
    }
    // This turn raises the cache's block count to a new maximum, so a router that counts as many
    // blocks has received all events.
    let last = prompt(8, 0, 64);
    cluster.fill_cache(0, &last).await;
    let resident = cluster.resident(0).await;
    let mut expected: BTreeSet<_> = (4..=7).flat_map(|kind| cluster.blocks(&chain(kind))).collect();
    expected.extend(cluster.blocks(&last));
    assert_eq!(resident, expected, "the oldest chains have made room");
    cluster.wait_for_report(0, resident.len()).await;
    // The router counts as many blocks as the engine has, and knows all of its chains, so both sets
    // are equal.
    for kind in 4..=7 {
        // One more token, so that the whole chain can be matched; the token fills no page.
        let turn = cluster.turn(&[chain(kind), vec![7]].concat(), &[]).await;
        assert_eq!(cluster.overlap(&turn).await, 480 / 64 * 64, "chain {kind}");
    }
}

/// Checks that blocks are forgotten when events are lost for good. A router with wrong knowledge of
/// the cache causes only more computation, never another answer.
#[tokio::test]
async fn lost_events_cost_recomputation_and_nothing_else() {
    let cluster = Cluster::new(1, 16, SMALL).await;
    let chain = |kind| prompt(kind, 0, 480);
    let asked = |kind| [chain(kind), vec![7]].concat();
    let first = cluster.turn(&asked(1), &[]).await;
    for kind in 2..=4 {
        cluster.fill_cache(0, &chain(kind)).await;
    }
    cluster.wait_for_report(0, 4 * (480 / 64)).await;
    // The event of the first chain's eviction is lost, and so is its replay.
    cluster.engines[0].kv_fault(0, Fault::Lose(1)).await;
    cluster.fill_cache(0, &chain(5)).await;
    cluster.fill_cache(0, &chain(6)).await;
    eventually("the loss to be known", || async {
        (cluster.reported_kv(0).await["state"] == "snapshot").then_some(())
    })
    .await;
    // The engine still has the chain, whether or not the router knows it.
    let kept = cluster.turn(&asked(5), &[]).await;
    assert_eq!((cluster.overlap(&kept).await, kept.meta("cached_tokens")), (0, Some(480)));
    let gone = cluster.turn(&asked(1), &[]).await;
    assert_eq!((cluster.overlap(&gone).await, gone.meta("cached_tokens")), (0, Some(0)));
    assert_eq!(gone.json()["output_ids"], first.json()["output_ids"]);
}

#[tokio::test]
async fn a_restarted_engine_is_known_to_have_nothing() {
    let mut cluster = Cluster::new(1, 16, SMALL).await;
    cluster.fill_cache(0, &prompt(1, 0, SYSTEM + 64)).await;
    cluster.wait_for_report(0, 9).await;
    let engine = cluster.engines.remove(0);
    cluster.engines.push(engine.restart().await.unwrap());
    cluster.wait_for_report(0, 0).await;
    let turn = eventually("a turn", || async {
        let url = cluster.router.url("/generate");
        let answer = cluster.web.post(&url, &[], &body(&prompt(1, 1, SYSTEM + 64))).await.ok()?;
        (answer.status == 200).then_some(answer)
    })
    .await;
    assert_eq!(turn.meta("cached_tokens"), Some(0));
    cluster.wait_for_report(0, 9).await;
}

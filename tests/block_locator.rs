//! End-to-end tests of placement by resident blocks, which the router knows from KV events.
//!
//! The prompts that fill the caches bypass the router, so the router knows them only from events.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::collections::BTreeSet;

use blocks::block::{BlockHash, BlockTokens, Chain, Scheme};
use engine_sim::kv::{Fault, KvEventsConfig};
use harness::{
    cluster::{Cluster, eventually, ids_turn},
    web::{Answer, Headers},
};
use serde_json::Value;

/// The leading tokens that prompts of one kind share.
const SYSTEM: u32 = 512;
/// The tokens of a pool that a few prompts fill.
const SMALL: usize = 2048;
/// The tokens of a pool that has room for a prompt while, by the last report, another still runs.
const ROOMY: usize = 16_384;

/// A cluster whose engines publish KV events.
struct Fleet {
    cluster: Cluster,
    page_tokens: u32,
}

impl Fleet {
    async fn start(count: usize, page_tokens: u32, pool_tokens: usize) -> Self {
        let started = Cluster::start(count, |settings| {
            settings.engine.kv_events = Some(KvEventsConfig::local());
            settings.engine.core.page_size = page_tokens as usize;
            settings.engine.core.max_total_tokens = pool_tokens;
        });
        let fleet = Self { cluster: started.await.unwrap(), page_tokens };
        for number in 0..count {
            fleet.wait_for_report(number, 0).await;
        }
        fleet
    }

    /// Runs a turn of one token directly on an agent, past the router.
    async fn fill_cache(&self, number: usize, prompt: &[u32]) {
        let url = self.cluster.agents[number].url("/generate");
        let answer = self.cluster.web.post(&url, &[], &ids_turn(prompt, 1)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    async fn turn(&self, prompt: &[u32], headers: Headers<'_>) -> Answer {
        self.cluster.turn("/generate", headers, &ids_turn(prompt, 1)).await
    }

    async fn wait_for_report(&self, number: usize, blocks: usize) {
        let what = format!("{blocks} blocks of worker {number}");
        let told = |worker: &Value| {
            worker["kv"]["state"] == "live" && worker["kv"]["resident_blocks"] == blocks
        };
        self.cluster.wait_for_worker(number, &what, told).await;
    }

    /// Returns the blocks of everything in an engine's cache.
    async fn resident(&self, number: usize) -> BTreeSet<BlockHash> {
        let chains = self.cluster.engines[number].cached(0).await.unwrap();
        chains.iter().flat_map(|(_, tokens)| self.blocks(tokens)).collect()
    }

    fn blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let scheme = Scheme::plain(BlockTokens::for_page(self.page_tokens).unwrap());
        let mut blocks = vec![];
        Chain::new(&scheme).push(tokens, &mut blocks);
        blocks
    }

    /// Returns the resident tokens, as placement saw them, of the worker that got the turn.
    async fn overlap(&self, turn: &Answer) -> u64 {
        let record = self.cluster.placement_record(turn).await;
        let mut compared = record["compared"].as_array().unwrap().iter();
        let own = compared.find(|one| one["worker"] == turn.header("x-berth-worker")).unwrap();
        own["resident_tokens"].as_u64().unwrap_or_else(|| panic!("no overlap in {record}"))
    }
}

/// Returns a prompt. Prompts of different kinds share no block; prompts of one kind share the first
/// [`SYSTEM`] tokens.
fn prompt(kind: u32, own: u32, tokens: u32) -> Vec<u32> {
    let token = |at| if at < SYSTEM { kind * 37 + at * 7 } else { kind + own * 11 + at * 3 };
    (0..tokens).map(|at| token(at) % 250).collect()
}

async fn a_conversation_lands_where_its_system_prompt_is(page_tokens: u32) {
    let fleet = Fleet::start(3, page_tokens, ROOMY).await;
    for (kind, number) in [(1, 2), (2, 0), (3, 1)] {
        fleet.fill_cache(number, &prompt(kind, 0, SYSTEM + 64)).await;
        fleet.wait_for_report(number, SYSTEM as usize / 64 + 1).await;
    }
    for (kind, number) in [(2, 0), (3, 1), (1, 2)] {
        let id = format!("s{kind}");
        let headers = [("x-berth-session-id", id.as_str())];
        let turn = fleet.turn(&prompt(kind, 1, SYSTEM + 100), &headers).await;
        let record = fleet.cluster.placement_record(&turn).await;
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
    let fleet = Fleet::start(1, 16, SMALL).await;
    // Four of these chains fill the pool.
    let chain = |kind| prompt(kind, 0, 480);
    for kind in 1..=3 {
        fleet.fill_cache(0, &chain(kind)).await;
    }
    fleet.wait_for_report(0, 3 * (480 / 64)).await;
    fleet.cluster.engines[0].kv_fault(0, Fault::Drop(3)).await;
    for kind in 4..=7 {
        fleet.fill_cache(0, &chain(kind)).await;
    }
    // This turn raises the cache's block count to a new maximum, so a router that counts as many
    // blocks has received all events.
    let last = prompt(8, 0, 64);
    fleet.fill_cache(0, &last).await;
    let resident = fleet.resident(0).await;
    let mut expected: BTreeSet<_> = (4..=7).flat_map(|kind| fleet.blocks(&chain(kind))).collect();
    expected.extend(fleet.blocks(&last));
    assert_eq!(resident, expected, "the oldest chains have made room");
    fleet.wait_for_report(0, resident.len()).await;
    // The router counts as many blocks as the engine has, and knows all of its chains, so both sets
    // are equal.
    for kind in 4..=7 {
        // One more token, so that the whole chain can be matched; the token fills no page.
        let turn = fleet.turn(&[chain(kind), vec![7]].concat(), &[]).await;
        assert_eq!(fleet.overlap(&turn).await, 480 / 64 * 64, "chain {kind}");
    }
}

/// Checks that blocks are forgotten when events are lost for good. A router with wrong knowledge of
/// the cache causes only more computation, never another answer.
#[tokio::test]
async fn lost_events_cost_recomputation_and_nothing_else() {
    let fleet = Fleet::start(1, 16, SMALL).await;
    let chain = |kind| prompt(kind, 0, 480);
    let asked = |kind| [chain(kind), vec![7]].concat();
    let first = fleet.turn(&asked(1), &[]).await;
    for kind in 2..=4 {
        fleet.fill_cache(0, &chain(kind)).await;
    }
    fleet.wait_for_report(0, 4 * (480 / 64)).await;
    // The event of the first chain's eviction is lost, and so is its replay.
    fleet.cluster.engines[0].kv_fault(0, Fault::Lose(1)).await;
    fleet.fill_cache(0, &chain(5)).await;
    fleet.fill_cache(0, &chain(6)).await;
    let lost = |worker: &Value| worker["kv"]["state"] == "snapshot";
    fleet.cluster.wait_for_worker(0, "the loss to be known", lost).await;
    // The engine still has the chain, whether or not the router knows it.
    let kept = fleet.turn(&asked(5), &[]).await;
    assert_eq!((fleet.overlap(&kept).await, kept.meta("cached_tokens")), (0, Some(480)));
    let gone = fleet.turn(&asked(1), &[]).await;
    assert_eq!((fleet.overlap(&gone).await, gone.meta("cached_tokens")), (0, Some(0)));
    assert_eq!(gone.json()["output_ids"], first.json()["output_ids"]);
}

#[tokio::test]
async fn a_restarted_engine_is_known_to_have_nothing() {
    let mut fleet = Fleet::start(1, 16, SMALL).await;
    fleet.fill_cache(0, &prompt(1, 0, SYSTEM + 64)).await;
    fleet.wait_for_report(0, 9).await;
    let engine = fleet.cluster.engines.remove(0);
    fleet.cluster.engines.push(engine.restart().await.unwrap());
    fleet.wait_for_report(0, 0).await;
    let turn = eventually("a turn", || async {
        let body = ids_turn(&prompt(1, 1, SYSTEM + 64), 1);
        let answer = fleet.cluster.post("/generate", &[], &body).await;
        (answer.status == 200).then_some(answer)
    })
    .await;
    assert_eq!(turn.meta("cached_tokens"), Some(0));
    fleet.wait_for_report(0, 9).await;
}

//! Tests of conversations whose clients name no session: they fill all workers, and stay.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{collections::BTreeMap, sync::Arc};

use tests::{
    cluster::{Agent, Cluster, agent_config, ids_turn, ready, router_config},
    engine_sim::{Config, EngineSim, kv::KvEventsConfig},
    web::Answer,
};

/// Tokens of each pool.
const POOL_TOKENS: usize = 4096;
/// Tokens of a prompt; seven of them fit into a pool with their answers, and an eighth doesn't.
const PROMPT_TOKENS: u32 = 560;
const PROMPTS_IN_POOL: u32 = 7;

/// A fleet of simulated engines with KV events, behind one router.
struct Fleet {
    cluster: Cluster,
    engines: Vec<Arc<EngineSim>>,
}

impl Fleet {
    async fn start(workers: usize) -> Self {
        let cluster = Cluster::start(0, |settings| settings.router = None).await.unwrap();
        let mut fleet = Self { cluster, engines: vec![] };
        for number in 0..workers {
            fleet.add_worker(number).await;
        }
        fleet.start_router().await;
        fleet
    }

    async fn add_worker(&mut self, number: usize) {
        let mut config = Config { kv_events: Some(KvEventsConfig::local()), ..Config::default() };
        config.core.page_size = 16;
        config.core.max_total_tokens = POOL_TOKENS;
        config.core.context_len = POOL_TOKENS;
        config.core.prefill_tokens_per_s = 20_000.0;
        let engine = Arc::new(EngineSim::start_local(config).await.unwrap());
        let agent = Agent::start(agent_config(&engine.url(), &format!("w{number}"))).unwrap();
        ready(&self.cluster.web, agent.admin).await;
        self.engines.push(engine);
        self.cluster.agents.push(agent);
    }

    async fn start_router(&mut self) {
        self.cluster.start_router(router_config(&[])).await.unwrap();
    }

    /// Asks with a prompt that no other number has, and `turns` times as long. Returns the answer.
    async fn ask(&self, number: u32, turns: u32) -> Answer {
        let token = |at| if at == 0 { number } else { (number + 7 * at + at / 256) % 256 };
        let prompt: Vec<u32> = (0..PROMPT_TOKENS * turns).map(token).collect();
        let answer = self.cluster.turn("/generate", &[], &ids_turn(&prompt, 1)).await;
        assert!(answer.status.is_success(), "{answer:?}");
        answer
    }
}

fn worker(answer: &Answer) -> String {
    answer.headers["x-berth-worker"].to_str().unwrap().to_owned()
}

fn cached_tokens(answer: &Answer) -> u64 {
    answer.json()["meta_info"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_one_after_another_fill_all_pools_and_the_oldest_goes_first() {
    for workers in [2, 3] {
        let fleet = Fleet::start(workers).await;
        let (kept, more) = (PROMPTS_IN_POOL * u32::try_from(workers).unwrap(), 4);
        for number in 0..kept + more {
            fleet.ask(number, 1).await;
        }
        // The newest first, so that no answer evicts what is asked for later.
        for number in (more..kept + more).rev() {
            let cached = cached_tokens(&fleet.ask(number, 1).await);
            assert!(
                cached >= 500,
                "{cached} tokens of prompt {number} are left of {workers} pools"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_stays_where_its_kv_is() {
    let fleet = Fleet::start(3).await;
    let homes: Vec<String> =
        [worker(&fleet.ask(0, 1).await), worker(&fleet.ask(1, 1).await)].into();
    for turns in 2..5 {
        for (number, home) in (0..).zip(&homes) {
            let answer = fleet.ask(number, turns).await;
            assert_eq!(worker(&answer), *home, "turn {turns} of conversation {number}");
            assert_eq!(answer.headers["x-berth-placement"], "sticky");
            let cached = cached_tokens(&answer);
            assert!(cached >= u64::from((turns - 1) * PROMPT_TOKENS - 64), "{cached} are cached");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_joins_gets_its_share_of_conversations() {
    let mut fleet = Fleet::start(2).await;
    for number in 0..6 {
        fleet.ask(number, 1).await;
    }
    fleet.add_worker(2).await;
    // The next router knows the rates that the first two agents have measured.
    let first = fleet.cluster.routers.remove(0);
    first.stop().await.unwrap();
    fleet.start_router().await;
    let mut by_worker: BTreeMap<String, u32> = BTreeMap::new();
    for number in 100..120 {
        *by_worker.entry(worker(&fleet.ask(number, 1).await)).or_default() += 1;
    }
    let joined = by_worker.get("w2/0").copied().unwrap_or(0);
    assert!(joined >= 6, "of 20 new conversations: {by_worker:?}");
}

//! Tests of conversations whose clients name no session: they fill all workers, and stay.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    sync::Arc,
};

use engine_sim::{Config, EngineSim, kv::KvEventsConfig};
use harness::{
    cluster::{Agent, Cluster, agent_config, eventually, ids_turn, ready, router_config},
    web::Answer,
};
use serde_json::{Value, json};

/// Tokens of each pool.
const POOL_TOKENS: usize = 4096;
const BLOCK_TOKENS: usize = 64;
/// Tokens of a prompt; seven of them fit into a pool with their answers, and an eighth doesn't.
const PROMPT_TOKENS: u32 = 560;
const PROMPTS_IN_POOL: u32 = 7;
/// How many new conversations of 20 a worker of three must get at least: its share is six or seven.
const SHARE_MIN: u32 = 5;

/// A fleet of simulated engines with KV events, behind one router.
struct Fleet {
    cluster: Cluster,
    engines: Vec<Arc<EngineSim>>,
    /// The folder of the file that lists the agents.
    folder: tempfile::TempDir,
}

impl Fleet {
    async fn start(workers: usize) -> Self {
        let cluster = Cluster::start(0, |settings| settings.router = None).await.unwrap();
        let mut fleet = Self { cluster, engines: vec![], folder: tempfile::tempdir().unwrap() };
        for number in 0..workers {
            fleet.start_worker(number).await;
        }
        fleet.list();
        let mut config = router_config(&[]);
        config.discovery.file = fleet.list_path();
        fleet.cluster.start_router_before(vec![], config).await.unwrap();
        fleet.wait_for_workers().await;
        fleet
    }

    /// Starts one more worker, which joins the running router.
    async fn add_worker(&mut self, number: usize) {
        self.start_worker(number).await;
        self.list();
        self.wait_for_workers().await;
    }

    fn list_path(&self) -> PathBuf {
        self.folder.path().join("workers.toml")
    }

    /// Writes the file that lists the agents.
    fn list(&self) {
        let urls: Vec<String> = self.cluster.agents.iter().map(Agent::control_url).collect();
        let new = self.list_path().with_extension("new");
        fs::write(&new, format!("workers = {}\n", json!(urls))).unwrap();
        fs::rename(new, self.list_path()).unwrap();
    }

    /// Waits until the router places turns on all workers.
    async fn wait_for_workers(&self) {
        eventually("fresh workers", async || {
            let answer = self.cluster.get("/v1/workers").await.json();
            let workers = answer["workers"].as_array().unwrap();
            let fresh = workers.iter().filter(|worker| worker["state"] == "fresh").count();
            (fresh == self.engines.len()).then_some(())
        })
        .await;
    }

    /// Makes each forward pass of one engine take longer.
    async fn slow_down(&self, number: usize, seconds: f64) {
        let url = format!("{}/slow_down", self.engines[number].url());
        let body = json!({"forward_sleep_time": seconds});
        let answer = self.cluster.web.post(&url, &[], &body).await.unwrap();
        assert!(answer.status.is_success(), "{answer:?}");
    }

    /// Begins 20 conversations, numbered from `first`. Returns how many of them `worker` gets.
    async fn count_of_twenty(&self, first: u32, wanted: &str) -> u32 {
        let mut by_worker: BTreeMap<String, u32> = BTreeMap::new();
        for number in first..first + 20 {
            *by_worker.entry(worker(&self.ask(number, 1).await)).or_default() += 1;
            self.settle().await;
        }
        by_worker.get(wanted).copied().unwrap_or(0)
    }

    async fn start_worker(&mut self, number: usize) {
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

    /// Asks with a prompt that no other number has, and `turns` times as long. Returns the answer.
    async fn ask(&self, number: u32, turns: u32) -> Answer {
        let token = |at| if at == 0 { number } else { (number + 7 * at + at / 256) % 256 };
        let prompt: Vec<u32> = (0..PROMPT_TOKENS * turns).map(token).collect();
        let answer = self.cluster.turn("/generate", &[], &ids_turn(&prompt, 1)).await;
        assert!(answer.status.is_success(), "{answer:?}");
        answer
    }

    /// Waits until the router knows what each engine holds, and that none computes. On a busy machine
    /// events and reports may come after the next prompt, which then goes elsewhere.
    async fn settle(&self) {
        eventually("the events of all that the engines hold", async || {
            let mut held = 0;
            for engine in &self.engines {
                let chains = engine.cached(0).await.unwrap();
                let blocks = chains.iter().flat_map(|(_, tokens)| {
                    (1..=tokens.len() / BLOCK_TOKENS).map(|end| &tokens[..end * BLOCK_TOKENS])
                });
                held += blocks.collect::<BTreeSet<_>>().len();
            }
            let answer = self.cluster.get("/v1/workers").await.json();
            let workers = answer["workers"].as_array().unwrap();
            let known = workers.iter().map(|worker| worker["kv"]["resident_blocks"].as_u64());
            let is_idle = |worker: &Value| worker["load"]["turns_running"] == 0;
            let is_known = known.sum::<Option<u64>>() == Some(held as u64);
            (is_known && workers.iter().all(is_idle)).then_some(())
        })
        .await;
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
            fleet.settle().await;
        }
        // The newest first, so that no answer evicts what is asked for later.
        let mut lost = vec![];
        for number in (more..kept + more).rev() {
            if cached_tokens(&fleet.ask(number, 1).await) < 500 {
                lost.push(number);
            }
            fleet.settle().await;
        }
        // A busy machine's engine computes more slowly than it says, and then a prompt goes
        // elsewhere and evicts another. In one pool alone, half of them would be lost.
        assert!(lost.len() <= kept as usize / 7, "prompts {lost:?} are lost of {workers} pools");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_stays_where_its_kv_is() {
    let fleet = Fleet::start(3).await;
    let homes: Vec<String> =
        [worker(&fleet.ask(0, 1).await), worker(&fleet.ask(1, 1).await)].into();
    for turns in 2..5 {
        for (number, home) in (0..).zip(&homes) {
            fleet.settle().await;
            let answer = fleet.ask(number, turns).await;
            if worker(&answer) != *home {
                let record = fleet.cluster.placement_record(&answer).await;
                panic!("turn {turns} of conversation {number} left {home}: {record}");
            }
            assert_eq!(answer.headers["x-berth-placement"], "sticky");
            let cached = cached_tokens(&answer);
            assert!(cached >= u64::from((turns - 1) * PROMPT_TOKENS - 64), "{cached} are cached");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_joins_gets_its_share_of_conversations() {
    let mut fleet = Fleet::start(2).await;
    // Enough for the agents to measure how fast their engines are.
    for number in 0..6 {
        fleet.ask(number, 1).await;
    }
    fleet.add_worker(2).await;
    let joined = fleet.count_of_twenty(100, "w2/0").await;
    assert!(joined >= SHARE_MIN, "{joined} of 20");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_first_turn_was_slow_gets_its_share_of_conversations() {
    let fleet = Fleet::start(3).await;
    // As long as ten such prompts take.
    fleet.slow_down(2, 0.3).await;
    let mut numbers = 0..100;
    let mut next_of_slow = async || {
        for number in numbers.by_ref().take(20) {
            let asked = worker(&fleet.ask(number, 1).await);
            fleet.settle().await;
            if asked == "w2/0" {
                return true;
            }
        }
        false
    };
    assert!(next_of_slow().await, "a first turn");
    fleet.slow_down(2, 0.0).await;
    assert!(next_of_slow().await, "the turn after it, within 20");
    let share = fleet.count_of_twenty(100, "w2/0").await;
    assert!(share >= SHARE_MIN, "{share} of 20");
}

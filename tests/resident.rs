//! Tests of the resident blocks that an agent reports from its engine's KV events.
//!
//! They cover stored blocks, evictions, flushes, lost messages and restarts, and check that a large
//! cache with a slow watcher doesn't disturb others.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::collections::BTreeSet;

use blocks::{
    block::{BlockHash, BlockTokens, Chain, Scheme},
    kv::{Change, RankChange},
};
use contract::v1::{self, worker_agent_client::WorkerAgentClient};
use engine_sim::{
    Config,
    kv::{Fault, KvEvent, KvEventsConfig, Medium, Stored},
    request::Space,
};
use harness::{
    cluster::{Agent, Cluster, PATIENCE, agent_config, eventually, ids_turn, ready},
    envelope::ENVELOPE,
};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tonic::{
    Code, Status, Streaming,
    transport::{Channel, Endpoint},
};

/// Starts an engine that publishes KV events, and its agent.
async fn start(change: impl FnOnce(&mut Config)) -> Cluster {
    let started = Cluster::start_worker(|settings| {
        settings.engine.kv_events = Some(KvEventsConfig::local());
        settings.engine.core.page_size = 16;
        settings.engine.core.max_total_tokens = 4096;
        change(&mut settings.engine);
    });
    started.await.unwrap()
}

/// Runs a turn whose answer is one token, which fills no page.
async fn turn(cluster: &Cluster, prompt: &[u32]) {
    cluster.turn("/generate", &[], &ids_turn(prompt, 1)).await;
}

/// Empties the cache; retries, because a busy engine refuses a flush.
async fn flush(cluster: &Cluster) {
    let url = format!("{}/flush_cache", cluster.engine().url());
    eventually("a flush", || async {
        let answer = cluster.web.post(&url, &[], &json!({})).await.unwrap();
        answer.status.is_success().then_some(())
    })
    .await;
}

async fn watch(agent: &Agent) -> Watcher {
    Watcher::new(agent.control_client().await.unwrap()).await
}

/// Returns a watcher that receives at most `bytes` bytes before it reads.
async fn watch_with_window(agent: &Agent, bytes: u32) -> Watcher {
    let control = format!("http://{}", agent.control);
    let endpoint = Endpoint::from_shared(control).unwrap().initial_stream_window_size(bytes);
    Watcher::new(WorkerAgentClient::new(endpoint.connect().await.unwrap())).await
}

/// The state that a router would build from the agent's events.
struct Watcher {
    stream: Streaming<v1::KvEvent>,
    next: u64,
    blocks: BTreeSet<BlockHash>,
    unknown: String,
    is_complete: bool,
    /// The changes since the snapshot was complete.
    changes: usize,
}

impl Watcher {
    async fn new(mut client: WorkerAgentClient<Channel>) -> Self {
        let stream = client.watch_kv(v1::WatchKvRequest {}).await.unwrap().into_inner();
        let (blocks, unknown) = (BTreeSet::new(), String::new());
        Self { stream, next: 0, blocks, unknown, is_complete: false, changes: 0 }
    }

    async fn receive(&mut self) -> Result<(), Status> {
        let event = tokio::time::timeout(PATIENCE, self.stream.message()).await;
        let event = event
            .map_err(|_| Status::cancelled(format!("nothing came; {} known", self.blocks.len())));
        let event = event??.expect("the stream goes on");
        assert_eq!(event.sequence, self.next, "events are counted");
        self.next += 1;
        let bytes: usize = prost::Message::encoded_len(&event);
        assert!(bytes <= 256 << 10, "a message of {bytes} bytes");
        for change in event.changes {
            self.apply(RankChange::try_from(change).unwrap().change);
        }
        Ok(())
    }

    fn apply(&mut self, change: Change) {
        self.changes += usize::from(self.is_complete);
        match change {
            Change::Reset { .. } => {
                self.blocks.clear();
                self.unknown.clear();
                self.is_complete = false;
            }
            Change::Unknown { why } => (self.unknown, self.is_complete) = (why, false),
            Change::Stored { parent, blocks, .. } => {
                let before = parent.is_none_or(|parent| self.blocks.contains(&parent));
                assert!(before, "{parent:?} is not resident");
                for block in blocks {
                    assert!(self.blocks.insert(block), "{block:?} is reported once");
                }
            }
            Change::Removed { blocks, .. } => {
                for block in blocks {
                    assert!(self.blocks.remove(&block), "{block:?} was not resident");
                }
            }
            Change::Complete => self.is_complete = true,
        }
    }

    async fn wait_until(&mut self, what: &str, reached: impl Fn(&Self) -> bool) {
        while !reached(self) {
            self.receive().await.unwrap_or_else(|status| panic!("before {what}: {status}"));
        }
    }

    async fn wait_for_changes(&mut self, changes: usize) {
        self.wait_until("changes", |watcher| watcher.changes >= changes).await;
    }

    async fn wait_for_blocks(&mut self, what: &str, blocks: &BTreeSet<BlockHash>) {
        self.wait_until(what, |watcher| watcher.is_complete && watcher.blocks == *blocks).await;
    }
}

/// Returns a prompt; prompts 2n and 2n + 1 have the same first 128 tokens.
fn prompt(number: u32) -> Vec<u32> {
    let own = |at: u32| if at < 128 { number / 2 } else { 100 + number };
    (0..300).map(|at| (own(at) * 7 + at) % 250).collect()
}

fn blocks_of(prompts: impl IntoIterator<Item = u32>) -> BTreeSet<BlockHash> {
    let scheme = Scheme::plain(BlockTokens::for_page(16).unwrap());
    let hashed = prompts.into_iter().flat_map(|number| {
        let mut blocks = vec![];
        Chain::new(&scheme).push(&prompt(number), &mut blocks);
        blocks
    });
    hashed.collect()
}

#[tokio::test]
async fn blocks_left_by_turns_and_removed_by_a_flush_are_reported() {
    let cluster = start(|_| {}).await;
    turn(&cluster, &prompt(0)).await;
    let mut early = watch(cluster.agent()).await;
    early.wait_for_blocks("the first turn", &blocks_of([0])).await;
    for number in 1..4 {
        turn(&cluster, &prompt(number)).await;
    }
    early.wait_for_blocks("four turns", &blocks_of(0..4)).await;
    let mut late = watch(cluster.agent()).await;
    late.wait_for_blocks("a snapshot", &blocks_of(0..4)).await;
    flush(&cluster).await;
    early.wait_for_blocks("the flush", &BTreeSet::new()).await;
    turn(&cluster, &prompt(9)).await;
    for watcher in [&mut early, &mut late] {
        watcher.wait_for_blocks("a turn after it", &blocks_of([9])).await;
    }
}

#[tokio::test]
async fn events_on_a_unix_socket_are_followed_and_its_replays_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| format!("ipc://{}", folder.path().join(name).display());
    let (endpoint, replay_endpoint) = (path("events"), Some(path("replay")));
    let config = KvEventsConfig { endpoint, replay_endpoint, ..KvEventsConfig::local() };
    let cluster = start(|engine| engine.kv_events = Some(config)).await;
    turn(&cluster, &prompt(0)).await;
    let mut early = watch(cluster.agent()).await;
    early.wait_for_blocks("the first turn", &blocks_of([0])).await;
    cluster.engine().kv_fault(0, Fault::Drop(1)).await;
    turn(&cluster, &prompt(1)).await;
    early.wait_for_blocks("a message that was sent again", &blocks_of(0..2)).await;
}

#[tokio::test]
async fn blocks_are_reported_with_their_rank() {
    let cluster = start(|config| config.dp_size = 2).await;
    let mut client = cluster.agent().control_client().await.unwrap();
    let mut events = client.watch_kv(v1::WatchKvRequest {}).await.unwrap().into_inner();
    for rank in [1, 0] {
        let headers = [(ENVELOPE, [r#"{"rank":0}"#, r#"{"rank":1}"#][rank])];
        cluster.turn("/generate", &headers, &ids_turn(&prompt(0), 1)).await;
        let stored = async {
            loop {
                for change in events.message().await.unwrap().expect("it goes on").changes {
                    let RankChange { dp_rank, change } = RankChange::try_from(change).unwrap();
                    if matches!(change, Change::Stored { .. }) {
                        return dp_rank as usize;
                    }
                }
            }
        };
        assert_eq!(tokio::time::timeout(PATIENCE, stored).await.unwrap(), rank);
    }
}

#[tokio::test]
async fn evicted_blocks_are_reported() {
    let cluster = start(|config| config.core.max_total_tokens = 1024).await;
    let mut watcher = watch(cluster.agent()).await;
    for number in (0..20).step_by(2) {
        turn(&cluster, &prompt(number)).await;
    }
    watcher.wait_until("the last turn", |known| known.blocks.is_superset(&blocks_of([18]))).await;
    assert!(watcher.blocks.len() * 64 <= 1024, "{} blocks in 1,024 tokens", watcher.blocks.len());
    // A second agent builds the same state from a replay of all messages.
    let agent = Agent::start(agent_config(&cluster.engine().url(), "w1"));
    let agent = agent.expect("both have state of their own");
    ready(&cluster.web, agent.admin).await;
    let mut third = watch(&agent).await;
    third.wait_for_blocks("a replay", &watcher.blocks).await;
}

#[tokio::test]
async fn lost_messages_are_requested_again_also_the_last_ones() {
    let cluster = start(|_| {}).await;
    let mut watcher = watch(cluster.agent()).await;
    turn(&cluster, &prompt(0)).await;
    watcher.wait_for_blocks("a turn", &blocks_of([0])).await;
    cluster.engine().kv_fault(0, Fault::Drop(2)).await;
    for number in 1..8 {
        turn(&cluster, &prompt(number)).await;
    }
    watcher.wait_for_blocks("a gap to be filled", &blocks_of(0..8)).await;
    cluster.engine().kv_fault(0, Fault::Drop(100)).await;
    turn(&cluster, &prompt(8)).await;
    watcher.wait_for_blocks("messages that nothing followed", &blocks_of(0..9)).await;
}

#[tokio::test]
async fn blocks_of_messages_that_are_lost_for_good_are_not_reported() {
    let cluster = start(|_| {}).await;
    let mut watcher = watch(cluster.agent()).await;
    turn(&cluster, &prompt(0)).await;
    watcher.wait_for_blocks("a turn", &blocks_of([0])).await;
    cluster.engine().kv_fault(0, Fault::Drop(1)).await;
    turn(&cluster, &prompt(2)).await;
    cluster.engine().kv_fault(0, Fault::Forget).await;
    turn(&cluster, &prompt(4)).await;
    turn(&cluster, &prompt(6)).await;
    // At least the last turn's blocks are known, perhaps some of the first two turns', and no
    // others.
    watcher.wait_until("what came later", |known| known.blocks.is_superset(&blocks_of([6]))).await;
    assert!(watcher.blocks.is_subset(&blocks_of([0, 2, 4, 6])));
    flush(&cluster).await;
    turn(&cluster, &prompt(1)).await;
    watcher.wait_for_blocks("a flush and a turn", &blocks_of([1])).await;
}

#[tokio::test]
async fn a_dead_engine_holds_nothing_and_its_successor_is_followed() {
    let mut cluster = start(|_| {}).await;
    let mut watcher = watch(cluster.agent()).await;
    turn(&cluster, &prompt(0)).await;
    watcher.wait_for_blocks("a turn", &blocks_of([0])).await;
    cluster.engine().kill();
    watcher.wait_until("the end", |known| known.unknown.contains("no KV events")).await;
    let engine = cluster.engines.remove(0);
    cluster.engines.push(engine.restart().await.unwrap());
    ready(&cluster.web, cluster.agent().admin).await;
    watcher.wait_for_blocks("an empty engine", &BTreeSet::new()).await;
    // The agent may still learn of the death that lies behind it, and refuse a turn or two.
    eventually("a turn", || async {
        let answer = cluster.post("/generate", &[], &ids_turn(&prompt(3), 1)).await;
        (answer.status == 200).then_some(())
    })
    .await;
    watcher.wait_for_blocks("a turn", &blocks_of([3])).await;
}

#[tokio::test]
async fn an_engine_without_a_publisher_is_reported_with_a_remedy() {
    let cluster = start(|config| config.kv_events = None).await;
    let mut watcher = watch(cluster.agent()).await;
    watcher.wait_until("the reason", |known| known.unknown.contains("--kv-events-config")).await;
}

/// Returns a chain of pages as the engine would store it; each page is one block.
fn chain(number: u32, pages: usize) -> Stored {
    let tokens = vec![number; 64 * pages];
    let mut before: Option<[u8; 32]> = None;
    let hashes = tokens.chunks(64).map(|page| {
        let mut sha = Sha256::new();
        before.iter().for_each(|before| sha.update(before));
        page.iter().for_each(|token| sha.update(token.to_le_bytes()));
        let digest: [u8; 32] = sha.finalize().into();
        before = Some(digest);
        i64::from_be_bytes(*digest.first_chunk().unwrap())
    });
    let (hashes, space) = (hashes.collect(), Space::default());
    Stored {
        hashes,
        parent: None,
        tokens,
        block_size: 64,
        space,
        session_id: None,
        medium: Medium::Device,
    }
}

/// Blocks of a large cache: two megabytes of hashes. This is twice what is in transit to a watcher
/// that reads nothing and has a window of [`WINDOW_BYTES`].
const BLOCKS: u32 = 250_000;
/// The bytes that a slow watcher's connection accepts unread.
const WINDOW_BYTES: u32 = 64 << 10;
/// Blocks of one chain.
const CHAIN: u32 = 1000;
/// Changes of one block per batch. Together with the number of batches: more changes than the agent
/// keeps for watchers.
const CHANGES: usize = 200;
const BATCHES: usize = 800;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_watcher_of_a_large_cache_delays_no_report_and_only_it_is_disconnected() {
    let cluster = start(|config| {
        config.core.page_size = 64;
        config.core.max_total_tokens = 64 * BLOCKS as usize;
    })
    .await;
    for number in 0..BLOCKS / CHAIN {
        cluster.engine().kv_publish(0, vec![KvEvent::Stored(chain(number, CHAIN as usize))]);
    }
    let mut fast = watch(cluster.agent()).await;
    let all = BLOCKS as usize;
    fast.wait_until("all blocks", |known| known.blocks.len() == all).await;

    let mut slow = watch_with_window(cluster.agent(), WINDOW_BYTES).await;
    slow.wait_until("the beginning", |known| !known.blocks.is_empty()).await;
    assert!(slow.blocks.len() < all, "it came in one part");
    // While the slow watcher reads nothing, a third watcher receives everything and reports
    // continue.
    let mut client = cluster.agent().control_client().await.unwrap();
    let mut reports = client.watch_load(v1::WatchLoadRequest {}).await.unwrap().into_inner();
    let mut third = watch(cluster.agent()).await;
    let mut reports_received = 0;
    while third.blocks.len() < all || reports_received < 20 {
        tokio::select! {
            report = reports.message() => {
                report.unwrap().expect("reports go on");
                reports_received += 1;
            }
            received = third.receive(), if third.blocks.len() < all => received.unwrap(),
        }
    }
    // More changes happen than the agent keeps for watchers; only the slow watcher misses some.
    // This is another one, because the agent gives a watcher up that reads nothing for 20 s.
    drop(slow);
    let mut slow = watch_with_window(cluster.agent(), WINDOW_BYTES).await;
    slow.wait_until("the beginning", |known| !known.blocks.is_empty()).await;
    fast.changes = 0;
    let first = chain(0, CHAIN as usize);
    let (last, parent) = (first.hashes[CHAIN as usize - 1], first.hashes[CHAIN as usize - 2]);
    let removed = KvEvent::Removed { hashes: vec![last], extra_key: None, medium: Medium::Device };
    let stored = Stored { hashes: vec![last], parent: Some(parent), ..chain(0, 1) };
    let pair = [removed, KvEvent::Stored(stored)];
    let batch: Vec<KvEvent> = std::iter::repeat_n(pair, CHANGES / 2).flatten().collect();
    let mut disconnected = None;
    for number in 0..BATCHES {
        cluster.engine().kv_publish(0, batch.clone());
        if number % 8 == 7 {
            fast.wait_for_changes(CHANGES * (number + 1)).await;
        }
        // On a busy machine all batches may take longer than those 20 s.
        if number % 250 == 249 && disconnected.is_none() {
            disconnected = slow.receive().await.err();
        }
    }
    let disconnected = loop {
        match disconnected {
            Some(status) => break status,
            None => disconnected = slow.receive().await.err(),
        }
    };
    assert_eq!(disconnected.code(), Code::ResourceExhausted, "{disconnected}");
}

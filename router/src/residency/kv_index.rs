//! Follows the agents' streams of resident blocks and keeps the overlap index up to date.
//!
//! One task per agent reads its stream, on a connection separate from the load reports so that they
//! don't delay each other. This module makes no placement decisions.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use proto::{
    block::{BlockHash, Tier},
    kv::{Change, RankChange},
    v1::{WatchKvRequest, worker_agent_client::WorkerAgentClient},
};
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tracing::{debug, info};

use super::{
    index::{Index, Overlap, Shared, Stats},
    kv_stream::{Follow, Phase},
};
use crate::{
    backoff::Backoff,
    fleet::{connect::describe_error, worker::WorkerRef},
};

/// Maximum number of blocks in one change to the index: look-ups wait about 20 µs for such a
/// change.
const BLOCKS_AT_ONCE: usize = 512;
/// Largest message accepted, in bytes. Agents send at most 256 KiB.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// The overlap index, and the state of each agent's stream.
#[derive(Debug)]
pub(crate) struct Residency {
    index: Shared,
    /// The stream of each agent. The mutexes are leaf locks.
    feeds: Vec<Mutex<Feed>>,
    /// By worker number: whether all of the worker's blocks are known. Placement reads it for every
    /// worker.
    live: Vec<AtomicBool>,
}

/// The state of one agent's stream.
#[derive(Debug, Default)]
struct Feed {
    /// The phase of each rank; empty while there is no stream.
    phases: HashMap<u32, Phase>,
    /// Why there is no stream.
    down: Option<String>,
}

/// What is known of one worker's resident blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Known {
    #[serde(flatten)]
    pub(crate) phase: Phase,
    /// Number of resident blocks, on the device or the host.
    pub(crate) resident_blocks: u64,
}

impl Residency {
    /// Creates an empty index for `agents` agents, of about `bytes_max` bytes at most.
    pub(crate) fn new(agents: usize, bytes_max: usize) -> Self {
        let feed = || Mutex::new(Feed::default());
        Self {
            index: Shared::new(Index::new(bytes_max)),
            feeds: std::iter::repeat_with(feed).take(agents).collect(),
            live: std::iter::repeat_with(AtomicBool::default)
                .take(WorkerRef { agent: agents, dp_rank: 0 }.number().unwrap_or(0))
                .collect(),
        }
    }

    /// Whether all resident blocks of the worker with this number are known.
    pub(crate) fn is_live(&self, number: usize) -> bool {
        self.live.get(number).is_some_and(|live| live.load(Ordering::Relaxed))
    }

    /// Counts the leading blocks of a chain that are resident on each worker.
    pub(crate) fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        self.index.look_up(chain, overlap);
    }

    /// Returns what is known of a worker's resident blocks.
    pub(crate) fn of(&self, worker: WorkerRef) -> Known {
        let unknown = |reason: &str| Phase::Unknown { reason: reason.to_owned() };
        let phase = {
            let feed = self.feeds[worker.agent].lock();
            let down = feed.down.as_deref().unwrap_or("the agent has sent no block event yet");
            let phase = feed.phases.get(&worker.dp_rank).cloned();
            phase.unwrap_or_else(|| unknown(down))
        };
        let blocks = |number| self.index.read(|index| index.resident(number));
        Known { phase, resident_blocks: worker.number().map_or(0, blocks) }
    }

    /// Returns the figures of the index.
    pub(crate) fn stats(&self) -> Stats {
        self.index.read(Index::stats)
    }

    fn apply(&self, agent: usize, RankChange { dp_rank, change }: RankChange) {
        // Ranks beyond the index's range have no number. Their turns are placed without overlap.
        let Some(number) = (WorkerRef { agent, dp_rank }).number() else { return };
        match change {
            Change::Reset { .. } => self.index.change(|index| index.begin_snapshot(number)),
            Change::Unknown { .. } => self.clear(number),
            Change::Complete => {
                self.index.change(|index| index.finish_snapshot(number));
                self.live[number].store(true, Ordering::Relaxed);
            }
            Change::Stored { tier, parent, blocks } => self.store(number, tier, parent, &blocks),
            Change::Removed { tier, blocks } => {
                for part in blocks.chunks(BLOCKS_AT_ONCE) {
                    self.index.change(|index| index.remove(number, tier, part));
                }
            }
        }
    }

    fn store(
        &self,
        number: usize,
        tier: Tier,
        mut parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) {
        for part in blocks.chunks(BLOCKS_AT_ONCE) {
            self.index.change(|index| index.store(number, tier, parent, part));
            parent = part.last().copied();
        }
    }

    /// Discards all blocks of an agent whose stream is lost: they can't be trusted any longer.
    fn forget(&self, agent: usize, why: String) {
        let ranks: Vec<u32> = {
            let mut feed = self.feeds[agent].lock();
            feed.down = Some(why);
            feed.phases.drain().map(|(rank, _)| rank).collect()
        };
        for dp_rank in ranks {
            if let Some(number) = (WorkerRef { agent, dp_rank }).number() {
                self.clear(number);
            }
        }
    }

    fn clear(&self, number: usize) {
        self.live[number].store(false, Ordering::Relaxed);
        self.index.change(|index| index.clear(number));
    }
}

/// The task that follows the stream of one agent.
#[derive(Debug)]
pub(crate) struct Watcher {
    pub(crate) agent: usize,
    pub(crate) endpoint: Endpoint,
    pub(crate) connect_max: Duration,
    pub(crate) residency: std::sync::Arc<Residency>,
}

impl Watcher {
    /// Follows the agent's stream until it is cancelled.
    pub(crate) async fn run(self, token: CancellationToken) {
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = self.follow_forever() => {}
        }
    }

    async fn follow_forever(&self) {
        let (mut backoff, mut told) = (Backoff::default(), String::new());
        loop {
            let mut follow = Follow::default();
            let why = self.follow_once(&mut follow).await;
            debug!(agent = self.agent, why, "stream of resident blocks ended");
            if !follow.phases().values().any(|phase| matches!(phase, Phase::Live { .. })) {
                // No rank was live, so the blocks are unknown. After a live stream breaks, its
                // blocks are kept while the task reconnects at once.
                if why != told {
                    info!(agent = self.agent, why, "resident blocks are unknown");
                    told.clone_from(&why);
                }
                self.residency.forget(self.agent, why);
            } else {
                backoff.reset();
                told.clear();
            }
            backoff.rest().await;
        }
    }

    /// Follows one stream to its end. Returns why it ended.
    async fn follow_once(&self, follow: &mut Follow) -> String {
        let first_word = async {
            let channel = self.endpoint.connect().await.map_err(|error| describe_error(&error))?;
            let client = WorkerAgentClient::new(channel);
            let mut client = client.max_decoding_message_size(MESSAGE_BYTES_MAX);
            let stream = client.watch_kv(WatchKvRequest {}).await;
            stream.map_err(|status| format!("{:?}: {}", status.code(), status.message()))
        };
        let mut stream = match tokio::time::timeout(self.connect_max, first_word).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(why)) => return why,
            Err(_) => return format!("no answer within {} ms", self.connect_max.as_millis()),
        };
        loop {
            let event = match stream.message().await {
                Ok(Some(event)) => event,
                Ok(None) => return "the agent ended the stream".to_owned(),
                Err(status) => return format!("{:?}: {}", status.code(), status.message()),
            };
            let changes = match follow.accept(event) {
                Ok(changes) => changes,
                Err(error) => return describe_error(&error),
            };
            for change in changes {
                self.residency.apply(self.agent, change);
            }
            let mut feed = self.residency.feeds[self.agent].lock();
            feed.down = None;
            feed.phases.clone_from(follow.phases());
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::block::BlockTokens;

    use super::*;

    fn blocks(from: u64, to: u64) -> Vec<BlockHash> {
        // In a real chain, too, the lowest three bits count the place of a block in its group.
        (from..to).map(|place| BlockHash((1 << 40) | (place % 8) | (place / 8 * 8) << 3)).collect()
    }

    fn on(agent: usize, change: Change) -> (usize, RankChange) {
        (agent, RankChange { dp_rank: 0, change })
    }

    fn overlap(residency: &Residency, chain: &[BlockHash], agent: usize) -> u32 {
        let mut overlap = Overlap::default();
        residency.look_up(chain, &mut overlap);
        overlap.device(WorkerRef { agent, dp_rank: 0 }.number().unwrap())
    }

    #[test]
    fn a_snapshot_counts_when_it_is_complete_and_what_failed_is_forgotten() {
        let residency = Residency::new(2, 1 << 20);
        let chain = blocks(0, 8);
        let reset = || Change::Reset { block_tokens: BlockTokens::for_page(1).unwrap() };
        let stored =
            Change::Stored { tier: Tier::Device, parent: None, blocks: chain[..5].to_vec() };
        for (agent, change) in [on(1, reset()), on(1, stored.clone())] {
            residency.apply(agent, change);
        }
        assert_eq!(overlap(&residency, &chain, 1), 0);
        residency.apply(1, RankChange { dp_rank: 0, change: Change::Complete });
        assert_eq!((overlap(&residency, &chain, 1), overlap(&residency, &chain, 0)), (5, 0));
        residency.feeds[1].lock().phases.insert(0, Phase::Live { block_tokens: 64 });
        let worker = WorkerRef { agent: 1, dp_rank: 0 };
        let known = Known { phase: Phase::Live { block_tokens: 64 }, resident_blocks: 5 };
        assert_eq!(residency.of(worker), known);
        residency.forget(1, "it is gone".to_owned());
        assert_eq!(overlap(&residency, &chain, 1), 0);
        let phase = Phase::Unknown { reason: "it is gone".to_owned() };
        assert_eq!(residency.of(worker), Known { phase, resident_blocks: 0 });
    }

    #[test]
    fn a_long_store_is_one_chain_however_it_is_cut() {
        let residency = Residency::new(1, 64 << 20);
        let scheme = proto::block::Scheme::plain(BlockTokens::for_page(1).unwrap());
        let (mut chain, mut hashes) = (proto::block::Chain::new(&scheme), vec![]);
        let tokens: Vec<u32> = (0..64 * 3 * 512 + 64).collect();
        chain.push(&tokens, &mut hashes);
        let stored = Change::Stored { tier: Tier::Device, parent: None, blocks: hashes.clone() };
        residency.apply(0, RankChange { dp_rank: 0, change: stored });
        assert_eq!(overlap(&residency, &hashes, 0), 3 * 512 + 1);
        let last = hashes[1..].to_vec();
        let removed = Change::Removed { tier: Tier::Device, blocks: last };
        residency.apply(0, RankChange { dp_rank: 0, change: removed });
        assert_eq!(overlap(&residency, &hashes, 0), 1);
    }
}

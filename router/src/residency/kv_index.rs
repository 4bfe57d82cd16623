//! Follows the agents' streams of resident blocks, and keeps the overlap index up to date.
//!
//! The task of each agent has a connection of its own, so that blocks and load reports don't delay
//! each other.

use std::{
    collections::HashMap,
    iter,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use blocks::{
    block::{BlockHash, Tier},
    kv::{Change, RankChange},
};
use contract::v1::WatchKvRequest;
use service::{backoff::Backoff, clock::now, log::describe_error};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::kv_stream::{KvPhase, KvStreamChecker};
use crate::{
    config::AGENTS_MAX,
    fleet::{
        dial::{AgentDialer, describe_status},
        worker::{AgentKey, WORKER_NUMBERS_MAX, WorkerRef},
    },
};
use blocks::index::{Index, IndexStats, Overlap, SharedIndex};

/// Look-ups have to wait for a change, about 20 µs for this number of blocks.
const BLOCKS_PER_CHANGE_MAX: usize = 512;
/// Least time between two resets of a rank. The stream of an agent whose engine loses its blocks
/// more often, or says so, is read more slowly. Each reset costs the index a slot.
const RESET_INTERVAL_MIN: Duration = Duration::from_millis(250);
/// Agents send at most 256 KiB.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct KvIndex {
    index: SharedIndex,
    /// By slot. The agent's [`KvWatcher`] replaces the state, and readers take no lock.
    stream_states: Vec<ArcSwap<StreamState>>,
    /// By worker number: whether all of the worker's blocks are known. Atomic, because each
    /// placement reads it for every worker.
    live_flags: Vec<AtomicBool>,
}

#[derive(Debug, Default)]
struct StreamState {
    /// `None` before the first event or loss of the slot's agent.
    agent: Option<AgentKey>,
    /// Empty while there is no stream.
    phases: HashMap<u32, KvPhase>,
    /// Why there is no stream. `None` before the first stream and after an event.
    loss_reason: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerKv {
    pub(crate) phase: KvPhase,
    /// A block on both the device and the host counts twice.
    pub(crate) resident_blocks: u64,
}

impl KvIndex {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            index: SharedIndex::new(Index::new(bytes_max)),
            stream_states: iter::repeat_with(ArcSwap::default).take(AGENTS_MAX).collect(),
            live_flags: iter::repeat_with(AtomicBool::default).take(WORKER_NUMBERS_MAX).collect(),
        }
    }

    /// Of the slot's newest agent; see [`Self::is_live_at`].
    pub(crate) fn is_live(&self, worker_number: usize) -> bool {
        self.live_flags.get(worker_number).is_some_and(|is_live| is_live.load(Ordering::Relaxed))
    }

    /// False for a worker of an agent that has left the fleet.
    pub(crate) fn is_live_at(&self, worker: WorkerRef) -> bool {
        let is_live = worker.number().is_some_and(|number| self.is_live(number));
        is_live && self.stream_states[worker.agent.slot()].load().agent == Some(worker.agent)
    }

    pub(crate) fn is_live_with(&self, worker: WorkerRef, block_tokens: u32) -> bool {
        let stream_state = self.stream_states[worker.agent.slot()].load();
        let is_of_agent = stream_state.agent == Some(worker.agent);
        is_of_agent
            && stream_state.phases.get(&worker.dp_rank) == Some(&KvPhase::Live { block_tokens })
    }

    pub(crate) fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        self.index.look_up(chain, overlap);
    }

    pub(crate) fn worker_kv(&self, worker: WorkerRef) -> WorkerKv {
        let stream_state = self.stream_states[worker.agent.slot()].load();
        let of_agent = Some(&*stream_state).filter(|state| state.agent == Some(worker.agent));
        let loss_reason = of_agent.and_then(|state| state.loss_reason.as_deref());
        let reason = loss_reason.unwrap_or("the agent has sent no block event yet");
        let phase = of_agent.and_then(|state| state.phases.get(&worker.dp_rank)).cloned();
        let phase = phase.unwrap_or_else(|| KvPhase::Unknown { reason: reason.to_owned() });
        let count_blocks =
            |worker_number| self.index.read(|index| index.resident_blocks(worker_number));
        let number = worker.number().filter(|_| of_agent.is_some());
        WorkerKv { phase, resident_blocks: number.map_or(0, count_blocks) }
    }

    pub(crate) fn stats(&self) -> IndexStats {
        self.index.read(Index::stats)
    }

    fn apply(&self, agent: AgentKey, RankChange { dp_rank, change }: RankChange) {
        // A rank beyond the index's range has no number, so its turns are placed without overlap.
        let Some(worker_number) = (WorkerRef { agent, dp_rank }).number() else { return };
        match change {
            Change::Reset { .. } => self.index.change(|index| index.begin_snapshot(worker_number)),
            Change::Unknown { .. } => self.clear(worker_number),
            Change::Complete => {
                self.index.change(|index| index.finish_snapshot(worker_number));
                self.live_flags[worker_number].store(true, Ordering::Relaxed);
            }
            Change::Stored { tier, parent, blocks } => {
                self.store(worker_number, tier, parent, &blocks);
            }
            Change::Removed { tier, blocks } => {
                for some_blocks in blocks.chunks(BLOCKS_PER_CHANGE_MAX) {
                    self.index.change(|index| index.remove(worker_number, tier, some_blocks));
                }
            }
        }
    }

    fn store(
        &self,
        worker_number: usize,
        tier: Tier,
        mut parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) {
        for some_blocks in blocks.chunks(BLOCKS_PER_CHANGE_MAX) {
            self.index.change(|index| index.store(worker_number, tier, parent, some_blocks));
            parent = some_blocks.last().copied();
        }
    }

    /// For an agent whose stream is lost: it reports no changes of its blocks any more.
    fn discard_agent(&self, agent: AgentKey, why: String) {
        let (phases, loss_reason) = (HashMap::new(), Some(why));
        let lost_state = StreamState { agent: Some(agent), phases, loss_reason };
        let old_state = self.stream_states[agent.slot()].swap(Arc::new(lost_state));
        for &dp_rank in old_state.phases.keys() {
            if let Some(worker_number) = (WorkerRef { agent, dp_rank }).number() {
                self.clear(worker_number);
            }
        }
    }

    /// The workers' numbers go to the next agent of the slot, so no block may be left of this one.
    /// Call this when the agent's [`KvWatcher`] has ended, and the next one's has not begun.
    pub(crate) fn end_agent(&self, agent: AgentKey) {
        self.stream_states[agent.slot()].store(Arc::default());
        agent.worker_numbers().for_each(|worker_number| self.clear(worker_number));
    }

    fn clear(&self, worker_number: usize) {
        self.live_flags[worker_number].store(false, Ordering::Relaxed);
        self.index.change(|index| index.clear(worker_number));
    }
}

#[derive(Debug, Default)]
struct ResetPace(HashMap<u32, Instant>);

impl ResetPace {
    async fn wait_before(&mut self, RankChange { dp_rank, change }: &RankChange) {
        if !matches!(change, Change::Reset { .. }) {
            return;
        }
        if let Some(last) = self.0.get(dp_rank) {
            tokio::time::sleep_until((*last + RESET_INTERVAL_MIN).into()).await;
        }
        self.0.insert(*dp_rank, now());
    }
}

#[derive(Debug)]
pub(crate) struct KvWatcher {
    pub(crate) agent: AgentKey,
    pub(crate) dialer: AgentDialer,
    /// Longest time to connect and to begin a stream.
    pub(crate) connect_max: Duration,
    pub(crate) kv_index: Arc<KvIndex>,
}

impl KvWatcher {
    pub(crate) async fn run(self, token: CancellationToken) {
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = self.run_forever() => {}
        }
    }

    async fn run_forever(&self) {
        let (mut backoff, mut logged_reason) = (Backoff::default(), String::new());
        loop {
            let mut checker = KvStreamChecker::default();
            let why = self.follow_once(&mut checker).await;
            debug!(agent = self.agent.slot(), why, "stream of resident blocks ended");
            if !checker.phases().values().any(|phase| matches!(phase, KvPhase::Live { .. })) {
                if why != logged_reason {
                    info!(agent = self.agent.slot(), why, "resident blocks are unknown");
                    logged_reason.clone_from(&why);
                }
                self.kv_index.discard_agent(self.agent, why);
            } else {
                // The blocks of a stream that was live are kept for a quick reconnect. They are
                // discarded if the next stream ends before any of its ranks is live.
                backoff.reset();
                logged_reason.clear();
            }
            backoff.pause().await;
        }
    }

    /// Returns why the stream ended.
    async fn follow_once(&self, checker: &mut KvStreamChecker) -> String {
        let open_stream = async {
            let client = self.dialer.connect().await?.client;
            let mut client = client.max_decoding_message_size(MESSAGE_BYTES_MAX);
            let stream = client.watch_kv(WatchKvRequest {}).await;
            stream.map_err(|status| describe_status(&status))
        };
        let mut stream = match tokio::time::timeout(self.connect_max, open_stream).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(why)) => return why,
            Err(_) => return format!("no answer within {} ms", self.connect_max.as_millis()),
        };
        let mut resets = ResetPace::default();
        loop {
            let event = match stream.message().await {
                Ok(Some(event)) => event,
                Ok(None) => return "the agent ended the stream".to_owned(),
                Err(status) => return describe_status(&status),
            };
            let changes = match checker.accept(event) {
                Ok(changes) => changes,
                Err(error) => return describe_error(&error),
            };
            for change in changes {
                resets.wait_before(&change).await;
                self.kv_index.apply(self.agent, change);
            }
            let stream_state = &self.kv_index.stream_states[self.agent.slot()];
            let old_state = stream_state.load();
            if old_state.loss_reason.is_some() || old_state.phases != *checker.phases() {
                let (agent, phases) = (Some(self.agent), checker.phases().clone());
                stream_state.store(Arc::new(StreamState { agent, phases, loss_reason: None }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use blocks::block::BlockTokens;

    use super::*;

    fn blocks(from: u64, to: u64) -> Vec<BlockHash> {
        // In a real chain, too, the lowest three bits count the place of a block in its group.
        (from..to).map(|place| BlockHash((1 << 40) | (place % 8) | (place / 8 * 8) << 3)).collect()
    }

    fn rank_0_change(agent: usize, change: Change) -> (AgentKey, RankChange) {
        (AgentKey::first(agent), RankChange { dp_rank: 0, change })
    }

    fn overlap(kv_index: &KvIndex, chain: &[BlockHash], agent: usize) -> u32 {
        let mut overlap = Overlap::default();
        kv_index.look_up(chain, &mut overlap);
        overlap.device_blocks(
            WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }.number().unwrap(),
        )
    }

    #[test]
    fn a_snapshot_counts_when_it_is_complete_and_what_failed_is_forgotten() {
        let kv_index = KvIndex::new(1 << 20);
        let chain = blocks(0, 8);
        let reset = || Change::Reset { block_tokens: BlockTokens::for_page(1).unwrap() };
        let stored =
            Change::Stored { tier: Tier::Device, parent: None, blocks: chain[..5].to_vec() };
        for (agent, change) in [rank_0_change(1, reset()), rank_0_change(1, stored.clone())] {
            kv_index.apply(agent, change);
        }
        assert_eq!(overlap(&kv_index, &chain, 1), 0);
        kv_index.apply(AgentKey::first(1), RankChange { dp_rank: 0, change: Change::Complete });
        assert_eq!((overlap(&kv_index, &chain, 1), overlap(&kv_index, &chain, 0)), (5, 0));
        let phases = HashMap::from([(0, KvPhase::Live { block_tokens: 64 })]);
        let worker = WorkerRef { agent: AgentKey::first(1), dp_rank: 0 };
        let state = StreamState { agent: Some(worker.agent), phases, loss_reason: None };
        kv_index.stream_states[1].store(Arc::new(state));
        let known = WorkerKv { phase: KvPhase::Live { block_tokens: 64 }, resident_blocks: 5 };
        assert_eq!(kv_index.worker_kv(worker), known);
        kv_index.discard_agent(worker.agent, "it is gone".to_owned());
        assert_eq!(overlap(&kv_index, &chain, 1), 0);
        let phase = KvPhase::Unknown { reason: "it is gone".to_owned() };
        assert_eq!(kv_index.worker_kv(worker), WorkerKv { phase, resident_blocks: 0 });
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_resets_again_and_again_is_read_more_slowly() {
        let reset = |dp_rank| {
            let block_tokens = BlockTokens::for_page(1).unwrap();
            RankChange { dp_rank, change: Change::Reset { block_tokens } }
        };
        let (mut pace, begin) = (ResetPace::default(), now());
        for rank in 0..100 {
            pace.wait_before(&reset(rank)).await;
        }
        assert_eq!(now(), begin, "the first resets of a stream wait for nothing");
        for _ in 0..8 {
            pace.wait_before(&reset(7)).await;
        }
        assert!(now().duration_since(begin) >= Duration::from_secs(2));
    }

    #[test]
    fn a_long_store_is_one_chain_however_it_is_cut() {
        let kv_index = KvIndex::new(64 << 20);
        let scheme = blocks::block::Scheme::plain(BlockTokens::for_page(1).unwrap());
        let (mut chain, mut hashes) = (blocks::block::Chain::new(&scheme), vec![]);
        let tokens: Vec<u32> = (0..64 * 3 * 512 + 64).collect();
        chain.push(&tokens, &mut hashes);
        let stored = Change::Stored { tier: Tier::Device, parent: None, blocks: hashes.clone() };
        kv_index.apply(AgentKey::first(0), RankChange { dp_rank: 0, change: stored });
        assert_eq!(overlap(&kv_index, &hashes, 0), 3 * 512 + 1);
        let last = hashes[1..].to_vec();
        let removed = Change::Removed { tier: Tier::Device, blocks: last };
        kv_index.apply(AgentKey::first(0), RankChange { dp_rank: 0, change: removed });
        assert_eq!(overlap(&kv_index, &hashes, 0), 1);
    }

    #[test]
    fn the_next_agent_of_a_slot_has_none_of_the_blocks_and_the_old_one_is_not_live() {
        let (kv_index, chain) = (KvIndex::new(1 << 20), blocks(0, 8));
        let (old, new) = (AgentKey::first(1), AgentKey::first(1).next());
        let at = |agent, dp_rank| WorkerRef { agent, dp_rank };
        let begin = |agent: AgentKey, ranks: u32, chain: &[BlockHash]| {
            for dp_rank in 0..ranks {
                let reset = Change::Reset { block_tokens: BlockTokens::for_page(1).unwrap() };
                let blocks = chain.to_vec();
                let stored = Change::Stored { tier: Tier::Device, parent: None, blocks };
                for change in [reset, stored, Change::Complete] {
                    kv_index.apply(agent, RankChange { dp_rank, change });
                }
            }
            let live = |rank| (rank, KvPhase::Live { block_tokens: 64 });
            let phases = (0..ranks).map(live).collect();
            let state = StreamState { agent: Some(agent), phases, loss_reason: None };
            kv_index.stream_states[agent.slot()].store(Arc::new(state));
        };
        let is_live =
            |agent| (kv_index.is_live_at(at(agent, 0)), kv_index.is_live_with(at(agent, 0), 64));
        begin(old, 2, &chain);
        // The task ended between the changes of one event and the record of their rank.
        let unrecorded = Change::Stored { tier: Tier::Device, parent: None, blocks: chain.clone() };
        kv_index.apply(old, RankChange { dp_rank: 2, change: unrecorded });
        kv_index.apply(old, RankChange { dp_rank: 2, change: Change::Complete });
        assert_eq!([old, new].map(is_live), [(true, true), (false, false)]);
        kv_index.end_agent(old);
        assert_eq!((overlap(&kv_index, &chain, 1), kv_index.stats().blocks), (0, 0));
        assert_eq!([old, new].map(is_live), [(false, false); 2]);
        assert!(!new.worker_numbers().any(|number| kv_index.is_live(number)));
        begin(new, 1, &chain[..3]);
        assert_eq!([old, new].map(is_live), [(false, false), (true, true)]);
        let blocks = [old, new].map(|agent| kv_index.worker_kv(at(agent, 0)).resident_blocks);
        assert_eq!(blocks, [0, 3]);
        let phase = kv_index.worker_kv(at(old, 0)).phase;
        assert!(matches!(phase, KvPhase::Unknown { .. }), "{phase:?}");
    }
}

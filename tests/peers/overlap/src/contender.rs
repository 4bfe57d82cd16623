//! The compared indexes behind one trait: Berth's, and two of the peer.
//!
//! Berth's index runs as in the router. The peer's are its concurrent compressed tree, behind its
//! thread pool, and its plain radix tree.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, RadixTree, ThreadPoolIndexer,
    indexer::SyncIndexer,
    protocols::{
        ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
        KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
        WorkerWithDpRank,
    },
};
use blocks::block::{BlockHash, Tier};
use blocks::index::{Index, Overlap, SharedIndex};
use tokio::runtime::Runtime;

use crate::workload::{Event, Kind, Query};

/// The number of threads that apply the peer's events, as in the peer's published measurements.
const PEER_THREADS: usize = 2;
const BLOCK_TOKENS: u32 = 64;

/// An index under comparison.
pub trait Contender {
    /// An event in the index's own format.
    type Event;

    fn new() -> Self;
    fn event(id: u64, event: Event) -> Self::Event;
    /// Applies the events; returns when all of them are applied.
    fn apply(&mut self, events: Vec<Self::Event>);
    /// Returns the duration of one look-up of a hashed prompt, up to its answer.
    fn look_up(&mut self, query: &Query) -> Duration;
    /// Returns the number of leading resident blocks by worker.
    fn answer(&mut self, query: &Query, workers: u64) -> Vec<u32>;
}

/// Berth's index.
pub struct Ours {
    index: SharedIndex,
    overlap: Overlap,
}

pub struct OurEvent {
    worker: usize,
    kind: Kind,
    blocks: Vec<BlockHash>,
}

impl Contender for Ours {
    type Event = OurEvent;

    fn new() -> Self {
        Self { index: SharedIndex::new(Index::new(usize::MAX)), overlap: Overlap::default() }
    }

    fn event(_: u64, event: Event) -> OurEvent {
        let blocks = event.blocks.iter().map(|block| block.ours).collect();
        OurEvent { worker: event.worker as usize, kind: event.kind, blocks }
    }

    fn apply(&mut self, events: Vec<OurEvent>) {
        for OurEvent { worker, kind, blocks } in events {
            self.index.change(|index| match kind {
                Kind::Store { parent } => {
                    let parent = parent.map(|block| block.ours);
                    index.store(worker, Tier::Device, parent, &blocks);
                }
                Kind::Remove => index.remove(worker, Tier::Device, &blocks),
            });
        }
    }

    fn look_up(&mut self, query: &Query) -> Duration {
        let prompt = query.chained.clone();
        let begin = Instant::now();
        self.index.look_up(black_box(&prompt), &mut self.overlap);
        black_box(&self.overlap);
        begin.elapsed()
    }

    fn answer(&mut self, query: &Query, workers: u64) -> Vec<u32> {
        self.index.look_up(&query.chained, &mut self.overlap);
        (0..workers as usize).map(|worker| self.overlap.device_blocks(worker)).collect()
    }
}

fn peer_event(id: u64, event: Event) -> RouterEvent {
    let blocks = event.blocks.into_iter();
    let data = match event.kind {
        Kind::Store { parent } => KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: parent.map(|block| ExternalSequenceBlockHash(block.peer)),
            start_position: None,
            blocks: blocks
                .map(|block| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(block.peer),
                    tokens_hash: LocalBlockHash(block.local),
                    mm_extra_info: None,
                })
                .collect(),
        }),
        Kind::Remove => KvCacheEventData::Removed(KvCacheRemoveData {
            block_hashes: blocks.map(|block| ExternalSequenceBlockHash(block.peer)).collect(),
        }),
    };
    RouterEvent::new(event.worker, KvCacheEvent { event_id: id, data, dp_rank: 0 })
}

fn by_worker(scores: &OverlapScores, workers: u64) -> Vec<u32> {
    let of = |worker| scores.scores.get(&WorkerWithDpRank::new(worker, 0)).copied().unwrap_or(0);
    (0..workers).map(of).collect()
}

/// The peer's concurrent compressed tree.
pub struct Compressed {
    pool: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    runtime: Runtime,
}

impl Contender for Compressed {
    type Event = RouterEvent;

    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build();
        let tree = ConcurrentRadixTreeCompressed::new();
        let pool = ThreadPoolIndexer::new(tree, PEER_THREADS, BLOCK_TOKENS);
        Self { pool, runtime: runtime.expect("a runtime can be built") }
    }

    fn event(id: u64, event: Event) -> RouterEvent {
        peer_event(id, event)
    }

    fn apply(&mut self, events: Vec<RouterEvent>) {
        for event in events {
            self.pool.enqueue_event(event).expect("the pool lives");
        }
        self.runtime.block_on(self.pool.flush_and_wait()).expect("the pool lives");
    }

    fn look_up(&mut self, query: &Query) -> Duration {
        let prompt = query.local.clone();
        let begin = Instant::now();
        let scores = black_box(self.pool.backend().find_matches(black_box(&prompt), false));
        let time = begin.elapsed();
        drop(scores);
        time
    }

    fn answer(&mut self, query: &Query, workers: u64) -> Vec<u32> {
        by_worker(&self.pool.backend().find_matches(&query.local, false), workers)
    }
}

/// The peer's plain radix tree.
pub struct Radix(RadixTree);

impl Contender for Radix {
    type Event = RouterEvent;

    fn new() -> Self {
        Self(RadixTree::new())
    }

    fn event(id: u64, event: Event) -> RouterEvent {
        peer_event(id, event)
    }

    fn apply(&mut self, events: Vec<RouterEvent>) {
        for event in events {
            self.0.apply_event(event).expect("events follow one another");
        }
    }

    fn look_up(&mut self, query: &Query) -> Duration {
        let prompt = query.local.clone();
        let begin = Instant::now();
        let scores = black_box(self.0.find_matches(black_box(prompt), false));
        let time = begin.elapsed();
        drop(scores);
        time
    }

    fn answer(&mut self, query: &Query, workers: u64) -> Vec<u32> {
        by_worker(&self.0.find_matches(query.local.clone(), false), workers)
    }
}

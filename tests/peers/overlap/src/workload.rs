//! The chains, events and queries, the same for all contenders.
//!
//! Sessions share a few system prompts and grow turn by turn, each on a home worker and some also
//! on a second one.

use dynamo_kv_router::protocols::{LocalBlockHash, compute_seq_hash_for_block};
use blocks::block::{BlockHash, BlockTokens, Scheme, hash_after};

/// The size of a workload.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    pub workers: u64,
    pub sessions: u64,
    /// The blocks of each of the four system prompts.
    pub system: u64,
    pub turns: u64,
    pub turn_blocks: u64,
    pub queries: u64,
}

const SYSTEMS: u64 = 4;

/// Returns a shape with 76 blocks per query on average.
const fn short(name: &'static str, workers: u64) -> Shape {
    let sessions = workers * 64;
    Shape { name, workers, sessions, system: 32, turns: 8, turn_blocks: 8, queries: 20_000 }
}

/// Returns a shape with 1,850 blocks per query on average.
const fn long(name: &'static str, workers: u64) -> Shape {
    let sessions = workers * 4;
    Shape { name, workers, sessions, system: 128, turns: 16, turn_blocks: 181, queries: 2_000 }
}

pub const SHAPES: [Shape; 6] = [
    short("76 blocks, 8 workers", 8),
    short("76 blocks, 32 workers", 32),
    short("76 blocks, 128 workers", 128),
    long("1,850 blocks, 8 workers", 8),
    long("1,850 blocks, 32 workers", 32),
    long("1,850 blocks, 128 workers", 128),
];

/// The shape for the measurement of memory.
pub const MEMORY: Shape = Shape { sessions: 128 * 256, queries: 0, ..short("memory", 128) };

/// One event on one worker.
#[derive(Debug, Clone)]
pub struct Event {
    pub worker: u64,
    pub kind: Kind,
    /// The blocks in chain order; for a removal, the leaf first.
    pub blocks: Vec<Block>,
}

/// A block with all its names.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// The hash of the block's tokens, which both sides chain.
    pub local: u64,
    /// The peer's chained hash.
    pub peer: u64,
    /// Berth's chained hash.
    pub ours: BlockHash,
}

#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Store { parent: Option<Block> },
    Remove,
}

/// A prompt: the hashes of its blocks' tokens, and the chained hashes.
#[derive(Debug, Clone)]
pub struct Query {
    pub local: Vec<LocalBlockHash>,
    pub chained: Vec<BlockHash>,
}

#[derive(Debug)]
struct Session {
    home: u64,
    second: Option<u64>,
    blocks: Vec<Block>,
}

/// The chains of all sessions, from which events and queries are made.
#[derive(Debug)]
pub struct Workload {
    pub shape: Shape,
    sessions: Vec<Session>,
}

/// The SplitMix64 generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn hashes(&mut self, n: u64) -> Vec<LocalBlockHash> {
        (0..n).map(|_| LocalBlockHash(self.next())).collect()
    }
}

impl Workload {
    pub fn new(shape: Shape) -> Self {
        let mut random = Random(42);
        let systems: Vec<_> = (0..SYSTEMS).map(|_| random.hashes(shape.system)).collect();
        let session = |id: u64| {
            let mut local = systems[random.below(SYSTEMS) as usize].clone();
            local.extend(random.hashes(shape.turns * shape.turn_blocks));
            let home = id % shape.workers;
            let moves = random.below(10) == 0;
            let second =
                moves.then(|| (home + 1 + random.below(shape.workers - 1)) % shape.workers);
            Session { home, second, blocks: blocks(&local) }
        };
        Self { shape, sessions: (0..shape.sessions).map(session).collect() }
    }

    /// Returns the stored blocks, turn by turn.
    pub fn stores(&self) -> impl Iterator<Item = Event> {
        let Shape { system, turns, turn_blocks, .. } = self.shape;
        (0..turns).flat_map(move |turn| {
            self.sessions.iter().flat_map(move |session| {
                let from = if turn == 0 { 0 } else { system + turn * turn_blocks };
                let to = system + (turn + 1) * turn_blocks;
                let parent = from.checked_sub(1).map(|at| session.blocks[at as usize]);
                let event = move |worker| Event {
                    worker,
                    kind: Kind::Store { parent },
                    blocks: session.blocks[from as usize..to as usize].to_vec(),
                };
                let second = session.second.filter(|_| turn < turns / 2);
                [Some(session.home), second].into_iter().flatten().map(event)
            })
        })
    }

    /// Returns the blocks evicted afterwards: the last turn of every second session.
    pub fn removes(&self) -> impl Iterator<Item = Event> {
        self.sessions.iter().step_by(2).map(|session| {
            let last = session.blocks.len() - self.shape.turn_blocks as usize;
            let blocks = session.blocks[last..].iter().rev().copied().collect();
            Event { worker: session.home, kind: Kind::Remove, blocks }
        })
    }

    /// Returns prompts that consist of a session up to a random turn, and one new turn.
    pub fn queries(&self) -> Vec<Query> {
        let Shape { sessions, system, turns, turn_blocks, queries, .. } = self.shape;
        let mut random = Random(99);
        let query = |_| {
            let session = &self.sessions[random.below(sessions) as usize];
            let known = system + (random.below(turns) + 1) * turn_blocks;
            let known = session.blocks[..known as usize].iter();
            let mut local: Vec<_> = known.map(|block| LocalBlockHash(block.local)).collect();
            local.extend(random.hashes(turn_blocks));
            let chained = blocks(&local).iter().map(|block| block.ours).collect();
            Query { local, chained }
        };
        (0..queries).map(query).collect()
    }
}

/// Returns a chain with both sides' names.
fn blocks(local: &[LocalBlockHash]) -> Vec<Block> {
    let tokens = BlockTokens::for_page(64).expect("a page has 64 tokens");
    let mut ours = Scheme::plain(tokens).root();
    let block = |(local, peer): (&LocalBlockHash, u64)| {
        ours = hash_after(ours, local.0);
        Block { local: local.0, peer, ours }
    };
    local.iter().zip(compute_seq_hash_for_block(local)).map(block).collect()
}

/// Returns the token ids of a prompt.
pub fn tokens(n: usize) -> Vec<u32> {
    let mut random = Random(7);
    (0..n).map(|_| (random.next() as u32) % 150_000).collect()
}

//! Benchmarks of the overlap index and of block hashing.
//!
//! They measure look-ups, stores, removes and hashes. All sessions share a system prompt that every
//! worker has, so each answer contains all workers. `tests/peers/overlap` runs the same benchmark
//! beside a peer.

use std::hint::black_box;

use blocks::block::{BlockHash, BlockTokens, Chain, Scheme, Tier, hash_after};
use blocks::index::{Index, Overlap, SharedIndex};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};

const SESSIONS_PER_WORKER: usize = 64;
const SYSTEM_BLOCKS: usize = 32;
const SESSION_BLOCKS: usize = 96;
/// Number of new blocks in a turn.
const TURN_BLOCKS: usize = 8;
const PROMPT_TOKENS: u32 = 131_072;

fn scheme() -> Scheme<'static> {
    Scheme::plain(BlockTokens::for_page(64).expect("64-token pages have blocks"))
}

/// Returns a chain that leaves the shared one after `shared` blocks.
fn chain(shared: usize, blocks: usize, session: usize) -> Vec<BlockHash> {
    let next = |last: &mut BlockHash, at: usize| {
        *last = hash_after(*last, if at < shared { 0 } else { 1 + session as u64 });
        Some(*last)
    };
    (0..blocks).scan(scheme().root(), next).collect()
}

fn sessions(workers: usize) -> Vec<(usize, Vec<BlockHash>)> {
    let session = |id| (id % workers, chain(SYSTEM_BLOCKS, SESSION_BLOCKS, id));
    (0..workers * SESSIONS_PER_WORKER).map(session).collect()
}

/// Returns an index into which all sessions were stored turn by turn.
fn filled(sessions: &[(usize, Vec<BlockHash>)]) -> Index {
    let mut index = Index::new(usize::MAX);
    for from in (0..SESSION_BLOCKS).step_by(TURN_BLOCKS) {
        for (worker, chain) in sessions {
            let parent = from.checked_sub(1).map(|at| chain[at]);
            index.store(*worker, Tier::Device, parent, &chain[from..from + TURN_BLOCKS]);
        }
    }
    index
}

fn look_up(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("look_up");
    for workers in [8, 32, 128, 1024] {
        let sessions = sessions(workers);
        let index = SharedIndex::new(filled(&sessions));
        let mut overlap = Overlap::default();
        // `grown` prompts continue at the end of their session; `forked` ones leave it in the
        // middle.
        let grown = |id: usize| {
            let mut chain = sessions[id].1.clone();
            chain.extend((0..TURN_BLOCKS as u64).map(|at| hash_after(BlockHash(at), id as u64)));
            chain
        };
        let forked = |id: usize| {
            let mut chain = grown(id);
            chain.drain(SYSTEM_BLOCKS + TURN_BLOCKS + 3..SESSION_BLOCKS);
            chain
        };
        let count = sessions.len();
        for (name, prompts) in [
            ("grown", (0..count).map(grown).collect::<Vec<_>>()),
            ("forked", (0..count).map(forked).collect()),
        ] {
            let mut order = (0..count).map(|at| at * 7919 % count).cycle();
            group.bench_function(BenchmarkId::new(name, workers), |bencher| {
                // In use, a prompt is hashed just before it is looked up. The copy puts it in the
                // cache, too.
                let next = || prompts[order.next().expect("a cycle has no end")].clone();
                let look_up = |prompt: &mut Vec<BlockHash>| index.look_up(prompt, &mut overlap);
                bencher.iter_batched_ref(next, look_up, BatchSize::SmallInput);
            });
        }
    }
    group.finish();
}

fn store(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("store");
    for workers in [8, 128] {
        let sessions = sessions(workers);
        group.throughput(Throughput::Elements((sessions.len() * SESSION_BLOCKS) as u64));
        group.bench_function(BenchmarkId::from_parameter(workers), |bencher| {
            bencher.iter_with_large_drop(|| filled(&sessions));
        });
    }
    group.finish();
}

fn remove(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("remove");
    for workers in [8, 128] {
        let sessions = sessions(workers);
        group.throughput(Throughput::Elements((sessions.len() * TURN_BLOCKS) as u64));
        group.bench_function(BenchmarkId::from_parameter(workers), |bencher| {
            let last_turns = |mut index: Index| {
                for (worker, chain) in &sessions {
                    let last = &chain[SESSION_BLOCKS - TURN_BLOCKS..];
                    index.remove(*worker, Tier::Device, last);
                }
                index
            };
            bencher.iter_batched(|| filled(&sessions), last_turns, BatchSize::LargeInput);
        });
    }
    group.finish();
}

fn hash(criterion: &mut Criterion) {
    let tokens: Vec<u32> = (0..PROMPT_TOKENS).map(|at| at * 7919 % 150_000).collect();
    let mut group = criterion.benchmark_group("hash");
    for new in [512, tokens.len()] {
        let (known, new) = tokens.split_at(tokens.len() - new);
        let mut chain = Chain::new(&scheme());
        let mut hashes = vec![];
        chain.push(known, &mut hashes);
        group.throughput(Throughput::Elements(new.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(new.len()), |bencher| {
            bencher.iter(|| {
                hashes.clear();
                let mut grown = chain;
                grown.push(black_box(new), &mut hashes);
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    look_up(&mut criterion);
    store(&mut criterion);
    remove(&mut criterion);
    hash(&mut criterion);
    criterion.final_summary();
}

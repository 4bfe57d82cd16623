//! The measurements: rounds over all contenders, forwards and then backwards.
//!
//! Each ratio compares figures of one round. The result is the median ratio, with its extremes.

use std::time::Instant;

use dynamo_kv_router::protocols::{
    BlockHashOptions, compute_block_hash_for_seq, compute_seq_hash_for_block,
};
use blocks::block::{BlockTokens, Chain, Scheme};

use crate::{
    contender::{Compressed, Contender, Ours, Radix},
    workload::{Event, Query, Workload, tokens},
};

/// The number of look-ups before those that count.
const WARM_UP: usize = 500;
const PROMPT_TOKENS: usize = 131_072;
const BLOCK_TOKENS: u32 = 64;
/// The number of times a prompt is hashed in one round.
const HASHINGS: usize = 100;

/// One contender's figures of one round, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Figures {
    pub look_up_p50: f64,
    pub look_up_p99: f64,
    pub store_per_block: f64,
    pub remove_per_block: f64,
}

/// The figures by contender: Berth's index, the compressed tree, the plain tree.
pub type Round = [Figures; 3];

/// Builds an index, queries it, and removes blocks from it.
fn figures<C: Contender>(workload: &Workload, queries: &[Query]) -> Figures {
    let mut index = C::new();
    let own = |(id, event): (u64, Event)| C::event(id, event);
    let blocks = |event: Event| event.blocks.len();
    let stored: usize = workload.stores().map(blocks).sum();
    let removed: usize = workload.removes().map(blocks).sum();
    let stores: Vec<C::Event> = (0..).zip(workload.stores()).map(own).collect();
    let removes: Vec<C::Event> = (1 << 40..).zip(workload.removes()).map(own).collect();

    let begin = Instant::now();
    index.apply(stores);
    let store = begin.elapsed();
    for query in queries.iter().take(WARM_UP) {
        index.look_up(query);
    }
    let mut times: Vec<u128> =
        queries.iter().map(|query| index.look_up(query).as_nanos()).collect();
    times.sort_unstable();
    let begin = Instant::now();
    index.apply(removes);
    let remove = begin.elapsed();
    let quantile = |q: f64| times[((times.len() - 1) as f64 * q) as usize] as f64;
    Figures {
        look_up_p50: quantile(0.5),
        look_up_p99: quantile(0.99),
        store_per_block: store.as_nanos() as f64 / stored as f64,
        remove_per_block: remove.as_nanos() as f64 / removed as f64,
    }
}

/// Measures one round: all contenders forwards, then backwards; returns the means.
pub fn round(workload: &Workload, queries: &[Query]) -> Round {
    let there = [
        figures::<Ours>(workload, queries),
        figures::<Compressed>(workload, queries),
        figures::<Radix>(workload, queries),
    ];
    let radix = figures::<Radix>(workload, queries);
    let compressed = figures::<Compressed>(workload, queries);
    let back = [figures::<Ours>(workload, queries), compressed, radix];
    let mean = |at: usize| {
        let (one, two) = (there[at], back[at]);
        Figures {
            look_up_p50: f64::midpoint(one.look_up_p50, two.look_up_p50),
            look_up_p99: f64::midpoint(one.look_up_p99, two.look_up_p99),
            store_per_block: f64::midpoint(one.store_per_block, two.store_per_block),
            remove_per_block: f64::midpoint(one.remove_per_block, two.remove_per_block),
        }
    };
    [mean(0), mean(1), mean(2)]
}

/// Returns the number of prompts on which the contenders disagree, before and after removals.
pub fn disagreements(workload: &Workload, queries: &[Query]) -> usize {
    fn fill<C: Contender>(events: impl Iterator<Item = Event>, index: &mut C) {
        index.apply((0..).zip(events).map(|(id, event)| C::event(id, event)).collect());
    }
    let (mut ours, mut compressed, mut radix) = (Ours::new(), Compressed::new(), Radix::new());
    let workers = workload.shape.workers;
    let mut differ = 0;
    for removed in [false, true] {
        if removed {
            fill(workload.removes(), &mut ours);
            fill(workload.removes(), &mut compressed);
            fill(workload.removes(), &mut radix);
        } else {
            fill(workload.stores(), &mut ours);
            fill(workload.stores(), &mut compressed);
            fill(workload.stores(), &mut radix);
        }
        for query in queries {
            let answer = ours.answer(query, workers);
            let agree = answer == compressed.answer(query, workers)
                && answer == radix.answer(query, workers);
            differ += usize::from(!agree);
        }
    }
    differ
}

/// Returns the microseconds to hash a prompt, from tokens to chained hashes: Berth's and the
/// peer's.
pub fn hashing() -> [f64; 2] {
    let tokens = tokens(PROMPT_TOKENS);
    let scheme = Scheme::plain(BlockTokens::for_page(BLOCK_TOKENS).expect("a page has 64 tokens"));
    let (mut ours, mut peer) = (vec![], vec![]);
    for _ in 0..HASHINGS {
        let begin = Instant::now();
        let mut hashes = vec![];
        Chain::new(&scheme).push(std::hint::black_box(&tokens), &mut hashes);
        std::hint::black_box(&hashes);
        ours.push(begin.elapsed().as_nanos() as f64 / 1e3);
        let begin = Instant::now();
        let options = BlockHashOptions::default();
        let local =
            compute_block_hash_for_seq(std::hint::black_box(&tokens), BLOCK_TOKENS, options);
        std::hint::black_box(compute_seq_hash_for_block(&local));
        peer.push(begin.elapsed().as_nanos() as f64 / 1e3);
    }
    [median(&ours), median(&peer)]
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    }
}

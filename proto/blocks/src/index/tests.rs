//! Compares the index with a simple oracle that keeps a set of blocks per worker and tier.

use std::collections::{HashMap, HashSet};

use crate::block::{BlockHash, hash_after};
use proptest::prelude::*;

use super::*;

const WORKERS: usize = 40;
const UNBOUNDED: usize = usize::MAX;
/// The root of an arbitrary hashing scheme.
const ROOT: BlockHash = BlockHash(7);

/// Returns the chain with one block per letter.
fn chain(letters: &[u8]) -> Vec<BlockHash> {
    let next = |last: &mut BlockHash, letter: &u8| {
        *last = hash_after(*last, u64::from(*letter));
        Some(*last)
    };
    letters.iter().scan(ROOT, next).collect()
}

/// Returns the chain of the letters, extended to `blocks` blocks with another letter.
fn long(letters: &[u8], blocks: usize, letter: u64) -> Vec<BlockHash> {
    let mut chain = chain(letters);
    extend(&mut chain, blocks, letter);
    chain
}

fn extend(chain: &mut Vec<BlockHash>, blocks: usize, letter: u64) {
    while chain.len() < blocks {
        chain.push(hash_after(chain.last().copied().unwrap_or(ROOT), letter));
    }
}

fn depths(index: &Index, chain: &[BlockHash]) -> Vec<(u32, u32)> {
    let mut overlap = Overlap::default();
    index.look_up(chain, &mut overlap);
    (0..WORKERS)
        .map(|worker| (overlap.device_blocks(worker), overlap.any_tier_blocks(worker)))
        .collect()
}

/// Returns the device depths of the first `N` workers.
fn device<const N: usize>(index: &Index, chain: &[BlockHash]) -> [u32; N] {
    std::array::from_fn(|worker| depths(index, chain)[worker].0)
}

#[derive(Debug, Clone)]
enum Step {
    Store { worker: usize, tier: Tier, letters: Vec<u8>, from: usize },
    Remove { worker: usize, tier: Tier, letters: Vec<u8>, from: usize, order: u8 },
    Clear { worker: usize },
    Begin { worker: usize },
    Finish { worker: usize },
}

fn letters() -> impl Strategy<Value = Vec<u8>> {
    // Mostly the same letter, so that chains have long common prefixes.
    prop::collection::vec(prop_oneof![12 => Just(0_u8), 2 => Just(1), 1 => Just(2)], 1..24)
}

fn step() -> impl Strategy<Value = Step> {
    let tier = || prop_oneof![4 => Just(Tier::Device), 1 => Just(Tier::Host)];
    let worker = || prop_oneof![3 => 0..3_usize, 1 => 0..WORKERS];
    prop_oneof![
        20 => (worker(), tier(), letters(), 0..24_usize).prop_map(|(worker, tier, letters, from)| {
            Step::Store { worker, tier, letters, from }
        }),
        12 => (worker(), tier(), letters(), 0..24_usize, 0..3_u8)
            .prop_map(|(worker, tier, letters, from, order)| {
                Step::Remove { worker, tier, letters, from, order }
            }),
        1 => worker().prop_map(|worker| Step::Clear { worker }),
        1 => worker().prop_map(|worker| Step::Begin { worker }),
        1 => worker().prop_map(|worker| Step::Finish { worker }),
    ]
}

/// The blocks that a worker holds, and those of its snapshot in progress.
#[derive(Debug, Default, Clone)]
struct Known {
    now: HashMap<Tier, HashSet<BlockHash>>,
    next: Option<HashMap<Tier, HashSet<BlockHash>>>,
}

#[derive(Debug, Default)]
struct Oracle {
    workers: HashMap<usize, Known>,
    parents: HashMap<BlockHash, BlockHash>,
}

impl Known {
    fn written(&mut self, tier: Tier) -> &mut HashSet<BlockHash> {
        self.next.as_mut().unwrap_or(&mut self.now).entry(tier).or_default()
    }
}

impl Oracle {
    /// Whether any worker has the block or a block that follows it.
    fn knows(&self, block: BlockHash) -> bool {
        let sets = self.workers.values().flat_map(|known| {
            known.now.values().chain(known.next.iter().flat_map(HashMap::values))
        });
        sets.flatten().any(|&held| {
            let up = |held: &BlockHash| self.parents.get(held).copied();
            std::iter::successors(Some(held), up).any(|above| above == block)
        })
    }

    fn depths(&self, chain: &[BlockHash]) -> Vec<(u32, u32)> {
        let none = Known::default();
        let of = |worker: usize| {
            let known = self.workers.get(&worker).unwrap_or(&none);
            let has = |tier, block: &BlockHash| {
                known.now.get(&tier).is_some_and(|held| held.contains(block))
            };
            let device = chain.iter().take_while(|block| has(Tier::Device, block)).count();
            let any = |block: &&BlockHash| has(Tier::Device, block) || has(Tier::Host, block);
            let count = |blocks: usize| u32::try_from(blocks).unwrap();
            (count(device), count(chain.iter().take_while(any).count()))
        };
        (0..WORKERS).map(of).collect()
    }

    /// Applies a step to the index and to the oracle. With `bounded`, the index may know less.
    fn step(&mut self, index: &mut Index, step: &Step, bounded: bool) {
        match step {
            Step::Store { worker, tier, letters, from } => {
                let chain = chain(letters);
                let from = from % chain.len();
                let parent = from.checked_sub(1).map(|at| chain[at]);
                let orphans = index.stats().orphan_blocks;
                index.store(*worker, *tier, parent, &chain[from..]);
                if index.stats().orphan_blocks > orphans {
                    let parent = parent.expect("only a parent can be unknown");
                    assert!(bounded || !self.knows(parent), "a known parent was not found");
                    return;
                }
                for pair in chain.windows(2) {
                    self.parents.insert(pair[1], pair[0]);
                }
                let known = self.workers.entry(*worker).or_default();
                known.written(*tier).extend(&chain[from..]);
            }
            Step::Remove { worker, tier, letters, from, order } => {
                let chain = chain(letters);
                let mut blocks = chain[from % chain.len()..].to_vec();
                match order {
                    0 => {}
                    1 => blocks.reverse(),
                    // Leaves a hole in the middle.
                    _ => blocks.truncate(2),
                }
                index.remove(*worker, *tier, &blocks);
                let known = self.workers.entry(*worker).or_default();
                known.written(*tier).retain(|held| !blocks.contains(held));
            }
            Step::Clear { worker } => {
                index.clear(*worker);
                self.workers.remove(worker);
            }
            Step::Begin { worker } => {
                index.begin_snapshot(*worker);
                self.workers.entry(*worker).or_default().next = Some(HashMap::new());
            }
            Step::Finish { worker } => {
                index.finish_snapshot(*worker);
                let known = self.workers.entry(*worker).or_default();
                known.now = known.next.take().unwrap_or_else(|| known.now.clone());
            }
        }
    }
}

proptest! {
    #[test]
    fn it_answers_what_sets_of_blocks_answer(
        steps in prop::collection::vec(step(), 1..60),
        questions in prop::collection::vec(letters(), 6),
    ) {
        let (mut index, mut oracle) = (Index::new(UNBOUNDED), Oracle::default());
        for (step, letters) in steps.iter().zip(questions.iter().cycle()) {
            oracle.step(&mut index, step, false);
            index.check_invariants();
            let chain = chain(letters);
            prop_assert_eq!(depths(&index, &chain), oracle.depths(&chain), "after {:?}", step);
        }
        prop_assert_eq!(index.stats().dropped_blocks, 0);
    }

    #[test]
    fn short_of_memory_it_forgets_and_never_invents(
        steps in prop::collection::vec(step(), 1..100),
        questions in prop::collection::vec(letters(), 3),
        bytes_max in 12_000..30_000_usize,
    ) {
        let (mut index, mut oracle) = (Index::new(bytes_max), Oracle::default());
        for (step, letters) in steps.iter().zip(questions.iter().cycle()) {
            oracle.step(&mut index, step, true);
            index.check_invariants();
            let chain = chain(letters);
            for (ours, all) in depths(&index, &chain).into_iter().zip(oracle.depths(&chain)) {
                prop_assert!(ours.0 <= all.0 && ours.1 <= all.1, "{:?} of {:?}", ours, all);
            }
        }
    }

    /// Events of a faulty peer: blocks in any order, after any parent.
    #[test]
    fn nonsense_breaks_nothing(
        made in prop::collection::vec((any::<prop::sample::Index>(), 0..3_u64), 40),
        steps in prop::collection::vec(
            (0..4_usize, any::<bool>(), prop::option::of(0..40_usize), 0..40_usize, 1..12_usize),
            1..80,
        ),
    ) {
        let mut pool = vec![ROOT];
        for (parent, letter) in made {
            // Only two group keys, so that blocks of different chains seem to follow each other.
            let hash = hash_after(pool[parent.index(pool.len())], letter);
            pool.push(BlockHash(hash.0 & !(0xff_fffe << 40)));
        }
        let mut index = Index::new(UNBOUNDED);
        for (worker, stores, parent, from, count) in steps {
            let blocks = &pool[from..pool.len().min(from + count)];
            if stores {
                index.store(worker, Tier::Device, parent.map(|at| pool[at]), blocks);
            } else {
                index.remove(worker, Tier::Device, blocks);
            }
            index.check_invariants();
        }
    }
}

#[test]
fn leading_blocks_end_at_a_hole_and_go_on_when_it_is_filled() {
    let mut index = Index::new(UNBOUNDED);
    let all = long(&[1], 10, 1000);
    index.store(0, Tier::Device, None, &all);
    index.remove(0, Tier::Device, &all[4..5]);
    assert_eq!(device(&index, &all), [4]);
    index.store(0, Tier::Device, Some(all[3]), &all[4..5]);
    assert_eq!(device(&index, &all), [10]);
    index.check_invariants();
    assert_eq!(index.stats().runs, 1, "what was split is joined again");
}

#[test]
fn a_lost_worker_disappears_at_once_and_is_swept_later() {
    let mut index = Index::new(UNBOUNDED);
    let all = long(&[1], 10, 1000);
    for worker in 0..3 {
        index.store(worker, Tier::Device, None, &all);
    }
    for letter in 0..100 {
        index.store(0, Tier::Device, None, &chain(&[letter, 7]));
    }
    index.clear(0);
    assert_eq!((device(&index, &all), index.resident_blocks(0)), ([0, 10, 10], 0));
    index.store(0, Tier::Device, None, &all[..6]);
    assert_eq!((device(&index, &all), index.resident_blocks(0)), ([6, 10, 10], 6));
    for _ in 0..20 {
        index.remove(0, Tier::Device, &[]);
    }
    index.check_invariants();
    assert_eq!(index.stats().blocks, 10, "the blocks before the clear are gone");
}

#[test]
fn a_worker_that_loses_its_blocks_again_and_again_harms_nobody() {
    let mut index = Index::new(UNBOUNDED);
    let all = long(&[1], 10, 1000);
    index.store(1, Tier::Device, None, &all);
    // Faster than the sweep goes on, as with a large tree.
    while index.slots.has_free() {
        if index.slots.begin_snapshot(0) {
            index.tree.add_slot();
        }
    }
    index.begin_snapshot(2);
    index.store(2, Tier::Device, None, &all[..6]);
    index.finish_snapshot(2);
    assert_eq!(device(&index, &all), [0, 10, 6]);
    index.check_invariants();
}

#[test]
fn a_snapshot_shows_when_it_is_complete() {
    let mut index = Index::new(UNBOUNDED);
    let (old, new) = (long(&[1], 10, 1000), long(&[2], 10, 1000));
    index.store(0, Tier::Device, None, &old);
    index.begin_snapshot(0);
    index.store(0, Tier::Device, None, &new);
    assert_eq!((device(&index, &old), device(&index, &new)), ([10], [0]));
    index.finish_snapshot(0);
    assert_eq!((device(&index, &old), device(&index, &new)), ([0], [10]));
    index.check_invariants();
}

#[test]
fn a_host_carries_on_where_the_device_ends() {
    let mut index = Index::new(UNBOUNDED);
    let all = long(&[1], 10, 1000);
    index.store(0, Tier::Device, None, &all[..8]);
    index.store(0, Tier::Host, Some(all[3]), &all[4..]);
    index.remove(0, Tier::Device, &all[5..8]);
    assert_eq!(depths(&index, &all)[0], (5, 10));
    index.remove(0, Tier::Device, &all[..5]);
    assert_eq!(depths(&index, &all)[0], (0, 0), "the first blocks are not resident");
    index.check_invariants();
}

#[test]
fn chains_longer_than_a_run_branch_and_end_anywhere() {
    let mut index = Index::new(UNBOUNDED);
    let all = long(&[], 10_000, 1000);
    let mut other = all[..5_000].to_vec();
    extend(&mut other, 8_000, 1001);
    index.store(0, Tier::Device, None, &all);
    index.store(1, Tier::Device, None, &other);
    index.store(2, Tier::Device, None, &all[..4_097]);
    index.check_invariants();
    assert_eq!(device(&index, &all), [10_000, 5_000, 4_097]);
    assert_eq!(device(&index, &other), [5_000, 8_000, 4_097]);
    index.remove(1, Tier::Device, &other[5_000..]);
    index.remove(0, Tier::Device, &all[9_999..]);
    index.remove(0, Tier::Device, &all[6_000..6_001]);
    index.check_invariants();
    assert_eq!(device(&index, &all), [6_000, 5_000, 4_097]);
}

#[test]
fn the_oldest_is_dropped_first_and_counted() {
    let chains: Vec<Vec<BlockHash>> = (0..60).map(|letter| long(&[9, letter], 100, 1000)).collect();
    let mut index = Index::new(48_000);
    for chain in &chains {
        index.store(0, Tier::Device, None, chain);
        index.check_invariants();
    }
    let kept: Vec<bool> = chains.iter().map(|chain| device(&index, chain) == [100]).collect();
    let first = kept.iter().position(|&kept| kept).unwrap();
    assert!((1..50).contains(&first), "some are dropped, many are kept: {first}");
    assert!(kept[first..].iter().all(|&kept| kept), "the newest are kept: {kept:?}");
    assert_eq!(index.stats().dropped_blocks + index.resident_blocks(0), 60 * 99 + 1);
    let orphan = chain(&[9, 0, 5]);
    index.store(0, Tier::Device, Some(chains[0][99]), &orphan[2..]);
    assert_eq!(index.stats().orphan_blocks, 1);
}

//! Remembers which prompts each worker was given, for agents that don't report resident blocks.
//!
//! Pure. The result is a guess, because the engine evicts on its own. For each worker, this module
//! forgets as an engine would: when the prompts exceed the pool's tokens, the end of the one unused
//! for longest goes first.
//!
//! A worker's prompts are kept as stretches: consecutive blocks without a branch. A new prompt adds
//! one stretch with the blocks that weren't known before. So a conversation has one stretch per
//! turn, and its next turn takes one step per stretch. An [`Index`] of this module's own finds
//! which worker has how much of a prompt.

use std::collections::{BTreeSet, HashMap};

use proto::block::{BlockHash, Tier};

use super::index::{Index, Overlap};
use crate::prompt::Blocks;

/// The prompts that all workers were given.
#[derive(Debug)]
pub struct LearnedPrompts {
    index: Index,
    workers: Vec<WorkerPrompts>,
    /// Number of prompts given so far; serves as the time of use.
    now: u64,
}

/// The prompts that one worker was given: a tree whose edges are stretches.
#[derive(Debug, Default)]
struct WorkerPrompts {
    stretches: HashMap<Id, Stretch>,
    by_first: HashMap<BlockHash, Id>,
    /// The stretches that no other follows, longest unused first.
    leaves: BTreeSet<(u64, Id)>,
    tokens: u64,
    next: Id,
}

/// The id of a stretch, never reused for the same worker.
type Id = u64;

#[derive(Debug)]
struct Stretch {
    blocks: Box<[BlockHash]>,
    block_tokens: u64,
    preceding: Option<Id>,
    /// Number of stretches that follow this one.
    followers: u32,
    used_at: u64,
}

impl LearnedPrompts {
    /// Creates an empty memory whose index holds about `bytes_max` bytes at most.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self { index: Index::new(bytes_max), workers: vec![], now: 0 }
    }

    /// Counts the leading blocks of a prompt that each worker was given.
    pub fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        self.index.look_up(chain, overlap);
    }

    /// Records that a worker with a pool of `pool_tokens` tokens was given a prompt.
    ///
    /// # Panics
    /// If `worker` is not below [`super::index::WORKERS_MAX`].
    pub fn record(&mut self, worker: usize, pool_tokens: u64, prompt: &Blocks) {
        if self.workers.len() <= worker {
            self.workers.resize_with(worker + 1, WorkerPrompts::default);
        }
        self.now += 1;
        let block_tokens = u64::from(prompt.block_tokens.get());
        let fitting = usize::try_from(pool_tokens / block_tokens).unwrap_or(usize::MAX);
        let chain = &prompt.hashes[..prompt.hashes.len().min(fitting)];
        let prompts = &mut self.workers[worker];
        let (known, preceding) = prompts.mark_used(chain, self.now);
        if !chain.is_empty() {
            // Stores the whole chain, as the index may have dropped known blocks when memory was
            // short.
            self.index.store(worker, Tier::Device, None, chain);
        }
        if known < chain.len() {
            prompts.insert(&chain[known..], block_tokens, preceding, self.now);
        }
        while prompts.tokens > pool_tokens {
            let Some(blocks) = prompts.remove_oldest() else { break };
            self.index.remove(worker, Tier::Device, &blocks);
        }
        if cfg!(debug_assertions) {
            self.workers[worker].check_invariants();
        }
    }

    /// Forgets all prompts of a worker that was lost or whose engine restarted.
    pub fn clear(&mut self, worker: usize) {
        if let Some(prompts) = self.workers.get_mut(worker) {
            *prompts = WorkerPrompts::default();
            self.index.clear(worker);
        }
    }

    /// Returns the number of tokens that a worker was given and that are not forgotten.
    #[must_use]
    pub fn tokens(&self, worker: usize) -> u64 {
        self.workers.get(worker).map_or(0, |prompts| prompts.tokens)
    }

    /// Checks all workers and the index, for tests.
    ///
    /// # Panics
    /// If an invariant is broken, with its description.
    pub fn check_invariants(&self) {
        self.index.check_invariants();
        self.workers.iter().for_each(WorkerPrompts::check_invariants);
    }
}

impl WorkerPrompts {
    /// Marks the known part of a chain as used now. Returns its number of blocks and its last
    /// stretch.
    fn mark_used(&mut self, chain: &[BlockHash], now: u64) -> (usize, Option<Id>) {
        let (mut known, mut last) = (0, None);
        while let Some(&id) = chain.get(known).and_then(|first| self.by_first.get(first)) {
            let stretch = self.stretches.get_mut(&id).expect("by_first names stretches");
            if stretch.followers == 0 {
                self.leaves.remove(&(stretch.used_at, id));
                self.leaves.insert((now, id));
            }
            let used = std::mem::replace(&mut stretch.used_at, now);
            let pairs = stretch.blocks.iter().zip(&chain[known..]);
            let matching = pairs.take_while(|(one, two)| one == two).count();
            known += matching;
            if matching < stretch.blocks.len() {
                return (known, Some(self.split(id, matching, used)));
            }
            last = Some(id);
        }
        (known, last)
    }

    /// Splits a stretch after its first `blocks` blocks. Returns the first part's id. The second
    /// part keeps `used` as its time of use.
    fn split(&mut self, id: Id, blocks: usize, used: u64) -> Id {
        let first_id = self.new_id();
        let second = self.stretches.get_mut(&id).expect("the stretch was just found");
        if second.followers == 0 {
            self.leaves.remove(&(second.used_at, id));
            self.leaves.insert((used, id));
        }
        let first = Stretch {
            blocks: second.blocks[..blocks].into(),
            block_tokens: second.block_tokens,
            preceding: second.preceding.replace(first_id),
            followers: 1,
            used_at: std::mem::replace(&mut second.used_at, used),
        };
        second.blocks = second.blocks[blocks..].into();
        self.by_first.insert(first.blocks[0], first_id);
        self.by_first.insert(second.blocks[0], id);
        self.stretches.insert(first_id, first);
        first_id
    }

    fn insert(&mut self, blocks: &[BlockHash], block_tokens: u64, preceding: Option<Id>, now: u64) {
        let id = self.new_id();
        if let Some(preceding) = preceding {
            let stretch = self.stretches.get_mut(&preceding).expect("it was found just before");
            if stretch.followers == 0 {
                self.leaves.remove(&(stretch.used_at, preceding));
            }
            stretch.followers += 1;
        }
        self.tokens += blocks.len() as u64 * block_tokens;
        self.leaves.insert((now, id));
        self.by_first.insert(blocks[0], id);
        let stretch =
            Stretch { blocks: blocks.into(), block_tokens, preceding, followers: 0, used_at: now };
        self.stretches.insert(id, stretch);
    }

    /// Removes the end that was unused for longest. Returns its blocks.
    fn remove_oldest(&mut self) -> Option<Box<[BlockHash]>> {
        let (_, id) = self.leaves.pop_first()?;
        let gone = self.stretches.remove(&id).expect("an end is a stretch");
        self.by_first.remove(&gone.blocks[0]);
        self.tokens -= gone.blocks.len() as u64 * gone.block_tokens;
        if let Some(before) = gone.preceding {
            let stretch = self.stretches.get_mut(&before).expect("followers are removed first");
            stretch.followers -= 1;
            if stretch.followers == 0 {
                self.leaves.insert((stretch.used_at, before));
            }
        }
        Some(gone.blocks)
    }

    fn new_id(&mut self) -> Id {
        self.next += 1;
        self.next
    }

    fn check_invariants(&self) {
        let tokens = |stretch: &Stretch| stretch.blocks.len() as u64 * stretch.block_tokens;
        assert_eq!(self.tokens, self.stretches.values().map(tokens).sum::<u64>());
        let mut after: HashMap<Id, u32> = HashMap::new();
        for (id, stretch) in &self.stretches {
            assert_eq!(self.by_first[&stretch.blocks[0]], *id);
            let is_leaf = self.leaves.contains(&(stretch.used_at, *id));
            assert_eq!(is_leaf, stretch.followers == 0, "ends are the stretches that none follows");
            if let Some(before) = stretch.preceding {
                assert!(
                    self.stretches[&before].used_at >= stretch.used_at,
                    "used before a follower"
                );
                *after.entry(before).or_default() += 1;
            }
        }
        for (id, stretch) in &self.stretches {
            assert_eq!(stretch.followers, after.get(id).copied().unwrap_or(0));
        }
        let leaves = self.stretches.values().filter(|stretch| stretch.followers == 0).count();
        assert_eq!((self.leaves.len(), self.by_first.len()), (leaves, self.stretches.len()));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::block::{BlockTokens, Chain, Scheme};

    use super::*;

    const BLOCK: u64 = 64;

    fn prompt(tokens: &[u32]) -> Blocks {
        let scheme = Scheme::plain(BlockTokens::for_page(1).unwrap());
        let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
        for token in tokens {
            chain.push(&[*token; 64], &mut hashes);
        }
        let block_tokens = scheme.block_tokens;
        Blocks { tokens: chain.tokens(), block_tokens, hashes, exact: false }
    }

    fn found(learned: &LearnedPrompts, worker: usize, tokens: &[u32]) -> u32 {
        let mut overlap = Overlap::default();
        learned.look_up(&prompt(tokens).hashes, &mut overlap);
        overlap.device(worker)
    }

    #[test]
    fn a_worker_is_known_by_what_it_was_given_until_it_restarts() {
        let mut learned = LearnedPrompts::new(1 << 20);
        learned.record(3, 1000 * BLOCK, &prompt(&[1, 2, 3]));
        learned.record(0, 1000 * BLOCK, &prompt(&[1, 9]));
        assert_eq!([0, 1, 3].map(|worker| found(&learned, worker, &[1, 2, 3, 4])), [1, 0, 3]);
        learned.clear(3);
        assert_eq!([0, 3].map(|worker| found(&learned, worker, &[1, 2])), [1, 0]);
        learned.record(3, 1000 * BLOCK, &prompt(&[1]));
        assert_eq!(found(&learned, 3, &[1, 2]), 1);
    }

    #[test]
    fn what_was_unused_longest_goes_when_the_pool_would_be_full() {
        let mut learned = LearnedPrompts::new(1 << 20);
        for tokens in [&[1, 2][..], &[1, 3, 4], &[5], &[1, 2]] {
            learned.record(0, 5 * BLOCK, &prompt(tokens));
        }
        learned.record(0, 5 * BLOCK, &prompt(&[6]));
        let left = [&[1, 2][..], &[1, 3, 4], &[5], &[6]].map(|tokens| found(&learned, 0, tokens));
        assert_eq!(left, [2, 1, 1, 1], "the end of the second prompt was forgotten");
        learned.record(0, 5 * BLOCK, &prompt(&[7, 8, 9, 10, 11, 12, 13]));
        assert_eq!(found(&learned, 0, &[7, 8, 9, 10, 11, 12, 13]), 5, "what the pool holds");
        assert_eq!(learned.tokens(0), 5 * BLOCK);
    }

    proptest! {
        /// A worker's known prompts are prefixes of given ones and fit into its pool, and the
        /// prompt given last is known as far as it fits.
        #[test]
        fn no_worker_has_more_than_its_pool_or_what_it_was_not_given(
            prompts in prop::collection::vec(
                (0..3_usize, prop::collection::vec(0..3_u32, 0..8), any::<bool>()), 1..60),
            pool in 1..20_u64,
        ) {
            let mut learned = LearnedPrompts::new(1 << 20);
            let mut given: Vec<Vec<Vec<u32>>> = vec![vec![]; 3];
            for (worker, tokens, restarts) in prompts {
                if restarts && tokens.len() < 2 {
                    learned.clear(worker);
                    given[worker].clear();
                }
                learned.record(worker, pool * BLOCK, &prompt(&tokens));
                given[worker].push(tokens.clone());
                learned.check_invariants();
                prop_assert!(learned.tokens(worker) <= pool * BLOCK);
                let fits = u64::from(found(&learned, worker, &tokens));
                prop_assert_eq!(fits, pool.min(tokens.len() as u64));
                for tokens in &given[worker] {
                    let alike = |other: &Vec<u32>| {
                        other.iter().zip(tokens).take_while(|(one, two)| one == two).count()
                    };
                    let most = given[worker].iter().map(alike).max().unwrap_or(0);
                    prop_assert!(found(&learned, worker, tokens) as usize <= most);
                }
            }
        }
    }
}

//! Which worker was given which prompts: what to go by where no agent says what is resident. Pure;
//! a guess by nature, because an engine evicts as it likes. Per worker it forgets what an engine
//! would have to: beyond the pool's tokens, the end of what was used longest ago goes first.
//!
//! A worker's prompts are kept as stretches of blocks, each a prompt's blocks beyond those that
//! were known before; so a conversation has one stretch a turn, and its next turn costs a step for
//! each.
//! The answer to who has most of a prompt comes from an [`Index`] of its own.

use std::collections::{BTreeSet, HashMap};

use proto::block::{BlockHash, Tier};

use super::Blocks;
use crate::overlap::{Index, Overlap};

/// What all workers were given.
#[derive(Debug)]
pub struct Learned {
    index: Index,
    workers: Vec<Worker>,
    /// Counts placements: what is used later has a larger one.
    now: u64,
}

/// What one worker was given: a tree whose edges are stretches.
#[derive(Debug, Default)]
struct Worker {
    stretches: HashMap<Id, Stretch>,
    by_first: HashMap<BlockHash, Id>,
    /// Those that no other follows, the longest unused first.
    ends: BTreeSet<(u64, Id)>,
    tokens: u64,
    next: Id,
}

/// Never used twice in one worker's life.
type Id = u64;

#[derive(Debug)]
struct Stretch {
    blocks: Box<[BlockHash]>,
    block_tokens: u64,
    before: Option<Id>,
    /// Stretches that follow it.
    after: u32,
    used: u64,
}

impl Learned {
    /// Knows nothing yet. Its index holds about `bytes_max` bytes at most.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self { index: Index::new(bytes_max), workers: vec![], now: 0 }
    }

    /// Leading blocks of a prompt on every worker.
    pub fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        self.index.look_up(chain, overlap);
    }

    /// A worker with a pool of so many tokens was given a prompt.
    ///
    /// # Panics
    /// When `worker` is not below [`crate::overlap::WORKERS_MAX`].
    pub fn given(&mut self, worker: usize, pool_tokens: u64, prompt: &Blocks) {
        if self.workers.len() <= worker {
            self.workers.resize_with(worker + 1, Worker::default);
        }
        self.now += 1;
        let block_tokens = u64::from(prompt.block_tokens.get());
        let fitting = usize::try_from(pool_tokens / block_tokens).unwrap_or(usize::MAX);
        let chain = &prompt.hashes[..prompt.hashes.len().min(fitting)];
        let of = &mut self.workers[worker];
        let (known, before) = of.walk(chain, self.now);
        if !chain.is_empty() {
            // All of it: the index may have dropped what is known here, when its memory was short.
            self.index.store(worker, Tier::Device, None, chain);
        }
        if known < chain.len() {
            of.insert(&chain[known..], block_tokens, before, self.now);
        }
        while of.tokens > pool_tokens {
            let Some(blocks) = of.remove_oldest() else { break };
            self.index.remove(worker, Tier::Device, &blocks);
        }
        if cfg!(debug_assertions) {
            self.workers[worker].check_invariants();
        }
    }

    /// A worker has nothing any more: it was lost, or its engine restarted.
    pub fn clear(&mut self, worker: usize) {
        if let Some(of) = self.workers.get_mut(worker) {
            *of = Worker::default();
            self.index.clear(worker);
        }
    }

    /// Tokens that a worker was given and that aren't forgotten.
    #[must_use]
    pub fn tokens(&self, worker: usize) -> u64 {
        self.workers.get(worker).map_or(0, |of| of.tokens)
    }

    /// Walks everything: for tests.
    ///
    /// # Panics
    /// With what is wrong.
    pub fn check_invariants(&self) {
        self.index.check_invariants();
        self.workers.iter().for_each(Worker::check_invariants);
    }
}

impl Worker {
    /// Renews what is known of a chain: how many of its blocks, and the stretch that ends there.
    fn walk(&mut self, chain: &[BlockHash], now: u64) -> (usize, Option<Id>) {
        let (mut known, mut last) = (0, None);
        while let Some(&id) = chain.get(known).and_then(|first| self.by_first.get(first)) {
            let stretch = self.stretches.get_mut(&id).expect("what has a first block is there");
            if stretch.after == 0 {
                self.ends.remove(&(stretch.used, id));
                self.ends.insert((now, id));
            }
            let used = std::mem::replace(&mut stretch.used, now);
            let pairs = stretch.blocks.iter().zip(&chain[known..]);
            let equal = pairs.take_while(|(one, two)| one == two).count();
            known += equal;
            if equal < stretch.blocks.len() {
                return (known, Some(self.split(id, equal, used)));
            }
            last = Some(id);
        }
        (known, last)
    }

    /// Parts a stretch, and says which is its first part. The second was used at `used`.
    fn split(&mut self, id: Id, blocks: usize, used: u64) -> Id {
        let first_id = self.new_id();
        let second = self.stretches.get_mut(&id).expect("it was just found");
        if second.after == 0 {
            self.ends.remove(&(second.used, id));
            self.ends.insert((used, id));
        }
        let first = Stretch {
            blocks: second.blocks[..blocks].into(),
            block_tokens: second.block_tokens,
            before: second.before.replace(first_id),
            after: 1,
            used: std::mem::replace(&mut second.used, used),
        };
        second.blocks = second.blocks[blocks..].into();
        self.by_first.insert(first.blocks[0], first_id);
        self.by_first.insert(second.blocks[0], id);
        self.stretches.insert(first_id, first);
        first_id
    }

    fn insert(&mut self, blocks: &[BlockHash], block_tokens: u64, before: Option<Id>, now: u64) {
        let id = self.new_id();
        if let Some(before) = before {
            let stretch = self.stretches.get_mut(&before).expect("the walk has just found it");
            if stretch.after == 0 {
                self.ends.remove(&(stretch.used, before));
            }
            stretch.after += 1;
        }
        self.tokens += blocks.len() as u64 * block_tokens;
        self.ends.insert((now, id));
        self.by_first.insert(blocks[0], id);
        let stretch = Stretch { blocks: blocks.into(), block_tokens, before, after: 0, used: now };
        self.stretches.insert(id, stretch);
    }

    /// Forgets the end that was unused longest, and says which blocks it had.
    fn remove_oldest(&mut self) -> Option<Box<[BlockHash]>> {
        let (_, id) = self.ends.pop_first()?;
        let gone = self.stretches.remove(&id).expect("an end is a stretch");
        self.by_first.remove(&gone.blocks[0]);
        self.tokens -= gone.blocks.len() as u64 * gone.block_tokens;
        if let Some(before) = gone.before {
            let stretch = self.stretches.get_mut(&before).expect("ends go before what they follow");
            stretch.after -= 1;
            if stretch.after == 0 {
                self.ends.insert((stretch.used, before));
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
            let is_end = self.ends.contains(&(stretch.used, *id));
            assert_eq!(is_end, stretch.after == 0, "ends are those that nothing follows");
            if let Some(before) = stretch.before {
                assert!(self.stretches[&before].used >= stretch.used, "used with what follows");
                *after.entry(before).or_default() += 1;
            }
        }
        for (id, stretch) in &self.stretches {
            assert_eq!(stretch.after, after.get(id).copied().unwrap_or(0));
        }
        let ends = self.stretches.values().filter(|stretch| stretch.after == 0).count();
        assert_eq!((self.ends.len(), self.by_first.len()), (ends, self.stretches.len()));
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

    fn found(learned: &Learned, worker: usize, tokens: &[u32]) -> u32 {
        let mut overlap = Overlap::default();
        learned.look_up(&prompt(tokens).hashes, &mut overlap);
        overlap.device(worker)
    }

    #[test]
    fn a_worker_is_known_by_what_it_was_given_until_it_restarts() {
        let mut learned = Learned::new(1 << 20);
        learned.given(3, 1000 * BLOCK, &prompt(&[1, 2, 3]));
        learned.given(0, 1000 * BLOCK, &prompt(&[1, 9]));
        assert_eq!([0, 1, 3].map(|worker| found(&learned, worker, &[1, 2, 3, 4])), [1, 0, 3]);
        learned.clear(3);
        assert_eq!([0, 3].map(|worker| found(&learned, worker, &[1, 2])), [1, 0]);
        learned.given(3, 1000 * BLOCK, &prompt(&[1]));
        assert_eq!(found(&learned, 3, &[1, 2]), 1);
    }

    #[test]
    fn what_was_unused_longest_goes_when_the_pool_would_be_full() {
        let mut learned = Learned::new(1 << 20);
        for tokens in [&[1, 2][..], &[1, 3, 4], &[5], &[1, 2]] {
            learned.given(0, 5 * BLOCK, &prompt(tokens));
        }
        learned.given(0, 5 * BLOCK, &prompt(&[6]));
        let left = [&[1, 2][..], &[1, 3, 4], &[5], &[6]].map(|tokens| found(&learned, 0, tokens));
        assert_eq!(left, [2, 1, 1, 1], "the end of the second one went");
        learned.given(0, 5 * BLOCK, &prompt(&[7, 8, 9, 10, 11, 12, 13]));
        assert_eq!(found(&learned, 0, &[7, 8, 9, 10, 11, 12, 13]), 5, "no more than fits");
        assert_eq!(learned.tokens(0), 5 * BLOCK);
    }

    proptest! {
        /// What is known of a worker is a tree of prompts that were given, within the pool, and
        /// the prompt given last is known whole.
        #[test]
        fn no_worker_has_more_than_its_pool_or_what_it_was_not_given(
            prompts in prop::collection::vec(
                (0..3_usize, prop::collection::vec(0..3_u32, 0..8), any::<bool>()), 1..60),
            pool in 1..20_u64,
        ) {
            let mut learned = Learned::new(1 << 20);
            let mut given: Vec<Vec<Vec<u32>>> = vec![vec![]; 3];
            for (worker, tokens, restarts) in prompts {
                if restarts && tokens.len() < 2 {
                    learned.clear(worker);
                    given[worker].clear();
                }
                learned.given(worker, pool * BLOCK, &prompt(&tokens));
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

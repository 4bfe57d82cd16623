//! Guesses which blocks of a prompt a worker has, from the prompts that this router sent to it.
//!
//! For workers whose agent doesn't report resident blocks. Pure. The engine evicts blocks without
//! telling the router. So this module forgets blocks as an engine would: when they exceed the
//! worker's pool, the end of the prompt that was unused for longest goes first.
//!
//! The prompts of one worker form a tree of stretches: consecutive blocks without a branch. A new
//! prompt adds one stretch. So a conversation has one stretch per turn, and its next turn visits
//! each of them once.

use std::collections::{BTreeSet, HashMap};

use blocks::block::{BlockHash, Tier};

use crate::prompt::Blocks;
use blocks::index::{Index, Overlap};

#[derive(Debug)]
pub struct LearnedPrompts {
    index: Index,
    workers: Vec<WorkerPrompts>,
    /// Serves as the clock for times of use.
    prompts_recorded: u64,
}

#[derive(Debug, Default)]
struct WorkerPrompts {
    stretches: HashMap<StretchId, Stretch>,
    by_first_block: HashMap<BlockHash, StretchId>,
    /// By time of last use.
    leaves: BTreeSet<(u64, StretchId)>,
    tokens: u64,
    last_id: StretchId,
}

/// Never reused for the same worker.
type StretchId = u64;

/// At least one block.
#[derive(Debug)]
struct Stretch {
    blocks: Box<[BlockHash]>,
    block_tokens: u64,
    /// `None` if this stretch begins a prompt.
    parent: Option<StretchId>,
    child_count: u32,
    /// The value of [`LearnedPrompts::prompts_recorded`] at the last use.
    used_at: u64,
}

impl LearnedPrompts {
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self { index: Index::new(bytes_max), workers: vec![], prompts_recorded: 0 }
    }

    pub fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        self.index.look_up(chain, overlap);
    }

    /// # Panics
    /// If `worker` is not below [`blocks::index::WORKERS_MAX`].
    pub fn record(&mut self, worker: usize, pool_tokens: u64, prompt: &Blocks) {
        if self.workers.len() <= worker {
            self.workers.resize_with(worker + 1, WorkerPrompts::default);
        }
        self.prompts_recorded += 1;
        let block_tokens = u64::from(prompt.block_tokens.get());
        let pool_blocks = usize::try_from(pool_tokens / block_tokens).unwrap_or(usize::MAX);
        let chain = &prompt.hashes[..prompt.hashes.len().min(pool_blocks)];
        let prompts = &mut self.workers[worker];
        let (known_blocks, parent) = prompts.mark_used(chain, self.prompts_recorded);
        if !chain.is_empty() {
            // Store the whole chain, because the index may have dropped known blocks when memory
            // was short.
            self.index.store(worker, Tier::Device, None, chain);
        }
        if known_blocks < chain.len() {
            prompts.insert_stretch(
                &chain[known_blocks..],
                block_tokens,
                parent,
                self.prompts_recorded,
            );
        }
        while prompts.tokens > pool_tokens {
            let Some(blocks) = prompts.remove_oldest_leaf() else { break };
            self.index.remove(worker, Tier::Device, &blocks);
        }
        if cfg!(debug_assertions) {
            self.workers[worker].check_invariants();
        }
    }

    /// For a worker that was lost or whose engine restarted.
    pub fn clear(&mut self, worker: usize) {
        if let Some(prompts) = self.workers.get_mut(worker) {
            *prompts = WorkerPrompts::default();
            self.index.clear(worker);
        }
    }

    /// A prefix that several prompts share counts once.
    #[must_use]
    pub fn tokens(&self, worker: usize) -> u64 {
        self.workers.get(worker).map_or(0, |prompts| prompts.tokens)
    }

    pub fn check_invariants(&self) {
        self.index.check_invariants();
        self.workers.iter().for_each(WorkerPrompts::check_invariants);
    }
}

impl WorkerPrompts {
    /// Splits a stretch that the chain leaves halfway. Returns the number of known blocks and the
    /// stretch that ends with them.
    fn mark_used(&mut self, chain: &[BlockHash], used_at: u64) -> (usize, Option<StretchId>) {
        let (mut known_blocks, mut last_stretch) = (0, None);
        while let Some(&id) =
            chain.get(known_blocks).and_then(|block| self.by_first_block.get(block))
        {
            let stretch = self.stretches.get_mut(&id).expect("by_first_block names stretches");
            if stretch.child_count == 0 {
                self.leaves.remove(&(stretch.used_at, id));
                self.leaves.insert((used_at, id));
            }
            let last_used_at = std::mem::replace(&mut stretch.used_at, used_at);
            let pairs = stretch.blocks.iter().zip(&chain[known_blocks..]);
            let matching_len = pairs.take_while(|(ours, theirs)| ours == theirs).count();
            known_blocks += matching_len;
            if matching_len < stretch.blocks.len() {
                return (known_blocks, Some(self.split(id, matching_len, last_used_at)));
            }
            last_stretch = Some(id);
        }
        (known_blocks, last_stretch)
    }

    /// The tail keeps the stretch's id and gets `tail_used_at`. Returns the head's id.
    fn split(&mut self, id: StretchId, head_len: usize, tail_used_at: u64) -> StretchId {
        let head_id = self.new_id();
        let tail = self.stretches.get_mut(&id).expect("the stretch was just found");
        if tail.child_count == 0 {
            self.leaves.remove(&(tail.used_at, id));
            self.leaves.insert((tail_used_at, id));
        }
        let head = Stretch {
            blocks: tail.blocks[..head_len].into(),
            block_tokens: tail.block_tokens,
            parent: tail.parent.replace(head_id),
            child_count: 1,
            used_at: std::mem::replace(&mut tail.used_at, tail_used_at),
        };
        tail.blocks = tail.blocks[head_len..].into();
        self.by_first_block.insert(head.blocks[0], head_id);
        self.by_first_block.insert(tail.blocks[0], id);
        self.stretches.insert(head_id, head);
        head_id
    }

    fn insert_stretch(
        &mut self,
        blocks: &[BlockHash],
        block_tokens: u64,
        parent: Option<StretchId>,
        used_at: u64,
    ) {
        let id = self.new_id();
        if let Some(parent) = parent {
            let stretch = self.stretches.get_mut(&parent).expect("it was found just before");
            if stretch.child_count == 0 {
                self.leaves.remove(&(stretch.used_at, parent));
            }
            stretch.child_count += 1;
        }
        self.tokens += blocks.len() as u64 * block_tokens;
        self.leaves.insert((used_at, id));
        self.by_first_block.insert(blocks[0], id);
        let stretch =
            Stretch { blocks: blocks.into(), block_tokens, parent, child_count: 0, used_at };
        self.stretches.insert(id, stretch);
    }

    fn remove_oldest_leaf(&mut self) -> Option<Box<[BlockHash]>> {
        let (_, id) = self.leaves.pop_first()?;
        let removed = self.stretches.remove(&id).expect("a leaf is a stretch");
        self.by_first_block.remove(&removed.blocks[0]);
        self.tokens -= removed.blocks.len() as u64 * removed.block_tokens;
        if let Some(parent) = removed.parent {
            let stretch = self.stretches.get_mut(&parent).expect("children are removed first");
            stretch.child_count -= 1;
            if stretch.child_count == 0 {
                self.leaves.insert((stretch.used_at, parent));
            }
        }
        Some(removed.blocks)
    }

    fn new_id(&mut self) -> StretchId {
        self.last_id += 1;
        self.last_id
    }

    fn check_invariants(&self) {
        let tokens = |stretch: &Stretch| stretch.blocks.len() as u64 * stretch.block_tokens;
        assert_eq!(self.tokens, self.stretches.values().map(tokens).sum::<u64>());
        let mut child_counts: HashMap<StretchId, u32> = HashMap::new();
        for (id, stretch) in &self.stretches {
            assert_eq!(self.by_first_block[&stretch.blocks[0]], *id);
            let is_leaf = self.leaves.contains(&(stretch.used_at, *id));
            assert_eq!(
                is_leaf,
                stretch.child_count == 0,
                "leaves are the stretches without children"
            );
            if let Some(parent) = stretch.parent {
                assert!(self.stretches[&parent].used_at >= stretch.used_at, "used before a child");
                *child_counts.entry(parent).or_default() += 1;
            }
        }
        for (id, stretch) in &self.stretches {
            assert_eq!(stretch.child_count, child_counts.get(id).copied().unwrap_or(0));
        }
        let leaves = self.stretches.values().filter(|stretch| stretch.child_count == 0).count();
        assert_eq!((self.leaves.len(), self.by_first_block.len()), (leaves, self.stretches.len()));
    }
}

#[cfg(test)]
mod tests {
    use blocks::block::{BlockTokens, Chain, Scheme};
    use proptest::prelude::*;

    use super::*;

    const BLOCK: u64 = 64;

    fn prompt(tokens: &[u32]) -> Blocks {
        let scheme = Scheme::plain(BlockTokens::for_page(1).unwrap());
        let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
        for token in tokens {
            chain.push(&[*token; 64], &mut hashes);
        }
        let block_tokens = scheme.block_tokens;
        Blocks { tokens: chain.tokens(), block_tokens, hashes, has_agent_hashes: false }
    }

    fn found(learned: &LearnedPrompts, worker: usize, tokens: &[u32]) -> u32 {
        let mut overlap = Overlap::default();
        learned.look_up(&prompt(tokens).hashes, &mut overlap);
        overlap.device_blocks(worker)
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
        let found_blocks =
            [&[1, 2][..], &[1, 3, 4], &[5], &[6]].map(|tokens| found(&learned, 0, tokens));
        assert_eq!(found_blocks, [2, 1, 1, 1], "the end of the second prompt was forgotten");
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

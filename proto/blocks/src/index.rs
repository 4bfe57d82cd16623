//! Finds how many leading blocks of a prompt each worker has in its KV cache. Pure.
//!
//! The hash of a block covers all tokens of the prompt up to the block's end. A chain is the
//! sequence of blocks of a prompt. A worker has a block on its device (GPU memory), on its host
//! (CPU memory) or on both. The index doesn't check the order of reports (`kv_stream` does).
//!
//! - `tree`: stores the chains as a tree of runs (a run is an unbranched part of a chain). A
//!   [`crate::table`] finds the run of a block.
//! - `slots`: the numbers that stand for workers in the tree. If a worker loses all its blocks, its
//!   slot ends, and its next blocks get another slot. A sweep removes the blocks of ended slots
//!   from the tree, a few runs at a time.

mod lru;
mod shared;
mod slots;
#[cfg(test)]
mod tests;
mod tree;
mod worker_set;

use crate::block::{BlockHash, Tier};

pub use self::shared::SharedIndex;
use self::{
    slots::Slots,
    tree::{Holder, StoreError, Tree},
};

/// Number of runs that each change also sweeps, as long as the tree may have blocks of ended slots.
/// A sweep of 100,000 runs takes 6,000 changes, and adds less than a microsecond to each.
const SWEEP_RUNS_PER_CHANGE: usize = 16;
/// Each worker needs two of the 65,535 slots, one that look-ups read and one for a snapshot in
/// progress. The others have ended and are being swept.
pub const WORKERS_MAX: usize = 1 << 14;

/// The counters count since the index was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexStats {
    pub blocks: u64,
    pub runs: u64,
    pub bytes: u64,
    /// Because memory was short. A block on two workers counts twice.
    pub dropped_blocks: u64,
    /// Not stored because the index didn't have their parent.
    pub orphan_blocks: u64,
    /// Stores that stopped early because a block can't follow its predecessor.
    pub contradictions: u64,
}

#[derive(Debug)]
pub struct Index {
    tree: Tree,
    slots: Slots,
    bytes_max: usize,
    /// The run at which the next step of the sweep begins.
    next_run_to_sweep: usize,
    dropped_blocks: u64,
    orphan_blocks: u64,
    contradictions: u64,
}

/// The number of leading blocks of the prompt that each worker has. The next look-up can overwrite
/// it, to reuse its allocations.
#[derive(Debug, Clone, Default)]
pub struct Overlap {
    /// By worker.
    slots: Vec<u16>,
    /// By slot.
    device_blocks: Vec<u32>,
    /// By slot, on the device or host. Empty if the index has no block on any host, because then
    /// `device_blocks` has the same numbers.
    any_tier_blocks: Vec<u32>,
}

impl Overlap {
    #[must_use]
    pub fn device_blocks(&self, worker: usize) -> u32 {
        self.count_for(worker, &self.device_blocks)
    }

    #[must_use]
    pub fn any_tier_blocks(&self, worker: usize) -> u32 {
        self.count_for(
            worker,
            if self.any_tier_blocks.is_empty() {
                &self.device_blocks
            } else {
                &self.any_tier_blocks
            },
        )
    }

    /// Whether a worker has the first block, on either tier.
    #[must_use]
    pub fn has_blocks(&self) -> bool {
        self.device_blocks.iter().chain(&self.any_tier_blocks).any(|blocks| *blocks > 0)
    }

    pub fn replace_counts(&mut self, other: &Self, is_replaced: impl Fn(usize) -> bool) {
        let worker_count = self.slots.len().max(other.slots.len());
        let merge = |count: fn(&Self, usize) -> u32| {
            let merged = |worker| count(if is_replaced(worker) { other } else { self }, worker);
            (0..worker_count).map(merged).collect::<Vec<u32>>()
        };
        let device_blocks = merge(Self::device_blocks);
        let any_tier_blocks = merge(Self::any_tier_blocks);
        // The merged counts are by worker, so each worker's slot is its own number.
        let slots = (0..u16::MAX).take(worker_count).collect();
        *self = Self { slots, device_blocks, any_tier_blocks };
    }

    fn count_for(&self, worker: usize, slot_counts: &[u32]) -> u32 {
        let slot = self.slots.get(worker).copied();
        slot.and_then(|slot| slot_counts.get(usize::from(slot))).copied().unwrap_or(0)
    }
}

impl Index {
    /// Uses about `bytes_max` bytes at most.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self {
            tree: Tree::new(),
            slots: Slots::default(),
            bytes_max,
            next_run_to_sweep: 0,
            dropped_blocks: 0,
            orphan_blocks: 0,
            contradictions: 0,
        }
    }

    pub fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        let Overlap { slots, device_blocks, any_tier_blocks } = overlap;
        slots.clear();
        slots.extend_from_slice(self.slots.current_slots());
        let any_tier_len = if self.tree.host_blocks() > 0 { self.slots.slot_count() } else { 0 };
        for (counts, len) in
            [(&mut *device_blocks, self.slots.slot_count()), (&mut *any_tier_blocks, any_tier_len)]
        {
            counts.clear();
            counts.resize(len, 0);
        }
        self.tree.look_up(chain, device_blocks, any_tier_blocks);
    }

    /// The blocks follow `parent` or, without a parent, begin a chain.
    ///
    /// # Panics
    /// If `worker` is not below [`WORKERS_MAX`].
    pub fn store(
        &mut self,
        worker: usize,
        tier: Tier,
        parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) {
        assert!(worker < WORKERS_MAX, "a worker's number is below WORKERS_MAX");
        self.sweep_until_a_slot_is_free();
        let (slot, is_slot_added) = self.slots.write_slot_or_new(worker);
        if is_slot_added {
            self.tree.add_slot();
        }
        match self.tree.store(Holder { slot, tier }, parent, blocks) {
            Ok(()) => {}
            Err(StoreError::UnknownParent) => self.orphan_blocks += blocks.len() as u64,
            Err(StoreError::Contradiction) => self.contradictions += 1,
        }
        self.sweep_and_shrink();
    }

    /// Blocks that the worker didn't have are ignored.
    pub fn remove(&mut self, worker: usize, tier: Tier, blocks: &[BlockHash]) {
        if let Some(slot) = self.slots.write_slot(worker) {
            self.tree.remove(Holder { slot, tier }, blocks);
        }
        self.sweep_and_shrink();
    }

    /// For a worker that was lost or whose cache is empty. Also discards a snapshot in progress.
    pub fn clear(&mut self, worker: usize) {
        self.slots.end_slots(worker);
        self.sweep_and_shrink();
    }

    /// Later stores and removals change the snapshot only. Look-ups see the worker's previous
    /// blocks until [`Self::finish_snapshot`].
    ///
    /// # Panics
    /// If `worker` is not below [`WORKERS_MAX`].
    pub fn begin_snapshot(&mut self, worker: usize) {
        assert!(worker < WORKERS_MAX, "a worker's number is below WORKERS_MAX");
        self.sweep_until_a_slot_is_free();
        if self.slots.begin_snapshot(worker) {
            self.tree.add_slot();
        }
        self.sweep_and_shrink();
    }

    pub fn finish_snapshot(&mut self, worker: usize) {
        self.slots.finish_snapshot(worker);
        self.sweep_and_shrink();
    }

    /// A block on both tiers counts twice.
    #[must_use]
    pub fn resident_blocks(&self, worker: usize) -> u64 {
        self.slots.read_slot(worker).map_or(0, |slot| self.tree.resident_blocks(slot))
    }

    #[must_use]
    pub fn stats(&self) -> IndexStats {
        IndexStats {
            blocks: self.tree.block_count() as u64,
            runs: self.tree.run_count() as u64,
            bytes: self.bytes() as u64,
            dropped_blocks: self.dropped_blocks,
            orphan_blocks: self.orphan_blocks,
            contradictions: self.contradictions,
        }
    }

    pub fn check_invariants(&self) {
        self.tree.check_invariants();
        assert!(
            self.bytes() <= self.bytes_max || self.tree.block_count() == 0,
            "over the memory bound"
        );
    }

    fn bytes(&self) -> usize {
        self.tree.bytes() + self.slots.bytes()
    }

    /// While memory is above the bound, drops the leaf run that was used longest ago.
    fn sweep_and_shrink(&mut self) {
        self.sweep();
        while self.bytes() > self.bytes_max {
            self.sweep();
            let Some(dropped_blocks) = self.tree.drop_oldest() else { return };
            self.dropped_blocks += dropped_blocks;
        }
    }

    /// Slots may end faster than the sweep goes on: an agent's engine may lose its blocks again and
    /// again.
    fn sweep_until_a_slot_is_free(&mut self) {
        while !self.slots.has_free() {
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        if !self.slots.has_ended_slots() {
            return;
        }
        let Self { tree, slots, next_run_to_sweep, .. } = self;
        tree.sweep(*next_run_to_sweep, SWEEP_RUNS_PER_CHANGE, |slot| slots.is_ended(slot));
        *next_run_to_sweep += SWEEP_RUNS_PER_CHANGE;
        if *next_run_to_sweep >= tree.run_id_count() {
            *next_run_to_sweep = 0;
            // A slot that ended in the middle of this pass may still have blocks.
            slots.free_ended(|slot| tree.resident_blocks(slot) == 0);
        }
    }
}

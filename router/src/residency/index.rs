//! The overlap index: which leading blocks of a prompt are resident on which worker.
//!
//! Pure. A single writer applies changes and snapshots; look-ups only read. The index knows a block
//! by its hash and a worker by a dense number. [`SharedIndex`] wraps it for many reading threads
//! and one writer.
//!
//! - `tree`: the blocks, as runs (unbranched parts of a chain), and how much of each run
//!   every worker holds. A [`proto::table`] finds the run of a block.
//! - `worker_set`: how much of one run each worker holds.
//! - `slots`: numbers that stand for workers in the tree, so that a worker can be removed at once.
//! - `lru`: the order in which runs are dropped when memory is short.

mod lru;
mod shared;
mod slots;
#[cfg(test)]
mod tests;
mod tree;
mod worker_set;

use proto::block::{BlockHash, Tier};

pub use self::shared::SharedIndex;
use self::{
    slots::Slots,
    tree::{Holder, Stopped, Tree},
};
use crate::fleet::worker::WORKER_NUMBERS_MAX;

/// Runs swept at each change while a slot has ended. Sweeping 100,000 runs takes 6,000 changes and
/// adds less than a microsecond to each.
const SWEEP_RUNS: usize = 16;
/// Maximum number of workers. A worker may need three slots: one that is read, one for a snapshot,
/// and one that is being swept.
pub const WORKERS_MAX: usize = WORKER_NUMBERS_MAX;

/// Figures of the index. The last three count since the index was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexStats {
    /// Number of distinct blocks.
    pub blocks: u64,
    /// Number of runs: unbranched parts of chains.
    pub runs: u64,
    /// Memory in use, in bytes.
    pub bytes: u64,
    /// Blocks dropped because memory was short. A block on two workers counts twice.
    pub dropped: u64,
    /// Blocks not stored because no worker was known to hold their parent.
    pub orphans: u64,
    /// Stores that stopped early because a block was known with another prefix.
    pub contradictions: u64,
}

/// The index of resident blocks.
#[derive(Debug)]
pub struct Index {
    tree: Tree,
    slots: Slots,
    bytes_max: usize,
    swept: usize,
    dropped: u64,
    orphans: u64,
    contradictions: u64,
}

/// The answer of a look-up. Pass it to the next look-up again to reuse its allocations.
#[derive(Debug, Clone, Default)]
pub struct Overlap {
    slots: Vec<u16>,
    device: Vec<u32>,
    either: Vec<u32>,
}

impl Overlap {
    /// Returns the number of leading blocks resident on the worker's device.
    #[must_use]
    pub fn device(&self, worker: usize) -> u32 {
        self.depth(worker, &self.device)
    }

    /// Returns the number of leading blocks resident on the worker's device or host.
    #[must_use]
    pub fn either(&self, worker: usize) -> u32 {
        self.depth(worker, if self.either.is_empty() { &self.device } else { &self.either })
    }

    /// Whether any worker has the first block on its device.
    #[must_use]
    pub fn is_found(&self) -> bool {
        self.device.iter().any(|blocks| *blocks > 0)
    }

    /// Takes over the other answer's counts for the workers that `is_taken` selects.
    pub fn take_counts(&mut self, other: &Self, is_taken: impl Fn(usize) -> bool) {
        let workers = self.slots.len().max(other.slots.len());
        let counts = |of: fn(&Self, usize) -> u32| {
            let one = |worker| of(if is_taken(worker) { other } else { self }, worker);
            (0..workers).map(one).collect::<Vec<u32>>()
        };
        let (device, either) = (counts(Self::device), counts(Self::either));
        let slots = (0..u16::MAX).take(workers).collect();
        *self = Self { slots, device, either };
    }

    fn depth(&self, worker: usize, depths: &[u32]) -> u32 {
        let slot = self.slots.get(worker).copied();
        slot.and_then(|slot| depths.get(usize::from(slot))).copied().unwrap_or(0)
    }
}

impl Index {
    /// Creates an empty index that uses about `bytes_max` bytes at most.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self {
            tree: Tree::new(),
            slots: Slots::default(),
            bytes_max,
            swept: 0,
            dropped: 0,
            orphans: 0,
            contradictions: 0,
        }
    }

    /// Counts the leading blocks of a chain that are resident on each worker.
    pub fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        let Overlap { slots, device, either } = overlap;
        slots.clear();
        slots.extend_from_slice(self.slots.current());
        let hosts = if self.tree.host_blocks() > 0 { self.slots.len() } else { 0 };
        for (depths, len) in [(&mut *device, self.slots.len()), (&mut *either, hosts)] {
            depths.clear();
            depths.resize(len, 0);
        }
        self.tree.look_up(chain, device, either);
    }

    /// Records that a worker has `blocks`. The first of them follows `parent`, or begins a chain.
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
        let (slot, more) = self.slots.write_slot_or_new(worker);
        if more {
            self.tree.add_slot();
        }
        match self.tree.store(Holder { slot, tier }, parent, blocks) {
            Ok(()) => {}
            Err(Stopped::Orphan) => self.orphans += blocks.len() as u64,
            Err(Stopped::Elsewhere) => self.contradictions += 1,
        }
        self.keep_bounds();
    }

    /// Records that a worker no longer has `blocks`. Blocks that it didn't have are ignored.
    pub fn remove(&mut self, worker: usize, tier: Tier, blocks: &[BlockHash]) {
        if let Some(slot) = self.slots.write_slot(worker) {
            self.tree.remove(Holder { slot, tier }, blocks);
        }
        self.keep_bounds();
    }

    /// Records that a worker has no blocks, because it was lost or its cache is empty.
    pub fn clear(&mut self, worker: usize) {
        self.slots.end(worker);
        self.keep_bounds();
    }

    /// Begins a snapshot of a worker's blocks: later stores belong to the snapshot. Look-ups see
    /// the previous blocks until [`Self::finish_snapshot`].
    ///
    /// # Panics
    /// If `worker` is not below [`WORKERS_MAX`].
    pub fn begin_snapshot(&mut self, worker: usize) {
        assert!(worker < WORKERS_MAX, "a worker's number is below WORKERS_MAX");
        if self.slots.begin_snapshot(worker) {
            self.tree.add_slot();
        }
        self.keep_bounds();
    }

    /// Completes the snapshot, which replaces the worker's previous blocks.
    pub fn finish_snapshot(&mut self, worker: usize) {
        self.slots.finish_snapshot(worker);
        self.keep_bounds();
    }

    /// Returns the number of blocks resident on a worker, on both tiers.
    #[must_use]
    pub fn resident(&self, worker: usize) -> u64 {
        self.slots.read_slot(worker).map_or(0, |slot| self.tree.resident_blocks(slot))
    }

    /// Returns the figures of the index.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        IndexStats {
            blocks: self.tree.blocks() as u64,
            runs: self.tree.runs() as u64,
            bytes: self.bytes() as u64,
            dropped: self.dropped,
            orphans: self.orphans,
            contradictions: self.contradictions,
        }
    }

    /// Checks the whole index, for tests.
    ///
    /// # Panics
    /// If an invariant is broken, with its description.
    pub fn check_invariants(&self) {
        self.tree.check_invariants();
        assert!(self.bytes() <= self.bytes_max || self.tree.blocks() == 0, "over the memory bound");
    }

    fn bytes(&self) -> usize {
        self.tree.bytes() + self.slots.bytes()
    }

    /// Sweeps a few runs, and drops the oldest ones while memory is above the bound.
    fn keep_bounds(&mut self) {
        self.sweep();
        while self.bytes() > self.bytes_max {
            self.sweep();
            let Some(dropped) = self.tree.drop_oldest() else { return };
            self.dropped += dropped;
        }
    }

    fn sweep(&mut self) {
        if !self.slots.has_ended() {
            return;
        }
        let Self { tree, slots, swept, .. } = self;
        tree.sweep(*swept, SWEEP_RUNS, |slot| slots.is_ended(slot));
        *swept += SWEEP_RUNS;
        if *swept >= tree.places() {
            *swept = 0;
            slots.free_ended(|slot| tree.resident_blocks(slot) == 0);
        }
    }
}

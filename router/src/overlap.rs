//! Which leading blocks of a prompt are resident on which worker. Pure: deltas and snapshots go in,
//! by one writer; look-ups read. It knows blocks by their hash alone and workers by a dense number;
//! [`Shared`] is what many threads read while one writes.
//!
//! - `tree`: the blocks, as runs without a branch, and who holds how much of each; a
//!   [`proto::table`] leads to them.
//! - `holders`: who holds how much of one run.
//! - `slots`: workers as the tree knows them, so that one disappears at once.
//! - `ages`: what is dropped first when memory is short.

mod ages;
mod holders;
mod shared;
mod slots;
#[cfg(test)]
mod tests;
mod tree;

use proto::block::BlockHash;
pub use proto::block::Tier;

pub use self::shared::Shared;
use self::{
    slots::Slots,
    tree::{Holder, Stopped, Tree},
};

/// Runs swept at every change while a slot has ended: a sweep of 100,000 runs is through after
/// 6,000 changes, and adds less than a microsecond to each.
const SWEEP_RUNS: usize = 16;
/// Workers at most: each may have a second slot for a snapshot and a third that is being swept.
pub const WORKERS_MAX: usize = 16_384;

/// What was counted; the last three since the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Distinct blocks known.
    pub blocks: u64,
    /// Pieces of chains without a branch.
    pub runs: u64,
    /// Memory held.
    pub bytes: u64,
    /// Blocks on workers forgotten because memory was short; a block on two workers is two.
    pub dropped: u64,
    /// Blocks not taken because nobody was known to hold their parent.
    pub orphans: u64,
    /// Stores not taken to the end because a block was known with another prefix.
    pub contradictions: u64,
}

/// The index.
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

/// One answer; keep it and pass it again to spare its allocation.
#[derive(Debug, Clone, Default)]
pub struct Overlap {
    slots: Vec<u16>,
    device: Vec<u32>,
    either: Vec<u32>,
}

impl Overlap {
    /// Leading blocks resident on a worker's device.
    #[must_use]
    pub fn device(&self, worker: usize) -> u32 {
        self.of(worker, &self.device)
    }

    /// Leading blocks resident on a worker's device or host.
    #[must_use]
    pub fn either(&self, worker: usize) -> u32 {
        self.of(worker, if self.either.is_empty() { &self.device } else { &self.either })
    }

    /// Whether any worker has the first block on its device.
    #[must_use]
    pub fn is_found(&self) -> bool {
        self.device.iter().any(|blocks| *blocks > 0)
    }

    /// Takes the other's counts for those workers that are asked for.
    pub fn replace(&mut self, other: &Self, is_taken: impl Fn(usize) -> bool) {
        let workers = self.slots.len().max(other.slots.len());
        let counts = |of: fn(&Self, usize) -> u32| {
            let one = |worker| of(if is_taken(worker) { other } else { self }, worker);
            (0..workers).map(one).collect::<Vec<u32>>()
        };
        let (device, either) = (counts(Self::device), counts(Self::either));
        let slots = (0..u16::MAX).take(workers).collect();
        *self = Self { slots, device, either };
    }

    fn of(&self, worker: usize, depths: &[u32]) -> u32 {
        let slot = self.slots.get(worker).copied();
        slot.and_then(|slot| depths.get(usize::from(slot))).copied().unwrap_or(0)
    }
}

impl Index {
    /// An empty index that will hold about `bytes_max` bytes at most.
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

    /// Leading blocks of a chain on every worker.
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

    /// A worker has blocks, the first of them after `parent`, or at the beginning.
    ///
    /// # Panics
    /// When `worker` is not below [`WORKERS_MAX`].
    pub fn store(
        &mut self,
        worker: usize,
        tier: Tier,
        parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) {
        assert!(worker < WORKERS_MAX, "workers have dense numbers");
        let (slot, more) = self.slots.of_or_new(worker);
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

    /// A worker has blocks no more; those it didn't have don't matter.
    pub fn remove(&mut self, worker: usize, tier: Tier, blocks: &[BlockHash]) {
        if let Some(slot) = self.slots.of(worker) {
            self.tree.remove(Holder { slot, tier }, blocks);
        }
        self.keep_bounds();
    }

    /// A worker has no blocks any more: it was lost, or its cache is empty.
    pub fn clear(&mut self, worker: usize) {
        self.slots.end(worker);
        self.keep_bounds();
    }

    /// What a worker stores from now on is a snapshot: look-ups see what it had before, until
    /// [`Self::finish_snapshot`].
    ///
    /// # Panics
    /// When `worker` is not below [`WORKERS_MAX`].
    pub fn begin_snapshot(&mut self, worker: usize) {
        assert!(worker < WORKERS_MAX, "workers have dense numbers");
        if self.slots.begin(worker) {
            self.tree.add_slot();
        }
        self.keep_bounds();
    }

    /// The snapshot is complete and takes the place of what was known of the worker.
    pub fn finish_snapshot(&mut self, worker: usize) {
        self.slots.finish(worker);
        self.keep_bounds();
    }

    /// Resident blocks known of a worker, both tiers.
    #[must_use]
    pub fn resident(&self, worker: usize) -> u64 {
        self.slots.read(worker).map_or(0, |slot| self.tree.held(slot))
    }

    /// The figures.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            blocks: self.tree.blocks() as u64,
            runs: self.tree.runs() as u64,
            bytes: self.bytes() as u64,
            dropped: self.dropped,
            orphans: self.orphans,
            contradictions: self.contradictions,
        }
    }

    /// Walks everything: for tests.
    ///
    /// # Panics
    /// With what is wrong.
    pub fn check_invariants(&self) {
        self.tree.check_invariants();
        assert!(self.bytes() <= self.bytes_max || self.tree.blocks() == 0, "the bound holds");
    }

    fn bytes(&self) -> usize {
        self.tree.bytes() + self.slots.bytes()
    }

    /// Sweeps a little, and drops what is too much.
    fn keep_bounds(&mut self) {
        self.sweep();
        while self.bytes() > self.bytes_max {
            self.sweep();
            let Some(dropped) = self.tree.drop_oldest() else { return };
            self.dropped += dropped;
        }
    }

    fn sweep(&mut self) {
        if !self.slots.any_ended() {
            return;
        }
        let Self { tree, slots, swept, .. } = self;
        tree.sweep(*swept, SWEEP_RUNS, |slot| slots.is_ended(slot));
        *swept += SWEEP_RUNS;
        if *swept >= tree.places() {
            *swept = 0;
            slots.reuse(|slot| tree.held(slot) == 0);
        }
    }
}

//! All chains of blocks as a tree of runs, and how much of each run every slot holds.
//!
//! The tree knows slots, not workers, and has no bound on memory.
//!
//! A run is an unbranched part of a chain. A hash identifies its whole prefix, so two chains that
//! agree at one block agree in all blocks before it. To compare a run with a prompt, their last
//! common position is compared first, and bisection finds the difference if they differ there. A
//! holder has a prefix of a run: its prefix length is the number of blocks in it. When a holder
//! would have a hole inside a run, the run is split there.
//!
//! The table has an entry for the first block of each group, which leads to the other blocks of the
//! group in the same run. Blocks of a run before its first complete group have an entry each.

mod check;
mod shape;

use std::ops::{Index, IndexMut, Range};

use proto::{
    block::{BlockHash, GROUP_BLOCKS, Tier},
    table::{Entry, PLACES, RunId, Table},
};

use super::{lru::Lru, worker_set::WorkerSet};

/// The empty run at which all chains begin.
pub(super) const ROOT: RunId = 0;
/// Maximum number of blocks in a run. It makes each place unique within the run; moving half of
/// such a run takes about 20 µs.
const RUN_BLOCKS_MAX: usize = PLACES as usize;
/// Number of parts into which a range is divided per step of the search for a difference.
const STRIDES: usize = 8;
/// Bytes that the allocator uses for itself per allocation.
const ALLOCATION_BYTES: usize = 16;

/// One tier of one slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holder {
    pub(super) slot: u16,
    pub(super) tier: Tier,
}

/// Why a store stopped early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopped {
    /// No holder of the parent is known.
    Orphan,
    /// A block is already known at another place in the tree.
    Elsewhere,
}

/// An unbranched part of a chain. One cache line, because a look-up reads one for each run it
/// passes.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Run {
    blocks: Vec<BlockHash>,
    device: WorkerSet,
    host: Option<Box<WorkerSet>>,
    /// Number of blocks before this run in its chain.
    start: u32,
    parent: RunId,
}

/// The children of a run: their number and the XOR of their ids. With one child left, the XOR is
/// its id.
#[derive(Debug, Clone, Copy, Default)]
struct Children {
    count: u32,
    xor: RunId,
}

/// A position between two blocks: after the first `blocks` blocks of a run.
#[derive(Debug, Clone, Copy)]
struct Place {
    run: RunId,
    blocks: usize,
}

/// The tree of all runs.
#[derive(Debug)]
pub(super) struct Tree {
    runs: Vec<Run>,
    children: Vec<Children>,
    /// All leaf runs, ordered by last use.
    lru: Lru,
    table: Table,
    free: Vec<RunId>,
    /// Number of distinct blocks.
    blocks: usize,
    /// Heap memory owned by the runs, in bytes.
    heap_bytes: usize,
    /// Resident blocks by slot, both tiers.
    resident_blocks: Vec<u64>,
    /// Resident blocks on hosts, over all slots.
    host_blocks: u64,
}

impl Index<RunId> for Tree {
    type Output = Run;

    fn index(&self, run: RunId) -> &Run {
        &self.runs[run as usize]
    }
}

impl IndexMut<RunId> for Tree {
    fn index_mut(&mut self, run: RunId) -> &mut Run {
        &mut self.runs[run as usize]
    }
}

impl Run {
    fn heap_bytes(&self) -> usize {
        let host = self.host.as_ref().map_or(0, |host| host.bytes() + size_of::<WorkerSet>());
        let blocks = match self.blocks.capacity() {
            0 => 0,
            capacity => capacity * size_of::<BlockHash>() + ALLOCATION_BYTES,
        };
        blocks + self.device.bytes() + host
    }

    fn holders(&self, tier: Tier) -> Option<&WorkerSet> {
        match tier {
            Tier::Device => Some(&self.device),
            Tier::Host => self.host.as_deref(),
        }
    }

    fn prefix_len(&self, holder: Holder) -> usize {
        self.holders(holder.tier).map_or(0, |holders| usize::from(holders.get(holder.slot)))
    }

    /// Returns the place of `block` if it is `after` blocks behind the place that the table
    /// proposes.
    fn place(&self, block: BlockHash, entry: Entry, after: usize) -> Option<usize> {
        let place = (entry.place.wrapping_sub(self.start) % PLACES) as usize + after;
        (self.blocks.get(place) == Some(&block)).then_some(place)
    }

    /// Returns the number of blocks before the run's first group begins.
    fn ungrouped(&self) -> usize {
        let before = (GROUP_BLOCKS - self.start as usize % GROUP_BLOCKS) % GROUP_BLOCKS;
        before.min(self.blocks.len())
    }

    /// Iterates over the places in a range whose blocks have a table entry, with key and entry.
    fn entries(
        &self,
        run: RunId,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, u64, Entry)> {
        let ungrouped = self.ungrouped();
        let from = range.start.max(ungrouped);
        let groups = ungrouped + (from - ungrouped).next_multiple_of(GROUP_BLOCKS);
        let places = (range.start..range.end.min(ungrouped))
            .chain((groups..range.end).step_by(GROUP_BLOCKS));
        places.map(move |at| {
            (at, first_key(self.blocks[at]), Entry::new(run, self.start as usize + at))
        })
    }

    /// Returns the number of leading blocks that at least one holder has.
    fn covered(&self) -> usize {
        let host = self.host.as_ref().map_or(0, |host| host.longest());
        usize::from(self.device.longest().max(host))
    }

    /// Returns the number of resident blocks, summed over all holders.
    fn resident_count(&self) -> u64 {
        let count = |holders: &WorkerSet| {
            holders.iter().map(|hold| u64::from(hold.prefix_len)).sum::<u64>()
        };
        count(&self.device) + self.host.as_deref().map_or(0, count)
    }

    fn set_prefix_len(&mut self, holder: Holder, prefix_len: usize, slots: usize) {
        let prefix_len = to_prefix_len(prefix_len);
        match holder.tier {
            Tier::Device => self.device.set(holder.slot, prefix_len, slots),
            Tier::Host => {
                let host = self.host.get_or_insert_default();
                host.set(holder.slot, prefix_len, slots);
                if host.is_empty() {
                    self.host = None;
                }
            }
        }
    }
}

/// Returns the key of a block's own table entry: the group's for the first block of a group.
fn first_key(block: BlockHash) -> u64 {
    if block.place() == 0 { block.group_key() } else { block.own_key() }
}

fn to_prefix_len(blocks: usize) -> u16 {
    u16::try_from(blocks).expect("a run has at most 4,096 blocks")
}

/// Returns the number of leading blocks that two slices have in common. Both begin at the same
/// depth.
fn common_len(ours: &[BlockHash], theirs: &[BlockHash]) -> usize {
    let both = ours.len().min(theirs.len());
    if both == 0 || ours[both - 1] == theirs[both - 1] {
        return both;
    }
    let (mut same, mut differs) = (0, both - 1);
    while same < differs {
        // Eight parts instead of two: the ends of the parts are independent reads, not a chain of
        // them.
        let step = (differs - same) / STRIDES + 1;
        let ends = (1..STRIDES).map(|stride| same + stride * step - 1);
        let equal = |at: usize| at < differs && ours[at] == theirs[at];
        same += step * ends.map(|at| usize::from(equal(at))).sum::<usize>();
        differs = differs.min(same + step - 1);
    }
    same
}

impl Tree {
    pub(super) fn new() -> Self {
        Self {
            runs: vec![Run::default()],
            children: vec![Children::default()],
            lru: Lru::new(),
            table: Table::new(),
            free: vec![],
            blocks: 0,
            heap_bytes: 0,
            resident_blocks: vec![],
            host_blocks: 0,
        }
    }

    /// Returns the number of distinct blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of runs in use.
    pub(super) fn runs(&self) -> usize {
        self.runs.len() - 1 - self.free.len()
    }

    /// Returns the number of entries in `runs`, used or free. A sweep goes through all of them.
    pub(super) fn places(&self) -> usize {
        self.runs.len()
    }

    /// Returns the memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let beside = size_of::<Children>() * self.children.capacity()
            + size_of::<RunId>() * self.free.capacity()
            + size_of::<u64>() * self.resident_blocks.capacity();
        let runs = size_of::<Run>() * self.runs.capacity();
        runs + beside + self.lru.bytes() + self.table.bytes() + self.heap_bytes
    }

    /// Adds an entry for a new slot.
    pub(super) fn add_slot(&mut self) {
        self.resident_blocks.push(0);
    }

    /// Returns the number of a slot's resident blocks, on both tiers.
    pub(super) fn resident_blocks(&self, slot: u16) -> u64 {
        self.resident_blocks[usize::from(slot)]
    }

    /// Returns the number of blocks resident on hosts, over all slots.
    pub(super) fn host_blocks(&self) -> u64 {
        self.host_blocks
    }

    /// Counts the leading blocks of a chain by slot: on the device, and on either tier. `either`
    /// may be empty if no block is on a host.
    pub(super) fn look_up(&self, chain: &[BlockHash], device: &mut [u32], either: &mut [u32]) {
        let mut depth = 0;
        while let Some(rest) = chain.get(depth..).filter(|rest| !rest.is_empty()) {
            let begins = |entry: Entry| {
                let run = &self[entry.run];
                let matched =
                    if run.start as usize == depth { common_len(&run.blocks, rest) } else { 0 };
                (matched > 0).then_some((run, matched))
            };
            let Some((run, matched)) = self.table.find(first_key(rest[0]), begins) else { return };
            run.device.add_depths(run.start, to_prefix_len(matched), device);
            if !either.is_empty() {
                run.device.add_depths(run.start, to_prefix_len(matched), either);
                if let Some(host) = &run.host {
                    host.add_depths(run.start, to_prefix_len(matched), either);
                }
            }
            if matched < run.blocks.len() {
                return;
            }
            depth += matched;
        }
    }

    /// Records that a holder has `blocks`, the first of which follows `parent`. If the store stops
    /// early, the blocks before the stop are kept.
    pub(super) fn store(
        &mut self,
        holder: Holder,
        parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) -> Result<(), Stopped> {
        let mut place = match parent {
            None => Place { run: ROOT, blocks: 0 },
            Some(parent) => {
                let (run, at) = self.find(parent).ok_or(Stopped::Orphan)?;
                Place { run, blocks: at + 1 }
            }
        };
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let inside = &self[place.run].blocks[place.blocks..];
            if !inside.is_empty() {
                let same = common_len(inside, rest);
                if same == 0 {
                    place.run = self.split(place.run, place.blocks).0;
                } else {
                    place = self.extend_prefix(holder, place, same);
                    rest = &rest[same..];
                }
                continue;
            }
            match self.find(first) {
                Some((run, 0)) if self[run].parent == place.run => place = Place { run, blocks: 0 },
                Some(_) => return Err(Stopped::Elsewhere),
                None => {
                    let before = self.blocks;
                    place = self.append(holder, place, rest)?;
                    rest = &rest[self.blocks - before..];
                }
            }
        }
        Ok(())
    }

    /// Records that a holder no longer has `blocks`. Returns how many of them it had.
    pub(super) fn remove(&mut self, holder: Holder, blocks: &[BlockHash]) -> usize {
        let (mut at, mut removed) = (0, 0);
        while let Some(&first) = blocks.get(at) {
            at += 1;
            let Some((run, place)) = self.find(first) else { continue };
            // Engines list the blocks of a node in either order. Take adjacent ones together.
            let (mut from, mut to) = (place, place + 1);
            let own = &self[run].blocks;
            while at < blocks.len() && own.get(to) == Some(&blocks[at]) {
                (at, to) = (at + 1, to + 1);
            }
            while at < blocks.len() && from > 0 && own[from - 1] == blocks[at] {
                (at, from) = (at + 1, from - 1);
            }
            removed += self.release(holder, run, from, to);
        }
        removed
    }

    /// Ends all holds of the slots that `ends` selects, in `runs` runs starting with run `from`.
    pub(super) fn sweep(&mut self, from: usize, runs: usize, ends: impl Fn(u16) -> bool) {
        for at in from..(from + runs).min(self.runs.len()) {
            let mut ending = vec![];
            for tier in [Tier::Device, Tier::Host] {
                let holds = self.runs[at].holders(tier).into_iter().flat_map(WorkerSet::iter);
                let ended = holds.filter(|hold| ends(hold.slot));
                ending.extend(ended.map(|hold| Holder { slot: hold.slot, tier }));
            }
            let run = RunId::try_from(at).expect("the number of a run is a RunId");
            for &holder in &ending {
                self.set_prefix_len(run, holder, 0);
            }
            if !ending.is_empty() {
                self.settle(run);
            }
        }
    }

    /// Removes the leaf run that was used longest ago. Returns how many resident blocks it had.
    pub(super) fn drop_oldest(&mut self) -> Option<u64> {
        let run = self.lru.oldest()?;
        let parent = self[run].parent;
        let dropped = self[run].resident_count();
        for tier in [Tier::Device, Tier::Host] {
            let holds: Vec<_> =
                self[run].holders(tier).into_iter().flat_map(WorkerSet::iter).collect();
            for hold in holds {
                self.set_prefix_len(run, Holder { slot: hold.slot, tier }, 0);
            }
        }
        self.settle(run);
        // The parent was used no later than the run that followed it.
        if parent != ROOT && self.children[parent as usize].count == 0 && self.is_used(parent) {
            self.lru.remove(parent);
            self.lru.push_oldest(parent);
        }
        Some(dropped)
    }

    fn is_used(&self, run: RunId) -> bool {
        !self[run].blocks.is_empty()
    }

    /// Returns the run that has a block, and the block's place in it.
    fn find(&self, block: BlockHash) -> Option<(RunId, usize)> {
        let with = |key: u64, after: usize| {
            let found =
                |entry: Entry| Some((entry.run, self[entry.run].place(block, entry, after)?));
            self.table.find(key, found)
        };
        let grouped = with(block.group_key(), block.place());
        if block.place() == 0 { grouped } else { grouped.or_else(|| with(block.own_key(), 0)) }
    }

    /// Changes a run and updates the account of heap memory.
    fn change<T>(&mut self, run: RunId, change: impl FnOnce(&mut Run) -> T) -> T {
        let run = &mut self.runs[run as usize];
        let before = run.heap_bytes();
        let result = change(run);
        self.heap_bytes = self.heap_bytes + run.heap_bytes() - before;
        result
    }

    fn set_prefix_len(&mut self, run: RunId, holder: Holder, prefix_len: usize) {
        let slots = self.resident_blocks.len();
        let before = self[run].prefix_len(holder) as u64;
        let resident_blocks = &mut self.resident_blocks[usize::from(holder.slot)];
        *resident_blocks = *resident_blocks + prefix_len as u64 - before;
        if holder.tier == Tier::Host {
            self.host_blocks = self.host_blocks + prefix_len as u64 - before;
        }
        self.change(run, |run| run.set_prefix_len(holder, prefix_len, slots));
    }

    /// Records that a holder has the `blocks` blocks after a place inside a run. Returns the place
    /// after them.
    fn extend_prefix(&mut self, holder: Holder, place: Place, blocks: usize) -> Place {
        let Place { run, blocks: from } = place;
        let (to, prefix_len) = (from + blocks, self[run].prefix_len(holder));
        if prefix_len < from {
            let (_, tail) = self.split(run, from);
            self.set_prefix_len(tail, holder, blocks);
            self.touch(tail);
            return Place { run: tail, blocks };
        }
        if prefix_len < to {
            self.set_prefix_len(run, holder, to);
        }
        self.touch(run);
        // The new blocks may have filled a hole before the child run.
        let whole = prefix_len < to && to == self[run].blocks.len();
        Place { run: if whole { self.join(run) } else { run }, blocks: to }
    }

    /// Marks a leaf run as the most recently used.
    fn touch(&mut self, run: RunId) {
        if self.children[run as usize].count == 0 {
            self.lru.touch(run);
        }
    }

    /// Records that a holder no longer has blocks `from..to` of a run. Returns how many of them it
    /// had.
    fn release(&mut self, holder: Holder, run: RunId, from: usize, to: usize) -> usize {
        let prefix_len = self[run].prefix_len(holder);
        let to = to.min(prefix_len);
        if from >= to {
            return 0;
        }
        let mut run = run;
        if to < prefix_len {
            // The holder keeps the blocks from `to` on: they become a run of their own.
            run = self.split(run, to).0;
        }
        self.set_prefix_len(run, holder, from);
        self.settle(run);
        to - from
    }
}

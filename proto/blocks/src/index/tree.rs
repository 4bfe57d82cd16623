//! Stores the resident blocks of all workers as a tree, and looks prompts up in it.
//!
//! The nodes of the tree are runs: a run is an unbranched part of a chain. A holder is one tier of
//! one slot. A holder's hold on a run is a prefix of the run. If a holder loses blocks inside a
//! run, the tree splits the run, so that every hold is a prefix again. The hash of a block covers
//! all tokens up to the block's end. So chains that agree at one block agree in all blocks before
//! it, and a search can find where they begin to differ.
//!
//! Eight consecutive blocks of a chain form a group, and their hashes contain the same group key.
//! Only the first block of a group has an entry in the table; the others are found relative to it.
//! If a run begins inside a group, its blocks there have own entries.

mod check;
mod shape;

use std::ops::{Index, IndexMut, Range};

use crate::{
    block::{BlockHash, GROUP_BLOCKS, Tier},
    table::{Entry, PLACE_MODULUS, RunId, RunTable},
};

use super::{lru::Lru, worker_set::WorkerSet};

/// The empty run at which all chains begin.
pub(super) const ROOT: RunId = 0;
/// A table entry has the number of blocks before its block only modulo [`PLACE_MODULUS`], so a
/// longer run is ambiguous. Moving half a run takes at most 20 µs.
const RUN_BLOCKS_MAX: usize = PLACE_MODULUS as usize;
const SEARCH_PARTS: usize = 8;
/// What the allocator itself needs for each allocation, estimated.
const ALLOCATION_BYTES: usize = 16;

#[derive(Debug, Clone, Copy)]
pub(super) struct Holder {
    pub(super) slot: u16,
    pub(super) tier: Tier,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreError {
    UnknownParent,
    /// A block is already at another position in the tree, or its hash can't follow its
    /// predecessor's.
    Contradiction,
}

/// Fills one cache line, because a look-up reads the struct of each run that it passes.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Run {
    blocks: Vec<BlockHash>,
    device: WorkerSet,
    /// `None` if no host has a block of the run.
    host: Option<Box<WorkerSet>>,
    /// Number of blocks before this run in its chain.
    depth: u32,
    parent: RunId,
}

/// The tree needs a child's id only if the run has no other child. Then the XOR is that id.
#[derive(Debug, Clone, Copy, Default)]
struct Children {
    count: u32,
    ids_xor: RunId,
}

#[derive(Debug, Clone, Copy)]
struct Position {
    run: RunId,
    blocks_before: usize,
}

#[derive(Debug)]
pub(super) struct Tree {
    runs: Vec<Run>,
    children: Vec<Children>,
    lru: Lru,
    table: RunTable,
    free_ids: Vec<RunId>,
    block_count: usize,
    heap_bytes: usize,
    /// By slot, on both tiers.
    resident_blocks: Vec<u64>,
    /// A block on two hosts counts twice.
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

    /// `block` stands `offset` blocks after the block that `entry` points to, if it is in this run.
    /// The table only proposes entries, so the hash is compared.
    fn index_of(&self, block: BlockHash, entry: Entry, offset: usize) -> Option<usize> {
        let index = (entry.place.wrapping_sub(self.depth) % PLACE_MODULUS) as usize + offset;
        (self.blocks.get(index) == Some(&block)).then_some(index)
    }

    /// Number of blocks before the first group that begins in this run.
    fn ungrouped_len(&self) -> usize {
        let ungrouped_len = (GROUP_BLOCKS - self.depth as usize % GROUP_BLOCKS) % GROUP_BLOCKS;
        ungrouped_len.min(self.blocks.len())
    }

    /// Those of the blocks of `range` that have a table entry: index in the run, key and value.
    fn entries(
        &self,
        run: RunId,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, u64, Entry)> {
        let ungrouped = self.ungrouped_len();
        let grouped_start = range.start.max(ungrouped);
        let first_group = ungrouped + (grouped_start - ungrouped).next_multiple_of(GROUP_BLOCKS);
        let indexes = (range.start..range.end.min(ungrouped))
            .chain((first_group..range.end).step_by(GROUP_BLOCKS));
        indexes.map(move |index| {
            (index, entry_key(self.blocks[index]), Entry::new(run, self.depth as usize + index))
        })
    }

    /// Number of leading blocks that at least one holder has.
    fn held_len(&self) -> usize {
        let host = self.host.as_ref().map_or(0, |host| host.longest_prefix_len());
        usize::from(self.device.longest_prefix_len().max(host))
    }

    fn resident_count(&self) -> u64 {
        let count = |holders: &WorkerSet| {
            holders.iter().map(|hold| u64::from(hold.prefix_len)).sum::<u64>()
        };
        count(&self.device) + self.host.as_deref().map_or(0, count)
    }

    fn set_prefix_len(&mut self, holder: Holder, prefix_len: usize, slot_count: usize) {
        let prefix_len = to_prefix_len(prefix_len);
        match holder.tier {
            Tier::Device => self.device.set(holder.slot, prefix_len, slot_count),
            Tier::Host => {
                let host = self.host.get_or_insert_default();
                host.set(holder.slot, prefix_len, slot_count);
                if host.is_empty() {
                    self.host = None;
                }
            }
        }
    }
}

/// The group key if the block is the first of its group, and otherwise a key made of other bits of
/// its hash.
fn entry_key(block: BlockHash) -> u64 {
    if block.index_in_group() == 0 { block.group_key() } else { block.own_key() }
}

fn to_prefix_len(blocks: usize) -> u16 {
    u16::try_from(blocks).expect("a run has at most 4,096 blocks")
}

/// Both parts of chains must begin at the same depth.
fn common_len(ours: &[BlockHash], theirs: &[BlockHash]) -> usize {
    let shorter_len = ours.len().min(theirs.len());
    if shorter_len == 0 || ours[shorter_len - 1] == theirs[shorter_len - 1] {
        return shorter_len;
    }
    // The first `same_len` blocks are equal, and the blocks at index `differing` are not.
    let (mut same_len, mut differing) = (0, shorter_len - 1);
    while same_len < differing {
        // A bisection would compare one block per step and wait for each memory read. The CPU can
        // do the reads of one step with eight parts at the same time.
        let part_len = (differing - same_len) / SEARCH_PARTS + 1;
        let part_ends = (1..SEARCH_PARTS).map(|part| same_len + part * part_len - 1);
        let is_equal = |index: usize| index < differing && ours[index] == theirs[index];
        same_len += part_len * part_ends.map(|end| usize::from(is_equal(end))).sum::<usize>();
        differing = differing.min(same_len + part_len - 1);
    }
    same_len
}

impl Tree {
    pub(super) fn new() -> Self {
        Self {
            runs: vec![Run::default()],
            children: vec![Children::default()],
            lru: Lru::new(),
            table: RunTable::new(),
            free_ids: vec![],
            block_count: 0,
            heap_bytes: 0,
            resident_blocks: vec![],
            host_blocks: 0,
        }
    }

    pub(super) fn block_count(&self) -> usize {
        self.block_count
    }

    pub(super) fn run_count(&self) -> usize {
        self.runs.len() - 1 - self.free_ids.len()
    }

    /// Used or free. A sweep goes through all of them.
    pub(super) fn run_id_count(&self) -> usize {
        self.runs.len()
    }

    pub(super) fn bytes(&self) -> usize {
        let other_vecs = size_of::<Children>() * self.children.capacity()
            + size_of::<RunId>() * self.free_ids.capacity()
            + size_of::<u64>() * self.resident_blocks.capacity();
        let runs = size_of::<Run>() * self.runs.capacity();
        runs + other_vecs + self.lru.bytes() + self.table.bytes() + self.heap_bytes
    }

    /// The slot gets the next higher number.
    pub(super) fn add_slot(&mut self) {
        self.resident_blocks.push(0);
    }

    pub(super) fn resident_blocks(&self, slot: u16) -> u64 {
        self.resident_blocks[usize::from(slot)]
    }

    pub(super) fn host_blocks(&self) -> u64 {
        self.host_blocks
    }

    /// Counts the leading blocks that each slot has. The arrays are indexed by slot and hold zeros
    /// at first. An empty `either` stays empty.
    pub(super) fn look_up(&self, chain: &[BlockHash], device: &mut [u32], either: &mut [u32]) {
        let mut depth = 0;
        while let Some(chain_rest) = chain.get(depth..).filter(|rest| !rest.is_empty()) {
            let match_run = |entry: Entry| {
                let run = &self[entry.run];
                let is_next = run.depth as usize == depth;
                let matched_len = if is_next { common_len(&run.blocks, chain_rest) } else { 0 };
                (matched_len > 0).then_some((run, matched_len))
            };
            let key = entry_key(chain_rest[0]);
            let Some((run, matched_len)) = self.table.find(key, match_run) else { return };
            run.device.add_depths(run.depth, to_prefix_len(matched_len), device);
            if !either.is_empty() {
                run.device.add_depths(run.depth, to_prefix_len(matched_len), either);
                if let Some(host) = &run.host {
                    host.add_depths(run.depth, to_prefix_len(matched_len), either);
                }
            }
            if matched_len < run.blocks.len() {
                return;
            }
            depth += matched_len;
        }
    }

    /// The blocks follow `parent` or, without a parent, begin a chain. If the store stops early,
    /// the blocks before the stop are kept.
    pub(super) fn store(
        &mut self,
        holder: Holder,
        parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) -> Result<(), StoreError> {
        let mut position = match parent {
            None => Position { run: ROOT, blocks_before: 0 },
            Some(parent) => {
                let (run, index) = self.find(parent).ok_or(StoreError::UnknownParent)?;
                Position { run, blocks_before: index + 1 }
            }
        };
        let mut unstored = blocks;
        while let Some(&first) = unstored.first() {
            let rest_of_run = &self[position.run].blocks[position.blocks_before..];
            if !rest_of_run.is_empty() {
                let same_len = common_len(rest_of_run, unstored);
                if same_len == 0 {
                    // The new chain branches off here, so the run must end here.
                    position.run = self.split(position.run, position.blocks_before).0;
                } else {
                    position = self.extend_prefix(holder, position, same_len);
                    unstored = &unstored[same_len..];
                }
                continue;
            }
            match self.find(first) {
                Some((run, 0)) if self[run].parent == position.run => {
                    position = Position { run, blocks_before: 0 };
                }
                Some(_) => return Err(StoreError::Contradiction),
                None => {
                    let old_block_count = self.block_count;
                    position = self.append(holder, position, unstored)?;
                    unstored = &unstored[self.block_count - old_block_count..];
                }
            }
        }
        Ok(())
    }

    /// Returns how many of the blocks the holder had.
    pub(super) fn remove(&mut self, holder: Holder, blocks: &[BlockHash]) -> usize {
        let (mut handled, mut removed_count) = (0, 0);
        while let Some(&first) = blocks.get(handled) {
            handled += 1;
            let Some((run, index)) = self.find(first) else { continue };
            // Engines may list adjacent blocks forwards or backwards.
            let (mut from, mut to) = (index, index + 1);
            let run_blocks = &self[run].blocks;
            while handled < blocks.len() && run_blocks.get(to) == Some(&blocks[handled]) {
                (handled, to) = (handled + 1, to + 1);
            }
            while handled < blocks.len() && from > 0 && run_blocks[from - 1] == blocks[handled] {
                (handled, from) = (handled + 1, from - 1);
            }
            removed_count += self.release(holder, run, from, to);
        }
        removed_count
    }

    pub(super) fn sweep(&mut self, from: usize, run_count: usize, is_ended: impl Fn(u16) -> bool) {
        for index in from..(from + run_count).min(self.runs.len()) {
            let mut ended_holders = vec![];
            for tier in [Tier::Device, Tier::Host] {
                let holds = self.runs[index].holders(tier).into_iter().flat_map(WorkerSet::iter);
                let ended_holds = holds.filter(|hold| is_ended(hold.slot));
                ended_holders.extend(ended_holds.map(|hold| Holder { slot: hold.slot, tier }));
            }
            let run = RunId::try_from(index).expect("the number of a run is a RunId");
            for &holder in &ended_holders {
                self.set_prefix_len(run, holder, 0);
            }
            if !ended_holders.is_empty() {
                self.tidy(run);
            }
        }
    }

    /// Removes the leaf run that was used longest ago. Returns its number of resident blocks; a
    /// block that two holders have counts twice.
    pub(super) fn drop_oldest(&mut self) -> Option<u64> {
        let run = self.lru.oldest()?;
        let parent = self[run].parent;
        let dropped_blocks = self[run].resident_count();
        for tier in [Tier::Device, Tier::Host] {
            let holds: Vec<_> =
                self[run].holders(tier).into_iter().flat_map(WorkerSet::iter).collect();
            for hold in holds {
                self.set_prefix_len(run, Holder { slot: hold.slot, tier }, 0);
            }
        }
        self.tidy(run);
        // If the parent is now a leaf, `tidy` has made it the newest leaf. But its last use was no
        // later than that of the removed run, which was the oldest leaf.
        if parent != ROOT && self.children[parent as usize].count == 0 && self.is_used(parent) {
            self.lru.remove(parent);
            self.lru.push_oldest(parent);
        }
        Some(dropped_blocks)
    }

    /// A free run has no blocks.
    fn is_used(&self, run: RunId) -> bool {
        !self[run].blocks.is_empty()
    }

    fn find(&self, block: BlockHash) -> Option<(RunId, usize)> {
        let find_by_key = |key: u64, offset: usize| {
            self.table.find(key, |Entry { run, place }| {
                Some((run, self[run].index_of(block, Entry { run, place }, offset)?))
            })
        };
        let by_group = find_by_key(block.group_key(), block.index_in_group());
        let by_own_key = || find_by_key(block.own_key(), 0);
        if block.index_in_group() == 0 { by_group } else { by_group.or_else(by_own_key) }
    }

    fn change_run<T>(&mut self, run: RunId, change: impl FnOnce(&mut Run) -> T) -> T {
        let run = &mut self.runs[run as usize];
        let old_bytes = run.heap_bytes();
        let result = change(run);
        self.heap_bytes = self.heap_bytes + run.heap_bytes() - old_bytes;
        result
    }

    fn set_prefix_len(&mut self, run: RunId, holder: Holder, prefix_len: usize) {
        let slot_count = self.resident_blocks.len();
        let old_prefix_len = self[run].prefix_len(holder) as u64;
        let resident_blocks = &mut self.resident_blocks[usize::from(holder.slot)];
        *resident_blocks = *resident_blocks + prefix_len as u64 - old_prefix_len;
        if holder.tier == Tier::Host {
            self.host_blocks = self.host_blocks + prefix_len as u64 - old_prefix_len;
        }
        self.change_run(run, |run| run.set_prefix_len(holder, prefix_len, slot_count));
    }

    /// Records that a holder has the `added_len` blocks that follow `position` in its run. Returns
    /// the position after them.
    fn extend_prefix(&mut self, holder: Holder, position: Position, added_len: usize) -> Position {
        let Position { run, blocks_before: from } = position;
        let (to, prefix_len) = (from + added_len, self[run].prefix_len(holder));
        if prefix_len < from {
            // The holder lacks a block before `from`, so the added blocks need their own run.
            let (_, tail) = self.split(run, from);
            self.set_prefix_len(tail, holder, added_len);
            self.touch(tail);
            return Position { run: tail, blocks_before: added_len };
        }
        if prefix_len < to {
            self.set_prefix_len(run, holder, to);
        }
        self.touch(run);
        // Perhaps no other holder has the child run without the whole of this run. Then they join.
        let is_now_whole = prefix_len < to && to == self[run].blocks.len();
        Position { run: if is_now_whole { self.join(run) } else { run }, blocks_before: to }
    }

    fn touch(&mut self, run: RunId) {
        if self.children[run as usize].count == 0 {
            self.lru.touch(run);
        }
    }

    /// Records that a holder no longer has the blocks `from..to`. Returns how many of them it had.
    fn release(&mut self, holder: Holder, run: RunId, from: usize, to: usize) -> usize {
        let prefix_len = self[run].prefix_len(holder);
        let to = to.min(prefix_len);
        if from >= to {
            return 0;
        }
        let mut run = run;
        if to < prefix_len {
            // The holder keeps the blocks from `to` on, so these become a run of their own.
            run = self.split(run, to).0;
        }
        self.set_prefix_len(run, holder, from);
        self.tidy(run);
        to - from
    }
}

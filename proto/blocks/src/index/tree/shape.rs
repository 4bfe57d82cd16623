//! Creates, extends, splits, joins and removes the runs of the overlap index's tree.
//!
//! Keeps the tree's block count, table, children and LRU list consistent with the runs.

use std::ops::Range;

use crate::{
    block::{BlockHash, Tier},
    table::{Entry, RUNS_MAX, RunId},
};

use super::{
    super::worker_set::{Hold, WorkerSet},
    Children, Holder, Position, ROOT, RUN_BLOCKS_MAX, Run, StoreError, Tree, to_prefix_len,
};

impl Tree {
    /// Appends blocks that the tree doesn't have yet at the end of a run. They extend that run if
    /// it is a leaf that the holder has completely. Otherwise they begin a new run. Appends only as
    /// many as fit into one run, and returns the position after them.
    pub(super) fn append(
        &mut self,
        holder: Holder,
        position: Position,
        blocks: &[BlockHash],
    ) -> Result<Position, StoreError> {
        let Position { run: last_run, blocks_before } = position;
        let is_leaf = last_run != ROOT && self.children[last_run as usize].count == 0;
        let can_grow = is_leaf
            && blocks_before < RUN_BLOCKS_MAX
            && self[last_run].prefix_len(holder) == blocks_before;
        let (run, old_len) =
            if can_grow { (last_run, blocks_before) } else { (self.add_child(last_run), 0) };
        let fitting_blocks = &blocks[..blocks.len().min(RUN_BLOCKS_MAX - old_len)];
        self.change_run(run, |run| {
            if run.blocks.capacity() < old_len + fitting_blocks.len() {
                // Leave some room for later blocks, but don't reserve twice the memory in use.
                run.blocks.reserve_exact(fitting_blocks.len() + old_len / 4);
            }
            run.blocks.extend_from_slice(fitting_blocks);
        });
        let new_len = self.add_to_table(run, old_len);
        self.block_count += new_len - old_len;
        self.change_run(run, |run| run.blocks.truncate(new_len));
        if new_len == 0 {
            self.drop_leaf(run);
        } else {
            self.set_prefix_len(run, holder, new_len);
            self.touch(run);
        }
        if new_len < old_len + fitting_blocks.len() {
            return Err(StoreError::Contradiction);
        }
        Ok(Position { run, blocks_before: new_len })
    }

    /// Stops at a block that can't follow its predecessor or is already known. Returns that block's
    /// index, or else the run's length.
    fn add_to_table(&mut self, run: RunId, from: usize) -> usize {
        let Self { table, runs, .. } = self;
        let this = &runs[run as usize];
        let preceding_blocks =
            if from > 0 { &this.blocks[..from] } else { &runs[this.parent as usize].blocks };
        let mut predecessor = preceding_blocks.last().copied();
        let can_follow = |&&block: &&BlockHash| block.can_follow(predecessor.replace(block));
        let end = from + this.blocks[from..].iter().take_while(can_follow).count();
        for (index, key, entry) in this.entries(run, from..end) {
            let is_known = |known: Entry| {
                runs[known.run as usize].index_of(this.blocks[index], known, 0).is_some()
            };
            if !table.insert(key, entry, is_known) {
                return index;
            }
        }
        end
    }

    fn add_child(&mut self, parent: RunId) -> RunId {
        let depth = self[parent].depth as usize + self[parent].blocks.len();
        let depth = u32::try_from(depth).expect("no prompt has four billion blocks");
        if parent != ROOT && self.children[parent as usize].count == 0 {
            self.lru.remove(parent);
        }
        let run = self.store_run(Run { depth, parent, ..Run::default() });
        self.children[parent as usize].add(run);
        self.lru.push_newest(run);
        run
    }

    /// The caller links the run to its parent.
    fn store_run(&mut self, run: Run) -> RunId {
        self.heap_bytes += run.heap_bytes();
        if let Some(id) = self.free_ids.pop() {
            self.runs[id as usize] = run;
            return id;
        }
        assert!(self.runs.len() < RUNS_MAX, "the bound on bytes is reached long before");
        let id = RunId::try_from(self.runs.len()).expect("RUNS_MAX is below RunId's maximum");
        if self.runs.len() == self.runs.capacity() {
            // Doubling would leave up to half of the memory unused.
            self.runs.reserve_exact(self.runs.len() / 4 + 64);
            self.children.reserve_exact(self.runs.len() / 4 + 64);
        }
        self.runs.push(run);
        self.children.push(Children::default());
        id
    }

    /// The caller has removed the run from all other places.
    fn free_run(&mut self, run: RunId) {
        self.change_run(run, |run| *run = Run::default());
        self.children[run as usize] = Children::default();
        self.free_ids.push(run);
    }

    fn redirect_entries(&mut self, from: RunId, range: Range<usize>, to: RunId) {
        let Self { table, runs, .. } = self;
        for (_, key, entry) in runs[from as usize].entries(from, range) {
            table.set_run(key, entry, to);
        }
    }

    /// Returns the ids of head and tail. If the run has children, the tail keeps the run's id,
    /// because the children name it as their parent. Otherwise the longer part keeps the id,
    /// because fewer table entries change then.
    pub(super) fn split(&mut self, run: RunId, head_len: usize) -> (RunId, RunId) {
        let len = self[run].blocks.len();
        debug_assert!(0 < head_len && head_len < len, "both parts have blocks");
        let children = self.children[run as usize];
        let tail_keeps_id = children.count > 0 || len - head_len >= head_len;
        let new_id = self.store_run(Run::default());
        let (head_id, tail_id) = if tail_keeps_id { (new_id, run) } else { (run, new_id) };
        let moved_range = if tail_keeps_id { 0..head_len } else { head_len..len };
        self.redirect_entries(run, moved_range, new_id);

        let mut head = self.change_run(run, std::mem::take);
        let may_split_group = head_len >= head.ungrouped_len();
        let tail = head.split_off(head_len, head_id);
        let parent = head.parent;
        self.change_run(head_id, |run| *run = head);
        self.change_run(tail_id, |run| *run = tail);
        if may_split_group {
            // The entry of a divided group leads only to the group's blocks in the head.
            let Self { table, runs, .. } = self;
            let tail = &runs[tail_id as usize];
            for (_, key, entry) in tail.entries(tail_id, 0..tail.ungrouped_len()) {
                table.insert(key, entry, |_| false);
            }
        }

        self.children[head_id as usize] = Children { count: 1, ids_xor: tail_id };
        self.children[tail_id as usize] = children;
        if tail_keeps_id {
            self.children[parent as usize].ids_xor ^= run ^ head_id;
        } else {
            // The run was a leaf. Now its tail is the leaf.
            self.lru.replace(run, tail_id);
        }
        (head_id, tail_id)
    }

    /// Joins a run with its only child, if every holder of the child holds the whole run. Returns
    /// the id of the joined run, or `run` if nothing was joined.
    pub(super) fn join(&mut self, run: RunId) -> RunId {
        let Children { count, ids_xor: child } = self.children[run as usize];
        if run == ROOT || count != 1 {
            return run;
        }
        let (len, child_len) = (self[run].blocks.len(), self[child].blocks.len());
        let holders_have_run = |tier: Tier| {
            let mut holds = self[child].holders(tier).into_iter().flat_map(WorkerSet::iter);
            holds.all(|hold| self[run].prefix_len(Holder { slot: hold.slot, tier }) == len)
        };
        if len + child_len > RUN_BLOCKS_MAX
            || !holders_have_run(Tier::Device)
            || !holders_have_run(Tier::Host)
        {
            return run;
        }
        let children = self.children[child as usize];
        let child_keeps_id = children.count > 0 || child_len > len;
        let (kept_id, freed_id) = if child_keeps_id { (child, run) } else { (run, child) };
        let has_group_start = self[run].ungrouped_len() < len;
        if has_group_start {
            // If the child begins inside a group, the group's first block is in `run`, and its
            // entry now leads to all blocks of the group. The child's own entries are redundant.
            let Self { table, runs, .. } = self;
            let child_run = &runs[child as usize];
            for (_, key, entry) in child_run.entries(child, 0..child_run.ungrouped_len()) {
                table.remove(key, entry);
            }
        }
        if child_keeps_id {
            self.redirect_entries(run, 0..len, child);
            let parent = self[run].parent;
            self.children[parent as usize].ids_xor ^= run ^ child;
        } else {
            // The table entries of the first `removed_len` blocks were removed above.
            let removed_len = if has_group_start { self[child].ungrouped_len() } else { 0 };
            self.redirect_entries(child, removed_len..child_len, run);
            self.lru.replace(child, run);
        }
        let slot_count = self.resident_blocks.len();
        let mut joined = self.change_run(run, std::mem::take);
        let child_run = self.change_run(child, std::mem::take);
        joined.absorb(&child_run, slot_count);
        self.change_run(kept_id, |run| *run = joined);
        self.free_run(freed_id);
        self.children[kept_id as usize] = children;
        kept_id
    }

    /// Call this after some holds of the run have ended or become shorter. Removes the blocks at
    /// the end of a leaf that no holder has, and empty runs. Joins runs where that is possible.
    pub(super) fn tidy(&mut self, run: RunId) {
        let mut run = run;
        while run != ROOT {
            if self.children[run as usize].count > 0 {
                run = self.join(run);
                self.join(self[run].parent);
                return;
            }
            let held_len = self[run].held_len();
            self.truncate_leaf(run, held_len);
            let parent = self[run].parent;
            if held_len > 0 {
                self.join(parent);
                return;
            }
            self.drop_leaf(run);
            run = parent;
        }
    }

    /// The run must be an empty leaf.
    fn drop_leaf(&mut self, run: RunId) {
        let parent = self[run].parent;
        self.lru.remove(run);
        self.free_run(run);
        self.children[parent as usize].remove(run);
        if parent != ROOT && self.children[parent as usize].count == 0 {
            self.lru.push_newest(parent);
        }
    }

    fn truncate_leaf(&mut self, run: RunId, len: usize) {
        let Self { table, runs, .. } = self;
        let this = &runs[run as usize];
        if len == this.blocks.len() {
            return;
        }
        for (_, key, entry) in this.entries(run, len..this.blocks.len()) {
            table.remove(key, entry);
        }
        self.block_count -= this.blocks.len() - len;
        self.change_run(run, |run| {
            run.blocks.truncate(len);
            if run.blocks.capacity() > 2 * len {
                run.blocks.shrink_to_fit();
            }
        });
    }
}

impl Children {
    pub(super) fn add(&mut self, run: RunId) {
        (self.count, self.ids_xor) = (self.count + 1, self.ids_xor ^ run);
    }

    fn remove(&mut self, run: RunId) {
        (self.count, self.ids_xor) = (self.count - 1, self.ids_xor ^ run);
    }
}

impl Run {
    fn split_off(&mut self, head_len: usize, head_id: RunId) -> Self {
        let blocks = self.blocks.split_off(head_len);
        self.blocks.shrink_to_fit();
        let host = self.host.as_deref_mut().map(|host| split_holds(host, head_len));
        let device = split_holds(&mut self.device, head_len);
        let to_box = |host: WorkerSet| (!host.is_empty()).then(|| Box::new(host));
        let depth = self.depth + u32::from(to_prefix_len(head_len));
        Self { blocks, device, host: host.and_then(to_box), depth, parent: head_id }
    }

    /// Each holder of the child must have all of this run.
    fn absorb(&mut self, child: &Self, slot_count: usize) {
        let len = self.blocks.len();
        self.blocks.reserve_exact(child.blocks.len());
        self.blocks.extend_from_slice(&child.blocks);
        for tier in [Tier::Device, Tier::Host] {
            for hold in child.holders(tier).into_iter().flat_map(WorkerSet::iter) {
                let holder = Holder { slot: hold.slot, tier };
                self.set_prefix_len(holder, len + usize::from(hold.prefix_len), slot_count);
            }
        }
    }
}

/// Limits `holds` to the first `head_len` blocks, and returns the holds on the tail.
fn split_holds(holds: &mut WorkerSet, head_len: usize) -> WorkerSet {
    let head_len = to_prefix_len(head_len);
    let to_tail_hold =
        |hold: Hold| Hold { prefix_len: hold.prefix_len.saturating_sub(head_len), ..hold };
    let tail_holds = holds.iter().map(to_tail_hold).filter(|hold| hold.prefix_len > 0).collect();
    holds.limit_prefix_lens(head_len);
    tail_holds
}

//! Creates, extends, splits, joins and removes runs.
//!
//! The caller says what is held. These functions keep blocks, table, children and LRU list
//! consistent.

use std::ops::Range;

use proto::{
    block::{BlockHash, Tier},
    table::{Entry, RUNS_MAX, RunId},
};

use super::{
    super::worker_set::{SlotPrefix, WorkerSet},
    Children, Holder, Place, ROOT, RUN_BLOCKS_MAX, Run, Stopped, Tree, to_prefix_len,
};

impl Tree {
    /// Appends unknown blocks to a run, or to a new run after it, as many as fit into one run.
    /// Returns the place after them.
    pub(super) fn append(
        &mut self,
        holder: Holder,
        place: Place,
        blocks: &[BlockHash],
    ) -> Result<Place, Stopped> {
        let Place { run: last, blocks: end } = place;
        let is_leaf = last != ROOT && self.children[last as usize].count == 0;
        let grows = is_leaf && end < RUN_BLOCKS_MAX && self[last].prefix_len(holder) == end;
        let (run, at) = if grows { (last, end) } else { (self.add_after(last), 0) };
        let fit = &blocks[..blocks.len().min(RUN_BLOCKS_MAX - at)];
        self.change(run, |run| {
            if run.blocks.capacity() < at + fit.len() {
                // Leave some room for the next turn, but don't reserve twice the memory in use.
                run.blocks.reserve_exact(fit.len() + at / 4);
            }
            run.blocks.extend_from_slice(fit);
        });
        let end = self.add_to_table(run, at);
        self.blocks += end - at;
        self.change(run, |run| run.blocks.truncate(end));
        if end == 0 {
            self.drop_leaf(run);
        } else {
            self.set_prefix_len(run, holder, end);
            self.touch(run);
        }
        if end < at + fit.len() { Err(Stopped::Elsewhere) } else { Ok(Place { run, blocks: end }) }
    }

    /// Adds a run's blocks from place `from` on to the table. Stops at a block that can't follow
    /// its predecessor or is already known. Returns the place where it stopped, or the run's end.
    fn add_to_table(&mut self, run: RunId, from: usize) -> usize {
        let Self { table, runs, .. } = self;
        let this = &runs[run as usize];
        let before =
            if from > 0 { &this.blocks[..from] } else { &runs[this.parent as usize].blocks };
        let mut parent = before.last().copied();
        let follows = |&&block: &&BlockHash| block.can_follow(parent.replace(block));
        let end = from + this.blocks[from..].iter().take_while(follows).count();
        for (at, key, entry) in this.entries(run, from..end) {
            let is_known =
                |known: Entry| runs[known.run as usize].place(this.blocks[at], known, 0).is_some();
            if !table.insert(key, entry, is_known) {
                return at;
            }
        }
        end
    }

    /// Adds an empty run after another.
    fn add_after(&mut self, parent: RunId) -> RunId {
        let start = self[parent].start as usize + self[parent].blocks.len();
        let start = u32::try_from(start).expect("no prompt has four billion blocks");
        if parent != ROOT && self.children[parent as usize].count == 0 {
            self.lru.remove(parent);
        }
        let run = self.add(Run { start, parent, ..Run::default() });
        self.children[parent as usize].add(run);
        self.lru.push_newest(run);
        run
    }

    fn add(&mut self, run: Run) -> RunId {
        self.heap_bytes += run.heap_bytes();
        if let Some(id) = self.free.pop() {
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

    fn discard(&mut self, run: RunId) {
        self.change(run, |run| *run = Run::default());
        self.children[run as usize] = Children::default();
        self.free.push(run);
    }

    /// Changes the table entries of a range of blocks from one run to another.
    fn rename(&mut self, from: RunId, range: Range<usize>, to: RunId) {
        let Self { table, runs, .. } = self;
        for (_, key, entry) in runs[from as usize].entries(from, range) {
            table.rename(key, entry, to);
        }
    }

    /// Splits a run after its first `at` blocks. Returns head and tail. The part that has children
    /// keeps the run's id; without children, the longer part does.
    pub(super) fn split(&mut self, run: RunId, at: usize) -> (RunId, RunId) {
        let len = self[run].blocks.len();
        debug_assert!(0 < at && at < len, "both parts have blocks");
        let children = self.children[run as usize];
        let tail_stays = children.count > 0 || len - at >= at;
        let id = self.add(Run::default());
        let (head, tail) = if tail_stays { (id, run) } else { (run, id) };
        self.rename(run, if tail_stays { 0..at } else { at..len }, id);

        let mut first = self.change(run, std::mem::take);
        // If the split divides a group, the group's entry stays with the head.
        let splits_group = at >= first.ungrouped();
        let second = first.split_off(at, head);
        let parent = first.parent;
        self.change(head, |run| *run = first);
        self.change(tail, |run| *run = second);
        if splits_group {
            let Self { table, runs, .. } = self;
            let second = &runs[tail as usize];
            for (_, key, entry) in second.entries(tail, 0..second.ungrouped()) {
                table.insert(key, entry, |_| false);
            }
        }

        self.children[head as usize] = Children { count: 1, xor: tail };
        self.children[tail as usize] = children;
        if tail_stays {
            self.children[parent as usize].xor ^= run ^ head;
        } else {
            // The run was a leaf. Now its tail is the leaf.
            self.lru.replace(run, tail);
        }
        (head, tail)
    }

    /// Joins a run with its only child, if every holder of the child holds the whole run. Returns
    /// the id of the joined run, or `run` if nothing was joined.
    pub(super) fn join(&mut self, run: RunId) -> RunId {
        let Children { count, xor: child } = self.children[run as usize];
        if run == ROOT || count != 1 {
            return run;
        }
        let (len, more) = (self[run].blocks.len(), self[child].blocks.len());
        let no_holes = |tier: Tier| {
            let mut holds = self[child].holders(tier).into_iter().flat_map(WorkerSet::iter);
            holds.all(|hold| self[run].prefix_len(Holder { slot: hold.slot, tier }) == len)
        };
        if len + more > RUN_BLOCKS_MAX || !no_holes(Tier::Device) || !no_holes(Tier::Host) {
            return run;
        }
        let children = self.children[child as usize];
        let child_stays = children.count > 0 || more > len;
        let (stays, goes) = if child_stays { (child, run) } else { (run, child) };
        if self[run].ungrouped() < len {
            // The group that the split had divided is in one run again.
            let Self { table, runs, .. } = self;
            let second = &runs[child as usize];
            for (_, key, entry) in second.entries(child, 0..second.ungrouped()) {
                table.remove(key, entry);
            }
        }
        if child_stays {
            self.rename(run, 0..len, child);
            let parent = self[run].parent;
            self.children[parent as usize].xor ^= run ^ child;
        } else {
            let kept = if self[run].ungrouped() < len { self[child].ungrouped() } else { 0 };
            self.rename(child, kept..more, run);
            self.lru.replace(child, run);
        }
        let slots = self.resident_blocks.len();
        let mut whole = self.change(run, std::mem::take);
        let second = self.change(child, std::mem::take);
        whole.absorb(&second, slots);
        self.change(stays, |run| *run = whole);
        self.discard(goes);
        self.children[stays as usize] = children;
        stays
    }

    /// Restores the shape after holds have ended: removes blocks that no holder has and no run
    /// follows, and joins runs where possible.
    pub(super) fn settle(&mut self, run: RunId) {
        let mut run = run;
        while run != ROOT {
            if self.children[run as usize].count > 0 {
                run = self.join(run);
                self.join(self[run].parent);
                return;
            }
            let covered = self[run].covered();
            self.truncate_run(run, covered);
            let parent = self[run].parent;
            if covered > 0 {
                self.join(parent);
                return;
            }
            self.drop_leaf(run);
            run = parent;
        }
    }

    /// Removes an empty leaf run from the tree.
    fn drop_leaf(&mut self, run: RunId) {
        let parent = self[run].parent;
        self.lru.remove(run);
        self.discard(run);
        self.children[parent as usize].remove(run);
        if parent != ROOT && self.children[parent as usize].count == 0 {
            self.lru.push_newest(parent);
        }
    }

    fn truncate_run(&mut self, run: RunId, len: usize) {
        let Self { table, runs, .. } = self;
        let this = &runs[run as usize];
        if len == this.blocks.len() {
            return;
        }
        for (_, key, entry) in this.entries(run, len..this.blocks.len()) {
            table.remove(key, entry);
        }
        self.blocks -= this.blocks.len() - len;
        self.change(run, |run| {
            run.blocks.truncate(len);
            if run.blocks.capacity() > 2 * len {
                run.blocks.shrink_to_fit();
            }
        });
    }
}

impl Children {
    pub(super) fn add(&mut self, run: RunId) {
        (self.count, self.xor) = (self.count + 1, self.xor ^ run);
    }

    fn remove(&mut self, run: RunId) {
        (self.count, self.xor) = (self.count - 1, self.xor ^ run);
    }
}

impl Run {
    /// Keeps the first `at` blocks. Returns a run with the other blocks, whose parent is `head`.
    fn split_off(&mut self, at: usize, head: RunId) -> Self {
        let blocks = self.blocks.split_off(at);
        self.blocks.shrink_to_fit();
        let host = self.host.as_deref_mut().map(|host| part(host, at));
        let device = part(&mut self.device, at);
        let boxed = |host: WorkerSet| (!host.is_empty()).then(|| Box::new(host));
        let start = self.start + u32::from(to_prefix_len(at));
        Self { blocks, device, host: host.and_then(boxed), start, parent: head }
    }

    /// Appends the blocks of a run whose holders all hold the whole of this one.
    fn absorb(&mut self, other: &Self, slots: usize) {
        let len = self.blocks.len();
        self.blocks.reserve_exact(other.blocks.len());
        self.blocks.extend_from_slice(&other.blocks);
        for tier in [Tier::Device, Tier::Host] {
            for hold in other.holders(tier).into_iter().flat_map(WorkerSet::iter) {
                let holder = Holder { slot: hold.slot, tier };
                self.set_prefix_len(holder, len + usize::from(hold.prefix_len), slots);
            }
        }
    }
}

/// Keeps the holders of the first `at` blocks. Returns those of the other blocks.
fn part(holders: &mut WorkerSet, at: usize) -> WorkerSet {
    let at = to_prefix_len(at);
    let others =
        |hold: SlotPrefix| SlotPrefix { prefix_len: hold.prefix_len.saturating_sub(at), ..hold };
    let after = holders.iter().map(others).filter(|hold| hold.prefix_len > 0).collect();
    holders.limit_prefix_lens(at);
    after
}

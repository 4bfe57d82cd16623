//! How runs are created, grown, split, joined and removed.
//!
//! Callers set which pages are resident. This module keeps the pages, the blocks, the table and the
//! tree links consistent.

use std::ops::Range;

use proto::{
    block::BlockHash,
    table::{Entry, RunId},
};

use super::{
    Error, Grid, Pages, Place, ROOT, RUN_PAGES_MAX, Run, Stored, TIERS, masked, table_key,
};

/// The result of an append: the position after the last appended page, and why no more were
/// appended.
pub(super) struct Appended {
    pub(super) at: Place,
    pub(super) stopped: Option<Error>,
}

impl Pages {
    /// Appends unknown pages of an event, starting with index `from`, after a place at the end of a
    /// run. Appends as many as fit in one run; they aren't marked resident yet.
    pub(super) fn append(&mut self, place: Place, stored: &Stored, from: usize) -> Appended {
        let mut chain = self.resume_chain(place, stored);
        let grows = place.run != ROOT
            && self.run(place.run).first_child == ROOT
            && place.pages < RUN_PAGES_MAX;
        let run =
            if grows { place.run } else { self.add_after(place.run, chain.last(), chain.sum()) };
        let depth = self.run(run).start as usize;
        let page_tokens = stored.page_tokens as usize;
        let (mut tokens, mut stopped) = (Vec::with_capacity(page_tokens), None);
        let (room, before) = (RUN_PAGES_MAX - self.run(run).pages.len(), self.run(run).bytes());
        let pages = stored.pages.iter().zip(stored.tokens.chunks(page_tokens));
        self.reserve(run, room.min(stored.pages.len() - from));
        for (&page, wide) in pages.skip(from).take(room) {
            tokens.clear();
            tokens.extend(wide.iter().map_while(|&token| u32::try_from(token).ok()));
            let at = self.run(run).pages.len();
            if tokens.len() < page_tokens {
                stopped = Some(Error::Token);
            } else if self.count == self.pages_max {
                stopped = Some(Error::Full(self.pages_max));
            } else if self.find(page).is_some() {
                stopped = Some(Error::Elsewhere);
            }
            if stopped.is_some() {
                break;
            }
            let page_is_block = self.grid.page_is_block();
            let content = &mut self.runs[run as usize];
            chain.push(&tokens, &mut content.blocks);
            content.pages.push(masked(page));
            if !page_is_block {
                content.sums.push(chain.sum());
            }
            self.table.insert(table_key(page.0), Entry::new(run, depth + at), |_| false);
            self.count += 1;
        }
        self.lists_bytes = self.lists_bytes + self.run(run).bytes() - before;
        let at = Place { run, pages: self.run(run).pages.len() };
        if at.pages == 0 {
            self.remove_leaf(run);
        }
        Appended { at, stopped }
    }

    /// Reserves some room for the next turn, but far less than the doubling of `Vec` would.
    fn reserve(&mut self, run: RunId, pages: usize) {
        fn reserve<T>(list: &mut Vec<T>, more: usize) {
            if list.capacity() < list.len() + more {
                list.reserve_exact(more + list.len() / 16);
            }
        }
        let (grid, content) = (self.grid, &mut self.runs[run as usize]);
        let depth = content.start as usize + content.pages.len();
        reserve(&mut content.pages, pages);
        reserve(&mut content.blocks, grid.blocks(depth + pages) - grid.blocks(depth));
        if !grid.page_is_block() {
            reserve(&mut content.sums, pages);
        }
    }

    fn add_after(&mut self, parent: RunId, last: BlockHash, sum: u64) -> RunId {
        let content = self.run(parent);
        let start = content.start as usize + content.pages.len();
        let start = u32::try_from(start).expect("no prompt has four billion pages");
        let run = self.add(Run { last, sum, start, ..Run::default() });
        self.link(parent, run);
        run
    }

    fn add(&mut self, run: Run) -> RunId {
        if let Some(id) = self.free.pop() {
            *self.run_mut(id) = run;
            return id;
        }
        let id = RunId::try_from(self.runs.len()).expect("there are fewer runs than pages");
        if self.runs.len() == self.runs.capacity() {
            self.runs.reserve_exact(self.runs.len() / 8 + 64);
        }
        self.runs.push(run);
        id
    }

    /// Makes `run` a child of `parent`.
    fn link(&mut self, parent: RunId, run: RunId) {
        let younger = self.run(parent).first_child;
        let content = self.run_mut(run);
        (content.parent, content.older, content.younger) = (parent, ROOT, younger);
        if younger != ROOT {
            self.run_mut(younger).older = run;
        }
        self.run_mut(parent).first_child = run;
    }

    /// Unlinks a run from its parent and its siblings.
    fn unlink(&mut self, run: RunId) {
        let Run { parent, older, younger, .. } = *self.run(run);
        if older == ROOT {
            self.run_mut(parent).first_child = younger;
        } else {
            self.run_mut(older).younger = younger;
        }
        if younger != ROOT {
            self.run_mut(younger).older = older;
        }
    }

    pub(super) fn children(&self, run: RunId) -> impl Iterator<Item = RunId> {
        let some = |run: RunId| (run != ROOT).then_some(run);
        std::iter::successors(some(self.run(run).first_child), move |&run| {
            some(self.run(run).younger)
        })
    }

    /// Returns the run after `run`, parents before children.
    pub(super) fn next_run(&self, run: RunId) -> Option<RunId> {
        if self.run(run).first_child != ROOT {
            return Some(self.run(run).first_child);
        }
        let mut run = run;
        while run != ROOT && self.run(run).younger == ROOT {
            run = self.run(run).parent;
        }
        (run != ROOT).then(|| self.run(run).younger)
    }

    /// Updates the table: its entries for some pages of `from` now lead to `to`.
    fn move_entries(&mut self, from: RunId, pages: Range<usize>, to: RunId) {
        let Self { runs, table, .. } = self;
        let content = &runs[from as usize];
        for at in pages {
            table.rename(
                table_key(content.pages[at]),
                Entry::new(from, content.start as usize + at),
                to,
            );
        }
    }

    /// Splits a run after its first `at` pages and returns both parts. The longer part keeps the
    /// id.
    pub(super) fn split(&mut self, run: RunId, at: usize) -> (RunId, RunId) {
        let len = self.run(run).pages.len();
        debug_assert!(0 < at && at < len, "both parts have pages");
        let id = self.add(Run::default());
        let tail_stays = len - at >= at;
        let (head, tail) = if tail_stays { (id, run) } else { (run, id) };
        self.move_entries(run, if tail_stays { 0..at } else { at..len }, id);
        let (parent, first_child) = (self.run(run).parent, self.run(run).first_child);
        self.unlink(run);
        let mut first = self.take_content(run);
        let second = first.split_off(at, self.grid);
        self.put_content(head, first);
        self.put_content(tail, second);
        self.run_mut(head).first_child = ROOT;
        self.link(parent, head);
        self.link(head, tail);
        self.run_mut(tail).first_child = first_child;
        self.set_children_parent(tail);
        (head, tail)
    }

    /// Joins a run with its child if it has exactly one and the pages fit in one run.
    fn join(&mut self, run: RunId) {
        let child = self.run(run).first_child;
        let is_only = run != ROOT && child != ROOT && self.run(child).younger == ROOT;
        let (len, more) = (self.run(run).pages.len(), self.run(child).pages.len());
        if !is_only || len + more > RUN_PAGES_MAX {
            return;
        }
        let child_stays = more > len;
        let (stays, goes) = if child_stays { (child, run) } else { (run, child) };
        self.move_entries(goes, 0..self.run(goes).pages.len(), stays);
        let (parent, first_child) = (self.run(run).parent, self.run(child).first_child);
        self.unlink(run);
        let second = self.take_content(child);
        let mut whole = self.take_content(run);
        whole.absorb(second);
        self.put_content(stays, whole);
        self.free.push(goes);
        self.link(parent, stays);
        self.run_mut(stays).first_child = first_child;
        self.set_children_parent(stays);
    }

    /// Sets the parent link of all children of a run.
    fn set_children_parent(&mut self, run: RunId) {
        let mut child = self.run(run).first_child;
        while child != ROOT {
            self.run_mut(child).parent = run;
            child = self.run(child).younger;
        }
    }

    /// Removes the pages that are resident in no tier and that no page follows, from the end of
    /// `run` upwards. Called after pages were released.
    pub(super) fn prune(&mut self, run: RunId) {
        let mut run = run;
        while run != ROOT && self.run(run).first_child == ROOT {
            let pages = &self.run(run).pages;
            let kept = pages.iter().rposition(|page| page & TIERS != 0).map_or(0, |at| at + 1);
            self.truncate_run(run, kept);
            let parent = self.run(run).parent;
            if kept > 0 {
                run = parent;
                break;
            }
            self.remove_leaf(run);
            run = parent;
        }
        self.join(run);
    }

    fn truncate_run(&mut self, run: RunId, len: usize) {
        let Self { runs, table, grid, .. } = self;
        let content = &mut runs[run as usize];
        let (depth, before) = (content.start as usize, content.bytes());
        for (at, &page) in content.pages.iter().enumerate().skip(len) {
            table.remove(table_key(page), Entry::new(run, depth + at));
        }
        self.count -= content.pages.len() - len;
        content.pages.truncate(len);
        content.sums.truncate(len);
        content.blocks.truncate(grid.blocks(depth + len) - grid.blocks(depth));
        if content.pages.capacity() > 2 * len {
            content.pages.shrink_to_fit();
            content.sums.shrink_to_fit();
            content.blocks.shrink_to_fit();
        }
        self.lists_bytes = self.lists_bytes + content.bytes() - before;
    }

    /// Removes an empty leaf run from the tree.
    fn remove_leaf(&mut self, run: RunId) {
        self.unlink(run);
        self.take_content(run);
        self.free.push(run);
    }

    /// Takes a run's content and leaves an empty run in its place.
    fn take_content(&mut self, run: RunId) -> Run {
        let taken = std::mem::take(self.run_mut(run));
        self.lists_bytes -= taken.bytes();
        taken
    }

    /// Stores a run's content where an empty run is.
    fn put_content(&mut self, run: RunId, new: Run) {
        self.lists_bytes += new.bytes();
        *self.run_mut(run) = new;
    }
}

impl Run {
    /// Returns the bytes of memory that the run's lists hold.
    pub(super) fn bytes(&self) -> usize {
        self.pages.capacity() * size_of::<u64>()
            + self.sums.capacity() * size_of::<u64>()
            + self.blocks.capacity() * size_of::<BlockHash>()
    }

    /// Keeps the first `at` pages, and returns a run with the others.
    fn split_off(&mut self, at: usize, grid: Grid) -> Self {
        let depth = self.start as usize;
        let blocks = grid.blocks(depth + at) - grid.blocks(depth);
        let sum = self.sums.get(at - 1).copied().unwrap_or(0);
        let last = blocks.checked_sub(1).map_or(self.last, |last| self.blocks[last]);
        let sums = if self.sums.is_empty() { vec![] } else { self.sums.split_off(at) };
        let second = Self {
            pages: self.pages.split_off(at),
            sums,
            blocks: self.blocks.split_off(blocks),
            last,
            sum,
            start: u32::try_from(depth + at).expect("a depth in the tree fits in a u32"),
            ..Self::default()
        };
        self.pages.shrink_to_fit();
        self.sums.shrink_to_fit();
        self.blocks.shrink_to_fit();
        second
    }

    /// Appends the pages of the run that follows.
    fn absorb(&mut self, other: Self) {
        self.pages.reserve_exact(other.pages.len());
        self.pages.extend(other.pages);
        self.sums.reserve_exact(other.sums.len());
        self.sums.extend(other.sums);
        self.blocks.reserve_exact(other.blocks.len());
        self.blocks.extend(other.blocks);
    }
}

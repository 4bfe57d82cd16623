//! Creates, grows, splits, joins and removes the runs of [`Pages`], which form a tree.
//!
//! Each change here keeps four things consistent: the runs' pages, their blocks, the links between
//! runs, and the table that finds a page's run.

use std::ops::Range;

use blocks::{
    block::BlockHash,
    table::{Entry, RunId},
};

use super::{
    Error, Grid, Pages, Position, ROOT, RUN_PAGES_MAX, Run, Stored, TIER_BITS, table_key,
    without_tier_bits,
};

pub(super) struct Appended {
    pub(super) end: Position,
    /// `None` if all pages that fit were appended.
    pub(super) rejection: Option<Error>,
}

impl Pages {
    /// The page at `from` must be unknown, and `position` the end of a run. Appends at most as many
    /// pages as fit in one run, and doesn't mark them resident.
    pub(super) fn append(&mut self, position: Position, stored: &Stored, from: usize) -> Appended {
        let mut chain = self.resume_chain(position, stored);
        let is_leaf_with_room = position.run != ROOT
            && self.run(position.run).first_child == ROOT
            && position.pages_before < RUN_PAGES_MAX;
        let run = if is_leaf_with_room {
            position.run
        } else {
            self.add_child(position.run, chain.last_hash(), chain.partial_sum())
        };
        let run_start = self.run(run).start_page as usize;
        let page_tokens = stored.page_tokens as usize;
        let (mut tokens, mut rejection) = (Vec::with_capacity(page_tokens), None);
        let room = RUN_PAGES_MAX - self.run(run).pages.len();
        let bytes_before = self.run(run).bytes();
        let pages = stored.pages.iter().zip(stored.tokens.chunks(page_tokens));
        self.reserve(run, room.min(stored.pages.len() - from));
        for (&page, event_tokens) in pages.skip(from).take(room) {
            tokens.clear();
            tokens.extend(event_tokens.iter().map_while(|&token| u32::try_from(token).ok()));
            let index = self.run(run).pages.len();
            if tokens.len() < page_tokens {
                rejection = Some(Error::WideToken);
            } else if self.page_count == self.pages_max.total() {
                rejection = Some(Error::TooManyPages(self.pages_max.total()));
            } else if self.find_page(page).is_some() {
                rejection = Some(Error::OtherParent);
            }
            if rejection.is_some() {
                break;
            }
            let page_is_block = self.grid.page_is_block();
            let content = &mut self.runs[run as usize];
            chain.push(&tokens, &mut content.blocks);
            content.pages.push(without_tier_bits(page));
            if !page_is_block {
                content.open_sums.push(chain.partial_sum());
            }
            self.table.insert(table_key(page.0), Entry::new(run, run_start + index), |_| false);
            self.page_count += 1;
        }
        self.lists_bytes = self.lists_bytes + self.run(run).bytes() - bytes_before;
        let end = Position { run, pages_before: self.run(run).pages.len() };
        if end.pages_before == 0 {
            self.remove_leaf(run);
        }
        Appended { end, rejection }
    }

    /// A list that must grow also gets a sixteenth of its length as reserve, because the next turn
    /// of the same session appends pages too. `Vec` itself would double the list and leave up to
    /// half of it unused.
    fn reserve(&mut self, run: RunId, pages: usize) {
        fn reserve_in<T>(list: &mut Vec<T>, more: usize) {
            if list.capacity() < list.len() + more {
                list.reserve_exact(more + list.len() / 16);
            }
        }
        let (grid, content) = (self.grid, &mut self.runs[run as usize]);
        let depth = content.start_page as usize + content.pages.len();
        reserve_in(&mut content.pages, pages);
        reserve_in(
            &mut content.blocks,
            grid.blocks_ended_in(depth + pages) - grid.blocks_ended_in(depth),
        );
        if !grid.page_is_block() {
            reserve_in(&mut content.open_sums, pages);
        }
    }

    fn add_child(&mut self, parent: RunId, block_before: BlockHash, open_sum_before: u64) -> RunId {
        let content = self.run(parent);
        let start_page = content.start_page as usize + content.pages.len();
        let start_page = u32::try_from(start_page).expect("no prompt has four billion pages");
        let child = Run { block_before, open_sum_before, start_page, ..Run::default() };
        let run = self.add_unlinked(child);
        self.link(parent, run);
        run
    }

    fn add_unlinked(&mut self, run: Run) -> RunId {
        if let Some(id) = self.free_ids.pop() {
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

    fn link(&mut self, parent: RunId, run: RunId) {
        let next_sibling = self.run(parent).first_child;
        let content = self.run_mut(run);
        (content.parent, content.previous_sibling, content.next_sibling) =
            (parent, ROOT, next_sibling);
        if next_sibling != ROOT {
            self.run_mut(next_sibling).previous_sibling = run;
        }
        self.run_mut(parent).first_child = run;
    }

    fn unlink(&mut self, run: RunId) {
        let Run { parent, previous_sibling, next_sibling, .. } = *self.run(run);
        if previous_sibling == ROOT {
            self.run_mut(parent).first_child = next_sibling;
        } else {
            self.run_mut(previous_sibling).next_sibling = next_sibling;
        }
        if next_sibling != ROOT {
            self.run_mut(next_sibling).previous_sibling = previous_sibling;
        }
    }

    pub(super) fn children(&self, run: RunId) -> impl Iterator<Item = RunId> {
        let some = |run: RunId| (run != ROOT).then_some(run);
        std::iter::successors(some(self.run(run).first_child), move |&run| {
            some(self.run(run).next_sibling)
        })
    }

    /// The walk visits a run before its children.
    pub(super) fn next_run(&self, run: RunId) -> Option<RunId> {
        if self.run(run).first_child != ROOT {
            return Some(self.run(run).first_child);
        }
        let mut run = run;
        while run != ROOT && self.run(run).next_sibling == ROOT {
            run = self.run(run).parent;
        }
        (run != ROOT).then(|| self.run(run).next_sibling)
    }

    /// `pages` are indexes in `from`.
    fn move_entries(&mut self, from: RunId, pages: Range<usize>, to: RunId) {
        let Self { runs, table, .. } = self;
        let content = &runs[from as usize];
        for index in pages {
            table.set_run(
                table_key(content.pages[index]),
                Entry::new(from, content.start_page as usize + index),
                to,
            );
        }
    }

    /// Returns the head and the tail. The longer one keeps the run's id, because each page of the
    /// other needs a new table entry.
    pub(super) fn split(&mut self, run: RunId, head_len: usize) -> (RunId, RunId) {
        let len = self.run(run).pages.len();
        debug_assert!(0 < head_len && head_len < len, "both parts have pages");
        let new_id = self.add_unlinked(Run::default());
        let tail_keeps_id = len - head_len >= head_len;
        let (head, tail) = if tail_keeps_id { (new_id, run) } else { (run, new_id) };
        self.move_entries(run, if tail_keeps_id { 0..head_len } else { head_len..len }, new_id);
        let (parent, first_child) = (self.run(run).parent, self.run(run).first_child);
        self.unlink(run);
        let mut head_content = self.take_content(run);
        let tail_content = head_content.split_off(head_len, self.grid);
        self.put_content(head, head_content);
        self.put_content(tail, tail_content);
        self.run_mut(head).first_child = ROOT;
        self.link(parent, head);
        self.link(head, tail);
        self.run_mut(tail).first_child = first_child;
        self.set_children_parent(tail);
        (head, tail)
    }

    /// Joins only if the pages of both fit in one run. The longer run's id stays in use.
    fn join_only_child(&mut self, run: RunId) {
        let child = self.run(run).first_child;
        let has_only_child = run != ROOT && child != ROOT && self.run(child).next_sibling == ROOT;
        let (len, child_len) = (self.run(run).pages.len(), self.run(child).pages.len());
        if !has_only_child || len + child_len > RUN_PAGES_MAX {
            return;
        }
        let (kept_id, freed_id) = if child_len > len { (child, run) } else { (run, child) };
        self.move_entries(freed_id, 0..self.run(freed_id).pages.len(), kept_id);
        let (parent, first_child) = (self.run(run).parent, self.run(child).first_child);
        self.unlink(run);
        let child_content = self.take_content(child);
        let mut joined = self.take_content(run);
        joined.absorb(child_content);
        self.put_content(kept_id, joined);
        self.free_ids.push(freed_id);
        self.link(parent, kept_id);
        self.run_mut(kept_id).first_child = first_child;
        self.set_children_parent(kept_id);
    }

    fn set_children_parent(&mut self, run: RunId) {
        let mut child = self.run(run).first_child;
        while child != ROOT {
            self.run_mut(child).parent = run;
            child = self.run(child).next_sibling;
        }
    }

    /// Removes pages that are resident in no tier, from the end of `run` back into its parents, up
    /// to a resident page, a run that has children, or the root. A page that isn't resident is kept
    /// if a tracked page follows it, because the position of the following page depends on it.
    pub(super) fn prune(&mut self, run: RunId) {
        let mut run = run;
        while run != ROOT && self.run(run).first_child == ROOT {
            let pages = &self.run(run).pages;
            let last_resident = pages.iter().rposition(|page| page & TIER_BITS != 0);
            let kept = last_resident.map_or(0, |index| index + 1);
            self.truncate_run(run, kept);
            let parent = self.run(run).parent;
            if kept > 0 {
                run = parent;
                break;
            }
            self.remove_leaf(run);
            run = parent;
        }
        self.join_only_child(run);
    }

    fn truncate_run(&mut self, run: RunId, len: usize) {
        let Self { runs, table, grid, .. } = self;
        let content = &mut runs[run as usize];
        let (run_start, bytes_before) = (content.start_page as usize, content.bytes());
        for (index, &page) in content.pages.iter().enumerate().skip(len) {
            table.remove(table_key(page), Entry::new(run, run_start + index));
        }
        self.page_count -= content.pages.len() - len;
        content.pages.truncate(len);
        content.open_sums.truncate(len);
        content
            .blocks
            .truncate(grid.blocks_ended_in(run_start + len) - grid.blocks_ended_in(run_start));
        if content.pages.capacity() > 2 * len {
            content.pages.shrink_to_fit();
            content.open_sums.shrink_to_fit();
            content.blocks.shrink_to_fit();
        }
        self.lists_bytes = self.lists_bytes + content.bytes() - bytes_before;
    }

    /// The run has no pages any more.
    fn remove_leaf(&mut self, run: RunId) {
        self.unlink(run);
        self.take_content(run);
        self.free_ids.push(run);
    }

    /// Leaves an empty run in its place.
    fn take_content(&mut self, run: RunId) -> Run {
        let taken = std::mem::take(self.run_mut(run));
        self.lists_bytes -= taken.bytes();
        taken
    }

    /// The run at this id is empty before.
    fn put_content(&mut self, run: RunId, content: Run) {
        self.lists_bytes += content.bytes();
        *self.run_mut(run) = content;
    }
}

impl Run {
    pub(super) fn bytes(&self) -> usize {
        self.pages.capacity() * size_of::<u64>()
            + self.open_sums.capacity() * size_of::<u64>()
            + self.blocks.capacity() * size_of::<BlockHash>()
    }

    fn split_off(&mut self, head_len: usize, grid: Grid) -> Self {
        let run_start = self.start_page as usize;
        let tail_start = run_start + head_len;
        let head_blocks = grid.blocks_ended_in(tail_start) - grid.blocks_ended_in(run_start);
        let open_sum_before = self.open_sums.get(head_len - 1).copied().unwrap_or(0);
        let block_before =
            head_blocks.checked_sub(1).map_or(self.block_before, |index| self.blocks[index]);
        let has_sums = !self.open_sums.is_empty();
        let tail = Self {
            pages: self.pages.split_off(head_len),
            open_sums: if has_sums { self.open_sums.split_off(head_len) } else { vec![] },
            blocks: self.blocks.split_off(head_blocks),
            block_before,
            open_sum_before,
            start_page: u32::try_from(tail_start).expect("a depth in the tree fits in a u32"),
            ..Self::default()
        };
        self.pages.shrink_to_fit();
        self.open_sums.shrink_to_fit();
        self.blocks.shrink_to_fit();
        tail
    }

    /// `other` begins where this run ends.
    fn absorb(&mut self, other: Self) {
        self.pages.reserve_exact(other.pages.len());
        self.pages.extend(other.pages);
        self.open_sums.reserve_exact(other.open_sums.len());
        self.open_sums.extend(other.open_sums);
        self.blocks.reserve_exact(other.blocks.len());
        self.blocks.extend(other.blocks);
    }
}

//! Marks pages of [`Pages`] as resident or gone, and finds the blocks that change with them.
//!
//! A block may begin in one run and end in a descendant of that run, which stores its hash. A
//! *block number* counts the blocks of a prompt from 0. A *block index* counts those that end in
//! one run from 0. Indexes of pages are in their run.

use std::ops::Range;

use blocks::{block::Tier, kv::Change, table::RunId};

use super::{Pages, ROOT, tier_bit};

impl Pages {
    pub(super) fn mark_resident(
        &mut self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
        changes: &mut Vec<Change>,
    ) {
        for new_pages in self.page_ranges_where(run, pages, |page| page & tier_bit(tier) == 0) {
            for page in &mut self.run_mut(run).pages[new_pages.clone()] {
                *page |= tier_bit(tier);
            }
            *self.resident.in_tier_mut(tier) += new_pages.len();
            let new_blocks = self.resident_block_ranges(run, new_pages, tier).into_iter();
            changes.extend(new_blocks.map(|(run, blocks)| self.stored_change(run, blocks, tier)));
        }
    }

    pub(super) fn mark_gone(
        &mut self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
        changes: &mut Vec<Change>,
    ) {
        for gone_pages in self.page_ranges_where(run, pages, |page| page & tier_bit(tier) != 0) {
            for (run, blocks) in self.resident_block_ranges(run, gone_pages.clone(), tier) {
                let blocks = self.run(run).blocks[blocks].to_vec();
                changes.push(Change::Removed { tier, blocks });
            }
            *self.resident.in_tier_mut(tier) -= gone_pages.len();
            for page in &mut self.run_mut(run).pages[gone_pages] {
                *page &= !tier_bit(tier);
            }
        }
        self.prune(run);
    }

    /// The blocks of a run come before those of its child runs.
    pub fn snapshot(&self) -> impl Iterator<Item = Change> {
        let runs = std::iter::successors(self.next_run(ROOT), |&run| self.next_run(run));
        let runs_and_tiers = runs.flat_map(|run| [(run, Tier::Device), (run, Tier::Host)]);
        runs_and_tiers.flat_map(move |(run, tier)| {
            let first_block = self.grid.blocks_ended_in(self.run(run).start_page as usize);
            let run_blocks = first_block..first_block + self.run(run).blocks.len();
            let mut resident = vec![];
            self.collect_resident_ranges(run, run_blocks, tier, &mut resident);
            resident.into_iter().map(move |(run, blocks)| self.stored_change(run, blocks, tier))
        })
    }

    /// `blocks` are block indexes in [`Run::blocks`](super::Run::blocks).
    fn stored_change(&self, run: RunId, blocks: Range<usize>, tier: Tier) -> Change {
        let content = self.run(run);
        let blocks_before_run = self.grid.blocks_ended_in(content.start_page as usize);
        let parent = match blocks.start.checked_sub(1) {
            Some(index) => Some(content.blocks[index]),
            None => (blocks_before_run > 0).then_some(content.block_before),
        };
        Change::Stored { tier, parent, blocks: content.blocks[blocks].to_vec() }
    }

    /// `matches` gets a page's hash with its tier bits.
    fn page_ranges_where(
        &self,
        run: RunId,
        pages: Range<usize>,
        matches: impl Fn(u64) -> bool,
    ) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = vec![];
        for index in pages.filter(|&index| matches(self.run(run).pages[index])) {
            match ranges.last_mut() {
                Some(range) if range.end == index => range.end += 1,
                _ => ranges.push(index..index + 1),
            }
        }
        ranges
    }

    /// Returns the resident blocks that contain tokens of `pages`: runs, each with a range of block
    /// indexes in it.
    fn resident_block_ranges(
        &self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
    ) -> Vec<(RunId, Range<usize>)> {
        let start = self.run(run).start_page as usize;
        let touched_blocks = self.grid.blocks_touching(start + pages.start, start + pages.end);
        let mut resident_ranges = vec![];
        self.collect_resident_ranges(run, touched_blocks, tier, &mut resident_ranges);
        resident_ranges
    }

    /// `blocks` are block numbers, and end in `run` or in its descendants. Descendants on different
    /// branches have blocks with the same number: all of these are checked.
    fn collect_resident_ranges(
        &self,
        run: RunId,
        blocks: Range<usize>,
        tier: Tier,
        resident_ranges: &mut Vec<(RunId, Range<usize>)>,
    ) {
        let content = self.run(run);
        let first_block = self.grid.blocks_ended_in(content.start_page as usize);
        let end_block = first_block + content.blocks.len();
        for block in blocks.start..blocks.end.min(end_block) {
            if !self.is_block_resident(run, block, tier) {
                continue;
            }
            let index = block - first_block;
            match resident_ranges.last_mut() {
                Some((last_run, range)) if *last_run == run && range.end == index => range.end += 1,
                _ => resident_ranges.push((run, index..index + 1)),
            }
        }
        if blocks.end > end_block {
            for child in self.children(run) {
                self.collect_resident_ranges(child, end_block..blocks.end, tier, resident_ranges);
            }
        }
    }

    /// The block ends in `run`.
    fn is_block_resident(&self, run: RunId, block: usize, tier: Tier) -> bool {
        let mut run = run;
        self.grid.pages_of(block).rev().all(|page| {
            while page < self.run(run).start_page as usize {
                run = self.run(run).parent;
            }
            let content = self.run(run);
            content.pages[page - content.start_page as usize] & tier_bit(tier) != 0
        })
    }
}

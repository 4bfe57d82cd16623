//! Marks pages of [`Pages`] as resident or gone, and finds the blocks that change with them.
//!
//! A block is resident in a tier while all its pages are. A block may begin in one run and end in
//! a descendant of that run. The run in which it ends stores its hash.

use std::ops::Range;

use proto::{block::Tier, table::RunId};

use super::{Delta, Pages, ROOT, tier_bit};

impl Pages {
    /// Marks pages of a run as resident in `tier`, and appends the blocks that this completes to
    /// `deltas`. `pages` are indexes in the run.
    pub(super) fn mark_resident(
        &mut self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
        deltas: &mut Vec<Delta>,
    ) {
        for new_pages in self.ranges_where(run, pages, |page| page & tier_bit(tier) == 0) {
            for page in &mut self.run_mut(run).pages[new_pages.clone()] {
                *page |= tier_bit(tier);
            }
            let completed = self.resident_blocks(run, new_pages, tier);
            let stored = completed.into_iter().map(|(run, blocks)| self.stored(run, blocks, tier));
            deltas.extend(stored);
        }
    }

    /// Marks pages of a run as no longer resident in `tier`, and appends the blocks that this
    /// breaks to `deltas`. `pages` are indexes in the run.
    pub(super) fn mark_gone(
        &mut self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
        deltas: &mut Vec<Delta>,
    ) {
        for gone_pages in self.ranges_where(run, pages, |page| page & tier_bit(tier) != 0) {
            for (run, blocks) in self.resident_blocks(run, gone_pages.clone(), tier) {
                let blocks = self.run(run).blocks[blocks].to_vec();
                deltas.push(Delta::Removed { tier, blocks });
            }
            for page in &mut self.run_mut(run).pages[gone_pages] {
                *page &= !tier_bit(tier);
            }
        }
        self.prune(run);
    }

    /// Returns all resident blocks as stored, parents before children.
    pub fn snapshot(&self) -> impl Iterator<Item = Delta> {
        let runs = std::iter::successors(self.next_run(ROOT), |&run| self.next_run(run));
        let runs_and_tiers = runs.flat_map(|run| [(run, Tier::Device), (run, Tier::Host)]);
        runs_and_tiers.flat_map(move |(run, tier)| {
            let first = self.grid.blocks_ended_in(self.run(run).start as usize);
            let mut found = vec![];
            self.collect_resident(run, first..first + self.run(run).blocks.len(), tier, &mut found);
            found.into_iter().map(move |(run, blocks)| self.stored(run, blocks, tier))
        })
    }

    /// Returns the change that reports blocks of a run as resident. `blocks` are indexes in
    /// [`Run::blocks`](super::Run::blocks).
    fn stored(&self, run: RunId, blocks: Range<usize>, tier: Tier) -> Delta {
        let content = self.run(run);
        let blocks_before_run = self.grid.blocks_ended_in(content.start as usize);
        let parent = match blocks.start.checked_sub(1) {
            Some(index) => Some(content.blocks[index]),
            None => (blocks_before_run > 0).then_some(content.block_before),
        };
        Delta::Stored { tier, parent, blocks: content.blocks[blocks].to_vec() }
    }

    /// Returns the page indexes of `pages` that satisfy `matches`, as ranges that are as long as
    /// possible.
    fn ranges_where(
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

    /// Returns the resident blocks that contain tokens of the pages with these indexes in `run`.
    /// Each entry is a run and a range of indexes in its list of blocks.
    fn resident_blocks(
        &self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
    ) -> Vec<(RunId, Range<usize>)> {
        let start = self.run(run).start as usize;
        let touched = self.grid.blocks_touching(start + pages.start, start + pages.end);
        let mut found = vec![];
        self.collect_resident(run, touched, tier, &mut found);
        found
    }

    /// Appends the resident ones of `blocks` to `found`, as [`Self::resident_blocks`] returns them.
    /// `blocks` are block numbers counted from the root. These blocks end in `run` or in its
    /// descendants, so one number can stand for several blocks.
    fn collect_resident(
        &self,
        run: RunId,
        blocks: Range<usize>,
        tier: Tier,
        found: &mut Vec<(RunId, Range<usize>)>,
    ) {
        let content = self.run(run);
        let first = self.grid.blocks_ended_in(content.start as usize);
        let end = first + content.blocks.len();
        for block in blocks.start..blocks.end.min(end) {
            if !self.is_resident(run, block, tier) {
                continue;
            }
            let index = block - first;
            match found.last_mut() {
                Some((last_run, range)) if *last_run == run && range.end == index => range.end += 1,
                _ => found.push((run, index..index + 1)),
            }
        }
        if blocks.end > end {
            for child in self.children(run) {
                self.collect_resident(child, end..blocks.end, tier, found);
            }
        }
    }

    /// Whether all pages of block number `block` are resident in `tier`. The block ends in `run`.
    fn is_resident(&self, run: RunId, block: usize, tier: Tier) -> bool {
        let mut run = run;
        self.grid.pages_of(block).rev().all(|page| {
            while page < self.run(run).start as usize {
                run = self.run(run).parent;
            }
            let content = self.run(run);
            content.pages[page - content.start as usize] & tier_bit(tier) != 0
        })
    }
}

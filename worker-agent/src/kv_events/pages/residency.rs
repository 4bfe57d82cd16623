//! Marks pages of [`Pages`] as resident or gone, and finds the blocks that change with them.
//!
//! A page of the engine's KV cache can be resident in two *tiers*: GPU memory and host memory. A
//! block, the unit that routers count in, is resident in a tier while all its pages are. The pages
//! are in *runs*, unbranched parts of the tree of known prompts. A block may begin in one run and
//! end in a descendant of that run. The run in which it ends stores its hash.

use std::ops::Range;

use proto::{block::Tier, table::RunId};

use super::{Delta, Pages, ROOT, tier_bit};

impl Pages {
    /// Marks pages of a run as resident in `tier`. Appends the blocks that become resident by this
    /// to `deltas`. `pages` are indexes in the run.
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
            let new_blocks = self.resident_blocks(run, new_pages, tier).into_iter();
            deltas.extend(new_blocks.map(|(run, blocks)| self.stored_delta(run, blocks, tier)));
        }
    }

    /// Marks pages of a run as no longer resident in `tier`. Appends the blocks that are no longer
    /// resident by this to `deltas`. `pages` are indexes in the run.
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

    /// Returns the changes that report all resident blocks, to a router that knows none. The blocks
    /// of a run come before those of its child runs.
    pub fn snapshot(&self) -> impl Iterator<Item = Delta> {
        let runs = std::iter::successors(self.next_run(ROOT), |&run| self.next_run(run));
        let runs_and_tiers = runs.flat_map(|run| [(run, Tier::Device), (run, Tier::Host)]);
        runs_and_tiers.flat_map(move |(run, tier)| {
            let first_block = self.grid.blocks_ended_in(self.run(run).start as usize);
            let run_blocks = first_block..first_block + self.run(run).blocks.len();
            let mut resident = vec![];
            self.collect_resident(run, run_blocks, tier, &mut resident);
            resident.into_iter().map(move |(run, blocks)| self.stored_delta(run, blocks, tier))
        })
    }

    /// Returns the change that reports blocks of a run as resident. `blocks` are indexes in
    /// [`Run::blocks`](super::Run::blocks).
    fn stored_delta(&self, run: RunId, blocks: Range<usize>, tier: Tier) -> Delta {
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
        let mut resident = vec![];
        self.collect_resident(run, touched, tier, &mut resident);
        resident
    }

    /// Appends the resident ones of `blocks` to `resident`, in the form of
    /// [`Self::resident_blocks`]. `blocks` are block numbers counted from the root, and the blocks
    /// end in `run` or in its descendants. Descendants on different branches have blocks with the
    /// same number, and all of these are checked.
    fn collect_resident(
        &self,
        run: RunId,
        blocks: Range<usize>,
        tier: Tier,
        resident: &mut Vec<(RunId, Range<usize>)>,
    ) {
        let content = self.run(run);
        let first_block = self.grid.blocks_ended_in(content.start as usize);
        let end_block = first_block + content.blocks.len();
        for block in blocks.start..blocks.end.min(end_block) {
            if !self.is_resident(run, block, tier) {
                continue;
            }
            let index = block - first_block;
            match resident.last_mut() {
                Some((last_run, range)) if *last_run == run && range.end == index => range.end += 1,
                _ => resident.push((run, index..index + 1)),
            }
        }
        if blocks.end > end_block {
            for child in self.children(run) {
                self.collect_resident(child, end_block..blocks.end, tier, resident);
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

//! Marks pages as resident or not, and finds the blocks that change with them.

use std::ops::Range;

use proto::{block::Tier, table::RunId};

use super::{Delta, Pages, ROOT, tier_bit};

impl Pages {
    /// Marks pages of a run as resident, and reports the blocks that this completes.
    pub(super) fn mark_resident(
        &mut self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
        deltas: &mut Vec<Delta>,
    ) {
        for part in self.ranges_where(run, pages, |page| page & tier_bit(tier) == 0) {
            for page in &mut self.run_mut(run).pages[part.clone()] {
                *page |= tier_bit(tier);
            }
            let found = self.resident_blocks(run, part, tier);
            deltas.extend(found.into_iter().map(|(run, blocks)| self.delta(run, blocks, tier)));
        }
    }

    /// Marks pages of a run as no longer resident, and reports the blocks that were.
    pub(super) fn mark_gone(
        &mut self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
        deltas: &mut Vec<Delta>,
    ) {
        for part in self.ranges_where(run, pages, |page| page & tier_bit(tier) != 0) {
            for (run, blocks) in self.resident_blocks(run, part.clone(), tier) {
                let blocks = self.run(run).blocks[blocks].to_vec();
                deltas.push(Delta::Removed { tier, blocks });
            }
            for page in &mut self.run_mut(run).pages[part] {
                *page &= !tier_bit(tier);
            }
        }
        self.prune(run);
    }

    /// Returns everything that is resident, in prefix order.
    pub fn snapshot(&self) -> impl Iterator<Item = Delta> {
        let runs = std::iter::successors(self.next_run(ROOT), |&run| self.next_run(run));
        let all = runs.flat_map(|run| [(run, Tier::Device), (run, Tier::Host)]);
        all.flat_map(move |(run, tier)| {
            let first = self.grid.blocks(self.run(run).start as usize);
            let mut found = vec![];
            self.collect(run, first..first + self.run(run).blocks.len(), tier, &mut found);
            found.into_iter().map(move |(run, blocks)| self.delta(run, blocks, tier))
        })
    }

    /// Returns the change that reports blocks of a run as resident.
    fn delta(&self, run: RunId, blocks: Range<usize>, tier: Tier) -> Delta {
        let content = self.run(run);
        let parent = match blocks.start.checked_sub(1) {
            Some(at) => Some(content.blocks[at]),
            None => (self.grid.blocks(content.start as usize) > 0).then_some(content.last),
        };
        Delta::Stored { tier, parent, blocks: content.blocks[blocks].to_vec() }
    }

    /// Returns the maximal ranges within `pages` whose pages all satisfy `matches`.
    fn ranges_where(
        &self,
        run: RunId,
        pages: Range<usize>,
        matches: impl Fn(u64) -> bool,
    ) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = vec![];
        for at in pages.filter(|&at| matches(self.run(run).pages[at])) {
            match parts.last_mut() {
                Some(part) if part.end == at => part.end += 1,
                _ => parts.push(at..at + 1),
            }
        }
        parts
    }

    /// Returns the resident blocks that contain tokens of some pages: for each run, the range of
    /// blocks that end in it.
    fn resident_blocks(
        &self,
        run: RunId,
        pages: Range<usize>,
        tier: Tier,
    ) -> Vec<(RunId, Range<usize>)> {
        let start = self.run(run).start as usize;
        let over = self.grid.blocks_over(start + pages.start, start + pages.end);
        let mut found = vec![];
        self.collect(run, over, tier, &mut found);
        found
    }

    /// Adds the resident blocks of a range to `found`. The blocks end in `run` or in its
    /// descendants.
    fn collect(
        &self,
        run: RunId,
        blocks: Range<usize>,
        tier: Tier,
        found: &mut Vec<(RunId, Range<usize>)>,
    ) {
        let content = self.run(run);
        let first = self.grid.blocks(content.start as usize);
        let end = first + content.blocks.len();
        for block in blocks.start..blocks.end.min(end) {
            if !self.is_resident(run, block, tier) {
                continue;
            }
            let at = block - first;
            match found.last_mut() {
                Some((last, places)) if *last == run && places.end == at => places.end += 1,
                _ => found.push((run, at..at + 1)),
            }
        }
        if blocks.end > end {
            for child in self.children(run) {
                self.collect(child, end..blocks.end, tier, found);
            }
        }
    }

    /// Whether all pages of a block are resident. The block ends in `run`.
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

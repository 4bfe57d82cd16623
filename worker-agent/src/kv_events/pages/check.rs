//! Checks the invariants of [`Pages`], which tracks the resident pages of one rank, for its tests.

use std::collections::HashSet;

use blocks::{
    block::Tier,
    table::{Entry, RunId},
};

use super::{Pages, ROOT, RUN_PAGES_MAX, Run, TIER_BITS, table_key, tier_bit};

impl Pages {
    pub fn check_invariants(&self) {
        let runs: Vec<RunId> =
            std::iter::successors(self.next_run(ROOT), |&run| self.next_run(run)).collect();
        let used: HashSet<RunId> = runs.iter().copied().collect();
        let free: HashSet<RunId> = self.free_ids.iter().copied().collect();
        assert_eq!(used.len(), runs.len(), "a run is in the tree once");
        assert_eq!(free.len(), self.free_ids.len(), "a run is free once");
        assert!(used.is_disjoint(&free), "a free run is not in the tree");
        assert_eq!(used.len() + free.len() + 1, self.runs.len(), "every run is used or free");
        runs.iter().for_each(|&run| self.check_run(run));
        let page_count: usize = runs.iter().map(|&run| self.run(run).pages.len()).sum();
        assert_eq!(self.page_count, page_count, "distinct pages");
        assert_eq!(self.table.entry_count(), page_count, "distinct pages");
        assert!(self.page_count <= self.pages_max.total(), "the bound holds");
        for tier in [Tier::Device, Tier::Host] {
            let is_resident = |page: &&u64| **page & tier_bit(tier) != 0;
            let in_run = |&run: &RunId| self.run(run).pages.iter().filter(is_resident).count();
            let resident: usize = runs.iter().map(in_run).sum();
            assert_eq!(self.resident.in_tier(tier), resident, "pages in {tier:?}");
        }
        let bytes: usize = self.runs.iter().map(Run::bytes).sum();
        assert_eq!(self.lists_bytes, bytes, "bytes of all runs' lists, free runs included");
    }

    fn check_run(&self, run: RunId) {
        let (checked_run, grid) = (self.run(run), self.grid);
        let len = checked_run.pages.len();
        assert!((1..=RUN_PAGES_MAX).contains(&len), "run {run} has {len} pages");
        let parent = self.run(checked_run.parent);
        let is_child = self.children(checked_run.parent).any(|child| child == run);
        assert!(is_child, "run {run} has a parent");
        let start = parent.start_page as usize + parent.pages.len();
        let start_page = checked_run.start_page as usize;
        assert_eq!(start_page, start, "run {run} begins where its parent ends");
        if checked_run.first_child == ROOT {
            assert!(
                checked_run.pages[len - 1] & TIER_BITS != 0,
                "leaf run {run} ends with a resident page"
            );
        }
        let sums_expected = if grid.page_is_block() { 0 } else { len };
        assert_eq!(
            checked_run.open_sums.len(),
            sums_expected,
            "a sum for each page, unless pages are blocks"
        );
        assert_eq!(
            checked_run.blocks.len(),
            grid.blocks_ended_in(start + len) - grid.blocks_ended_in(start),
            "run {run}"
        );
        if checked_run.parent != ROOT {
            let last_block = parent.blocks.last().copied().unwrap_or(parent.block_before);
            assert_eq!(checked_run.block_before, last_block);
            assert_eq!(checked_run.open_sum_before, parent.open_sums.last().copied().unwrap_or(0));
        }
        for (index, &page) in checked_run.pages.iter().enumerate() {
            let entry = Entry::new(run, start + index);
            let is_entry = |found: Entry| (found == entry).then_some(());
            let found = self.table.find(table_key(page), is_entry);
            assert!(found.is_some(), "page {index} of run {run}");
        }
    }
}

//! Checks the invariants of the overlap index's tree of blocks, for tests.

use std::collections::{HashMap, HashSet};

use crate::{
    block::Tier,
    table::{Entry, RunId},
};

use super::{super::worker_set::WorkerSet, Children, ROOT, RUN_BLOCKS_MAX, Tree};

impl Tree {
    /// Computes again from the runs what the tree keeps beside them.
    pub(in super::super) fn check_invariants(&self) {
        let free_ids: HashSet<RunId> = self.free_ids.iter().copied().collect();
        assert_eq!(free_ids.len(), self.free_ids.len(), "a run is in the free list only once");
        let ids = (1..self.runs.len()).map(|id| RunId::try_from(id).expect("ids are u32"));
        let used_runs: Vec<RunId> = ids.filter(|run| !free_ids.contains(run)).collect();
        let mut children: HashMap<RunId, Children> = HashMap::new();
        let (mut block_count, mut heap_bytes, mut host_blocks) = (0, 0, 0);
        let mut resident_blocks = vec![0; self.resident_blocks.len()];
        for &run in &used_runs {
            self.check_run(run);
            let this = &self[run];
            children.entry(this.parent).or_default().add(run);
            block_count += this.blocks.len();
            heap_bytes += this.heap_bytes();
            for tier in [Tier::Device, Tier::Host] {
                for hold in this.holders(tier).into_iter().flat_map(WorkerSet::iter) {
                    resident_blocks[usize::from(hold.slot)] += u64::from(hold.prefix_len);
                    host_blocks += if tier == Tier::Host { u64::from(hold.prefix_len) } else { 0 };
                }
            }
        }
        for run in used_runs.iter().copied().chain([ROOT]) {
            let (stored, counted) = (self.children[run as usize], children.remove(&run));
            let counted = counted.unwrap_or_default();
            let (stored, counted) =
                ((stored.count, stored.ids_xor), (counted.count, counted.ids_xor));
            assert_eq!(stored, counted, "children of run {run}");
        }
        let leaves: HashSet<RunId> = used_runs
            .iter()
            .copied()
            .filter(|&run| self.children[run as usize].count == 0)
            .collect();
        assert_eq!(self.lru.iter().collect::<HashSet<_>>(), leaves, "the list has all leaves");
        assert_eq!(self.lru.iter().count(), leaves.len(), "the list has each leaf once");
        let entries =
            used_runs.iter().map(|&run| self[run].entries(run, 0..self[run].blocks.len()).count());
        assert_eq!(self.table.entry_count(), entries.sum::<usize>(), "number of table entries");
        assert_eq!(self.block_count, block_count, "distinct blocks");
        assert_eq!(self.heap_bytes, heap_bytes, "memory of runs");
        assert_eq!(
            (&self.resident_blocks, self.host_blocks),
            (&resident_blocks, host_blocks),
            "resident blocks"
        );
    }

    fn check_run(&self, run: RunId) {
        let this = &self[run];
        let len = this.blocks.len();
        assert!((1..=RUN_BLOCKS_MAX).contains(&len), "run {run} has {len} blocks");
        assert!(this.held_len() <= len, "no holder has more of run {run} than its blocks");
        let parent = &self[this.parent];
        let depth = parent.depth as usize + parent.blocks.len();
        assert_eq!(this.depth as usize, depth, "run {run} begins where its parent ends");
        if self.children[run as usize].count == 0 {
            assert_eq!(this.held_len(), len, "a holder has the last block of leaf run {run}");
        }
        assert!(this.host.as_ref().is_none_or(|host| !host.is_empty()), "run {run}: empty host");
        for (index, key, entry) in this.entries(run, 0..len) {
            let is_entry = |proposed: Entry| (proposed == entry).then_some(());
            let is_in_table = self.table.find(key, is_entry).is_some();
            assert!(is_in_table, "block {index} of run {run} is in the table");
        }
        for (index, &block) in this.blocks.iter().enumerate() {
            let (found_run, found_index) = self.find(block).expect("every block is found");
            assert_eq!(self[found_run].blocks[found_index], block, "block {index} of run {run}");
        }
    }
}

//! Defines the trait [`Backend`], by which an accountant audits a pool in host or device memory.
//!
//! All backends return the same [`Counts`]. A backend doesn't say which pages have faults;
//! [`crate::audit`] does. The *valid rows* are those that didn't change while they were copied.

use super::{Error, Pool, Stream, snapshot::Snapshot};
use crate::{
    audit::{PoolCopy, ValidRows},
    reference::{self, LiveRow, Marks, PageSet, SessionPages},
    report::{PagesByOwner, Scope, Session},
};
use std::ops::Range;

#[derive(Clone, Debug)]
pub(super) struct CopyLayout {
    /// The live rows. In the copy, the page references of one row follow those of the row before.
    pub rows: Vec<LiveRow>,
    /// The page references to digest, numbered from 0 through all rows.
    pub window: Range<u32>,
}

/// An audit calls `copy`, `is_copied`, `count`, `read_copy` and `digests`, in this order.
pub(super) trait Backend: Send {
    /// Makes the private copy and the window's digests. For a pool on a device, this only enqueues
    /// the work, which begins after all work that `stream` has so far.
    fn copy(
        &mut self,
        pool: &Pool,
        snapshot: &Snapshot<'_>,
        layout: &CopyLayout,
        stream: Stream,
    ) -> Result<(), Error>;

    fn is_copied(&mut self) -> Result<bool, Error>;

    /// Waits until all enqueued work is done, so that nothing reads the engine's lists any more.
    fn wait(&mut self) -> Result<(), Error>;

    fn count(&mut self, pool: &Pool, valid_rows: &ValidRows) -> Result<Counts, Error>;

    /// Returns the private copy. Called only if the counts show a fault.
    fn read_copy(&mut self, pool: &Pool) -> Result<PoolCopy, Error>;

    /// Returns the digests of the window, one per page reference.
    fn digests(&mut self) -> Result<Vec<PageDigest>, Error>;
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PageDigest {
    /// [`reference::PAGE_BAD`] if the row's entry is not a page of the pool.
    pub page: u32,
    pub digest: u64,
}

/// Bit of a class number: the page is in a free list.
const FREE_BIT: usize = 4;
/// Bit of a class number: a valid row references the page.
const HELD_BIT: usize = 2;
/// Bit of a class number: the page is in the radix tree.
const TREE_BIT: usize = 1;

/// The counts of one private copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Indexed by session number, up to the highest one that has rows.
    pub sessions: Vec<SessionPages>,
    /// Pages by class: the sum of [`FREE_BIT`], [`HELD_BIT`] and [`TREE_BIT`].
    pub classes: [u64; 8],
    /// As `classes`, with [`HELD_BIT`] only for pages referenced outside a row's protected part.
    pub unprotected_classes: [u64; 8],
    /// The number of pages outside the radix tree that several sessions reference.
    pub aliased_pages: u64,
    pub free_runs: u64,
    /// The faults in the free lists.
    pub free: ListFaults,
    /// The faults in the radix tree's list.
    pub tree: ListFaults,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListFaults {
    pub duplicates: u64,
    pub outside_pool: u64,
    /// Whether the list names page 0, the engine's padding page, which must be in no list.
    pub has_padding: bool,
}

impl ListFaults {
    fn new(PageSet { has, duplicates, outside_pool }: &PageSet) -> Self {
        Self { duplicates: *duplicates, outside_pool: *outside_pool, has_padding: has[0] }
    }

    fn has_fault(&self) -> bool {
        self.duplicates > 0 || self.outside_pool > 0 || self.has_padding
    }
}

impl Counts {
    pub(super) fn count_by_reference(copy: &PoolCopy, valid_rows: &ValidRows, pool: &Pool) -> Self {
        let (npages, page_shift) = (pool.pages(), pool.page_shift());
        let mark = |rows: &[LiveRow]| reference::mark(rows, &copy.row_page_ids, page_shift, npages);
        let (marks, unprotected): (Marks, Marks) =
            (mark(&valid_rows.rows), mark(&valid_rows.unprotected));
        let (free, tree) = (&copy.free.set, &copy.tree.set);
        let (rows, page_list) = (&valid_rows.rows, &copy.row_page_ids);
        let by_number = reference::session_pages(rows, page_list, &marks, tree, page_shift);
        let session_count = by_number.keys().next_back().map_or(0, |highest| highest + 1);
        let pages_of = |number: u32| by_number.get(&number).copied().unwrap_or_default();
        Self {
            sessions: (0..session_count).map(pages_of).collect(),
            classes: reference::class_counts(free, &marks, tree),
            unprotected_classes: reference::class_counts(free, &unprotected, tree),
            aliased_pages: marks.aliased_pages(tree),
            free_runs: free.runs(),
            free: ListFaults::new(free),
            tree: ListFaults::new(tree),
        }
    }

    pub(super) fn held_pages(&self) -> u64 {
        self.sum_classes(|class| class & HELD_BIT != 0)
    }

    /// Returns the number of distinct pages in the free lists, without the padding page.
    pub(super) fn free_pages(&self) -> u64 {
        let padding_pages = u64::from(self.free.has_padding);
        self.sum_classes(|class| class & FREE_BIT != 0) - padding_pages
    }

    fn sum_classes(&self, is_summed: impl Fn(usize) -> bool) -> u64 {
        (0..8).filter(|&class| is_summed(class)).map(|class| self.classes[class]).sum()
    }

    /// `refs` counts the page references of the valid rows, also those outside the pool.
    pub(super) fn has_fault(&self, refs: u64, scope: Scope) -> bool {
        let refs_in_pool: u64 = self.sessions.iter().map(|session| session.refs).sum();
        let cached_unprotected = self.unprotected_classes[HELD_BIT | TREE_BIT];
        // Pages with a class above `FREE_BIT` are free, and also held or in the tree.
        let corrupt: u64 = self.classes[FREE_BIT + 1..].iter().sum();
        refs != refs_in_pool
            || self.aliased_pages + cached_unprotected + corrupt > 0
            || self.pages_by_owner(scope).is_some_and(|pages| pages.leaked > 0)
            || self.free.has_fault()
            || self.tree.has_fault()
    }

    /// Without the padding page. `None` unless the copy is complete.
    pub(super) fn pages_by_owner(&self, scope: Scope) -> Option<PagesByOwner> {
        if scope != Scope::Complete {
            return None;
        }
        let (free, tree) = (self.free, self.tree);
        let mut classes = self.classes;
        let padding_class =
            usize::from(free.has_padding) * FREE_BIT + usize::from(tree.has_padding) * TREE_BIT;
        classes[padding_class] -= 1;
        let reference::ClassCounts { leaked, free, private, cached, cached_in_use, corrupt } =
            classes.into();
        Some(PagesByOwner { free, private, cached, cached_in_use, leaked, corrupt })
    }

    /// Without the whole pool, [`Session::freed_by_close`] isn't exact: absent unless
    /// `is_pool_known`.
    pub(super) fn session_entry(&self, number: u32, is_pool_known: bool) -> Session {
        let pages = self.sessions.get(number as usize).copied().unwrap_or_default();
        let SessionPages { refs, exclusive_pages, share_q32, runs, tail_tokens, freed_by_close } =
            pages;
        Session {
            number,
            refs,
            exclusive_pages,
            share_q32,
            freed_by_close: is_pool_known.then_some(freed_by_close),
            runs,
            tail_tokens,
        }
    }
}

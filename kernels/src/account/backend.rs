//! The interface between the accountant and the memory that holds the pool.
//!
//! A backend makes the private copy and counts in it.

use super::{Error, Pool, Stream, snapshot::Snapshot};
use crate::{
    audit::{ListedPages, PoolCopy, ValidRows},
    reference::{self, LiveRow, Marks, PageSet, SessionPages},
    report::{Classes, Scope, Session},
};
use std::ops::Range;

/// The layout of the private copy.
#[derive(Clone, Debug)]
pub(super) struct CopyLayout {
    /// The live rows, placed one behind the other in the copy.
    pub rows: Vec<LiveRow>,
    /// Range of the page references whose pages are digested.
    pub window: Range<u32>,
}

/// Access to the pool's memory, host or device, and the code that counts there.
pub(super) trait Backend: Send {
    /// Makes the private copy and the window's digests, or enqueues that work behind `stream`.
    fn copy(
        &mut self,
        pool: &Pool,
        snapshot: &Snapshot<'_>,
        layout: &CopyLayout,
        stream: Stream,
    ) -> Result<(), Error>;

    /// Returns whether the private copy has been made.
    fn is_copied(&mut self) -> Result<bool, Error>;

    /// Waits for everything that was enqueued.
    fn wait(&mut self) -> Result<(), Error>;

    /// Counts in the private copy, over the kept rows only.
    fn count(&mut self, pool: &Pool, kept: &ValidRows) -> Result<Counts, Error>;

    /// Returns the private copy itself; called only if the counts show a fault.
    fn read_copy(&mut self, pool: &Pool) -> Result<PoolCopy, Error>;

    /// Returns page and digest of each page reference in the window.
    fn digests(&mut self) -> Result<Vec<(u32, u64)>, Error>;
}

/// The counts of one private copy. A list that the snapshot lacks counts as empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Pages of each session, indexed by session number; sessions above the last with rows are left
    /// out.
    pub sessions: Vec<SessionPages>,
    /// Pages of each class, indexed by class number; see [`reference::class_counts`].
    pub classes: [u64; 8],
    /// As `classes`, but only pages that rows hold outside their protected part count as
    /// referenced.
    pub own_classes: [u64; 8],
    /// Pages outside the radix tree that several sessions hold.
    pub aliased: u64,
    pub free_runs: u64,
    pub free: Option<ListCount>,
    pub tree: Option<ListCount>,
}

/// Faults in the free lists, or in the radix tree's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListCount {
    pub duplicates: u64,
    pub bad: u64,
    /// Whether the list names the padding page.
    pub padding: bool,
}

impl ListCount {
    fn new(listed: &ListedPages) -> Self {
        let PageSet { has, duplicates, bad } = &listed.set;
        Self { duplicates: *duplicates, bad: *bad, padding: has[0] }
    }

    fn has_fault(&self) -> bool {
        self.duplicates > 0 || self.bad > 0 || self.padding
    }
}

impl Counts {
    /// Counts with the scalar reference.
    pub(super) fn by_reference(copy: &PoolCopy, kept: &ValidRows, pool: &Pool) -> Self {
        let (npages, shift) = (pool.pages(), pool.page_shift());
        let marked = |rows: &[LiveRow]| reference::mark(rows, &copy.staged, shift, npages);
        let (marks, own): (Marks, Marks) = (marked(&kept.rows), marked(&kept.own));
        let empty = PageSet { has: vec![false; npages as usize], duplicates: 0, bad: 0 };
        let free = copy.free.as_ref().map_or(&empty, |listed| &listed.set);
        let tree = copy.tree.as_ref().map_or(&empty, |listed| &listed.set);
        let by = reference::session(&kept.rows, &copy.staged, &marks, Some(tree), shift);
        let numbers = by.keys().next_back().map_or(0, |last| last + 1);
        Self {
            sessions: (0..numbers).map(|n| by.get(&n).copied().unwrap_or_default()).collect(),
            classes: reference::class_counts(free, &marks, tree),
            own_classes: reference::class_counts(free, &own, tree),
            aliased: marks.aliased_pages(tree),
            free_runs: free.runs(),
            free: copy.free.as_ref().map(ListCount::new),
            tree: copy.tree.as_ref().map(ListCount::new),
        }
    }

    /// Returns the number of distinct pages that the kept rows hold.
    pub(super) fn held_pages(&self) -> u64 {
        self.sum(|free_referenced_treed| free_referenced_treed & 2 != 0)
    }

    /// Returns the number of distinct pages in the free lists, without the padding page.
    pub(super) fn free_pages(&self) -> u64 {
        self.sum(|class| class & 4 != 0) - u64::from(self.free.is_some_and(|list| list.padding))
    }

    fn sum(&self, of: impl Fn(usize) -> bool) -> u64 {
        (0..8).filter(|&class| of(class)).map(|class| self.classes[class]).sum()
    }

    /// Returns whether the counts show a fault that this scope can prove. `refs` is the number of
    /// page references of the kept rows, valid or not.
    pub(super) fn has_fault(&self, refs: u64, scope: Scope) -> bool {
        let sound: u64 = self.sessions.iter().map(|session| session.refs).sum();
        let own_cached = self.own_classes[3];
        let across = self.aliased + own_cached + self.classes[5..].iter().sum::<u64>();
        refs != sound
            || (across > 0 && scope.moment().is_some())
            || self.classes(scope).is_some_and(|classes| classes.leaked > 0)
            || self.free.iter().chain(&self.tree).any(ListCount::has_fault)
    }

    /// Returns the pages by class, without the padding page, if the copy is complete and
    /// consistent.
    pub(super) fn classes(&self, scope: Scope) -> Option<Classes> {
        scope.complete()?;
        let (free, tree) = (self.free?, self.tree?);
        let mut classes = self.classes;
        classes[usize::from(free.padding) << 2 | usize::from(tree.padding)] -= 1;
        let reference::ClassCounts { leaked, free, private, cached, cached_in_use, corrupt } =
            classes.into();
        Some(Classes { free, private, cached, cached_in_use, leaked, corrupt })
    }

    /// Returns a session's entry. What a close frees is included only if `exact`.
    pub(super) fn session(&self, number: u32, exact: bool) -> Session {
        let pages = self.sessions.get(number as usize).copied().unwrap_or_default();
        let SessionPages { refs, uss, pss_q32, runs, tail_tokens, freed } = pages;
        Session {
            number,
            refs,
            exclusive: uss,
            share_q32: pss_q32,
            freed: exact.then_some(freed),
            runs,
            tail_tokens,
        }
    }
}

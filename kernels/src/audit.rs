//! Finds the faults in a copy of an engine's rows, free lists and radix tree, and names the pages.
//!
//! An audit calls this only if its counts show a fault. Nothing here reads the engine's memory or a
//! GPU. Not every copy can show every fault: [`SameMoment`] proves that rows and lists may be
//! compared, [`CompleteCopy`] also that no row is missing. [`crate::digest`] finds sealed pages
//! that an engine rewrote, which no copy shows.

use crate::{
    digest::ChangedPage,
    reference::{self, LiveRow, Marks, OWNER_SHARED, PAGE_BAD, PageSet},
    report::{
        FAULTS_PER_KIND_MAX, FaultKind, Finding, KindFindings, SESSIONS_PER_FAULT_MAX, Scope,
    },
};
use std::collections::BTreeSet;

/// Proof that the snapshot's rows, free lists and radix tree are from the same moment.
#[derive(Clone, Copy, Debug)]
pub struct SameMoment(());

/// Proof of [`SameMoment`], and that no row is missing, nor left out because it changed meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct CompleteCopy(());

impl Scope {
    /// The engine sets `is_snapshot_complete` if its snapshot has every row that holds pages, and
    /// rows, free lists and radix tree are from the same moment. `rows_changed` rows are left out:
    /// they may have changed while they were copied.
    pub fn new(is_snapshot_complete: bool, rows_changed: usize) -> Self {
        match (is_snapshot_complete, rows_changed) {
            (false, _) => Self::Partial,
            (true, 0) => Self::Complete,
            (true, _) => Self::RowsChanged,
        }
    }

    pub fn same_moment(self) -> Option<SameMoment> {
        (self != Self::Partial).then_some(SameMoment(()))
    }

    pub fn complete_copy(self) -> Option<CompleteCopy> {
        (self == Self::Complete).then_some(CompleteCopy(()))
    }
}

/// The number of faults of one kind, and the pages or list entries of the first few faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultTally {
    pub count: u64,
    /// At most [`FAULTS_PER_KIND_MAX`] values of [`Finding::page_or_entry`].
    pub first_values: Vec<i64>,
}

impl FaultTally {
    fn add(&mut self, page_or_entry: i64) {
        self.count += 1;
        if self.first_values.len() < FAULTS_PER_KIND_MAX {
            self.first_values.push(page_or_entry);
        }
    }
}

/// The pages of a list of ids (a free list or the radix tree), with the faults in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPages {
    pub set: PageSet,
    /// Pages that the list names more than once. A page that is named three times counts twice.
    pub repeated: FaultTally,
    /// Ids that no list may contain: those outside the pool, and those of the padding page 0.
    pub invalid: FaultTally,
}

impl ListedPages {
    /// A page has `1 << shift` ids. If `shift` is 0, they are page ids, otherwise token slots.
    pub fn new(ids: impl IntoIterator<Item = i64>, shift: u32, pages: u32) -> Self {
        let mut has = vec![false; pages as usize];
        let (mut repeated, mut invalid) = (FaultTally::default(), FaultTally::default());
        let mut outside_pool = 0;
        for id in ids {
            let page = id >> shift;
            let entry = usize::try_from(page).ok().and_then(|page| has.get_mut(page));
            if entry.is_none() || page == 0 {
                invalid.add(id);
            }
            match entry {
                None => outside_pool += 1,
                // The tree lists all slots of a page. Only the first slot names the page.
                Some(is_listed) if id & ((1 << shift) - 1) == 0 => {
                    if std::mem::replace(is_listed, true) {
                        repeated.add(page);
                    }
                }
                Some(_) => {}
            }
        }
        let set = PageSet { has, duplicates: repeated.count, outside_pool };
        Self { set, repeated, invalid }
    }
}

#[derive(Clone, Debug, Default)]
pub struct PoolCopy {
    /// The page list of [`reference::gather_pages`].
    pub row_page_ids: Vec<u32>,
    /// The pages in the free lists; `None` if the snapshot has no free list.
    pub free: Option<ListedPages>,
    /// The pages in the radix tree; `None` if the snapshot doesn't have the tree.
    pub tree: Option<ListedPages>,
}

#[derive(Clone, Debug, Default)]
pub struct ValidRows {
    pub rows: Vec<LiveRow>,
    /// Of each row, the part behind the beginning that the radix tree owns. A row of which that is
    /// unknown is not in this list.
    pub unprotected: Vec<LiveRow>,
}

/// A report has an entry for each of these kinds, also if there is no such fault.
/// `has_unprotected`: the copy has rows with a part that the radix tree doesn't own.
pub fn detectable_kinds(
    scope: Scope,
    has_free: bool,
    has_tree: bool,
    has_unprotected: bool,
) -> Vec<FaultKind> {
    let is_same_moment = scope.same_moment().is_some();
    let is_complete = scope.complete_copy().is_some();
    let can_show = |kind: &FaultKind| match kind {
        FaultKind::Aliased => is_same_moment && has_tree,
        FaultKind::Leaked => is_complete && has_free && has_tree,
        FaultKind::DoubleFree | FaultKind::BadFreeEntry => has_free,
        FaultKind::FreeHeld => is_same_moment && has_free,
        FaultKind::FreeCached => is_same_moment && has_free && has_tree,
        FaultKind::CachedUnprotected => is_same_moment && has_tree && has_unprotected,
        FaultKind::TreeTwice | FaultKind::BadTreeEntry => has_tree,
        FaultKind::BadRowEntry => true,
        FaultKind::SealedPageChanged => false,
    };
    FaultKind::ALL.into_iter().filter(can_show).collect()
}

/// The pool has `npages` pages of `1 << page_shift` tokens.
pub fn find_faults(
    copy: &PoolCopy,
    valid_rows: &ValidRows,
    npages: u32,
    page_shift: u32,
    scope: Scope,
) -> Vec<KindFindings> {
    let marks = reference::mark(&valid_rows.rows, &copy.row_page_ids, page_shift, npages);
    let finder = FaultFinder { copy, valid_rows, page_shift, marks };
    let (has_free, has_tree) = (copy.free.is_some(), copy.tree.is_some());
    let has_unprotected = !valid_rows.unprotected.is_empty();
    let kinds = detectable_kinds(scope, has_free, has_tree, has_unprotected);
    kinds.into_iter().map(|kind| finder.find(kind, scope)).collect()
}

pub fn no_faults(kind: FaultKind) -> KindFindings {
    KindFindings { kind, count: 0, first_faults: vec![] }
}

/// `pages` are those that [`crate::digest`] has found.
pub fn changed_page_findings(pages: &[ChangedPage]) -> KindFindings {
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    let finding = |&ChangedPage { page, session }: &ChangedPage| Finding {
        page_or_entry: page.into(),
        sessions: vec![session],
        session_count: 1,
    };
    KindFindings {
        kind: FaultKind::SealedPageChanged,
        count: pages.len() as u64,
        first_faults: pages.iter().take(FAULTS_PER_KIND_MAX).map(finding).collect(),
    }
}

struct FaultFinder<'a> {
    copy: &'a PoolCopy,
    valid_rows: &'a ValidRows,
    page_shift: u32,
    /// The reference count and the owner of each page, counted over the valid rows.
    marks: Marks,
}

impl FaultFinder<'_> {
    /// The findings are empty if a copy with this scope can't show the kind.
    fn find(&self, kind: FaultKind, scope: Scope) -> KindFindings {
        let empty_tally = FaultTally::default;
        let list_tally = |tally: Option<&FaultTally>| tally.cloned().unwrap_or_default();
        let (free, tree) = (self.copy.free.as_ref(), self.copy.tree.as_ref());
        let (same_moment, complete) = (scope.same_moment(), scope.complete_copy());
        let tally = match kind {
            FaultKind::Aliased => {
                same_moment.map_or_else(empty_tally, |proof| self.aliased_pages(proof))
            }
            FaultKind::Leaked => {
                complete.map_or_else(empty_tally, |proof| self.leaked_pages(proof))
            }
            FaultKind::FreeHeld => {
                same_moment.map_or_else(empty_tally, |proof| self.free_held_pages(proof))
            }
            FaultKind::FreeCached => {
                same_moment.map_or_else(empty_tally, |proof| self.free_cached_pages(proof))
            }
            FaultKind::CachedUnprotected => {
                same_moment.map_or_else(empty_tally, |proof| self.cached_unprotected_pages(proof))
            }
            FaultKind::DoubleFree => list_tally(free.map(|free| &free.repeated)),
            FaultKind::BadFreeEntry => list_tally(free.map(|free| &free.invalid)),
            FaultKind::TreeTwice => list_tally(tree.map(|tree| &tree.repeated)),
            FaultKind::BadTreeEntry => list_tally(tree.map(|tree| &tree.invalid)),
            FaultKind::BadRowEntry => return self.bad_row_entries(),
            FaultKind::SealedPageChanged => empty_tally(),
        };
        let holders = self.holding_sessions(kind, &tally.first_values);
        let mut first_faults: Vec<Finding> = (tally.first_values.iter().zip(holders))
            .map(|(&page_or_entry, sessions)| Finding {
                page_or_entry,
                session_count: u32::try_from(sessions.len()).expect("a snapshot has few sessions"),
                sessions: sessions.into_iter().take(SESSIONS_PER_FAULT_MAX).collect(),
            })
            .collect();
        first_faults.sort();
        KindFindings { kind, count: tally.count, first_faults }
    }

    /// For [`FaultKind::CachedUnprotected`], only the rows' unprotected parts count.
    fn holding_sessions(&self, kind: FaultKind, pages: &[i64]) -> Vec<BTreeSet<u32>> {
        let mut holders = vec![BTreeSet::new(); pages.len()];
        if pages.is_empty() || matches!(kind, FaultKind::BadFreeEntry | FaultKind::BadTreeEntry) {
            return holders;
        }
        let only_unprotected = kind == FaultKind::CachedUnprotected;
        let rows =
            if only_unprotected { &self.valid_rows.unprotected } else { &self.valid_rows.rows };
        for row in rows {
            for &page in row_pages(row, &self.copy.row_page_ids, self.page_shift) {
                for (&wanted_page, sessions) in pages.iter().zip(&mut holders) {
                    if wanted_page == i64::from(page) {
                        sessions.insert(row.session);
                    }
                }
            }
        }
        holders
    }

    fn aliased_pages(&self, _: SameMoment) -> FaultTally {
        let is_shared = |page: usize| self.marks.owner[page] == OWNER_SHARED;
        self.tally_pages(|page| is_shared(page) && !lists_page(&self.copy.tree, page))
    }

    fn leaked_pages(&self, _: CompleteCopy) -> FaultTally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        let is_listed = |page| lists_page(free, page) || lists_page(tree, page);
        let has_owner = |page| is_listed(page) || self.marks.refcnt[page] > 0;
        // Page 0 is the padding page. It never has an owner, so it is not a leak.
        self.tally_pages(|page| page > 0 && !has_owner(page))
    }

    fn free_held_pages(&self, _: SameMoment) -> FaultTally {
        self.tally_pages(|page| lists_page(&self.copy.free, page) && self.marks.refcnt[page] > 0)
    }

    fn free_cached_pages(&self, _: SameMoment) -> FaultTally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        self.tally_pages(|page| lists_page(free, page) && lists_page(tree, page))
    }

    fn cached_unprotected_pages(&self, _: SameMoment) -> FaultTally {
        let npages = u32::try_from(self.marks.refcnt.len()).expect("a pool's page count is a u32");
        let rows = &self.valid_rows.unprotected;
        let unprotected = reference::mark(rows, &self.copy.row_page_ids, self.page_shift, npages);
        self.tally_pages(|page| lists_page(&self.copy.tree, page) && unprotected.refcnt[page] > 0)
    }

    fn tally_pages(&self, is_fault: impl Fn(usize) -> bool) -> FaultTally {
        let mut tally = FaultTally::default();
        for page in (0..self.marks.refcnt.len()).filter(|&page| is_fault(page)) {
            tally.add(i64::try_from(page).expect("a pool's page count is a u32"));
        }
        tally
    }

    fn bad_row_entries(&self) -> KindFindings {
        let mut findings = no_faults(FaultKind::BadRowEntry);
        for row in &self.valid_rows.rows {
            for (index, &page) in
                (0i64..).zip(row_pages(row, &self.copy.row_page_ids, self.page_shift))
            {
                if page != PAGE_BAD {
                    continue;
                }
                findings.count += 1;
                if findings.first_faults.len() < FAULTS_PER_KIND_MAX {
                    findings.first_faults.push(Finding {
                        page_or_entry: index,
                        sessions: vec![row.session],
                        session_count: 1,
                    });
                }
            }
        }
        findings.first_faults.sort();
        findings
    }
}

fn lists_page(listed: &Option<ListedPages>, page: usize) -> bool {
    listed.as_ref().is_some_and(|listed| listed.set.has[page])
}

fn row_pages<'a>(row: &LiveRow, row_page_ids: &'a [u32], page_shift: u32) -> &'a [u32] {
    let start = row.list_start as usize;
    &row_page_ids[start..start + row.pages(page_shift) as usize]
}

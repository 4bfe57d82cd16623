//! Finds the faults in a copy of an engine's rows, free lists and radix tree, and names the pages.
//!
//! An audit calls this only if its counts show a fault. Nothing here reads the engine's memory or a
//! GPU. A copy without the rows that changed meanwhile doesn't show pages without an owner.
//! [`crate::digest`] finds sealed pages that an engine rewrote, which no copy shows.

use crate::{
    digest::ChangedPage,
    reference::{self, LiveRow, Marks, OWNER_SHARED, PAGE_BAD, PageSet},
    report::{
        FAULTS_PER_KIND_MAX, FaultKind, Finding, KindFindings, SESSIONS_PER_FAULT_MAX, Scope,
    },
};
use std::collections::BTreeSet;

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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// The pages in the free lists.
    pub free: ListedPages,
    /// The pages in the radix tree.
    pub tree: ListedPages,
}

#[derive(Clone, Debug, Default)]
pub struct ValidRows {
    pub rows: Vec<LiveRow>,
    /// Of each row, the part behind the beginning that the radix tree owns.
    pub unprotected: Vec<LiveRow>,
}

/// A report has an entry for each of these kinds, also if there is no such fault. `has_rows`: the
/// copy has valid rows.
pub fn detectable_kinds(scope: Scope, has_rows: bool) -> Vec<FaultKind> {
    let can_show = |kind: &FaultKind| match kind {
        FaultKind::Leaked => scope == Scope::Complete,
        FaultKind::CachedUnprotected => has_rows,
        FaultKind::SealedPageChanged => false,
        _ => true,
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
    let kinds = detectable_kinds(scope, !valid_rows.rows.is_empty());
    kinds.into_iter().map(|kind| finder.find(kind)).collect()
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
    fn find(&self, kind: FaultKind) -> KindFindings {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        let tally = match kind {
            FaultKind::Aliased => self.aliased_pages(),
            FaultKind::Leaked => self.leaked_pages(),
            FaultKind::FreeHeld => self.free_held_pages(),
            FaultKind::FreeCached => self.free_cached_pages(),
            FaultKind::CachedUnprotected => self.cached_unprotected_pages(),
            FaultKind::DoubleFree => free.repeated.clone(),
            FaultKind::BadFreeEntry => free.invalid.clone(),
            FaultKind::TreeTwice => tree.repeated.clone(),
            FaultKind::BadTreeEntry => tree.invalid.clone(),
            FaultKind::BadRowEntry => return self.bad_row_entries(),
            FaultKind::SealedPageChanged => FaultTally::default(),
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

    fn aliased_pages(&self) -> FaultTally {
        let is_shared = |page: usize| self.marks.owner[page] == OWNER_SHARED;
        self.tally_pages(|page| is_shared(page) && !self.copy.tree.set.has[page])
    }

    fn leaked_pages(&self) -> FaultTally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        let is_listed = |page| free.set.has[page] || tree.set.has[page];
        let has_owner = |page| is_listed(page) || self.marks.refcnt[page] > 0;
        // Page 0 is the padding page. It never has an owner, so it is not a leak.
        self.tally_pages(|page| page > 0 && !has_owner(page))
    }

    fn free_held_pages(&self) -> FaultTally {
        self.tally_pages(|page| self.copy.free.set.has[page] && self.marks.refcnt[page] > 0)
    }

    fn free_cached_pages(&self) -> FaultTally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        self.tally_pages(|page| free.set.has[page] && tree.set.has[page])
    }

    fn cached_unprotected_pages(&self) -> FaultTally {
        let npages = u32::try_from(self.marks.refcnt.len()).expect("a pool's page count is a u32");
        let rows = &self.valid_rows.unprotected;
        let unprotected = reference::mark(rows, &self.copy.row_page_ids, self.page_shift, npages);
        self.tally_pages(|page| self.copy.tree.set.has[page] && unprotected.refcnt[page] > 0)
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

fn row_pages<'a>(row: &LiveRow, row_page_ids: &'a [u32], page_shift: u32) -> &'a [u32] {
    let start = row.list_start as usize;
    &row_page_ids[start..start + row.pages(page_shift) as usize]
}

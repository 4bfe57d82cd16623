//! Finds the faults in a copy of an engine's rows, free lists and radix tree, and names the pages.
//!
//! A fault is, for example, a page without an owner, or a free page that a row still references.
//! An audit (see [`crate::account`]) first only counts pages. If the counts show a fault, the audit
//! reads the copy into host memory and calls [`findings`], which looks for the faults with the
//! functions of [`mod@crate::reference`]. Nothing here reads the engine's memory or a GPU.
//!
//! Not every copy can show every fault. Two types are proofs that a copy can show a kind of fault:
//! - [`SameMoment`]: rows and lists may be compared. A page that is free and in a row needs this.
//! - [`CompleteCopy`]: also, no row is missing. A page without an owner needs this.
//!
//! One kind is not found in the copy: [`Kind::Changed`], a page that was rewritten against the
//! rules. [`crate::digest`] finds those pages, and [`changed`] only makes their findings.

use crate::{
    digest::ChangedPage,
    reference::{self, LiveRow, Marks, OWNER_SHARED, PAGE_BAD, PageSet},
    report::{Finding, Kind, KindFindings, NAMED_MAX, NAMED_SESSIONS_MAX, Scope},
};
use std::collections::BTreeSet;

/// Proof that the snapshot's rows, free lists and radix tree are from the same moment.
#[derive(Clone, Copy, Debug)]
pub struct SameMoment(());

/// Proof that all is from the same moment, and that the copy has every row that holds pages. No row
/// was left out, because no row changed while it was copied.
#[derive(Clone, Copy, Debug)]
pub struct CompleteCopy(());

impl Scope {
    /// Returns the scope of a copy.
    ///
    /// The engine sets `is_snapshot_complete` if its snapshot has every row that holds pages, and
    /// rows, free lists and radix tree are from the same moment. `rows_changed` is the number of
    /// rows that the engine may have changed while they were copied. The audit leaves those out.
    pub fn new(is_snapshot_complete: bool, rows_changed: usize) -> Self {
        match (is_snapshot_complete, rows_changed) {
            (false, _) => Self::Partial,
            (true, 0) => Self::Complete,
            (true, _) => Self::RowsChanged,
        }
    }

    /// Returns the proof that rows and lists are from the same moment, if they are.
    pub fn same_moment(self) -> Option<SameMoment> {
        (self != Self::Partial).then_some(SameMoment(()))
    }

    /// Returns the proof that the copy is complete, if it is.
    pub fn complete_copy(self) -> Option<CompleteCopy> {
        (self == Self::Complete).then_some(CompleteCopy(()))
    }
}

/// The number of faults of one kind, and the pages or list entries of the first few faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub count: u64,
    /// At most [`NAMED_MAX`] values.
    pub named: Vec<i64>,
}

impl Tally {
    fn add(&mut self, page_or_entry: i64) {
        self.count += 1;
        if self.named.len() < NAMED_MAX {
            self.named.push(page_or_entry);
        }
    }
}

/// The pages of a list of ids (a free list or the radix tree), with the faults in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPages {
    /// The same set as [`reference::slots_to_set`] returns.
    pub set: PageSet,
    /// Pages that the list names more than once. A page that is named three times counts twice.
    pub repeated: Tally,
    /// Ids that no list may contain: those outside the pool, and those of the padding page 0.
    pub invalid: Tally,
}

impl ListedPages {
    /// Reads a list of ids of a pool of `pages` pages. A page has `1 << shift` ids. If `shift` is
    /// 0, the ids are page ids, otherwise token slots.
    pub fn new(ids: impl IntoIterator<Item = i64>, shift: u32, pages: u32) -> Self {
        let mut has = vec![false; pages as usize];
        let (mut repeated, mut invalid) = (Tally::default(), Tally::default());
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

/// A copy of the engine's rows, free lists and radix tree in host memory.
#[derive(Clone, Debug, Default)]
pub struct PoolCopy {
    /// The ids of the rows' pages, one row after another. This is the page list of
    /// [`reference::gather_pages`]. [`LiveRow::list_start`] is the index where a row begins.
    pub row_page_ids: Vec<u32>,
    /// The pages in the free lists; `None` if the snapshot has no free list.
    pub free: Option<ListedPages>,
    /// The pages in the radix tree; `None` if the snapshot doesn't have the tree.
    pub tree: Option<ListedPages>,
}

/// The rows whose copy is valid, because they didn't change while they were copied.
#[derive(Clone, Debug, Default)]
pub struct ValidRows {
    pub rows: Vec<LiveRow>,
    /// The parts of these rows that the radix tree doesn't own, each as a row. The beginning of a
    /// row that the tree owns is the row's protected part. A row whose protected part is unknown
    /// is not in this list.
    pub unprotected: Vec<LiveRow>,
}

/// Returns the kinds of fault that a copy can show. If such a kind has no fault, the report gives
/// the count 0 for it. [`Kind::Changed`] is never among them, because a copy of rows and lists
/// doesn't show the pages' contents.
pub fn kinds(scope: Scope, has_free: bool, has_tree: bool, has_unprotected: bool) -> Vec<Kind> {
    let is_same_moment = scope.same_moment().is_some();
    let is_complete = scope.complete_copy().is_some();
    let can_show = |kind: &Kind| match kind {
        Kind::Aliased => is_same_moment && has_tree,
        Kind::Leaked => is_complete && has_free && has_tree,
        Kind::DoubleFree | Kind::FreeEntry => has_free,
        Kind::FreeHeld => is_same_moment && has_free,
        Kind::FreeCached => is_same_moment && has_free && has_tree,
        Kind::CachedPrivate => is_same_moment && has_tree && has_unprotected,
        Kind::TreeTwice | Kind::TreeEntry => has_tree,
        Kind::RowEntry => true,
        Kind::Changed => false,
    };
    Kind::ALL.into_iter().filter(can_show).collect()
}

/// Returns the findings of every kind that the copy can show. The pool has `npages` pages of
/// `1 << page_shift` tokens.
pub fn findings(
    copy: &PoolCopy,
    kept: &ValidRows,
    npages: u32,
    page_shift: u32,
    scope: Scope,
) -> Vec<KindFindings> {
    let marks = reference::mark(&kept.rows, &copy.row_page_ids, page_shift, npages);
    let finder = FaultFinder { copy, kept, page_shift, marks };
    let (has_free, has_tree) = (copy.free.is_some(), copy.tree.is_some());
    let kinds = kinds(scope, has_free, has_tree, !kept.unprotected.is_empty());
    kinds.into_iter().map(|kind| finder.find(kind, scope)).collect()
}

/// Returns the findings of a kind that has no fault.
pub fn none_of(kind: Kind) -> KindFindings {
    KindFindings { kind, count: 0, named: vec![] }
}

/// Returns the findings of sealed pages whose contents changed. The engine must not rewrite a
/// sealed page while its session's key stays the same. [`crate::digest`] has found the pages, by
/// comparing hashes of their contents.
pub fn changed(pages: &[ChangedPage]) -> KindFindings {
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    let named = pages.iter().take(NAMED_MAX).map(|&ChangedPage { page, session }| Finding {
        at: page.into(),
        sessions: vec![session],
        sessions_count: 1,
    });
    KindFindings { kind: Kind::Changed, count: pages.len() as u64, named: named.collect() }
}

/// Looks for faults in one copy.
struct FaultFinder<'a> {
    copy: &'a PoolCopy,
    kept: &'a ValidRows,
    page_shift: u32,
    /// The reference count and the owner of each page, by the kept rows.
    marks: Marks,
}

impl FaultFinder<'_> {
    /// Returns the findings of one kind. They are empty if a copy with this scope can't show it.
    fn find(&self, kind: Kind, scope: Scope) -> KindFindings {
        let no_faults = Tally::default;
        let in_list = |tally: Option<&Tally>| tally.cloned().unwrap_or_default();
        let (free, tree) = (self.copy.free.as_ref(), self.copy.tree.as_ref());
        let (moment, complete) = (scope.same_moment(), scope.complete_copy());
        let tally = match kind {
            Kind::Aliased => moment.map_or_else(no_faults, |proof| self.aliased(proof)),
            Kind::Leaked => complete.map_or_else(no_faults, |proof| self.leaked(proof)),
            Kind::FreeHeld => moment.map_or_else(no_faults, |proof| self.free_held(proof)),
            Kind::FreeCached => moment.map_or_else(no_faults, |proof| self.free_cached(proof)),
            Kind::CachedPrivate => {
                moment.map_or_else(no_faults, |proof| self.cached_private(proof))
            }
            Kind::DoubleFree => in_list(free.map(|free| &free.repeated)),
            Kind::FreeEntry => in_list(free.map(|free| &free.invalid)),
            Kind::TreeTwice => in_list(tree.map(|tree| &tree.repeated)),
            Kind::TreeEntry => in_list(tree.map(|tree| &tree.invalid)),
            Kind::RowEntry => return self.row_entries(),
            Kind::Changed => no_faults(),
        };
        let holders = self.holders(kind, &tally.named);
        let mut named: Vec<Finding> = (tally.named.iter().zip(holders))
            .map(|(&at, sessions)| Finding {
                at,
                sessions_count: u32::try_from(sessions.len()).expect("a snapshot has few sessions"),
                sessions: sessions.into_iter().take(NAMED_SESSIONS_MAX).collect(),
            })
            .collect();
        named.sort();
        KindFindings { kind, count: tally.count, named }
    }

    /// Returns, for each named page, the sessions whose rows hold the page. For
    /// [`Kind::CachedPrivate`], only the rows' unprotected parts count.
    fn holders(&self, kind: Kind, named: &[i64]) -> Vec<BTreeSet<u32>> {
        let mut holders = vec![BTreeSet::new(); named.len()];
        if named.is_empty() || matches!(kind, Kind::FreeEntry | Kind::TreeEntry) {
            return holders;
        }
        let is_private = kind == Kind::CachedPrivate;
        let rows = if is_private { &self.kept.unprotected } else { &self.kept.rows };
        for row in rows {
            for &page in row_pages(row, &self.copy.row_page_ids, self.page_shift) {
                for (_, holders) in
                    (named.iter().zip(&mut holders)).filter(|(named, _)| **named == i64::from(page))
                {
                    holders.insert(row.session);
                }
            }
        }
        holders
    }

    fn aliased(&self, _: SameMoment) -> Tally {
        let is_shared = |page: usize| self.marks.owner[page] == OWNER_SHARED;
        self.pages(|page| is_shared(page) && !lists_page(&self.copy.tree, page))
    }

    fn leaked(&self, _: CompleteCopy) -> Tally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        let is_listed = |page| lists_page(free, page) || lists_page(tree, page);
        let has_owner = |page| is_listed(page) || self.marks.refcnt[page] > 0;
        // Page 0 is the padding page. It never has an owner, so it is not a leak.
        self.pages(|page| page > 0 && !has_owner(page))
    }

    fn free_held(&self, _: SameMoment) -> Tally {
        self.pages(|page| lists_page(&self.copy.free, page) && self.marks.refcnt[page] > 0)
    }

    fn free_cached(&self, _: SameMoment) -> Tally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        self.pages(|page| lists_page(free, page) && lists_page(tree, page))
    }

    fn cached_private(&self, _: SameMoment) -> Tally {
        let npages = u32::try_from(self.marks.refcnt.len()).expect("a pool's page count is a u32");
        let rows = &self.kept.unprotected;
        let unprotected = reference::mark(rows, &self.copy.row_page_ids, self.page_shift, npages);
        self.pages(|page| lists_page(&self.copy.tree, page) && unprotected.refcnt[page] > 0)
    }

    /// Returns the pages of the pool for which `is_fault` returns true.
    fn pages(&self, is_fault: impl Fn(usize) -> bool) -> Tally {
        let mut tally = Tally::default();
        for page in (0..self.marks.refcnt.len()).filter(|&page| is_fault(page)) {
            tally.add(i64::try_from(page).expect("a pool's page count is a u32"));
        }
        tally
    }

    /// Returns the findings of row entries that are not a page of the pool.
    fn row_entries(&self) -> KindFindings {
        let mut findings = none_of(Kind::RowEntry);
        for row in &self.kept.rows {
            for (index, &page) in
                (0i64..).zip(row_pages(row, &self.copy.row_page_ids, self.page_shift))
            {
                if page != PAGE_BAD {
                    continue;
                }
                findings.count += 1;
                if findings.named.len() < NAMED_MAX {
                    let sessions = vec![row.session];
                    findings.named.push(Finding { at: index, sessions, sessions_count: 1 });
                }
            }
        }
        findings.named.sort();
        findings
    }
}

/// Returns whether there is a list, and the list names the page.
fn lists_page(listed: &Option<ListedPages>, page: usize) -> bool {
    listed.as_ref().is_some_and(|listed| listed.set.has[page])
}

/// Returns the ids of one row's pages.
fn row_pages<'a>(row: &LiveRow, row_page_ids: &'a [u32], page_shift: u32) -> &'a [u32] {
    let start = row.list_start as usize;
    &row_page_ids[start..start + row.pages(page_shift) as usize]
}

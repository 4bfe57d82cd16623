//! Finds the faults in a copy of an engine's rows, free lists and radix tree, and names the pages.
//!
//! A fault is, for example, a page without an owner, or a free page that a row still references.
//! The backend of an audit only counts. If its counts show a fault, the audit reads the copy into
//! host memory. The functions here then look for the faults with the scalar reference. They only
//! compute.
//!
//! Some faults can't be seen in every snapshot. Two types are proofs that a fault can be seen.
//! Faults that show only when rows and lists are compared need a [`Moment`]. Pages without an owner
//! need a [`Complete`].

use crate::{
    digest::ChangedPage,
    reference::{self, LiveRow, Marks, OWNER_SHARED, PAGE_BAD, PageSet},
    report::{Finding, Kind, KindFindings, NAMED_MAX, NAMED_SESSIONS_MAX, Scope},
};
use std::collections::BTreeSet;

/// Proof that the snapshot's rows, free lists and radix tree are from one moment.
#[derive(Clone, Copy, Debug)]
pub struct Moment(());

/// Proof that all is from one moment, and that the copy has every row, because no row changed while
/// it was copied.
#[derive(Clone, Copy, Debug)]
pub struct Complete(());

impl Scope {
    /// Returns the scope of a copy. `is_complete` is what the engine says of its snapshot, and
    /// `rows_moved` is the number of rows that changed since the snapshot.
    pub fn new(is_complete: bool, rows_moved: usize) -> Self {
        match (is_complete, rows_moved) {
            (false, _) => Self::Partial,
            (true, 0) => Self::Complete,
            (true, _) => Self::Moved,
        }
    }

    /// Returns the proof that rows and lists are from one moment, if they are.
    pub fn moment(self) -> Option<Moment> {
        (self != Self::Partial).then_some(Moment(()))
    }

    /// Returns the proof that the copy is complete, if it is.
    pub fn complete(self) -> Option<Complete> {
        (self == Self::Complete).then_some(Complete(()))
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
    /// Pages that the list names again. A page that is named three times counts twice.
    pub repeated: Tally,
    /// Ids that no list may contain: outside the pool, or in the padding page 0.
    pub invalid: Tally,
}

impl ListedPages {
    /// Reads a list of ids of a pool of `pages` pages. A page has `1 << shift` ids. If `shift` is
    /// 0, the ids are page ids, otherwise token slots.
    pub fn new(ids: impl IntoIterator<Item = i64>, shift: u32, pages: u32) -> Self {
        let mut has = vec![false; pages as usize];
        let (mut repeated, mut invalid, mut bad) = (Tally::default(), Tally::default(), 0);
        for id in ids {
            let has_page = usize::try_from(id >> shift).ok().and_then(|page| has.get_mut(page));
            if has_page.is_none() || id >> shift == 0 {
                invalid.add(id);
            }
            match has_page {
                None => bad += 1,
                // The tree lists all slots of a page. Only the first slot names the page.
                Some(has_page) if id & ((1 << shift) - 1) == 0 => {
                    if std::mem::replace(has_page, true) {
                        repeated.add(id >> shift);
                    }
                }
                Some(_) => {}
            }
        }
        Self { set: PageSet { has, duplicates: repeated.count, bad }, repeated, invalid }
    }
}

/// A copy of the engine's rows, free lists and radix tree. A missing list is `None`.
#[derive(Clone, Debug, Default)]
pub struct PoolCopy {
    /// The page references of all rows, one row after another. A page reference is the id of the
    /// page at one place of a row.
    pub page_list: Vec<u32>,
    pub free: Option<ListedPages>,
    pub tree: Option<ListedPages>,
}

/// The rows that an audit keeps: those that didn't change while they were copied.
#[derive(Clone, Debug, Default)]
pub struct ValidRows {
    pub rows: Vec<LiveRow>,
    /// The parts of these rows that the radix tree doesn't own, each as a row. Rows of which the
    /// protected part (the part that the tree owns) is unknown are left out.
    pub unprotected: Vec<LiveRow>,
}

/// Returns the kinds of fault that a snapshot can show, except [`Kind::Changed`]. A report has the
/// count 0 for each of these kinds of which there is no fault.
pub fn kinds(scope: Scope, has_free: bool, has_tree: bool, has_unprotected: bool) -> Vec<Kind> {
    let moment = scope.moment().is_some();
    let complete = scope.complete().is_some();
    let can_show = |kind: &Kind| match kind {
        Kind::Aliased => moment && has_tree,
        Kind::Leaked => complete && has_free && has_tree,
        Kind::DoubleFree | Kind::FreeEntry => has_free,
        Kind::FreeHeld => moment && has_free,
        Kind::FreeCached => moment && has_free && has_tree,
        Kind::CachedPrivate => moment && has_tree && has_unprotected,
        Kind::TreeTwice | Kind::TreeEntry => has_tree,
        Kind::RowEntry => true,
        Kind::Changed => false,
    };
    Kind::ALL.into_iter().filter(can_show).collect()
}

/// Returns the findings of every kind that the snapshot can show. The pool has `npages` pages of
/// `1 << shift` tokens.
pub fn findings(
    copy: &PoolCopy,
    kept: &ValidRows,
    npages: u32,
    shift: u32,
    scope: Scope,
) -> Vec<KindFindings> {
    let marks = reference::mark(&kept.rows, &copy.page_list, shift, npages);
    let finder = FaultFinder { copy, kept, shift, marks };
    let (has_free, has_tree) = (copy.free.is_some(), copy.tree.is_some());
    let kinds = kinds(scope, has_free, has_tree, !kept.unprotected.is_empty());
    kinds.into_iter().map(|kind| finder.find(kind, scope)).collect()
}

/// Returns the findings of a kind of which there is no fault.
pub fn none_of(kind: Kind) -> KindFindings {
    KindFindings { kind, count: 0, named: vec![] }
}

/// Returns the findings of sealed pages that changed.
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
    shift: u32,
    /// The reference count and the owner of each page, by the kept rows.
    marks: Marks,
}

impl FaultFinder<'_> {
    /// Returns the findings of one kind. They are empty if the scope can't show that kind.
    fn find(&self, kind: Kind, scope: Scope) -> KindFindings {
        let none = Tally::default;
        let listed = |tally: Option<&Tally>| tally.cloned().unwrap_or_default();
        let (free, tree) = (self.copy.free.as_ref(), self.copy.tree.as_ref());
        let tally = match kind {
            Kind::Aliased => scope.moment().map_or_else(none, |proof| self.aliased(proof)),
            Kind::Leaked => scope.complete().map_or_else(none, |proof| self.leaked(proof)),
            Kind::FreeHeld => scope.moment().map_or_else(none, |proof| self.free_held(proof)),
            Kind::FreeCached => scope.moment().map_or_else(none, |proof| self.free_cached(proof)),
            Kind::CachedPrivate => {
                scope.moment().map_or_else(none, |proof| self.cached_private(proof))
            }
            Kind::DoubleFree => listed(free.map(|free| &free.repeated)),
            Kind::FreeEntry => listed(free.map(|free| &free.invalid)),
            Kind::TreeTwice => listed(tree.map(|tree| &tree.repeated)),
            Kind::TreeEntry => listed(tree.map(|tree| &tree.invalid)),
            Kind::RowEntry => return self.row_entries(),
            Kind::Changed => none(),
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
            for &page in row_pages(row, &self.copy.page_list, self.shift) {
                for (_, holders) in
                    (named.iter().zip(&mut holders)).filter(|(named, _)| **named == i64::from(page))
                {
                    holders.insert(row.session);
                }
            }
        }
        holders
    }

    fn aliased(&self, _: Moment) -> Tally {
        let is_shared = |page: usize| self.marks.owner[page] == OWNER_SHARED;
        self.pages(|page| is_shared(page) && !lists_page(&self.copy.tree, page))
    }

    fn leaked(&self, _: Complete) -> Tally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        let is_listed = |page| lists_page(free, page) || lists_page(tree, page);
        let has_owner = |page| is_listed(page) || self.marks.refcnt[page] > 0;
        // Page 0 is the padding page. It never has an owner, so it is not a leak.
        self.pages(|page| page > 0 && !has_owner(page))
    }

    fn free_held(&self, _: Moment) -> Tally {
        self.pages(|page| lists_page(&self.copy.free, page) && self.marks.refcnt[page] > 0)
    }

    fn free_cached(&self, _: Moment) -> Tally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        self.pages(|page| lists_page(free, page) && lists_page(tree, page))
    }

    fn cached_private(&self, _: Moment) -> Tally {
        let npages = u32::try_from(self.marks.refcnt.len()).expect("a pool's page count is a u32");
        let rows = &self.kept.unprotected;
        let unprotected = reference::mark(rows, &self.copy.page_list, self.shift, npages);
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

    /// Returns the entries of rows that are not a page of the pool.
    fn row_entries(&self) -> KindFindings {
        let mut findings = none_of(Kind::RowEntry);
        for row in &self.kept.rows {
            for (index, &page) in (0i64..).zip(row_pages(row, &self.copy.page_list, self.shift)) {
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

/// Returns the row's part of the page list.
fn row_pages<'a>(row: &LiveRow, page_list: &'a [u32], shift: u32) -> &'a [u32] {
    let start = row.out_off as usize;
    &page_list[start..start + row.pages(shift) as usize]
}

//! Findings: names the faults in a copy of the engine's lists. Pure, on the host, scalar.
//!
//! The backend counts. Only if its counts show a fault does the copy itself come here; it is then
//! count_pages again by the scalar reference, and the faults get names. Types keep unanswerable
//! questions from being asked: a finding across rows and lists needs a [`Moment`], a finding about
//! pages without an owner needs a [`Complete`].

use crate::{
    reference::{self, LiveRow, Marks, OWNER_SHARED, PAGE_BAD, PageSet},
    report::{Finding, Found, Kind, NAMED_MAX, NAMED_SESSIONS_MAX, Scope},
};
use std::collections::BTreeSet;

/// Proof that rows and lists are from one moment.
#[derive(Clone, Copy, Debug)]
pub struct Moment(());

/// Proof that, in addition, no row changed: the copy is complete.
#[derive(Clone, Copy, Debug)]
pub struct Complete(());

impl Scope {
    /// Returns the scope of a snapshot: `complete` is the caller's promise, `rows_moved` the number
    /// of rows that changed since.
    pub fn new(complete: bool, rows_moved: usize) -> Self {
        match (complete, rows_moved) {
            (false, _) => Self::Partial,
            (true, 0) => Self::Complete,
            (true, _) => Self::Moved,
        }
    }

    pub fn moment(self) -> Option<Moment> {
        (self != Self::Partial).then_some(Moment(()))
    }

    pub fn complete(self) -> Option<Complete> {
        (self == Self::Complete).then_some(Complete(()))
    }
}

/// A number of faults, and the first few of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub count: u64,
    pub first: Vec<i64>,
}

impl Tally {
    fn add(&mut self, at: i64) {
        self.count += 1;
        if self.first.len() < NAMED_MAX {
            self.first.push(at);
        }
    }
}

/// A list of ids as a set of pages ([`reference::slots_to_set`]), with the faults in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPages {
    pub set: PageSet,
    /// Pages that the list names more than once.
    pub repeated: Tally,
    /// Ids that a list must not contain: outside the pool, or of the padding page.
    pub odd: Tally,
}

impl ListedPages {
    /// Reads a list of ids with `1 << shift` ids per page: page ids if `shift` is 0, else token
    /// slots.
    pub fn new(ids: impl IntoIterator<Item = i64>, shift: u32, pages: u32) -> Self {
        let mut has = vec![false; pages as usize];
        let (mut repeated, mut odd, mut bad) = (Tally::default(), Tally::default(), 0);
        for id in ids {
            let place = usize::try_from(id >> shift).ok().and_then(|page| has.get_mut(page));
            if place.is_none() || id >> shift == 0 {
                odd.add(id);
            }
            match place {
                None => bad += 1,
                // A page counts as named only by its first slot.
                Some(has) if id & ((1 << shift) - 1) == 0 => {
                    if std::mem::replace(has, true) {
                        repeated.add(id >> shift);
                    }
                }
                Some(_) => {}
            }
        }
        Self { set: PageSet { has, duplicates: repeated.count, bad }, repeated, odd }
    }
}

/// A copy of the engine's lists, as far as the snapshot had them.
#[derive(Clone, Debug, Default)]
pub struct PoolCopy {
    /// Page references of all rows, one row after another.
    pub staged: Vec<u32>,
    pub free: Option<ListedPages>,
    pub tree: Option<ListedPages>,
}

/// The rows whose part of the copy is valid.
#[derive(Clone, Debug, Default)]
pub struct ValidRows {
    pub rows: Vec<LiveRow>,
    /// The unprotected parts of those rows whose protected part is known. Empty if there are none.
    pub own: Vec<LiveRow>,
}

/// Returns the kinds of fault that a snapshot can show, digests aside. A sound audit reports 0 for
/// each.
pub fn kinds(scope: Scope, has_free: bool, has_tree: bool, has_own: bool) -> Vec<Kind> {
    let moment = scope.moment().is_some();
    let complete = scope.complete().is_some();
    let answered = |kind: &Kind| match kind {
        Kind::Aliased => moment && has_tree,
        Kind::Leaked => complete && has_free && has_tree,
        Kind::DoubleFree | Kind::FreeEntry => has_free,
        Kind::FreeHeld => moment && has_free,
        Kind::FreeCached => moment && has_free && has_tree,
        Kind::CachedPrivate => moment && has_tree && has_own,
        Kind::TreeTwice | Kind::TreeEntry => has_tree,
        Kind::RowEntry => true,
        Kind::Changed => false,
    };
    Kind::ALL.into_iter().filter(answered).collect()
}

/// Returns the findings of every kind that the snapshot can show.
pub fn findings(
    copy: &PoolCopy,
    kept: &ValidRows,
    (npages, shift): (u32, u32),
    scope: Scope,
) -> Vec<Found> {
    let marks = reference::mark(&kept.rows, &copy.staged, shift, npages);
    let finder = FaultFinder { copy, kept, shift, marks };
    let asked = kinds(scope, copy.free.is_some(), copy.tree.is_some(), !kept.own.is_empty());
    asked.into_iter().map(|kind| finder.found(kind, scope)).collect()
}

/// Returns a finding with count 0.
pub fn none_of(kind: Kind) -> Found {
    Found { kind, count: 0, named: vec![] }
}

/// Returns the finding of changed pages; `pages` are pairs of page and session.
pub fn changed(pages: &[(u32, u32)]) -> Found {
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    let named = pages.iter().take(NAMED_MAX).map(|&(page, session)| Finding {
        at: page.into(),
        sessions: vec![session],
        sessions_count: 1,
    });
    Found { kind: Kind::Changed, count: pages.len() as u64, named: named.collect() }
}

struct FaultFinder<'a> {
    copy: &'a PoolCopy,
    kept: &'a ValidRows,
    shift: u32,
    marks: Marks,
}

impl FaultFinder<'_> {
    fn found(&self, kind: Kind, scope: Scope) -> Found {
        let none = Tally::default;
        let listed = |tally: Option<&Tally>| tally.cloned().unwrap_or_default();
        let (free, tree) = (self.copy.free.as_ref(), self.copy.tree.as_ref());
        let tally = match kind {
            Kind::Aliased => scope.moment().map_or_else(none, |m| self.aliased(m)),
            Kind::Leaked => scope.complete().map_or_else(none, |w| self.leaked(w)),
            Kind::FreeHeld => scope.moment().map_or_else(none, |m| self.free_held(m)),
            Kind::FreeCached => scope.moment().map_or_else(none, |m| self.free_cached(m)),
            Kind::CachedPrivate => scope.moment().map_or_else(none, |m| self.cached_private(m)),
            Kind::DoubleFree => listed(free.map(|free| &free.repeated)),
            Kind::FreeEntry => listed(free.map(|free| &free.odd)),
            Kind::TreeTwice => listed(tree.map(|tree| &tree.repeated)),
            Kind::TreeEntry => listed(tree.map(|tree| &tree.odd)),
            Kind::RowEntry => return self.row_entries(),
            Kind::Changed => none(),
        };
        let holders = self.holders(kind, &tally.first);
        let mut named: Vec<Finding> = (tally.first.iter().zip(holders))
            .map(|(&at, sessions)| Finding {
                at,
                sessions_count: u32::try_from(sessions.len()).expect("a snapshot has few sessions"),
                sessions: sessions.into_iter().take(NAMED_SESSIONS_MAX).collect(),
            })
            .collect();
        named.sort();
        Found { kind, count: tally.count, named }
    }

    /// Returns, for each named page, the sessions that hold it.
    fn holders(&self, kind: Kind, named: &[i64]) -> Vec<BTreeSet<u32>> {
        let mut holders = vec![BTreeSet::new(); named.len()];
        if named.is_empty() || matches!(kind, Kind::FreeEntry | Kind::TreeEntry) {
            return holders;
        }
        let rows = if kind == Kind::CachedPrivate { &self.kept.own } else { &self.kept.rows };
        for row in rows {
            for &page in row_pages(row, &self.copy.staged, self.shift) {
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
        self.pages(|page| self.marks.owner[page] == OWNER_SHARED && !has(&self.copy.tree, page))
    }

    /// Page 0 is the padding page: it has no owner and is not a leak.
    fn leaked(&self, _: Complete) -> Tally {
        let (free, tree) = (&self.copy.free, &self.copy.tree);
        let owned = |page| has(free, page) || has(tree, page) || self.marks.refcnt[page] > 0;
        self.pages(|page| page > 0 && !owned(page))
    }

    fn free_held(&self, _: Moment) -> Tally {
        self.pages(|page| has(&self.copy.free, page) && self.marks.refcnt[page] > 0)
    }

    fn free_cached(&self, _: Moment) -> Tally {
        self.pages(|page| has(&self.copy.free, page) && has(&self.copy.tree, page))
    }

    fn cached_private(&self, _: Moment) -> Tally {
        let npages = u32::try_from(self.marks.refcnt.len()).expect("a pool's page count is a u32");
        let own = reference::mark(&self.kept.own, &self.copy.staged, self.shift, npages);
        self.pages(|page| has(&self.copy.tree, page) && own.refcnt[page] > 0)
    }

    fn pages(&self, is: impl Fn(usize) -> bool) -> Tally {
        let mut tally = Tally::default();
        for page in (0..self.marks.refcnt.len()).filter(|&page| is(page)) {
            tally.add(i64::try_from(page).expect("a pool's page count is a u32"));
        }
        tally
    }

    fn row_entries(&self) -> Found {
        let mut found = none_of(Kind::RowEntry);
        for row in &self.kept.rows {
            for (at, &page) in (0i64..).zip(row_pages(row, &self.copy.staged, self.shift)) {
                if page != PAGE_BAD {
                    continue;
                }
                found.count += 1;
                if found.named.len() < NAMED_MAX {
                    let sessions = vec![row.session];
                    found.named.push(Finding { at, sessions, sessions_count: 1 });
                }
            }
        }
        found.named.sort();
        found
    }
}

fn has(listed: &Option<ListedPages>, page: usize) -> bool {
    listed.as_ref().is_some_and(|listed| listed.set.has[page])
}

fn row_pages<'a>(row: &LiveRow, staged: &'a [u32], shift: u32) -> &'a [u32] {
    let start = row.out_off as usize;
    &staged[start..start + row.pages(shift) as usize]
}

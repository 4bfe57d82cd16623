//! The result of one audit. The module `bytes` encodes it.
//!
//! A figure that the snapshot could not answer is absent, never zero: an `Option`, a kind without
//! an entry in `findings`, or a session without an entry. This module only holds values.

mod bytes;

pub use bytes::{Error, REPORT_BYTES_HEAD_MAX, SESSION_BYTES, VERSION};

/// Findings named per kind, at most; all are counted.
pub const NAMED_MAX: usize = 16;
/// Sessions named per finding, at most; all are counted.
pub const NAMED_SESSIONS_MAX: usize = 8;
/// Session entries in one report, at most.
pub const SESSIONS_MAX: usize = 1 << 16;

/// The report of one audit of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The number of audits that this accountant finished before.
    pub number: u64,
    pub scope: Scope,
    pub page_tokens: u32,
    /// The pool's pages, including the padding page.
    pub pages: u32,
    /// Rows whose copy is valid; `rows_moved` counts the rows that changed while they were copied.
    pub rows: u32,
    pub rows_moved: u32,
    /// Distinct pages that the valid rows hold.
    pub held_pages: u64,
    /// Absent if no free list was given.
    pub free: Option<FreePages>,
    /// Absent unless the scope is [`Scope::Complete`], and free lists and radix tree were given.
    pub classes: Option<Classes>,
    /// Sessions of which no row changed, by number; sessions without rows have no entry.
    pub sessions: Vec<Session>,
    pub digests: Digests,
    /// By kind, ascending; a kind that this snapshot could not show has no entry.
    pub findings: Vec<Found>,
}

impl Report {
    /// Returns the findings of one kind; `None` if the snapshot could not show that kind.
    pub fn found(&self, kind: Kind) -> Option<&Found> {
        self.findings.iter().find(|found| found.kind == kind)
    }

    /// Returns the number of faults of all kinds that the snapshot could show.
    pub fn alarms(&self) -> u64 {
        self.findings.iter().map(|found| found.count).fold(0, u64::saturating_add)
    }
}

/// How complete the snapshot was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every row, free page and tree page is from one moment, and no row changed: all figures are
    /// exact.
    Complete,
    /// From one moment, but some rows changed and were left out. Findings are true, pages without
    /// an owner are unknown, and `exclusive` is an upper bound.
    Moved,
    /// Not from one moment: rows are exact, and nothing is known across rows and lists.
    Partial,
}

/// The free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreePages {
    /// Number of distinct free pages.
    pub pages: u64,
    /// Number of contiguous runs of free pages.
    pub runs: u64,
}

/// All pages but the padding page, counted by owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    pub free: u64,
    /// Referenced by rows and not in the radix tree.
    pub private: u64,
    /// Only in the radix tree.
    pub cached: u64,
    pub cached_in_use: u64,
    /// Without an owner: not free, not referenced, not in the tree.
    pub leaked: u64,
    /// Free and at the same time referenced or in the tree.
    pub corrupt: u64,
}

/// The pages of one session, in pages unless a field says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// The session's number in the snapshot.
    pub number: u32,
    /// Page references of the session's rows.
    pub refs: u64,
    /// Distinct pages that no other session references.
    pub exclusive: u64,
    /// Proportional share: each page divided by its number of references, in units of 2^-32 page.
    pub share_q32: u64,
    /// Pages that closing the session frees, exactly; absent unless the report has classes.
    pub freed: Option<u64>,
    /// Contiguous runs of pages: the number of transfer descriptors to move the session.
    pub runs: u64,
    /// Token slots allocated beyond the end of the session's rows.
    pub tail_tokens: u64,
}

impl Session {
    /// Returns the references to pages that other sessions hold too. For a session with one row,
    /// this is the number of such pages.
    pub fn shared(&self) -> u64 {
        self.refs.saturating_sub(self.exclusive)
    }
}

/// Counts of the sealed pages that this audit digested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// Pages compared with an earlier digest.
    pub compared: u64,
    /// Pages seen for the first time, and remembered.
    pub fresh: u64,
    /// Pages remembered after this audit.
    pub remembered: u64,
}

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// A page outside the radix tree is referenced by rows of several sessions. `at` is the page.
    Aliased = 1,
    /// A page has no owner. `at` is the page.
    Leaked = 2,
    /// The free lists name a page more than once. `at` is the page.
    DoubleFree = 3,
    /// A free page is referenced by rows. `at` is the page.
    FreeHeld = 4,
    /// A free page is in the radix tree. `at` is the page.
    FreeCached = 5,
    /// A row references a page of the radix tree outside its protected part. `at` is the page.
    CachedPrivate = 6,
    /// The radix tree names a page more than once. `at` is the page.
    TreeTwice = 7,
    /// An entry of a row is not a page of the pool. `at` is the page's index in the row.
    RowEntry = 8,
    /// An entry of the free lists is not a page that may be allocated. `at` is the entry's value.
    FreeEntry = 9,
    /// An entry of the radix tree is not a page of the pool. `at` is the entry's value.
    TreeEntry = 10,
    /// The content of a sealed page changed though nothing may rewrite it. `at` is the page.
    Changed = 11,
}

impl Kind {
    pub const ALL: [Self; 11] = [
        Self::Aliased,
        Self::Leaked,
        Self::DoubleFree,
        Self::FreeHeld,
        Self::FreeCached,
        Self::CachedPrivate,
        Self::TreeTwice,
        Self::RowEntry,
        Self::FreeEntry,
        Self::TreeEntry,
        Self::Changed,
    ];

    /// Returns the name used in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aliased => "aliased",
            Self::Leaked => "leaked",
            Self::DoubleFree => "double_free",
            Self::FreeHeld => "free_held",
            Self::FreeCached => "free_cached",
            Self::CachedPrivate => "cached_private",
            Self::TreeTwice => "tree_twice",
            Self::RowEntry => "row_entry",
            Self::FreeEntry => "free_entry",
            Self::TreeEntry => "tree_entry",
            Self::Changed => "changed",
        }
    }
}

/// All faults of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub kind: Kind,
    pub count: u64,
    /// The first [`NAMED_MAX`] faults, ascending.
    pub named: Vec<Finding>,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The page or entry; see [`Kind`].
    pub at: i64,
    /// The first [`NAMED_SESSIONS_MAX`] sessions concerned, ascending.
    pub sessions: Vec<u32>,
    /// The number of sessions concerned.
    pub sessions_count: u32,
}

//! What one audit found: the report as a value. Its bytes are in `bytes`.
//!
//! A figure that the cut could not answer is absent, never zero: an `Option`, a kind without an
//! entry in `findings`, or a session without a line. The report reads nothing and decides nothing.

mod bytes;

pub use bytes::{Error, REPORT_BYTES_HEAD_MAX, SESSION_BYTES, VERSION};

/// Findings named per kind; all of them are counted.
pub const NAMED_MAX: usize = 16;
/// Sessions named per finding; all of them are counted.
pub const NAMED_SESSIONS_MAX: usize = 8;
/// Lines of sessions in one report.
pub const SESSIONS_MAX: usize = 1 << 16;

/// One audit of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Audits of this accountant before this one.
    pub number: u64,
    pub scope: Scope,
    pub page_tokens: u32,
    /// The pool's pages, the padding page included.
    pub pages: u32,
    /// Rows whose copy is good, and rows that moved while they were copied.
    pub rows: u32,
    pub rows_moved: u32,
    /// Distinct pages that the kept rows hold.
    pub held_pages: u64,
    /// Absent when no free list was given.
    pub free: Option<FreePages>,
    /// Absent unless the scope is [`Scope::Whole`] and both free lists and tree were given.
    pub classes: Option<Classes>,
    /// Sessions of which no row moved, by number; sessions without rows have no line.
    pub sessions: Vec<Session>,
    pub digests: Digests,
    /// By kind, ascending; a kind that this cut could not answer has no entry.
    pub findings: Vec<Found>,
}

impl Report {
    /// What was found of one kind; `None` when the cut could not answer it.
    pub fn found(&self, kind: Kind) -> Option<&Found> {
        self.findings.iter().find(|found| found.kind == kind)
    }

    /// Everything that should not be, over all kinds that could be answered.
    pub fn alarms(&self) -> u64 {
        self.findings.iter().map(|found| found.count).fold(0, u64::saturating_add)
    }
}

/// How much of the truth the cut was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every row, free page and tree page of one moment, and no row moved: every figure is exact.
    Whole,
    /// Of one moment, but some rows moved and were left out: what was found is true, what nobody
    /// seems to own is unknown, `exclusive` is an upper bound.
    Moved,
    /// The caller could not promise one moment: rows are exact, nothing is said across lists.
    Partial,
}

/// The free list(s).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreePages {
    /// Distinct free pages.
    pub pages: u64,
    /// Contiguous runs of them.
    pub runs: u64,
}

/// Every page but the padding page, by who says it is theirs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    pub free: u64,
    /// Referenced by rows only.
    pub private: u64,
    /// In the tree only.
    pub cached: u64,
    pub cached_in_use: u64,
    /// Owned by nobody.
    pub leaked: u64,
    /// Free, and at once referenced or in the tree.
    pub corrupt: u64,
}

/// What one session holds, in pages unless named otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its number in the cut.
    pub number: u32,
    /// Page references of its rows.
    pub refs: u64,
    /// Distinct pages that no other session references.
    pub exclusive: u64,
    /// Proportional share, in units of 2^-32 page.
    pub share_q32: u64,
    /// Exactly what a close would free; absent unless the report's classes are there.
    pub freed: Option<u64>,
    /// Contiguous page runs: transfer descriptors if it moved.
    pub runs: u64,
    /// Token slots allocated past the end of its rows.
    pub tail_tokens: u64,
}

impl Session {
    /// References to pages that other sessions hold too. Of a session of one row: those pages.
    pub fn shared(&self) -> u64 {
        self.refs.saturating_sub(self.exclusive)
    }
}

/// Sealed pages that were digested in this audit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// Compared with an earlier digest.
    pub compared: u64,
    /// Seen for the first time, and remembered.
    pub fresh: u64,
    /// Pages remembered after this audit.
    pub remembered: u64,
}

/// What a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// A page outside the tree that rows of several sessions name. `at` is the page.
    Aliased = 1,
    /// A page that nobody owns. `at` is the page.
    Leaked = 2,
    /// An entry of the free lists that names a page named before. `at` is the page.
    DoubleFree = 3,
    /// A free page that rows name. `at` is the page.
    FreeHeld = 4,
    /// A free page that the tree holds. `at` is the page.
    FreeCached = 5,
    /// A page of the tree that a row holds behind its protected part. `at` is the page.
    CachedPrivate = 6,
    /// A page that the tree names again. `at` is the page.
    TreeTwice = 7,
    /// An entry of a row that is no page of the pool. `at` is the page's place in the row.
    RowEntry = 8,
    /// An entry of the free lists that is no page to be given out. `at` is the entry.
    FreeEntry = 9,
    /// An entry of the tree that is no page of the pool. `at` is the entry.
    TreeEntry = 10,
    /// A sealed page whose content is not what it was, though nothing rewrote it. `at` is the
    /// page.
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

    /// Its word in logs and metrics.
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

/// All findings of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub kind: Kind,
    pub count: u64,
    /// The first [`NAMED_MAX`] of them, ascending.
    pub named: Vec<Finding>,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// What it is about: see [`Kind`].
    pub at: i64,
    /// The first [`NAMED_SESSIONS_MAX`] sessions concerned, ascending.
    pub sessions: Vec<u32>,
    /// All sessions concerned.
    pub sessions_count: u32,
}

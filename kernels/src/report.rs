//! Defines the report of one audit of a KV pool.
//!
//! A report counts the pages by owner, counts the pages of each session, and lists the faults.
//! [`crate::account`] fills in the report. The module `bytes` encodes it for another process.
//!
//! An engine's snapshot may lack its free lists or its radix tree, and rows may change while they
//! are copied. A figure that such a snapshot can't give is absent from the report, never zero: an
//! `Option` is `None`, a kind of fault has no entry in `findings`, or a session has no entry in
//! `sessions`.
//!
//! A *page reference* is one page of one row. A page that two rows name has two references.

mod bytes;

pub use bytes::{Error, REPORT_BYTES_HEAD_MAX, SESSION_BYTES, VERSION};

/// Faults that a report names per kind, at most. The report counts all of them.
pub const NAMED_MAX: usize = 16;
/// Sessions that a report names per fault, at most. The report counts all of them.
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
    /// The number of rows in the audit: those that didn't change while they were copied.
    pub rows: u32,
    /// The number of rows that changed while they were copied, and are left out.
    pub rows_changed: u32,
    /// The number of distinct pages that these `rows` hold.
    pub held_pages: u64,
    /// Absent if the snapshot has no free list.
    pub free: Option<FreePages>,
    /// Absent unless the scope is [`Scope::Complete`], and the snapshot has free lists and the
    /// radix tree.
    pub classes: Option<Classes>,
    /// The sessions that have rows, by ascending number. A session is left out if one of its rows
    /// changed while it was copied.
    pub sessions: Vec<Session>,
    pub digests: Digests,
    /// By ascending kind. A kind that this snapshot can't show has no entry.
    pub findings: Vec<KindFindings>,
}

impl Report {
    /// Returns the findings of one kind, or `None` if the snapshot can't show that kind.
    pub fn found(&self, kind: Kind) -> Option<&KindFindings> {
        self.findings.iter().find(|findings| findings.kind == kind)
    }

    /// Returns the number of all faults.
    pub fn alarms(&self) -> u64 {
        self.findings.iter().map(|findings| findings.count).fold(0, u64::saturating_add)
    }
}

/// How complete the audit's copy of the engine's rows and lists is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All rows, free lists and the radix tree are from the same moment, and no row changed while
    /// it was copied. All figures are exact.
    Complete,
    /// All is from the same moment, but some rows changed while they were copied, and are left out.
    /// The findings are true. Pages without an owner can't be found, and [`Session::exclusive`] is
    /// an upper bound.
    RowsChanged,
    /// Rows and lists are not from the same moment, or not all of them are known. What the report
    /// says of rows is exact. It says nothing that needs rows and lists together.
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
    /// In the radix tree and not referenced by rows.
    pub cached: u64,
    /// In the radix tree and referenced by rows.
    pub cached_in_use: u64,
    /// Without an owner: not free, not referenced, and not in the radix tree.
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
    /// The session's proportional share of its pages, in units of 2^-32 page. Each of its
    /// references to a page adds one page divided by the number of all references to that page.
    pub share_q32: u64,
    /// The exact number of pages that closing the session frees. Absent unless the report has
    /// `classes`.
    pub freed: Option<u64>,
    /// Contiguous runs of pages. A transfer of the session's KV needs one descriptor per run.
    pub runs: u64,
    /// Token slots of the rows' last pages that lie beyond the rows' ends.
    pub tail_tokens: u64,
}

impl Session {
    /// Returns `refs` less `exclusive`. For a session with one row, this is the number of its pages
    /// that other sessions hold too. A session with several rows counts a page once more for each
    /// further row that references it.
    pub fn shared(&self) -> u64 {
        self.refs.saturating_sub(self.exclusive)
    }
}

/// Counts of digested pages. An audit digests sealed pages, whose contents must not change, to see
/// whether they changed since an earlier audit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// Pages compared with an earlier digest.
    pub compared: u64,
    /// Pages without an earlier digest, whose digest is now remembered.
    pub fresh: u64,
    /// Pages whose digest is remembered after this audit.
    pub remembered: u64,
}

/// The kind of a fault. Each variant says what [`Finding::at`] holds.
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
    /// The radix tree owns one part of a row. A page of the tree is in another part of the row.
    /// `at` is the page.
    CachedPrivate = 6,
    /// The radix tree names a page more than once. `at` is the page.
    TreeTwice = 7,
    /// An entry of a row is not a page of the pool. `at` is the page's index in the row.
    RowEntry = 8,
    /// An entry of the free lists is outside the pool, or the padding page. `at` is the entry's
    /// value.
    FreeEntry = 9,
    /// An entry of the radix tree is outside the pool, or in the padding page. `at` is the entry's
    /// value.
    TreeEntry = 10,
    /// The content of a sealed page changed, though the engine may not rewrite that page while the
    /// session's key stays the same; see [`crate::digest`]. `at` is the page.
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

/// The findings of one kind: how many faults there are, and some of the faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindFindings {
    pub kind: Kind,
    pub count: u64,
    /// At most [`NAMED_MAX`] of the faults, in ascending order.
    pub named: Vec<Finding>,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The page, the index in the row, or the entry's value; see [`Kind`].
    pub at: i64,
    /// The sessions whose rows have the page or the entry, by ascending number. Only the first
    /// [`NAMED_SESSIONS_MAX`] of these sessions are here.
    pub sessions: Vec<u32>,
    /// The number of all these sessions.
    pub sessions_count: u32,
}

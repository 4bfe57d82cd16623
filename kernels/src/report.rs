//! Defines the report of one audit of a KV pool: pages by owner, pages by session, and faults.
//!
//! - A *page reference* is one page of one row. A page that two rows name has two references.
//! - The *padding page* is page 0. The engine never gives it to a row.
//! - A *sealed* page lies in a part of a row that the engine must not rewrite any more.
//! - The *protected part* of a row is its beginning, whose pages the radix tree owns.
//!
//! A figure that needs the rows that changed meanwhile is absent from the report, never zero.

mod bytes;

use serde::{Deserialize, Serialize};

pub use bytes::{Error, REPORT_BYTES_WITHOUT_SESSIONS_MAX, SESSION_BYTES_MAX, VERSION};

/// The maximum number of faults of one kind that a report lists. The report counts all of them.
pub const FAULTS_PER_KIND_MAX: usize = 16;
/// The maximum number of sessions that a report lists for one fault. The report counts all of them.
pub const SESSIONS_PER_FAULT_MAX: usize = 8;
pub const SESSIONS_MAX: usize = 1 << 16;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The audit's number: 0 for an accountant's first finished audit, then 1, and so on.
    pub audit_number: u64,
    pub scope: Scope,
    pub page_tokens: u32,
    /// The number of pages in the pool, including the padding page.
    pub pages: u32,
    /// The number of rows in the audit: those that didn't change while they were copied.
    pub rows: u32,
    /// The number of rows that changed meanwhile, and are left out.
    pub rows_changed: u32,
    /// The number of distinct pages that the rows in the audit reference.
    pub held_pages: u64,
    pub free: FreePages,
    /// Absent unless the scope is [`Scope::Complete`].
    pub pages_by_owner: Option<PagesByOwner>,
    /// By ascending number. A session is left out if it has no row, or one that changed meanwhile.
    pub sessions: Vec<Session>,
    pub digests: DigestCounts,
    /// By ascending kind. A kind of fault that this audit can't show has no entry.
    pub findings: Vec<KindFindings>,
}

impl Report {
    /// Returns the findings of one kind, or `None` if the audit can't show that kind of fault.
    pub fn findings_of(&self, kind: FaultKind) -> Option<&KindFindings> {
        self.findings.iter().find(|findings| findings.kind == kind)
    }

    pub fn fault_count(&self) -> u64 {
        self.findings.iter().map(|findings| findings.count).fold(0, u64::saturating_add)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scope {
    /// No row changed while it was copied. All figures are exact.
    Complete,
    /// Some rows changed while they were copied, and are left out. Every listed fault is real.
    /// Pages without an owner can't be found, and [`Session::exclusive_pages`] is an upper bound.
    RowsChanged,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreePages {
    pub pages: u64,
    pub runs: u64,
}

/// All pages except the padding page, counted by owner. Each page is in exactly one count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagesByOwner {
    /// In a free list only.
    pub free: u64,
    /// Referenced by rows and not in the radix tree.
    pub private: u64,
    /// In the radix tree and not referenced by rows.
    pub cached: u64,
    /// In the radix tree and referenced by rows.
    pub cached_in_use: u64,
    /// Without an owner: not free, not referenced, and not in the radix tree.
    pub leaked: u64,
    /// Free and at the same time referenced or in the radix tree.
    pub corrupt: u64,
}

/// The pages of one session. Counts are in pages unless a field says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    pub number: u32,
    pub refs: u64,
    /// The number of distinct pages that no other session references.
    pub exclusive_pages: u64,
    /// In units of 2^-32 page: each reference adds one page divided by all references to that page.
    pub share_q32: u64,
    /// Absent unless the report has [`Report::pages_by_owner`].
    pub freed_by_close: Option<u64>,
    /// Contiguous runs. A transfer of the session's KV needs one descriptor per run.
    pub runs: u64,
    /// The number of unused token slots in the last pages of the session's rows.
    pub tail_tokens: u64,
}

impl Session {
    /// References that don't count as exclusive pages. With several rows, a page counts again for
    /// each further row that references it.
    pub fn shared(&self) -> u64 {
        self.refs.saturating_sub(self.exclusive_pages)
    }
}

/// Sealed pages of which an audit has made digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DigestCounts {
    pub compared: u64,
    /// Pages without an earlier digest, whose digest is now remembered.
    pub fresh: u64,
    /// After this audit.
    pub remembered: u64,
}

/// The kind of a fault. [`Finding::page_or_entry`] is the page, unless a variant says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FaultKind {
    /// Rows of several sessions reference a page that is outside the radix tree.
    Aliased,
    /// A page has no owner.
    Leaked,
    /// The free lists name a page more than once.
    DoubleFree,
    /// Rows reference a free page.
    FreeHeld,
    /// A free page is in the radix tree.
    FreeCached,
    /// A row has a page of the radix tree outside its protected part.
    CachedUnprotected,
    /// The radix tree names a page more than once.
    TreeTwice,
    /// An entry of a row is not a page of the pool. The finding has its index in the row's pages.
    BadRowEntry,
    /// An entry of the free lists is outside the pool, or is the padding page. The finding has it.
    BadFreeEntry,
    /// An entry of the radix tree is outside the pool, or in the padding page. The finding has it.
    BadTreeEntry,
    /// The contents changed, though the session's key stayed the same; see [`crate::digest`].
    SealedPageChanged,
}

impl FaultKind {
    /// In ascending order.
    pub const ALL: [Self; 11] = [
        Self::Aliased,
        Self::Leaked,
        Self::DoubleFree,
        Self::FreeHeld,
        Self::FreeCached,
        Self::CachedUnprotected,
        Self::TreeTwice,
        Self::BadRowEntry,
        Self::BadFreeEntry,
        Self::BadTreeEntry,
        Self::SealedPageChanged,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Aliased => "aliased",
            Self::Leaked => "leaked",
            Self::DoubleFree => "double_free",
            Self::FreeHeld => "free_held",
            Self::FreeCached => "free_cached",
            Self::CachedUnprotected => "cached_private",
            Self::TreeTwice => "tree_twice",
            Self::BadRowEntry => "row_entry",
            Self::BadFreeEntry => "free_entry",
            Self::BadTreeEntry => "tree_entry",
            Self::SealedPageChanged => "changed",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindFindings {
    pub kind: FaultKind,
    pub count: u64,
    /// At most [`FAULTS_PER_KIND_MAX`] of the faults, in ascending order.
    pub first_faults: Vec<Finding>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    /// The page, the index in the row, or the entry's value; see [`FaultKind`].
    pub page_or_entry: i64,
    /// The sessions whose rows have it, in ascending order, at most [`SESSIONS_PER_FAULT_MAX`].
    pub sessions: Vec<u32>,
    /// The number of all sessions whose rows have the page or the entry.
    pub session_count: u32,
}

//! Defines what an engine gives to an accountant: its KV pool once, and a snapshot for each audit.
//!
//! They name the engine's memory by address, so `unsafe` functions make them. The addresses are
//! trusted. All other values are checked, here and when an audit begins.

use crate::report::SESSIONS_MAX;

pub const ROWS_MAX: usize = 1 << 16;
/// Of one snapshot: 256 MiB of copied page ids.
pub const REFS_MAX: u64 = 1 << 26;
/// The maximum number of KV buffers of one pool: two for each of 512 layers.
pub const BUFFERS_MAX: usize = 1 << 10;
/// The maximum number of free lists of one snapshot. SGLang has two: free and released pages.
pub const FREE_LISTS_MAX: usize = 16;
/// A list without faults has at most one entry per slot. A list over this limit is refused unread.
const ENTRIES_PER_SLOT_MAX: u64 = 4;
const PAGE_TOKENS_MAX: u32 = 1 << 12;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("a page of {0} tokens: must be a power of two up to {PAGE_TOKENS_MAX}")]
    PageTokens(u32),
    #[error("a pool of {pages} pages of {page_tokens} tokens: needs 2 pages and i32 slots")]
    Pages { pages: u32, page_tokens: u32 },
    #[error(
        "req_to_token has {rows} rows, {stride} entries apart, at {addr:#x}: not a table of i32"
    )]
    Table { addr: u64, rows: u32, stride: u32 },
    #[error("KV buffer {index} at {addr:#x} with {page_bytes} bytes per page: 16 must divide both")]
    Buffer { index: usize, addr: u64, page_bytes: u64 },
    #[error("{n} {what}, {max} at most")]
    TooMany { what: &'static str, n: u64, max: u64 },
    #[error("row {row} of {len} tokens in session {session}: outside the pool or the keys")]
    Row { row: u32, len: u32, session: u32 },
    #[error("row {0}: its sealed or protected part is longer than the row")]
    PartTooLong(u32),
    #[error("the {what} at {addr:#x} has {n} entries: misaligned, or too long for the pool")]
    List { what: &'static str, addr: u64, n: u64 },
}

/// The table `req_to_token`: `rows` rows of `i32` token slots, `stride` entries apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTable {
    pub addr: u64,
    pub rows: u32,
    pub stride: u32,
}

/// One KV buffer: page `p` lies at `addr + p * page_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBuffer {
    pub addr: u64,
    pub page_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Base-2 logarithm of the tokens per page.
    page_shift: u32,
    /// The number of pages, including the padding page.
    pages: u32,
    table: RequestTable,
    buffers: Vec<PoolBuffer>,
}

impl Pool {
    /// `pages` includes the padding page 0. The pages of a pool without `buffers` are not digested.
    ///
    /// # Safety
    /// As long as an accountant of this pool lives, `table` and all `pages` of each buffer must be
    /// readable by this process, in the memory where the accountant works (host or device).
    pub unsafe fn new(
        page_tokens: u32,
        pages: u32,
        table: RequestTable,
        buffers: Vec<PoolBuffer>,
    ) -> Result<Self, Error> {
        if !page_tokens.is_power_of_two() || page_tokens > PAGE_TOKENS_MAX {
            return Err(Error::PageTokens(page_tokens));
        }
        let slots = u64::from(pages) * u64::from(page_tokens);
        if pages < 2 || slots > i32::MAX as u64 {
            return Err(Error::Pages { pages, page_tokens });
        }
        let RequestTable { addr, rows, stride } = table;
        if addr == 0 || !addr.is_multiple_of(4) || rows == 0 || stride == 0 {
            return Err(Error::Table { addr, rows, stride });
        }
        at_most("KV buffers", buffers.len(), BUFFERS_MAX)?;
        for (index, &PoolBuffer { addr, page_bytes }) in buffers.iter().enumerate() {
            let is_aligned = page_bytes.is_multiple_of(16) && addr.is_multiple_of(16);
            let buffer_end = page_bytes.checked_mul(pages.into()).and_then(|n| n.checked_add(addr));
            if addr == 0 || page_bytes == 0 || !is_aligned || buffer_end.is_none() {
                return Err(Error::Buffer { index, addr, page_bytes });
            }
        }
        Ok(Self { page_shift: page_tokens.trailing_zeros(), pages, table, buffers })
    }

    pub fn page_tokens(&self) -> u32 {
        1 << self.page_shift
    }

    pub fn page_shift(&self) -> u32 {
        self.page_shift
    }

    pub fn pages(&self) -> u32 {
        self.pages
    }

    pub fn table(&self) -> RequestTable {
        self.table
    }

    pub(super) fn rows_max(&self) -> usize {
        ROWS_MAX.min(self.table.rows as usize)
    }

    pub fn buffers(&self) -> &[PoolBuffer] {
        &self.buffers
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotRow {
    pub row: u32,
    /// The number of tokens whose slots are allocated.
    pub len: u32,
    /// The session's number: an index into the snapshot's keys.
    pub session: u32,
    /// Number of sealed tokens, which are at the row's beginning; may be 0. The engine doesn't
    /// rewrite their KV while the session's key stays the same.
    pub sealed_tokens: u32,
    /// Tokens at the row's beginning whose pages the radix tree owns.
    pub protected_tokens: u32,
    /// A number that changes whenever any token slot in `[0, len)` may be rewritten.
    pub version: u64,
}

/// A list of `i64` ids in the engine's memory: page ids, or token slots. The default is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdList {
    addr: u64,
    entries: u64,
}

impl IdList {
    /// # Safety
    /// The ids must be in the memory where the accountant works. They must not be freed or
    /// overwritten until the audit that gets the list has finished or was abandoned.
    pub unsafe fn new(addr: u64, entries: u64) -> Self {
        Self { addr, entries }
    }

    pub fn addr(&self) -> u64 {
        self.addr
    }

    pub fn entries(&self) -> u64 {
        self.entries
    }
}

/// The CUDA stream whose work must finish before a snapshot is valid; the default is the device's
/// default stream. Ignored for host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    /// # Safety
    /// When an audit begins, the handle must be a stream of the accountant's device, in its primary
    /// context.
    pub unsafe fn new(handle: u64) -> Self {
        Self(handle)
    }

    #[cfg(feature = "cuda")]
    pub(super) fn handle(self) -> u64 {
        self.0
    }
}

/// A snapshot of the engine's rows and page lists between two steps of its scheduler: of every row
/// that holds pages, and of whole lists.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a> {
    pub rows: &'a [SnapshotRow],
    /// Indexed by session number. A session gets another key when its KV is computed anew, or when
    /// it may have given up a sealed page.
    pub keys: &'a [u64],
    /// The free lists, as page ids.
    pub free: &'a [IdList],
    /// The radix tree's token slots: all slots of each page that the tree holds.
    pub tree: IdList,
    /// Pages to digest in this audit, at most; 0 for none.
    pub digest_pages_max: u32,
}

impl Snapshot<'_> {
    pub(super) fn check(&self, pool: &Pool) -> Result<(), Error> {
        at_most("sessions", self.keys.len(), SESSIONS_MAX)?;
        at_most("rows", self.rows.len(), pool.rows_max())?;
        at_most("free lists", self.free.len(), FREE_LISTS_MAX)?;
        let mut refs = 0;
        for row in self.rows {
            let &SnapshotRow { row: number, len, session, .. } = row;
            let table = pool.table();
            if number >= table.rows || len > table.stride || session as usize >= self.keys.len() {
                return Err(Error::Row { row: number, len, session });
            }
            if row.sealed_tokens > len || row.protected_tokens > len {
                return Err(Error::PartTooLong(number));
            }
            refs += u64::from(len).div_ceil(pool.page_tokens().into());
        }
        if refs > REFS_MAX {
            return Err(Error::TooMany { what: "page references", n: refs, max: REFS_MAX });
        }
        let entries_max = ENTRIES_PER_SLOT_MAX * (u64::from(pool.pages()) << pool.page_shift());
        let free = self.free.iter().map(|list| ("free list", list));
        for (what, &IdList { addr, entries: n }) in free.chain([("tree", &self.tree)]) {
            let is_placed = n == 0 || (addr != 0 && addr.is_multiple_of(8));
            if !is_placed || n > entries_max {
                return Err(Error::List { what, addr, n });
            }
        }
        Ok(())
    }
}

fn at_most(what: &'static str, n: usize, max: usize) -> Result<(), Error> {
    if n > max { Err(Error::TooMany { what, n: n as u64, max: max as u64 }) } else { Ok(()) }
}

//! What the accountant is told: the pool once, and a cut of the engine's books for each audit.
//!
//! The engine's memory is named by address, so these values are made by `unsafe` functions; all
//! else about them is checked, here and when an audit begins.

use crate::report::SESSIONS_MAX;

/// Rows of one cut.
pub const ROWS_MAX: usize = 1 << 16;
/// Page references of one cut: 256 MiB of copied page ids.
pub const REFS_MAX: u64 = 1 << 26;
/// KV buffers of one pool: two for each of 512 layers.
pub const BUFFERS_MAX: usize = 1 << 10;
/// Free lists of one cut. SGLang has two: the free and the released.
pub const FREE_LISTS_MAX: usize = 16;
/// A list that names each of the pool's slots this often is refused, not read.
const NAMED_TIMES_MAX: u64 = 4;
/// Tokens of a page, a power of two.
const PAGE_TOKENS_MAX: u32 = 1 << 12;

/// Why the accountant was told nonsense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("a page of {0} tokens: a power of two up to {PAGE_TOKENS_MAX} is needed")]
    PageTokens(u32),
    #[error("a pool of {pages} pages of {page_tokens} tokens: its slots must fit in an i32")]
    Pages { pages: u32, page_tokens: u32 },
    #[error("req_to_token of {rows} rows, {stride} entries apart, at {addr:#x}")]
    Table { addr: u64, rows: u32, stride: u32 },
    #[error("KV buffer {at} at {addr:#x} with {page_bytes} bytes per page: 16 must divide both")]
    Buffer { at: usize, addr: u64, page_bytes: u64 },
    #[error("{n} {what}, {max} at most")]
    TooMany { what: &'static str, n: u64, max: u64 },
    #[error("row {row} of {len} tokens in session {session}: not in this pool or cut")]
    Row { row: u32, len: u32, session: u32 },
    #[error("row {0}: its sealed or protected part is longer than the row")]
    Part(u32),
    #[error("the {what} at address {addr:#x} with {n} entries")]
    List { what: &'static str, addr: u64, n: u64 },
}

/// `req_to_token`: `rows` rows of token slots as `i32`, `stride` entries apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    pub addr: u64,
    pub rows: u32,
    pub stride: u32,
}

/// One KV buffer: page `p` lies at `addr + p * page_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub addr: u64,
    pub page_bytes: u64,
}

/// The engine's KV pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    shift: u32,
    pages: u32,
    table: Table,
    buffers: Vec<Buffer>,
}

impl Pool {
    /// A pool of `pages` pages, the padding page 0 included, of `page_tokens` tokens each.
    ///
    /// # Errors
    /// Sizes that no pool has. Without buffers there are no digests.
    ///
    /// # Safety
    /// As long as an accountant of this pool lives, `table` and all `pages` of each buffer are
    /// memory of the place where it accounts (host or device), readable by this process.
    pub unsafe fn new(
        page_tokens: u32,
        pages: u32,
        table: Table,
        buffers: Vec<Buffer>,
    ) -> Result<Self, Error> {
        if !page_tokens.is_power_of_two() || page_tokens > PAGE_TOKENS_MAX {
            return Err(Error::PageTokens(page_tokens));
        }
        let slots = u64::from(pages) * u64::from(page_tokens);
        if pages < 2 || slots > i32::MAX as u64 {
            return Err(Error::Pages { pages, page_tokens });
        }
        let Table { addr, rows, stride } = table;
        if addr == 0 || !addr.is_multiple_of(4) || rows == 0 || stride == 0 {
            return Err(Error::Table { addr, rows, stride });
        }
        at_most("KV buffers", buffers.len(), BUFFERS_MAX)?;
        for (at, &Buffer { addr, page_bytes }) in buffers.iter().enumerate() {
            let whole = page_bytes.is_multiple_of(16) && addr.is_multiple_of(16);
            let last = page_bytes.checked_mul(pages.into()).and_then(|n| n.checked_add(addr));
            if addr == 0 || page_bytes == 0 || !whole || last.is_none() {
                return Err(Error::Buffer { at, addr, page_bytes });
            }
        }
        Ok(Self { shift: page_tokens.trailing_zeros(), pages, table, buffers })
    }

    pub fn page_tokens(&self) -> u32 {
        1 << self.shift
    }

    /// Base-2 logarithm of the page's tokens.
    pub fn shift(&self) -> u32 {
        self.shift
    }

    pub fn pages(&self) -> u32 {
        self.pages
    }

    pub fn table(&self) -> Table {
        self.table
    }

    /// Rows of one cut, at most.
    pub(super) fn rows_max(&self) -> usize {
        ROWS_MAX.min(self.table.rows as usize)
    }

    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }
}

/// One live row at the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub row: u32,
    /// Tokens whose slots are allocated.
    pub len: u32,
    /// Its session's number: an index into the cut's keys.
    pub session: u32,
    /// Tokens that nothing rewrites as long as the session's key stays; 0 for none.
    pub sealed_tokens: u32,
    /// Tokens of its prefix that are the tree's; the rest is the row's own. `None` if unknown.
    pub protected_tokens: Option<u32>,
    /// Changes whenever `[0, len)` of the row may be rewritten.
    pub version: u64,
}

/// A list of `i64` ids in the engine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List {
    addr: u64,
    n: u64,
}

impl List {
    /// `n` ids from `addr` on.
    ///
    /// # Safety
    /// They are memory of the place where the accountant accounts, and neither freed nor
    /// overwritten until the audit that they are given to has finished or was abandoned.
    pub unsafe fn new(addr: u64, n: u64) -> Self {
        Self { addr, n }
    }

    pub fn addr(&self) -> u64 {
        self.addr
    }

    pub fn entries(&self) -> u64 {
        self.n
    }
}

/// The stream behind whose work the books of a cut are true. Host memory has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    /// The device's default stream, which is always there.
    pub const DEFAULT: Self = Self(0);

    /// A stream by the driver's handle.
    ///
    /// # Safety
    /// It is a stream of the accountant's device, in its primary context, when an audit begins.
    pub unsafe fn new(handle: u64) -> Self {
        Self(handle)
    }

    #[cfg(feature = "cuda")]
    pub(super) fn handle(self) -> u64 {
        self.0
    }
}

/// The engine's books at one moment, between two steps of its scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Cut<'a> {
    pub rows: &'a [Row],
    /// One for each session: changes whenever the session's KV was made anew, or any page of its
    /// sealed part may have been given up.
    pub keys: &'a [u64],
    /// Page ids. Empty when not given.
    pub free: &'a [List],
    /// Token slots: of each page that the tree holds, all of them.
    pub tree: Option<List>,
    /// Is every row that holds pages among `rows`, and are rows, free lists and tree of one
    /// moment and complete? Only then can be told what nobody owns, or what two own.
    pub whole: bool,
    /// Sealed pages to digest, at most; 0 for none.
    pub digest_pages_max: u32,
}

impl Cut<'_> {
    /// Refuses what is not a cut of this pool.
    pub(super) fn check(&self, pool: &Pool) -> Result<(), Error> {
        at_most("sessions", self.keys.len(), SESSIONS_MAX)?;
        at_most("rows", self.rows.len(), pool.rows_max())?;
        at_most("free lists", self.free.len(), FREE_LISTS_MAX)?;
        let mut refs = 0;
        for row in self.rows {
            let &Row { row: at, len, session, .. } = row;
            let table = pool.table();
            if at >= table.rows || len > table.stride || session as usize >= self.keys.len() {
                return Err(Error::Row { row: at, len, session });
            }
            if row.sealed_tokens > len || row.protected_tokens.is_some_and(|n| n > len) {
                return Err(Error::Part(at));
            }
            refs += u64::from(len).div_ceil(pool.page_tokens().into());
        }
        if refs > REFS_MAX {
            return Err(Error::TooMany { what: "page references", n: refs, max: REFS_MAX });
        }
        let entries_max = NAMED_TIMES_MAX * (u64::from(pool.pages()) << pool.shift());
        let free = self.free.iter().map(|list| ("free list", list));
        for (what, &List { addr, n, .. }) in free.chain(self.tree.iter().map(|t| ("tree", t))) {
            let placed = n == 0 || (addr != 0 && addr.is_multiple_of(8));
            if !placed || n > entries_max {
                return Err(Error::List { what, addr, n });
            }
        }
        Ok(())
    }
}

fn at_most(what: &'static str, n: usize, max: usize) -> Result<(), Error> {
    if n > max { Err(Error::TooMany { what, n: n as u64, max: max as u64 }) } else { Ok(()) }
}

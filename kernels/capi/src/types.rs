//! The structures of `berth_kv.h`, and how they become the accountant's values.

use crate::error::Error;
use kernels::{
    account::{Buffer, Cut, List, Pool, Row, Table},
    table::TableRow,
};
use std::{
    ffi::{CStr, c_char},
    mem::MaybeUninit,
    slice,
};

/// `berth_kv_buffer`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawBuffer {
    addr: u64,
    page_bytes: u64,
}

/// `berth_kv_pool`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawPool {
    page_tokens: u32,
    pages: u32,
    r2t: u64,
    r2t_rows: u32,
    r2t_stride: u32,
    buffers: *const RawBuffer,
    nbuffers: u32,
    pub(crate) device: i32,
}

/// `berth_kv_row`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawRow {
    row: u32,
    len: u32,
    session: u32,
    sealed_tokens: u32,
    protected_tokens: u32,
    zero: u32,
    version: u64,
}

/// `berth_kv_list`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawList {
    addr: u64,
    n: u64,
}

/// `berth_kv_cut`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawCut {
    rows: *const RawRow,
    keys: *const u64,
    free: *const RawList,
    tree: *const RawList,
    nrows: u32,
    nsessions: u32,
    nfree: u32,
    whole: u32,
    digest_pages_max: u32,
    zero: u32,
    pub(crate) stream: u64,
}

/// `berth_kv_table_row`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawTableRow {
    row: u32,
    len: u32,
    session: u32,
    zero: u32,
    version: u64,
    key: u64,
}

/// The structure behind a pointer.
///
/// # Safety
/// It is null, or what it points to is readable during the call.
pub(crate) unsafe fn read<T: Copy>(what: &'static str, from: *const T) -> Result<T, Error> {
    if from.is_null() || !from.is_aligned() {
        return Err(Error::Pointer(what));
    }
    // SAFETY: neither null nor misaligned, and the caller promises the rest.
    Ok(unsafe { from.read() })
}

/// The place behind a pointer, to be written.
///
/// # Safety
/// It is null, or what it points to is the caller's to give away for `'a`.
pub(crate) unsafe fn place<'a>(
    what: &'static str,
    to: *mut u64,
) -> Result<&'a mut MaybeUninit<u64>, Error> {
    if to.is_null() || !to.is_aligned() {
        return Err(Error::Pointer(what));
    }
    // SAFETY: neither null nor misaligned, and the caller promises the rest.
    Ok(unsafe { &mut *to.cast() })
}

/// The text behind a pointer; `None` where that is null.
///
/// # Safety
/// It is null, or a string that stays for `'a`.
pub(crate) unsafe fn text<'a>(from: *const c_char) -> Option<&'a CStr> {
    // SAFETY: not null, and the caller promises the rest.
    (!from.is_null()).then(|| unsafe { CStr::from_ptr(from) })
}

/// The array behind a pointer; an empty one may be null.
///
/// # Safety
/// It is null, or `n` items from it on are readable for `'a`.
pub(crate) unsafe fn array<'a, T>(
    what: &'static str,
    from: *const T,
    n: u32,
) -> Result<&'a [T], Error> {
    if n == 0 {
        return Ok(&[]);
    }
    if from.is_null() || !from.is_aligned() {
        return Err(Error::Pointer(what));
    }
    // SAFETY: neither null nor misaligned, and the caller promises the rest.
    Ok(unsafe { slice::from_raw_parts(from, n as usize) })
}

impl RawPool {
    /// # Safety
    /// What `berth_kv_open` asks for.
    pub(crate) unsafe fn pool(&self) -> Result<Pool, Error> {
        // SAFETY: the caller's promise.
        let buffers = unsafe { array("pool's buffers", self.buffers, self.nbuffers)? };
        let buffers =
            buffers.iter().map(|&RawBuffer { addr, page_bytes }| Buffer { addr, page_bytes });
        let table = Table { addr: self.r2t, rows: self.r2t_rows, stride: self.r2t_stride };
        // SAFETY: the caller's promise.
        Ok(unsafe { Pool::new(self.page_tokens, self.pages, table, buffers.collect())? })
    }
}

/// A cut whose arrays are ours.
#[derive(Debug)]
pub(crate) struct Books {
    rows: Vec<Row>,
    keys: Vec<u64>,
    free: Vec<List>,
    tree: Option<List>,
    whole: bool,
    digest_pages_max: u32,
}

impl RawCut {
    /// # Safety
    /// What `berth_kv_begin` asks for.
    pub(crate) unsafe fn books(&self) -> Result<Books, Error> {
        let list = |&RawList { addr, n }: &RawList| {
            // SAFETY: the caller's promise.
            unsafe { List::new(addr, n) }
        };
        // SAFETY: the caller's promise.
        let (rows, keys, free) = unsafe {
            let rows = array("cut's rows", self.rows, self.nrows)?;
            let keys = array("cut's keys", self.keys, self.nsessions)?;
            (rows, keys, array("cut's free lists", self.free, self.nfree)?)
        };
        let tree = if self.tree.is_null() {
            None
        } else {
            // SAFETY: the caller's promise.
            Some(list(&unsafe { read("cut's tree", self.tree)? }))
        };
        Ok(Books {
            rows: rows.iter().map(RawRow::row).collect(),
            keys: keys.to_vec(),
            free: free.iter().map(list).collect(),
            tree,
            whole: self.whole != 0,
            digest_pages_max: self.digest_pages_max,
        })
    }
}

impl RawRow {
    fn row(&self) -> Row {
        Row {
            row: self.row,
            len: self.len,
            session: self.session,
            sealed_tokens: self.sealed_tokens,
            protected_tokens: Some(self.protected_tokens).filter(|&tokens| tokens != u32::MAX),
            version: self.version,
        }
    }
}

impl RawTableRow {
    pub(crate) fn row(&self) -> TableRow {
        let &Self { row, len, session, version, key, .. } = self;
        TableRow { row, len, session, version, key }
    }
}

impl Books {
    pub(crate) fn cut(&self) -> Cut<'_> {
        Cut {
            rows: &self.rows,
            keys: &self.keys,
            free: &self.free,
            tree: self.tree,
            whole: self.whole,
            digest_pages_max: self.digest_pages_max,
        }
    }
}

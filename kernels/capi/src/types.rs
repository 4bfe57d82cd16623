//! Declares the structures of `berth_kv.h`, and converts them to the types of [`kernels`].
//!
//! The header describes the fields. The functions check pointers, and the [`kernels`] check values.

use crate::error::Error;
use kernels::account::{IdList, Pool, PoolBuffer, RequestTable, Snapshot, SnapshotRow};
use std::{
    ffi::{CStr, c_char},
    mem::MaybeUninit,
    slice,
};

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawBuffer {
    addr: u64,
    page_bytes: u64,
}

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

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawList {
    addr: u64,
    n: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawSnapshot {
    rows: *const RawRow,
    keys: *const u64,
    free: *const RawList,
    tree: *const RawList,
    nrows: u32,
    nsessions: u32,
    nfree: u32,
    digest_pages_max: u32,
    pub(crate) stream: u64,
}

/// `what` names the pointer in an error.
///
/// # Safety
/// The pointer must be null, or its target readable during the call.
pub(crate) unsafe fn read_struct<T: Copy>(what: &'static str, from: *const T) -> Result<T, Error> {
    if from.is_null() || !from.is_aligned() {
        return Err(Error::BadPointer(what));
    }
    // SAFETY: not null and not misaligned; the caller guarantees the rest.
    Ok(unsafe { from.read() })
}

/// # Safety
/// The pointer must be null, or its target exclusively writable for `'a`.
pub(crate) unsafe fn output_at<'a>(
    what: &'static str,
    to: *mut u64,
) -> Result<&'a mut MaybeUninit<u64>, Error> {
    if to.is_null() || !to.is_aligned() {
        return Err(Error::BadPointer(what));
    }
    // SAFETY: not null and not misaligned; the caller guarantees the rest.
    Ok(unsafe { &mut *to.cast() })
}

/// `None` if the pointer is null.
///
/// # Safety
/// The pointer must be null, or a string that stays valid for `'a`.
pub(crate) unsafe fn c_str<'a>(from: *const c_char) -> Option<&'a CStr> {
    // SAFETY: not null; the caller guarantees the rest.
    (!from.is_null()).then(|| unsafe { CStr::from_ptr(from) })
}

/// The pointer to an empty array may be null.
///
/// # Safety
/// The pointer must be null, or point to `n` items readable for `'a`.
pub(crate) unsafe fn read_array<'a, T>(
    what: &'static str,
    from: *const T,
    n: u32,
) -> Result<&'a [T], Error> {
    if n == 0 {
        return Ok(&[]);
    }
    if from.is_null() || !from.is_aligned() {
        return Err(Error::BadPointer(what));
    }
    // SAFETY: not null and not misaligned; the caller guarantees the rest.
    Ok(unsafe { slice::from_raw_parts(from, n as usize) })
}

impl RawPool {
    /// # Safety
    /// The same as for `berth_kv_open`.
    pub(crate) unsafe fn convert(&self) -> Result<Pool, Error> {
        // SAFETY: guaranteed by the caller.
        let buffers = unsafe { read_array("pool's buffers", self.buffers, self.nbuffers)? };
        let buffers =
            buffers.iter().map(|&RawBuffer { addr, page_bytes }| PoolBuffer { addr, page_bytes });
        let table = RequestTable { addr: self.r2t, rows: self.r2t_rows, stride: self.r2t_stride };
        // SAFETY: guaranteed by the caller.
        Ok(unsafe { Pool::new(self.page_tokens, self.pages, table, buffers.collect())? })
    }
}

#[derive(Debug)]
pub(crate) struct OwnedSnapshot {
    rows: Vec<SnapshotRow>,
    keys: Vec<u64>,
    free: Vec<IdList>,
    tree: IdList,
    digest_pages_max: u32,
}

impl RawSnapshot {
    /// # Safety
    /// The same as for `berth_kv_begin`.
    pub(crate) unsafe fn convert(&self) -> Result<OwnedSnapshot, Error> {
        let to_list = |&RawList { addr, n }: &RawList| {
            // SAFETY: guaranteed by the caller.
            unsafe { IdList::new(addr, n) }
        };
        // SAFETY: guaranteed by the caller.
        let (rows, keys, free) = unsafe {
            let rows = read_array("snapshot's rows", self.rows, self.nrows)?;
            let keys = read_array("snapshot's keys", self.keys, self.nsessions)?;
            (rows, keys, read_array("snapshot's free lists", self.free, self.nfree)?)
        };
        // SAFETY: guaranteed by the caller.
        let tree = unsafe { read_struct("snapshot's tree", self.tree)? };
        Ok(OwnedSnapshot {
            rows: rows.iter().map(RawRow::convert).collect(),
            keys: keys.to_vec(),
            free: free.iter().map(to_list).collect(),
            tree: to_list(&tree),
            digest_pages_max: self.digest_pages_max,
        })
    }
}

impl RawRow {
    fn convert(&self) -> SnapshotRow {
        SnapshotRow {
            row: self.row,
            len: self.len,
            session: self.session,
            sealed_tokens: self.sealed_tokens,
            protected_tokens: self.protected_tokens,
            version: self.version,
        }
    }
}

impl OwnedSnapshot {
    pub(crate) fn as_snapshot(&self) -> Snapshot<'_> {
        Snapshot {
            rows: &self.rows,
            keys: &self.keys,
            free: &self.free,
            tree: self.tree,
            digest_pages_max: self.digest_pages_max,
        }
    }
}

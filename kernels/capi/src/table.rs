//! The functions of the row table: an engine's side of [`kernels::ipc`].

use crate::{
    HOST, device,
    error::{Error, guarded},
    handles::Handles,
    types::{RawPool, RawTableRow, array, place, read, text},
};
use kernels::ipc::Publisher;
use std::{
    ffi::{OsStr, c_char},
    os::unix::ffi::OsStrExt,
    path::Path,
};

static TABLES: Handles<Publisher> = Handles::new();

fn status(table: u64, call: impl FnOnce() -> Result<(), Error>) -> i32 {
    guarded(&TABLES, table, call).map_or_else(|code| code, |()| 0)
}

/// Makes a row table.
///
/// # Safety
/// As of [`crate::berth_kv_open`]; `path` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_table_open(
    pool: *const RawPool,
    fatbin: *const c_char,
    path: *const c_char,
    tables: u32,
    rows_max: u32,
    out: *mut u64,
) -> i32 {
    status(0, || {
        // SAFETY: the caller's promise.
        let (raw, fatbin, path, out) =
            unsafe { (read("pool", pool)?, text(fatbin), text(path), place("handle", out)?) };
        let path = path.ok_or(Error::Pointer("path of the table"))?;
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        // SAFETY: the caller's promise.
        let pool = unsafe { raw.pool()? };
        let publisher = match raw.device {
            HOST => Publisher::host(&pool, path, tables, rows_max)?,
            ordinal => Publisher::device(&pool, device(ordinal, fatbin)?, path, tables, rows_max)?,
        };
        out.write(TABLES.open(publisher)?);
        Ok(())
    })
}

/// A step begins.
///
/// # Safety
/// `stream` is a stream of the table's device, or 0, until the table is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_table_begin(table: u64, stream: u64) -> i32 {
    status(table, || {
        // SAFETY: the caller's promise.
        TABLES.with(table, |publisher| Ok(unsafe { publisher.begin(stream) }?))
    })
}

/// A step is done.
///
/// # Safety
/// As of [`berth_kv_table_begin`]; `rows` are `n` readable items.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_table_done(
    table: u64,
    rows: *const RawTableRow,
    n: u32,
    stream: u64,
) -> i32 {
    status(table, || {
        // SAFETY: the caller's promise.
        let rows = unsafe { array("table's rows", rows, n)? };
        let rows: Vec<_> = rows.iter().map(RawTableRow::row).collect();
        // SAFETY: the caller's promise.
        TABLES.with(table, |publisher| Ok(unsafe { publisher.done(&rows, stream) }?))
    })
}

/// Takes the table back.
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_table_close(table: u64) -> i32 {
    status(table, || TABLES.close(table))
}

//! The functions of the row table: the engine's side of [`kernels::ipc`].

use crate::{
    HOST, device,
    error::{Error, guard_call},
    handles::Handles,
    types::{RawPool, RawTableRow, array, c_str, out_pointer, read},
};
use kernels::ipc::Publisher;
use std::{
    ffi::{OsStr, c_char},
    os::unix::ffi::OsStrExt,
    path::Path,
};

static TABLES: Handles<Publisher> = Handles::new();

fn status(table: u64, call: impl FnOnce() -> Result<(), Error>) -> i32 {
    guard_call(&TABLES, table, call).map_or_else(|code| code, |()| 0)
}

/// Creates a row table.
///
/// # Safety
/// The same as for [`crate::berth_kv_open`]; also, `path` must be null or a string.
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
        // SAFETY: guaranteed by the caller.
        let (raw, fatbin, path, out) = unsafe {
            (read("pool", pool)?, c_str(fatbin), c_str(path), out_pointer("handle", out)?)
        };
        let path = path.ok_or(Error::Pointer("path of the table"))?;
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        // SAFETY: guaranteed by the caller.
        let pool = unsafe { raw.pool()? };
        let publisher = match raw.device {
            HOST => Publisher::host(&pool, path, tables, rows_max)?,
            ordinal => Publisher::device(&pool, device(ordinal, fatbin)?, path, tables, rows_max)?,
        };
        out.write(TABLES.open(publisher)?);
        Ok(())
    })
}

/// Begins a step.
///
/// # Safety
/// `stream` must be 0, or a stream of the table's device until the table is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_table_begin(table: u64, stream: u64) -> i32 {
    status(table, || {
        // SAFETY: guaranteed by the caller.
        TABLES.with(table, |publisher| Ok(unsafe { publisher.begin_step(stream) }?))
    })
}

/// Ends a step.
///
/// # Safety
/// The same as for [`berth_kv_table_begin`]; also, `rows` must be `n` readable items.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_table_done(
    table: u64,
    rows: *const RawTableRow,
    n: u32,
    stream: u64,
) -> i32 {
    status(table, || {
        // SAFETY: guaranteed by the caller.
        let rows = unsafe { array("table's rows", rows, n)? };
        let rows: Vec<_> = rows.iter().map(RawTableRow::row).collect();
        // SAFETY: guaranteed by the caller.
        TABLES.with(table, |publisher| Ok(unsafe { publisher.end_step(&rows, stream) }?))
    })
}

/// Closes the table.
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_table_close(table: u64) -> i32 {
    status(table, || TABLES.close(table))
}

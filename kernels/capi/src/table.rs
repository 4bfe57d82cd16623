//! The C functions with which an engine publishes its live rows, for audits by another process.
//!
//! A live row is a row of the engine's table `req_to_token` that is in use. The engine writes the
//! list of these rows, the row table, into a file after each step. The functions here call a
//! [`Publisher`]. [`kernels::ipc`] describes such audits, and `berth_kv.h` describes the functions.

use crate::{
    HOST_MEMORY,
    error::{Error, guard_call},
    handles::Handles,
    open_device,
    types::{RawPool, RawTableRow, c_str, output_at, read_array, read_struct},
};
use kernels::ipc::Publisher;
use std::{
    ffi::{OsStr, c_char},
    os::unix::ffi::OsStrExt,
    path::Path,
};

static PUBLISHERS: Handles<Publisher> = Handles::new();

/// Runs a call on a row table with [`guard_call`]. Returns 0, or the error's number.
fn call_status(table: u64, call: impl FnOnce() -> Result<(), Error>) -> i32 {
    guard_call(&PUBLISHERS, table, call).map_or_else(|code| code, |()| 0)
}

/// Creates the file `path` for the row tables of an engine, and writes the handle to `out`.
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
    call_status(0, || {
        // SAFETY: guaranteed by the caller.
        let (raw, fatbin, path, out) = unsafe {
            (read_struct("pool", pool)?, c_str(fatbin), c_str(path), output_at("handle", out)?)
        };
        let path = path.ok_or(Error::BadPointer("path of the table"))?;
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        // SAFETY: guaranteed by the caller.
        let pool = unsafe { raw.convert()? };
        let publisher = match raw.device {
            HOST_MEMORY => Publisher::host(&pool, path, tables, rows_max)?,
            ordinal => {
                Publisher::device(&pool, open_device(ordinal, fatbin)?, path, tables, rows_max)?
            }
        };
        out.write(PUBLISHERS.open(publisher)?);
        Ok(())
    })
}

/// Begins a step of the engine's scheduler.
///
/// # Safety
/// `stream` must be 0, or a stream of the table's device until the table is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_table_begin(table: u64, stream: u64) -> i32 {
    call_status(table, || {
        // SAFETY: guaranteed by the caller.
        PUBLISHERS.with(table, |publisher| Ok(unsafe { publisher.begin_step(stream) }?))
    })
}

/// Ends a step of the engine's scheduler, and publishes its live rows.
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
    call_status(table, || {
        // SAFETY: guaranteed by the caller.
        let rows = unsafe { read_array("table's rows", rows, n)? };
        let rows: Vec<_> = rows.iter().map(RawTableRow::convert).collect();
        // SAFETY: guaranteed by the caller.
        PUBLISHERS.with(table, |publisher| Ok(unsafe { publisher.end_step(&rows, stream) }?))
    })
}

/// Closes the row table, and deletes its file.
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_table_close(table: u64) -> i32 {
    call_status(table, || PUBLISHERS.close(table))
}

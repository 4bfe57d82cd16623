//! The library `libberth_kv`, with which an engine audits its KV pool in its own process.
//!
//! It offers [`kernels::account`] by a C ABI, which the engine's Python code (the shim) calls.
//! `berth_kv.h` describes each function. The functions here check pointers, catch panics, and turn
//! errors into a number and a text.

mod error;
mod handles;
mod types;

pub use types::{RawBuffer, RawList, RawPool, RawRow, RawSnapshot};

use error::{Error, guard_call};
use handles::Handles;

use kernels::{
    account::{self, Accountant, Stream},
    cuda::{self, Device},
    report::{REPORT_BYTES_WITHOUT_SESSIONS_MAX, SESSION_BYTES_MAX},
};
use std::{
    ffi::{CStr, OsStr, c_char},
    os::unix::ffi::OsStrExt,
};
use types::{c_str, output_at, read_array, read_struct};

const ABI: u32 = 2;
/// [`RawPool`]'s `device` for a pool in host memory.
const HOST_MEMORY: i32 = -1;

static ACCOUNTANTS: Handles = Handles::new();

/// Returns 0, or the error's number.
fn call_status(handle: u64, call: impl FnOnce() -> Result<(), Error>) -> i32 {
    guard_call(&ACCOUNTANTS, handle, call).map_or_else(|code| code, |()| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_abi() -> u32 {
    ABI
}

#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_error() -> *const c_char {
    error::last_error()
}

/// # Safety
/// `pool` and its array of buffers must be readable, `fatbin` null or a string, and `out` writable.
/// The addresses in `pool` must stay valid while the handle is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_open(
    pool: *const RawPool,
    fatbin: *const c_char,
    out: *mut u64,
) -> i32 {
    call_status(0, || {
        // SAFETY: guaranteed by the caller.
        let (raw, fatbin, out) =
            unsafe { (read_struct("pool", pool)?, c_str(fatbin), output_at("handle", out)?) };
        // SAFETY: guaranteed by the caller.
        let pool = unsafe { raw.convert()? };
        let accountant = match raw.device {
            HOST_MEMORY => Accountant::host(pool),
            ordinal => Accountant::device(pool, open_device(ordinal, fatbin)?)?,
        };
        out.write(ACCOUNTANTS.open(accountant)?);
        Ok(())
    })
}

fn open_device(ordinal: i32, fatbin: Option<&CStr>) -> Result<Device, Error> {
    let device_ordinal = u32::try_from(ordinal).map_err(|_| Error::BadOrdinal(ordinal))?;
    let path = fatbin.ok_or(Error::BadPointer("path of the kernels"))?;
    if let Some(missing) = cuda::missing() {
        return Err(cuda::Error::from(missing).into());
    }
    let image = std::fs::read(OsStr::from_bytes(path.to_bytes()))?;
    Ok(Device::open(device_ordinal, &image)?)
}

/// # Safety
/// `snapshot` and its arrays must be readable. The lists must be in the pool's kind of memory, and
/// unchanged until the audit has ended. The stream must be a stream of the device, or 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_begin(handle: u64, snapshot: *const RawSnapshot) -> i32 {
    call_status(handle, || {
        // SAFETY: guaranteed by the caller.
        let raw = unsafe { read_struct("snapshot", snapshot)? };
        // SAFETY: guaranteed by the caller.
        let (owned, stream) = unsafe { (raw.convert()?, Stream::new(raw.stream)) };
        ACCOUNTANTS.with(handle, |accountant| Ok(accountant.begin(&owned.as_snapshot(), stream)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_ready(handle: u64) -> i32 {
    let is_ready = guard_call(&ACCOUNTANTS, handle, || {
        ACCOUNTANTS.with(handle, |accountant| Ok(accountant.is_ready()?))
    });
    is_ready.map_or_else(|code| code, i32::from)
}

/// # Safety
/// `rows` and `versions` must have `n` readable items each, and `buffer` `capacity` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_finish(
    handle: u64,
    rows: *const u32,
    versions: *const u64,
    n: u32,
    buffer: *mut u8,
    capacity: u64,
) -> i64 {
    let written = guard_call(&ACCOUNTANTS, handle, || {
        // SAFETY: guaranteed by the caller.
        let current_versions: Vec<(u32, u64)> = unsafe {
            let rows = read_array("rows", rows, n)?.iter().copied();
            let versions = read_array("versions", versions, n)?.iter().copied();
            rows.zip(versions).collect()
        };
        if buffer.is_null() {
            return Err(Error::BadPointer("buffer"));
        }
        ACCOUNTANTS.with(handle, |accountant| {
            let session_count = accountant.session_count().ok_or(account::Error::Idle)?;
            let needed = report_bytes_max(session_count);
            if needed > capacity {
                return Err(Error::BufferTooSmall { needed, capacity });
            }
            let bytes = accountant.finish(&current_versions)?.encode();
            assert!(bytes.len() as u64 <= needed, "a report is within its bound");
            // SAFETY: the bytes are at most `needed`, and the caller guarantees `capacity` bytes.
            unsafe { buffer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            Ok(bytes.len())
        })
    });
    written.map_or_else(i64::from, |n| i64::try_from(n).expect("a report is a few MiB"))
}

#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_report_bytes_max(nsessions: u32) -> u64 {
    report_bytes_max(nsessions as usize)
}

fn report_bytes_max(session_count: usize) -> u64 {
    (REPORT_BYTES_WITHOUT_SESSIONS_MAX + session_count * SESSION_BYTES_MAX) as u64
}

#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_abandon(handle: u64) -> i32 {
    call_status(handle, || ACCOUNTANTS.with(handle, |accountant| Ok(accountant.abandon()?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_close(handle: u64) -> i32 {
    call_status(handle, || ACCOUNTANTS.close(handle))
}

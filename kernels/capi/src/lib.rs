//! `libberth_kv`: [`kernels::account`] for the engine's own process, behind a C ABI.
//!
//! `berth_kv.h` is the contract. Here, its functions: pointers are checked, panics caught, errors
//! become numbers and a text. It accounts nothing itself.

mod handles;
mod types;

pub use types::{RawBuffer, RawCut, RawList, RawPool, RawRow};

use kernels::{
    account::{self, Accountant, Pool},
    cuda::{self, Device},
    report::{REPORT_BYTES_HEAD_MAX, SESSION_BYTES},
};
use std::{
    cell::RefCell,
    ffi::{CStr, CString, OsStr, c_char},
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
};
use types::{array, read};

const ABI: u32 = 1;
const HOST: i32 = -1;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the {0} is null or misaligned")]
    Pointer(&'static str),
    #[error("{0} is no open handle")]
    Handle(u64),
    #[error("another call about this handle is running: come back when it has returned")]
    Running,
    #[error("too many handles are open: close some")]
    Full,
    #[error("a report of {needed} bytes may not fit in {capacity}: give a larger buffer")]
    Small { needed: u64, capacity: u64 },
    #[error("device {0}: give a CUDA ordinal, or -1 for host memory")]
    Ordinal(i32),
    #[error("the kernels: {0}: build them with kernels/cuda/build")]
    Fatbin(#[from] std::io::Error),
    #[error("a panic: this is a fault of the library, the handle is closed")]
    Panic,
    #[error(transparent)]
    Device(#[from] cuda::Error),
    #[error(transparent)]
    Account(#[from] account::Error),
    #[error(transparent)]
    Cut(#[from] account::CutError),
}

impl Error {
    /// Its number in the header.
    fn code(&self) -> i32 {
        use account::Error as Account;
        match self {
            Self::Pointer(_) | Self::Handle(_) | Self::Ordinal(_) | Self::Fatbin(_) => -1,
            Self::Cut(_) | Self::Account(Account::Cut(_)) => -1,
            Self::Running | Self::Account(Account::Busy) => -2,
            Self::Account(Account::Idle | Account::NotReady) => -3,
            Self::Device(_) | Self::Account(Account::Device(_) | Account::Disagree) => -4,
            Self::Small { .. } => -5,
            Self::Panic => -6,
            Self::Full => -7,
        }
    }
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Runs a call, whatever happens in it.
fn guarded<T>(handle: u64, call: impl FnOnce() -> Result<T, Error>) -> Result<T, i32> {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        // Whatever it was doing, its accountant is in no state to go on.
        let _ = handles::close(handle);
        Err(Error::Panic)
    });
    result.map_err(|error| {
        LAST.set(CString::new(error.to_string()).ok());
        error.code()
    })
}

/// [`guarded`] for calls that answer 0.
fn status(handle: u64, call: impl FnOnce() -> Result<(), Error>) -> i32 {
    guarded(handle, call).map_or_else(|code| code, |()| 0)
}

/// The version of this contract.
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_abi() -> u32 {
    ABI
}

/// This thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_error() -> *const c_char {
    let last = LAST.with_borrow(|last| last.as_ref().map(|text| text.as_ptr()));
    last.unwrap_or(c"".as_ptr())
}

/// Opens a pool.
///
/// # Safety
/// `pool` and its buffers are readable, `fatbin` is null or a string, `out` is writable; the
/// addresses in `pool` are the pool's as long as the handle is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_open(
    pool: *const RawPool,
    fatbin: *const c_char,
    out: *mut u64,
) -> i32 {
    status(0, || {
        if out.is_null() || !out.is_aligned() {
            return Err(Error::Pointer("place for the handle"));
        }
        // SAFETY: the caller's promise.
        let (raw, fatbin) = unsafe {
            let raw = read("pool", pool)?;
            (raw, (!fatbin.is_null()).then(|| CStr::from_ptr(fatbin)))
        };
        // SAFETY: the caller's promise.
        let pool = unsafe { raw.pool()? };
        let accountant = match raw.device {
            HOST => Accountant::host(pool),
            device => on_device(pool, device, fatbin)?,
        };
        let handle = handles::open(accountant)?;
        // SAFETY: not null, aligned, and the caller promises that it is writable.
        unsafe { out.write(handle) };
        Ok(())
    })
}

fn on_device(pool: Pool, ordinal: i32, fatbin: Option<&CStr>) -> Result<Accountant, Error> {
    let number = u32::try_from(ordinal).map_err(|_| Error::Ordinal(ordinal))?;
    let path = fatbin.ok_or(Error::Pointer("path of the kernels"))?;
    if let Some(missing) = cuda::missing() {
        return Err(cuda::Error::from(missing).into());
    }
    let image = std::fs::read(OsStr::from_bytes(path.to_bytes()))?;
    Ok(Accountant::device(pool, Device::open(number, &image)?)?)
}

/// Begins an audit.
///
/// # Safety
/// `cut` and its arrays are readable; the lists' addresses are the pool's kind of memory, and stay
/// as they are until the audit has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_begin(handle: u64, cut: *const RawCut) -> i32 {
    status(handle, || {
        // SAFETY: the caller's promise.
        let raw = unsafe { read("cut", cut)? };
        // SAFETY: the caller's promise.
        let books = unsafe { raw.books()? };
        handles::with(handle, |accountant| Ok(accountant.begin(&books.cut(), raw.stream)?))
    })
}

/// Is the audit's copy made?
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_ready(handle: u64) -> i32 {
    let ready = guarded(handle, || handles::with(handle, |accountant| Ok(accountant.ready()?)));
    ready.map_or_else(|code| code, i32::from)
}

/// Ends an audit: its report's bytes go into `buffer`.
///
/// # Safety
/// `rows` and `versions` are `n` readable items each, `buffer` is `capacity` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_kv_finish(
    handle: u64,
    rows: *const u32,
    versions: *const u64,
    n: u32,
    buffer: *mut u8,
    capacity: u64,
) -> i64 {
    let written = guarded(handle, || {
        // SAFETY: the caller's promise.
        let now: Vec<(u32, u64)> = unsafe {
            let rows = array("rows", rows, n)?.iter().copied();
            rows.zip(array("versions", versions, n)?.iter().copied()).collect()
        };
        if buffer.is_null() {
            return Err(Error::Pointer("buffer"));
        }
        handles::with(handle, |accountant| {
            let sessions = accountant.sessions().ok_or(account::Error::Idle)?;
            let needed = report_bytes_max(sessions);
            if needed > capacity {
                return Err(Error::Small { needed, capacity });
            }
            let bytes = accountant.finish(&now)?.encode();
            // SAFETY: they are at most `needed`, and the caller promises `capacity` bytes.
            unsafe { buffer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            Ok(bytes.len())
        })
    });
    written.map_or_else(i64::from, |n| i64::try_from(n).expect("a report is a few MiB"))
}

/// Bytes that are enough for a report of so many sessions.
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_report_bytes_max(nsessions: u32) -> u64 {
    report_bytes_max(nsessions as usize)
}

fn report_bytes_max(sessions: usize) -> u64 {
    (REPORT_BYTES_HEAD_MAX + sessions * SESSION_BYTES) as u64
}

/// Gives the audit under way up.
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_abandon(handle: u64) -> i32 {
    status(handle, || handles::with(handle, |accountant| Ok(accountant.abandon()?)))
}

/// Closes the handle.
#[unsafe(no_mangle)]
pub extern "C" fn berth_kv_close(handle: u64) -> i32 {
    status(handle, || handles::close(handle))
}

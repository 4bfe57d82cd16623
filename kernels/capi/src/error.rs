//! Errors of the C ABI: a number for programs, a text for people, and no panic.

use crate::handles::Handles;
use kernels::{account, cuda, ipc};
use std::{
    cell::RefCell,
    ffi::{CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
};

// The same numbers as in `berth_kv.h`.
const INVALID: i32 = -1;
const BUSY: i32 = -2;
const STATE: i32 = -3;
const DEVICE: i32 = -4;
const SMALL: i32 = -5;
const PANIC: i32 = -6;
const FULL: i32 = -7;
const UNSHARED: i32 = -8;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the {0} is null or misaligned")]
    Pointer(&'static str),
    #[error("{0} is not an open handle")]
    Handle(u64),
    #[error("another call on this handle is running: try again when it has returned")]
    Running,
    #[error("too many handles are open: close some")]
    Full,
    #[error("the report may need {needed} bytes, the buffer has {capacity}: use a larger buffer")]
    Small { needed: u64, capacity: u64 },
    #[error("device {0}: give a CUDA ordinal, or -1 for host memory")]
    Ordinal(i32),
    #[error("the kernels: {0}: build them with kernels/cuda/build")]
    Fatbin(#[from] std::io::Error),
    #[error("the library panicked, which is a bug in it; the handle is closed")]
    Panic,
    #[error(transparent)]
    Device(#[from] cuda::Error),
    #[error(transparent)]
    Ipc(#[from] ipc::Error),
    #[error(transparent)]
    Account(#[from] account::Error),
    #[error(transparent)]
    Snapshot(#[from] account::SnapshotError),
}

impl Error {
    /// Returns the error's number in the header.
    fn code(&self) -> i32 {
        match self {
            Self::Pointer(_) | Self::Handle(_) | Self::Ordinal(_) | Self::Fatbin(_) => INVALID,
            Self::Running => BUSY,
            Self::Small { .. } => SMALL,
            Self::Panic => PANIC,
            Self::Full => FULL,
            Self::Snapshot(_) => INVALID,
            Self::Device(_) => DEVICE,
            Self::Account(error) => account_code(error),
            Self::Ipc(error) => ipc_code(error),
        }
    }
}

fn account_code(error: &account::Error) -> i32 {
    use account::Error;
    match error {
        Error::Snapshot(_) => INVALID,
        Error::Busy => BUSY,
        Error::Idle | Error::NotReady => STATE,
        Error::Device(_) | Error::Disagree => DEVICE,
    }
}

fn ipc_code(error: &ipc::Error) -> i32 {
    use ipc::Error;
    match error {
        Error::Table(_) => INVALID,
        Error::NoBeginning | Error::NoStep | Error::Overrun => STATE,
        Error::Unshared(_) | Error::OtherGpu | Error::Export { .. } => UNSHARED,
        Error::Account(error) => account_code(error),
        Error::Device(_) => DEVICE,
    }
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Runs a call, catches its panic, and records its error as this thread's last error.
pub(crate) fn guard_call<H, T>(
    handles: &Handles<H>,
    handle: u64,
    call: impl FnOnce() -> Result<T, Error>,
) -> Result<T, i32> {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        // After a panic the state of the handle is unknown, so close the handle.
        let _ = handles.close(handle);
        Err(Error::Panic)
    });
    result.map_err(|error| {
        LAST.set(CString::new(describe(&error)).ok());
        error.code()
    })
}

/// Returns this thread's last error; never null.
pub(crate) fn last_error() -> *const c_char {
    let last = LAST.with_borrow(|last| last.as_ref().map(|text| text.as_ptr()));
    last.unwrap_or(c"".as_ptr())
}

/// Returns the error and its sources in one line.
fn describe(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", describe(source)),
    }
}

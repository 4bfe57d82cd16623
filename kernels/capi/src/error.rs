//! Turns the errors and panics of a call into what the C ABI returns: an error number and a text.

use crate::handles::Handles;
use kernels::{account, cuda};
use std::{
    cell::RefCell,
    ffi::{CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
};

// The error numbers of `berth_kv.h`.
const INVALID: i32 = -1;
const BUSY: i32 = -2;
const STATE: i32 = -3;
const DEVICE: i32 = -4;
const SMALL: i32 = -5;
const PANIC: i32 = -6;
const FULL: i32 = -7;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the {0} is null or misaligned")]
    BadPointer(&'static str),
    #[error("{0} is not an open handle")]
    UnknownHandle(u64),
    #[error("another call on this handle is running: try again when it has returned")]
    HandleInUse,
    #[error("too many handles are open: close some")]
    TooManyHandles,
    #[error("the report may need {needed} bytes, the buffer has {capacity}: use a larger buffer")]
    BufferTooSmall { needed: u64, capacity: u64 },
    #[error("device {0}: give a CUDA ordinal, or -1 for host memory")]
    BadOrdinal(i32),
    #[error("the kernels: {0}: build them with kernels/cuda/build")]
    Fatbin(#[from] std::io::Error),
    #[error("the library panicked, which is a bug in it; the handle is closed")]
    Panic,
    #[error(transparent)]
    Device(#[from] cuda::Error),
    #[error(transparent)]
    Account(#[from] account::Error),
    #[error(transparent)]
    Snapshot(#[from] account::SnapshotError),
}

impl Error {
    fn code(&self) -> i32 {
        match self {
            Self::BadPointer(_)
            | Self::UnknownHandle(_)
            | Self::BadOrdinal(_)
            | Self::Fatbin(_) => INVALID,
            Self::HandleInUse => BUSY,
            Self::BufferTooSmall { .. } => SMALL,
            Self::Panic => PANIC,
            Self::TooManyHandles => FULL,
            Self::Snapshot(_) => INVALID,
            Self::Device(_) => DEVICE,
            Self::Account(error) => account_code(error),
        }
    }
}

fn account_code(error: &account::Error) -> i32 {
    use account::Error;
    match error {
        Error::Snapshot(_) => INVALID,
        Error::Busy => BUSY,
        Error::Idle | Error::NotReady => STATE,
        Error::Device(_) | Error::CountsDiffer => DEVICE,
    }
}

thread_local! {
    static NEWEST_ERROR: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Catches a panic of the call. Stores an error's text for [`last_error`], and returns its number.
pub(crate) fn guard_call<T>(
    handles: &Handles,
    handle: u64,
    call: impl FnOnce() -> Result<T, Error>,
) -> Result<T, i32> {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        // After a panic the state of the handle is unknown, so close the handle.
        let _ = handles.close(handle);
        Err(Error::Panic)
    });
    result.map_err(|error| {
        NEWEST_ERROR.set(CString::new(describe(&error)).ok());
        error.code()
    })
}

/// The text of this thread's newest error: empty if there was none, never null.
pub(crate) fn last_error() -> *const c_char {
    let text = NEWEST_ERROR.with_borrow(|text| text.as_ref().map(|text| text.as_ptr()));
    text.unwrap_or(c"".as_ptr())
}

/// The error's text and those of its sources, in one line.
fn describe(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", describe(source)),
    }
}

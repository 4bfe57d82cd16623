//! The open accountants, by number: what was closed, or never opened, is an error and no crash.

use crate::Error;
use kernels::account::Accountant;
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

/// One engine process has a pool per model and rank that it runs: a handful.
const HANDLES_MAX: usize = 64;

struct Handles {
    next: u64,
    open: BTreeMap<u64, Arc<Mutex<Accountant>>>,
}

static HANDLES: Mutex<Handles> = Mutex::new(Handles { next: 1, open: BTreeMap::new() });

pub(crate) fn open(accountant: Accountant) -> Result<u64, Error> {
    let mut handles = HANDLES.lock();
    if handles.open.len() >= HANDLES_MAX {
        return Err(Error::Full);
    }
    let number = handles.next;
    handles.next += 1;
    handles.open.insert(number, Arc::new(Mutex::new(accountant)));
    Ok(number)
}

/// Runs `call` with the accountant of this number, unless another call does so now.
pub(crate) fn with<T>(
    number: u64,
    call: impl FnOnce(&mut Accountant) -> Result<T, Error>,
) -> Result<T, Error> {
    let accountant = HANDLES.lock().open.get(&number).cloned().ok_or(Error::Handle(number))?;
    let mut accountant = accountant.try_lock().ok_or(Error::Running)?;
    call(&mut accountant)
}

/// Forgets the accountant; it is dropped when no call is left that runs with it.
pub(crate) fn close(number: u64) -> Result<(), Error> {
    let closed = HANDLES.lock().open.remove(&number);
    // Dropped here, after the lock.
    closed.map(drop).ok_or(Error::Handle(number))
}

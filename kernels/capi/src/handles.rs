//! Keeps the open accountants, each under a number: the handle that C callers hold.
//!
//! An accountant audits one pool. A handle is no pointer, so a call with a closed or unknown handle
//! returns an error and can't crash.

use crate::Error;
use kernels::account::Accountant;
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

/// Open handles, at most. An engine's process has one pool per model and rank, so it needs only a
/// few.
const HANDLES_MAX: usize = 64;

/// All open accountants.
#[derive(Debug)]
pub(crate) struct Handles(Mutex<OpenAccountants>);

#[derive(Debug)]
struct OpenAccountants {
    /// The highest number so far. No number is used again.
    highest_number: u64,
    by_number: BTreeMap<u64, Arc<Mutex<Accountant>>>,
}

impl Handles {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(OpenAccountants { highest_number: 0, by_number: BTreeMap::new() }))
    }

    /// Stores an accountant and returns its number.
    pub(crate) fn open(&self, accountant: Accountant) -> Result<u64, Error> {
        let mut open = self.0.lock();
        if open.by_number.len() >= HANDLES_MAX {
            return Err(Error::TooManyHandles);
        }
        open.highest_number += 1;
        let number = open.highest_number;
        open.by_number.insert(number, Arc::new(Mutex::new(accountant)));
        Ok(number)
    }

    /// Runs `call` with the accountant of this number. Returns [`Error::HandleInUse`] if another
    /// call is using the accountant.
    pub(crate) fn with<R>(
        &self,
        number: u64,
        call: impl FnOnce(&mut Accountant) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let accountant =
            self.0.lock().by_number.get(&number).cloned().ok_or(Error::UnknownHandle(number))?;
        let mut accountant = accountant.try_lock().ok_or(Error::HandleInUse)?;
        call(&mut accountant)
    }

    /// Forgets the accountant of this number, which is dropped when no call uses it any more.
    pub(crate) fn close(&self, number: u64) -> Result<(), Error> {
        let removed = self.0.lock().by_number.remove(&number);
        // The drop can take long, so it happens after the lock is released.
        removed.map(drop).ok_or(Error::UnknownHandle(number))
    }
}

//! Keeps the open accountants, each under a number: the handle that C callers hold.
//!
//! A handle is no pointer, so a call with a closed or unknown handle returns an error and can't
//! crash.

use crate::Error;
use kernels::account::Accountant;
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

/// An engine's process has one pool per model and rank, so it needs only a few.
const HANDLES_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct Handles(Mutex<OpenAccountants>);

#[derive(Debug)]
struct OpenAccountants {
    /// No number is used again.
    highest_number: u64,
    by_number: BTreeMap<u64, Arc<Mutex<Accountant>>>,
}

impl Handles {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(OpenAccountants { highest_number: 0, by_number: BTreeMap::new() }))
    }

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

    /// Doesn't wait while another call uses the accountant: returns [`Error::HandleInUse`].
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

    /// A call that still uses the accountant completes; then the accountant is dropped.
    pub(crate) fn close(&self, number: u64) -> Result<(), Error> {
        let removed = self.0.lock().by_number.remove(&number);
        // The drop can take long, so it happens after the lock is released.
        removed.map(drop).ok_or(Error::UnknownHandle(number))
    }
}

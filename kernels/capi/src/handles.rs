//! Open objects by number; a closed or unknown number is an error, not a crash.

use crate::Error;
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

/// Bound on open handles: an engine process has one pool per model and rank, so a handful.
const HANDLES_MAX: usize = 64;

/// All open objects of one kind.
#[derive(Debug)]
pub(crate) struct Handles<T>(Mutex<Open<T>>);

#[derive(Debug)]
struct Open<T> {
    /// The highest number so far, so that no number is reused.
    last: u64,
    by_number: BTreeMap<u64, Arc<Mutex<T>>>,
}

impl<T> Handles<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Open { last: 0, by_number: BTreeMap::new() }))
    }

    pub(crate) fn open(&self, value: T) -> Result<u64, Error> {
        let mut open = self.0.lock();
        if open.by_number.len() >= HANDLES_MAX {
            return Err(Error::Full);
        }
        open.last += 1;
        let number = open.last;
        open.by_number.insert(number, Arc::new(Mutex::new(value)));
        Ok(number)
    }

    /// Runs `call` with the object of this number, unless another call is using it now.
    pub(crate) fn with<R>(
        &self,
        number: u64,
        call: impl FnOnce(&mut T) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let value = self.0.lock().by_number.get(&number).cloned().ok_or(Error::Handle(number))?;
        let mut value = value.try_lock().ok_or(Error::Running)?;
        call(&mut value)
    }

    /// Closes the number. The object is dropped when no call uses it any more.
    pub(crate) fn close(&self, number: u64) -> Result<(), Error> {
        let closed = self.0.lock().by_number.remove(&number);
        // Drop only after the lock is released.
        closed.map(drop).ok_or(Error::Handle(number))
    }
}

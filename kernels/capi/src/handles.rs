//! What is open, by number: what was closed, or never opened, is an error and no crash.

use crate::Error;
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

/// One engine process has a pool per model and rank that it runs: a handful.
const HANDLES_MAX: usize = 64;

/// All open ones of one kind.
#[derive(Debug)]
pub(crate) struct Handles<T>(Mutex<Open<T>>);

#[derive(Debug)]
struct Open<T> {
    /// The highest number so far: none is given twice.
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

    /// Runs `call` with the one of this number, unless another call does so now.
    pub(crate) fn with<R>(
        &self,
        number: u64,
        call: impl FnOnce(&mut T) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let value = self.0.lock().by_number.get(&number).cloned().ok_or(Error::Handle(number))?;
        let mut value = value.try_lock().ok_or(Error::Running)?;
        call(&mut value)
    }

    /// Forgets it; it is dropped when no call is left that runs with it.
    pub(crate) fn close(&self, number: u64) -> Result<(), Error> {
        let closed = self.0.lock().by_number.remove(&number);
        // Dropped here, after the lock.
        closed.map(drop).ok_or(Error::Handle(number))
    }
}

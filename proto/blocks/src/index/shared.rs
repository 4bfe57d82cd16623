//! Wraps the overlap index in a lock, so that many threads look prompts up while one task writes.
//!
//! The lock is held for one change or one look-up, and no other lock is taken meanwhile.

use crate::block::BlockHash;
use parking_lot::RwLock;

use super::{Index, Overlap};

/// How many times a writer tries to get the lock before it waits for it. A try delays no reader,
/// but a waiting writer blocks new readers until the present ones have finished. If the operating
/// system has paused one of these, all look-ups wait for it.
const TRY_WRITES_MAX: usize = 64;

#[derive(Debug)]
pub struct SharedIndex(RwLock<Index>);

impl SharedIndex {
    #[must_use]
    pub fn new(index: Index) -> Self {
        Self(RwLock::new(index))
    }

    pub fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        self.0.read().look_up(chain, overlap);
    }

    /// The caller must keep the change short.
    pub fn change<T>(&self, change: impl FnOnce(&mut Index) -> T) -> T {
        let guard = (0..TRY_WRITES_MAX).find_map(|_| {
            std::hint::spin_loop();
            self.0.try_write()
        });
        change(&mut guard.unwrap_or_else(|| self.0.write()))
    }

    pub fn read<T>(&self, read: impl FnOnce(&Index) -> T) -> T {
        read(&self.0.read())
    }
}

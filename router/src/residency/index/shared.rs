//! The overlap index behind a lock: many threads look up while one task writes.
//!
//! The lock is a leaf: no other lock is taken while it is held. It is held for one change or one
//! look-up.

use parking_lot::RwLock;
use proto::block::BlockHash;

use super::{Index, Overlap};

/// How often a writer tries to get the lock without waiting. A writer that waits blocks new readers
/// until the present ones finish, and any of these may be descheduled.
const TRIES: usize = 64;

/// An index that many threads can read.
#[derive(Debug)]
pub struct SharedIndex(RwLock<Index>);

impl SharedIndex {
    /// Wraps an index.
    #[must_use]
    pub fn new(index: Index) -> Self {
        Self(RwLock::new(index))
    }

    /// Counts the leading blocks of a chain that are resident on each worker.
    pub fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        self.0.read().look_up(chain, overlap);
    }

    /// Applies one change. The caller must keep it short.
    pub fn change<T>(&self, change: impl FnOnce(&mut Index) -> T) -> T {
        let free = (0..TRIES).find_map(|_| {
            std::hint::spin_loop();
            self.0.try_write()
        });
        change(&mut free.unwrap_or_else(|| self.0.write()))
    }

    /// Reads the index under the lock.
    pub fn read<T>(&self, read: impl FnOnce(&Index) -> T) -> T {
        read(&self.0.read())
    }
}

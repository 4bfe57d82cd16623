//! Wraps the overlap index in a lock, so that many threads look prompts up while one task writes.
//!
//! The overlap index finds how many leading blocks of a prompt each worker has. The lock is held
//! for one change or one look-up, and no other lock is taken meanwhile. The writer is `kv_index`;
//! the readers are the tasks that place turns.

use parking_lot::RwLock;
use proto::block::BlockHash;

use super::{Index, Overlap};

/// How many times a writer tries to get the lock before it waits for the lock. A try delays no
/// reader, but a waiting writer blocks new readers until the present readers have finished. If the
/// operating system has paused one of the present readers, all look-ups wait for that reader.
const TRY_WRITES_MAX: usize = 64;

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
        let guard = (0..TRY_WRITES_MAX).find_map(|_| {
            std::hint::spin_loop();
            self.0.try_write()
        });
        change(&mut guard.unwrap_or_else(|| self.0.write()))
    }

    /// Reads the index under the lock.
    pub fn read<T>(&self, read: impl FnOnce(&Index) -> T) -> T {
        read(&self.0.read())
    }
}

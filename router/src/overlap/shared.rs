//! The index among threads: many look up while one task writes. The lock is a leaf, held for one
//! change or one look-up.

use parking_lot::RwLock;
use proto::block::BlockHash;

use super::{Index, Overlap};

/// How often a writer looks for a moment without readers before it makes one. A waiting writer
/// would make readers wait in turn, behind whichever of them was descheduled.
const TRIES: usize = 64;

/// An index that is read by many.
#[derive(Debug)]
pub struct Shared(RwLock<Index>);

impl Shared {
    /// Takes it over.
    #[must_use]
    pub fn new(index: Index) -> Self {
        Self(RwLock::new(index))
    }

    /// Leading blocks of a chain on every worker.
    pub fn look_up(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        self.0.read().look_up(chain, overlap);
    }

    /// One change, kept short by its caller.
    pub fn change<T>(&self, change: impl FnOnce(&mut Index) -> T) -> T {
        let free = (0..TRIES).find_map(|_| {
            std::hint::spin_loop();
            self.0.try_write()
        });
        change(&mut free.unwrap_or_else(|| self.0.write()))
    }

    /// Reads more than an answer.
    pub fn read<T>(&self, read: impl FnOnce(&Index) -> T) -> T {
        read(&self.0.read())
    }
}

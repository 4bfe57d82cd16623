//! Reads the tables of live rows that an engine in another process publishes, for the agent.
//!
//! [`super`] describes the tables, their ring, epochs, and the words `begun` and `done`. The caller
//! is `RemoteAuditor` in `crate::ipc`, which reads the tables and words in the order that [`super`]
//! describes. A table that the engine overwrites during the read is not returned, and the caller
//! tries again. No function waits.

use super::{
    Error, PoolFacts, TableRow,
    layout::{self, FileWords, RingSize},
};
use memmap2::MmapOptions;
use std::{
    fs::File,
    path::Path,
    sync::atomic::{AtomicU64, Ordering, fence},
};

/// Reads the tables of one engine, for the agent.
#[derive(Debug)]
pub struct TableReader {
    words: FileWords,
    facts: PoolFacts,
}

impl TableReader {
    /// Opens the file at `path` and checks its contents. The file must not be truncated while it is
    /// mapped. The engine, which runs as the same user, guarantees that.
    ///
    /// # Errors
    /// When there is no file, the file has no tables of this version, or the engine has closed it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |error| Error::File(path.to_owned(), error);
        let map = || MmapOptions::new().map_raw_read_only(&File::open(path)?);
        // First map the file for the smallest ring, to read the head. Then map the file for the
        // ring that the head describes.
        let smallest = RingSize::new(2, 1)?;
        let words = FileWords::new(map().map_err(failed)?, smallest)?;
        let head = words.head_words().map(|word| word.load(Ordering::Relaxed));
        let (facts, size) = layout::read_head(&head)?;
        let words = FileWords::new(map().map_err(failed)?, size)?;
        let reader = Self { words, facts };
        reader.check()?;
        Ok(reader)
    }

    pub fn facts(&self) -> &PoolFacts {
        &self.facts
    }

    /// Checks that the engine has not closed its table.
    ///
    /// # Errors
    /// [`Error::Closed`] when the engine has closed the table.
    pub fn check(&self) -> Result<(), Error> {
        if self.words.closed_word().load(Ordering::Acquire) == 0 {
            Ok(())
        } else {
            Err(Error::Closed)
        }
    }

    /// Returns the epoch of the newest step whose changes are all made; 0 before the first step.
    pub fn done_epoch(&self) -> u64 {
        load(self.words.done_word())
    }

    /// Returns the epoch of the newest step that has begun to make changes. Everything that the
    /// caller read before this call was read before any later step began.
    pub fn begun_epoch(&self) -> u64 {
        // Without this fence, the CPU could make the caller's earlier reads after this read.
        fence(Ordering::SeqCst);
        load(self.words.begun_word())
    }

    /// Returns the epoch of the newest step whose table is in the ring; 0 before the first step.
    pub fn newest_epoch(&self) -> u64 {
        load(self.words.newest_word())
    }

    /// Returns the table of the step with this epoch. Returns `None` if the ring doesn't hold that
    /// table yet, or no longer.
    pub fn table(&self, epoch: u64) -> Option<Vec<TableRow>> {
        let table = self.words.table_place(epoch);
        if epoch == 0 || table.epoch.load(Ordering::Acquire) != epoch {
            return None;
        }
        let row_count = usize::try_from(table.row_count.load(Ordering::Relaxed)).ok()?;
        if row_count > self.words.size().rows_max as usize {
            return None;
        }
        let read_row = |index| {
            let words = self.words.row(table.rows_start, index);
            TableRow::from_words(words.map(|word| word.load(Ordering::Relaxed)))
        };
        let rows = (0..row_count).map(read_row).collect();
        // If the writer has begun to overwrite the table meanwhile, the table's epoch has changed.
        fence(Ordering::Acquire);
        (table.epoch.load(Ordering::Relaxed) == epoch).then_some(rows)
    }
}

fn load(word: &AtomicU64) -> u64 {
    word.load(Ordering::Acquire)
}

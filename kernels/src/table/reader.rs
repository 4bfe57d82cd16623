//! The agent's side: reads tables from the ring, each of them consistent.

use super::{
    Error, PoolFacts, TableRow,
    layout::{self, RingSize, Words},
};
use memmap2::MmapOptions;
use std::{
    fs::File,
    path::Path,
    sync::atomic::{AtomicU64, Ordering, fence},
};

/// Reads the tables of one engine.
#[derive(Debug)]
pub struct Reader {
    words: Words,
    facts: PoolFacts,
}

impl Reader {
    /// Opens the file at `path`. Its contents are validated. The file must not be truncated while
    /// it is mapped: the engine, which runs as the same user, guarantees that.
    ///
    /// # Errors
    /// When there is no file, the file is not a table, or the engine has closed it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |error| Error::File(path.to_owned(), error);
        let map = || MmapOptions::new().map_raw_read_only(&File::open(path)?);
        // First map enough for any head, then as much as the head says.
        let least = RingSize::new(2, 1)?;
        let words = Words::new(map().map_err(failed)?, least)?;
        let head = words.head().map(|word| word.load(Ordering::Relaxed));
        let (facts, size) = layout::read_head(&head)?;
        let words = Words::new(map().map_err(failed)?, size)?;
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
        if self.words.closed().load(Ordering::Acquire) == 0 { Ok(()) } else { Err(Error::Closed) }
    }

    /// Returns the newest step whose changes are all made; 0 before the first step.
    pub fn done(&self) -> u64 {
        get(self.words.done())
    }

    /// Returns the newest step that has begun to make changes. Everything that the caller read
    /// before this call was read before any later step began.
    pub fn begun(&self) -> u64 {
        // Keeps the caller's earlier reads before the read of this word.
        fence(Ordering::SeqCst);
        get(self.words.begun())
    }

    /// Returns the newest step whose table has been published.
    pub fn newest(&self) -> u64 {
        get(self.words.newest())
    }

    /// Returns the table of a step; `None` if the ring doesn't hold it yet, or no longer.
    pub fn table(&self, epoch: u64) -> Option<Vec<TableRow>> {
        let (number, count, first) = self.words.table(epoch);
        if epoch == 0 || number.load(Ordering::Acquire) != epoch {
            return None;
        }
        let rows = usize::try_from(count.load(Ordering::Relaxed)).ok()?;
        if rows > self.words.size().rows_max as usize {
            return None;
        }
        let read = |i| {
            let words = self.words.row(first, i).map(|word| word.load(Ordering::Relaxed));
            TableRow::from_words(words)
        };
        let rows = (0..rows).map(read).collect();
        // If the writer has overwritten the table meanwhile, its number has changed.
        fence(Ordering::Acquire);
        (number.load(Ordering::Relaxed) == epoch).then_some(rows)
    }
}

fn get(word: &AtomicU64) -> u64 {
    word.load(Ordering::Acquire)
}

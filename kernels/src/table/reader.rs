//! The agent's side: tables out of the ring, none of them half old and half new.

use super::{
    Error, Facts, TableRow,
    layout::{self, Shape, Words},
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
    facts: Facts,
}

impl Reader {
    /// Opens the file at `path`. What stands in it is believed as far as it makes sense; that it
    /// isn't cut short while it is mapped is the engine's, who has to be the same user, to keep.
    ///
    /// # Errors
    /// No file, one that is no table, or one that was taken back.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |error| Error::File(path.to_owned(), error);
        let map = || MmapOptions::new().map_raw_read_only(&File::open(path)?);
        // Large enough for a head at least, then for what the head says.
        let least = Shape::new(2, 1)?;
        let words = Words::new(map().map_err(failed)?, least)?;
        let head = words.head().map(|word| word.load(Ordering::Relaxed));
        let (facts, shape) = layout::read_head(&head)?;
        let words = Words::new(map().map_err(failed)?, shape)?;
        let reader = Self { words, facts };
        reader.check()?;
        Ok(reader)
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Is the engine still there to write?
    ///
    /// # Errors
    /// [`Error::Closed`] when it has taken the table back.
    pub fn check(&self) -> Result<(), Error> {
        if self.words.closed().load(Ordering::Acquire) == 0 { Ok(()) } else { Err(Error::Closed) }
    }

    /// The newest step whose changes are all made; 0 before the first.
    pub fn done(&self) -> u64 {
        get(self.words.done())
    }

    /// The newest step that has begun to make changes. What the caller read before is older than
    /// it.
    pub fn begun(&self) -> u64 {
        // What was read before may not be read after.
        fence(Ordering::SeqCst);
        get(self.words.begun())
    }

    /// The newest step whose table is there.
    pub fn newest(&self) -> u64 {
        get(self.words.newest())
    }

    /// The table of a step; `None` if the ring doesn't have it, not yet or not any more.
    pub fn table(&self, epoch: u64) -> Option<Vec<TableRow>> {
        let (number, count, first) = self.words.table(epoch);
        if epoch == 0 || number.load(Ordering::Acquire) != epoch {
            return None;
        }
        let rows = usize::try_from(count.load(Ordering::Relaxed)).ok()?;
        if rows > self.words.shape().rows_max as usize {
            return None;
        }
        let read = |i| {
            let words = self.words.row(first, i).map(|word| word.load(Ordering::Relaxed));
            TableRow::from_words(words)
        };
        let rows = (0..rows).map(read).collect();
        // If the writer has been here meanwhile, it shows now.
        fence(Ordering::Acquire);
        (number.load(Ordering::Relaxed) == epoch).then_some(rows)
    }
}

fn get(word: &AtomicU64) -> u64 {
    word.load(Ordering::Acquire)
}

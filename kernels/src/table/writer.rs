//! The engine's side: one table a step, into the ring.

use super::{
    Error, Facts, TableRow,
    layout::{self, Shape, Words},
};
use memmap2::MmapRaw;
use std::{
    fs::{self, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering, fence},
};

/// Writes the tables of one engine; takes them back on drop.
#[derive(Debug)]
pub struct Writer {
    words: Words,
    path: PathBuf,
    epoch: u64,
}

/// A step that has begun. What it changes in `req_to_token` lies between its beginning and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stepped {
    pub epoch: u64,
}

impl Writer {
    /// The page that a device writes into, and where in it.
    #[cfg(feature = "cuda")]
    pub(crate) const HEAD_BYTES: usize = layout::HEAD_BYTES;
    #[cfg(feature = "cuda")]
    pub(crate) const BEGUN_BYTE: usize = layout::BEGUN_BYTE;
    #[cfg(feature = "cuda")]
    pub(crate) const DONE_BYTE: usize = layout::DONE_BYTE;

    /// Makes the file at `path`, readable by this user alone, in the place of an older one. A ring
    /// of `tables` tables of up to `rows_max` rows.
    ///
    /// # Errors
    /// Sizes out of bounds, or a file that can't be made.
    pub fn create(path: &Path, facts: &Facts, tables: u32, rows_max: u32) -> Result<Self, Error> {
        let shape = Shape::new(tables, rows_max)?;
        let failed = |error| Error::File(path.to_owned(), error);
        // Another name first: a reader sees a whole file or none.
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let new = PathBuf::from(new);
        let map = || {
            let _ = fs::remove_file(&new);
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create_new(true).mode(0o600).open(&new)?;
            file.set_len(shape.bytes() as u64)?;
            MmapRaw::map_raw(&file)
        };
        let words = Words::new(map().map_err(failed)?, shape)?;
        for (word, value) in words.head().into_iter().zip(layout::head(facts, shape)) {
            word.store(value, Ordering::Relaxed);
        }
        fence(Ordering::Release);
        fs::rename(&new, path).map_err(failed)?;
        Ok(Self { words, path: path.to_owned(), epoch: 0 })
    }

    /// Numbers the next step. `begun` is the caller's to set, to the epoch, before the step changes
    /// anything: by [`Self::set_begun`], or by the stream that makes the changes.
    pub fn begin(&mut self) -> Stepped {
        self.epoch += 1;
        Stepped { epoch: self.epoch }
    }

    /// Writes the table of the rows as they are after the step. `done` is the caller's to set,
    /// after the last change.
    ///
    /// # Errors
    /// More rows than a table has.
    pub fn publish(&mut self, step: Stepped, rows: &[TableRow]) -> Result<(), Error> {
        let rows_max = self.words.shape().rows_max;
        if rows.len() > rows_max as usize {
            return Err(Error::Rows { rows: rows.len(), rows_max });
        }
        let (epoch, count, first) = self.words.table(step.epoch);
        epoch.store(0, Ordering::Relaxed);
        // A reader that sees any of what follows sees that the table is not the old one any more.
        fence(Ordering::Release);
        count.store(rows.len() as u64, Ordering::Relaxed);
        for (i, row) in rows.iter().enumerate() {
            for (word, value) in self.words.row(first, i).into_iter().zip(row.to_words()) {
                word.store(value, Ordering::Relaxed);
            }
        }
        epoch.store(step.epoch, Ordering::Release);
        self.words.newest().store(step.epoch, Ordering::Release);
        Ok(())
    }

    /// Says that a step has begun, where the host makes its changes.
    pub fn set_begun(&self, step: Stepped) {
        set(self.words.begun(), step);
        // The step's changes are not to be seen before it.
        fence(Ordering::SeqCst);
    }

    /// Says that a step's changes are all made, where the host makes them.
    pub fn set_done(&self, step: Stepped) {
        set(self.words.done(), step);
    }

    /// The page of the words, for a device to write into.
    #[cfg(feature = "cuda")]
    pub(crate) fn head_page(&self) -> *mut u8 {
        self.words.start()
    }
}

fn set(word: &AtomicU64, step: Stepped) {
    word.store(step.epoch, Ordering::Release);
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.words.closed().store(1, Ordering::Release);
        // Somebody else may have made a newer one there; then that one goes, and he has a file that
        // nobody finds. An engine has one writer.
        let _ = fs::remove_file(&self.path);
    }
}

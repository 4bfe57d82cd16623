//! The engine's side: writes one table per step into the ring.

use super::{
    Error, PoolFacts, TableRow,
    layout::{self, RingSize, Words},
};
use memmap2::MmapRaw;
use std::{
    fs::{self, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering, fence},
};

/// Writes the tables of one engine, and closes them on drop.
#[derive(Debug)]
pub struct Writer {
    words: Words,
    path: PathBuf,
    epoch: u64,
}

/// A step that has begun, between its first and its last change of `req_to_token`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub epoch: u64,
}

impl Writer {
    /// Size of the page that a device writes into; offsets of its words follow.
    #[cfg(feature = "cuda")]
    pub(crate) const HEAD_BYTES: usize = layout::HEAD_BYTES;
    #[cfg(feature = "cuda")]
    pub(crate) const BEGUN_BYTE: usize = layout::BEGUN_BYTE;
    #[cfg(feature = "cuda")]
    pub(crate) const DONE_BYTE: usize = layout::DONE_BYTE;

    /// Creates the file at `path`, replacing an older one, readable by this user only. The ring has
    /// `tables` tables of up to `rows_max` rows.
    ///
    /// # Errors
    /// When a size is out of bounds, or the file can't be created.
    pub fn create(
        path: &Path,
        facts: &PoolFacts,
        tables: u32,
        rows_max: u32,
    ) -> Result<Self, Error> {
        let size = RingSize::new(tables, rows_max)?;
        let failed = |error| Error::File(path.to_owned(), error);
        // The file gets its name last, so a reader sees a complete file or none.
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let new = PathBuf::from(new);
        let map = || {
            let _ = fs::remove_file(&new);
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create_new(true).mode(0o600).open(&new)?;
            file.set_len(size.bytes() as u64)?;
            MmapRaw::map_raw(&file)
        };
        let words = Words::new(map().map_err(failed)?, size)?;
        for (word, value) in words.head().into_iter().zip(layout::head(facts, size)) {
            word.store(value, Ordering::Relaxed);
        }
        fence(Ordering::Release);
        fs::rename(&new, path).map_err(failed)?;
        Ok(Self { words, path: path.to_owned(), epoch: 0 })
    }

    /// Numbers the next step. Before the step changes anything, the caller must set `begun` to the
    /// epoch: by [`Self::set_begun`], or by the stream that makes the changes.
    pub fn begin_step(&mut self) -> Step {
        self.epoch += 1;
        Step { epoch: self.epoch }
    }

    /// Writes the table of the rows as they are after the step. The caller must set `done` after
    /// the step's last change.
    ///
    /// # Errors
    /// When there are more rows than a table holds.
    pub fn publish(&mut self, step: Step, rows: &[TableRow]) -> Result<(), Error> {
        let rows_max = self.words.size().rows_max;
        if rows.len() > rows_max as usize {
            return Err(Error::Rows { rows: rows.len(), rows_max });
        }
        let (epoch, count, first) = self.words.table(step.epoch);
        epoch.store(0, Ordering::Relaxed);
        // A reader that sees a write below also sees that the old table's number is gone.
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

    /// Marks a step as begun, if the host makes the changes.
    pub fn set_begun(&self, step: Step) {
        set(self.words.begun(), step);
        // No change of the step may become visible before `begun`.
        fence(Ordering::SeqCst);
    }

    /// Marks a step's changes as complete, if the host makes them.
    pub fn set_done(&self, step: Step) {
        set(self.words.done(), step);
    }

    /// Returns the page of the words, for a device to write into.
    #[cfg(feature = "cuda")]
    pub(crate) fn head_page(&self) -> *mut u8 {
        self.words.start()
    }
}

fn set(word: &AtomicU64, step: Step) {
    word.store(step.epoch, Ordering::Release);
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.words.closed().store(1, Ordering::Release);
        // Another writer may have replaced the file; then its file is deleted, and readers no
        // longer find it. An engine has one writer.
        let _ = fs::remove_file(&self.path);
    }
}

//! Writes the engine's tables of live rows, one per scheduler step, for readers in other processes.
//!
//! [`super`] describes the tables, their ring, epochs, and the words `begun` and `done`. The caller
//! is `Publisher` in `crate::ipc`. If `req_to_token` is in host memory, the writer also sets the
//! two words. On a GPU, the caller has a stream set them.

use super::{
    Error, PoolFacts, TableRow,
    layout::{self, FileWords, RingSize},
};
use memmap2::MmapRaw;
use std::{
    fs::{self, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering, fence},
};

/// Writes the tables of one engine. On drop, it tells the readers that the engine has closed them.
#[derive(Debug)]
pub struct TableWriter {
    words: FileWords,
    path: PathBuf,
    /// The epoch of the newest step; 0 before the first step.
    epoch: u64,
}

/// A step that has begun, between its first and its last change of `req_to_token`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub epoch: u64,
}

impl TableWriter {
    /// Size in bytes of the file's first memory page, into which a device writes.
    #[cfg(feature = "cuda")]
    pub(crate) const FIRST_PAGE_BYTES: usize = layout::RING_START_BYTE;
    /// Offset in bytes of the word `begun` in that page.
    #[cfg(feature = "cuda")]
    pub(crate) const BEGUN_BYTE: usize = layout::BEGUN_BYTE;
    /// Offset in bytes of the word `done` in that page.
    #[cfg(feature = "cuda")]
    pub(crate) const DONE_BYTE: usize = layout::DONE_BYTE;

    /// Creates the file at `path`, and replaces an older file. Only this user may read the file.
    /// The ring has `tables` tables of up to `rows_max` rows.
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
        // The file gets its final name when it is complete, so a reader never sees a part of it.
        let mut new_path = path.as_os_str().to_owned();
        new_path.push(".new");
        let new_path = PathBuf::from(new_path);
        let map = || {
            let _ = fs::remove_file(&new_path);
            let mut options = OpenOptions::new();
            let file =
                options.read(true).write(true).create_new(true).mode(0o600).open(&new_path)?;
            file.set_len(size.file_bytes() as u64)?;
            MmapRaw::map_raw(&file)
        };
        let words = FileWords::new(map().map_err(failed)?, size)?;
        for (word, value) in words.head_words().into_iter().zip(layout::head_values(facts, size)) {
            word.store(value, Ordering::Relaxed);
        }
        fence(Ordering::Release);
        fs::rename(&new_path, path).map_err(failed)?;
        Ok(Self { words, path: path.to_owned(), epoch: 0 })
    }

    /// Returns the next step. Before the step's first change, the caller must have `begun` set to
    /// the step's epoch: by [`Self::set_begun`], or by the stream that makes the changes.
    pub fn begin_step(&mut self) -> Step {
        self.epoch += 1;
        Step { epoch: self.epoch }
    }

    /// Writes the step's table: `rows` are the live rows after the step. The caller must have
    /// `done` set after this call and after the step's last change.
    ///
    /// # Errors
    /// When there are more rows than a table holds.
    pub fn publish(&mut self, step: Step, rows: &[TableRow]) -> Result<(), Error> {
        let rows_max = self.words.size().rows_max;
        if rows.len() > rows_max as usize {
            return Err(Error::TooManyRows { rows: rows.len(), rows_max });
        }
        let table = self.words.table_place(step.epoch);
        table.epoch.store(0, Ordering::Relaxed);
        // A reader that sees one of the writes below also sees that the older table is gone.
        fence(Ordering::Release);
        table.row_count.store(rows.len() as u64, Ordering::Relaxed);
        for (index, row) in rows.iter().enumerate() {
            let words = self.words.row(table.rows_start, index);
            for (word, value) in words.into_iter().zip(row.to_words()) {
                word.store(value, Ordering::Relaxed);
            }
        }
        table.epoch.store(step.epoch, Ordering::Release);
        self.words.newest_word().store(step.epoch, Ordering::Release);
        Ok(())
    }

    /// Marks a step as begun, if the host makes the changes.
    pub fn set_begun(&self, step: Step) {
        store_epoch(self.words.begun_word(), step);
        // No change of the step may become visible before `begun`.
        fence(Ordering::SeqCst);
    }

    /// Marks a step's changes as complete, if the host makes them.
    pub fn set_done(&self, step: Step) {
        store_epoch(self.words.done_word(), step);
    }

    /// Returns the address of the memory page that has `begun` and `done`, for a device to write.
    #[cfg(feature = "cuda")]
    pub(crate) fn first_page(&self) -> *mut u8 {
        self.words.start()
    }
}

fn store_epoch(word: &AtomicU64, step: Step) {
    word.store(step.epoch, Ordering::Release);
}

impl Drop for TableWriter {
    fn drop(&mut self) {
        self.words.closed_word().store(1, Ordering::Release);
        // If another writer has replaced the file, this deletes the file of that writer. That
        // doesn't happen, because an engine has one writer.
        let _ = fs::remove_file(&self.path);
    }
}

//! Follows the content of a small file that somebody else may replace at any time.
//!
//! The file is read twice a second. That notices every kind of change: writing in place, a rename
//! over the file, and the swap of a symbolic link on its path, as Kubernetes does. A change counts
//! once two readings in a row agree, so a file that is being written is not taken half. This module
//! doesn't know what the content means.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

/// The time between two readings. With two readings for each change, a change takes effect within
/// a second. Reading a file of a few KiB takes about 20 µs.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// The new content of a file, or why it can't be read.
pub type Content<'a> = Result<&'a [u8], &'a str>;

/// A file and its last content.
#[derive(Debug)]
pub struct WatchedFile {
    path: PathBuf,
    bytes_max: u64,
    changes: Changes,
}

/// Decides which readings of a file are changes. Pure.
#[derive(Debug)]
struct Changes {
    /// The content that counts, or the error.
    current: Result<Vec<u8>, String>,
    /// The last reading, if it differs from `current`.
    candidate: Option<Result<Vec<u8>, String>>,
}

impl Changes {
    /// Takes a reading. Returns the content if it has changed and two readings agree.
    fn read(&mut self, reading: Result<Vec<u8>, String>) -> Option<&Result<Vec<u8>, String>> {
        if reading == self.current {
            self.candidate = None;
            return None;
        }
        if self.candidate.as_ref() != Some(&reading) {
            self.candidate = Some(reading);
            return None;
        }
        self.candidate = None;
        self.current = reading;
        Some(&self.current)
    }
}

impl WatchedFile {
    /// Reads a file for the first time. Returns its content, too.
    ///
    /// # Errors
    /// When the file can't be read, isn't a regular file, or has more than `bytes_max` bytes.
    pub fn open(path: &Path, bytes_max: u64) -> io::Result<(Vec<u8>, Self)> {
        let content = read(path, bytes_max)?;
        let changes = Changes { current: Ok(content.clone()), candidate: None };
        Ok((content, Self { path: path.to_owned(), bytes_max, changes }))
    }

    /// Reads the file again and again until `stop` is cancelled. Calls `on_change` once with each
    /// new content, and once if the file can't be read any more.
    pub async fn follow(mut self, mut on_change: impl FnMut(Content<'_>), stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(READ_INTERVAL) => {}
            }
            let (path, bytes_max) = (self.path.clone(), self.bytes_max);
            let reading = tokio::task::spawn_blocking(move || {
                read(&path, bytes_max).map_err(|e| e.to_string())
            });
            // A reading that panicked counts as none.
            let Ok(reading) = reading.await else { continue };
            if let Some(content) = self.changes.read(reading) {
                on_change(content.as_deref().map_err(String::as_str));
            }
        }
    }
}

fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    // Opening a pipe would wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut content = vec![];
    File::open(path)?.take(bytes_max + 1).read_to_end(&mut content)?;
    if content.len() as u64 > bytes_max {
        return Err(io::Error::other(format!("it has more than {bytes_max} bytes")));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes() -> Changes {
        Changes { current: Ok(b"a".to_vec()), candidate: None }
    }

    #[test]
    fn a_change_counts_once_after_two_equal_readings() {
        let mut changes = changes();
        assert_eq!(changes.read(Ok(b"a".to_vec())), None);
        assert_eq!(changes.read(Ok(b"b".to_vec())), None);
        assert_eq!(changes.read(Ok(b"b".to_vec())), Some(&Ok(b"b".to_vec())));
        assert_eq!(changes.read(Ok(b"b".to_vec())), None);
    }

    #[test]
    fn a_file_that_is_being_written_is_not_taken_half() {
        let mut changes = changes();
        for half in ["", "b", "bb", "a"] {
            assert_eq!(changes.read(Ok(half.as_bytes().to_vec())), None, "{half:?}");
        }
        assert_eq!(changes.read(Ok(b"bb".to_vec())), None, "an old reading doesn't count");
    }

    #[test]
    fn a_file_that_is_gone_is_told_once() {
        let mut changes = changes();
        let gone = || Err("gone".to_owned());
        assert_eq!(changes.read(gone()), None);
        assert_eq!(changes.read(gone()), Some(&gone()));
        assert_eq!(changes.read(gone()), None);
    }

    #[test]
    fn only_regular_files_of_bounded_size_are_read() {
        let folder = std::env::temp_dir();
        assert!(WatchedFile::open(&folder, 10).is_err(), "a folder");
        assert!(WatchedFile::open(Path::new("/dev/zero"), 10).is_err(), "a device");
        let path = folder.join(format!("berth-watched-{}", std::process::id()));
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(WatchedFile::open(&path, 10).unwrap().0, b"0123456789");
        assert!(WatchedFile::open(&path, 9).is_err(), "one byte too many");
        std::fs::remove_file(&path).unwrap();
    }
}

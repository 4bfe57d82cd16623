//! Values read from files, and read again whenever the files change: certificates, keys and tokens.
//!
//! Reading twice a second notices every change: writing in place, a rename over a file, and the
//! swap of a symbolic link on its path, as Kubernetes does. A change counts once two readings in a
//! row agree, so a file that is being written is not taken half. A content that can't be used
//! leaves the old value in effect.

use std::{
    fmt,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use sha2::{Digest as _, Sha256};
use tracing::{info, warn};

use crate::{metrics::By, tasks::Tasks};

/// The time between two readings. With two readings for each change, a change takes effect within
/// about a second. Reading three files takes some 50 µs.
const READ_INTERVAL: Duration = Duration::from_millis(500);
/// A bundle of 300 certificates has about 512 KiB, and a key file at most 1 KiB for each key.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{path} can't be read: {why}")]
    Unreadable {
        path: String,
        /// The system's error, or that the file is too long.
        why: String,
    },
    #[error("{0}")]
    Content(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Change {
    purpose: &'static str,
    result: &'static str,
}

crate::metrics! {
    pub struct Metrics {
        /// Changes of files, by what they are for and whether they can be used
        reloads: Family<Change, Counter> = "file_reloads";
        /// 1 while changed files can't be used and their old content is in effect
        outdated: By<Gauge> = "file_outdated", By::label("purpose");
    }
}

/// A value that follows its files. Clones share it.
pub struct Reloaded<T>(Arc<ArcSwap<T>>);

impl<T> Reloaded<T> {
    /// Returns a value of no file, which never changes.
    #[must_use]
    pub fn fixed(value: T) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(value)))
    }

    #[must_use]
    pub fn load(&self) -> Arc<T> {
        self.0.load_full()
    }
}

impl<T> Clone for Reloaded<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

// The value may be a secret, so it is not shown.
impl<T> fmt::Debug for Reloaded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reloaded")
    }
}

pub struct Source<T> {
    /// What the files are for: the label of the metrics, and a field of the log.
    purpose: &'static str,
    paths: Vec<PathBuf>,
    parse: Parse<T>,
}

/// Makes a value of the contents of files, in the order of their paths.
type Parse<T> = Box<dyn Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync>;

impl<T> fmt::Debug for Source<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("purpose", &self.purpose)
            .field("paths", &self.paths)
            .finish()
    }
}

impl<T> Source<T> {
    pub fn new(
        purpose: &'static str,
        paths: Vec<PathBuf>,
        parse: impl Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync + 'static,
    ) -> Self {
        Self { purpose, paths, parse: Box::new(parse) }
    }

    pub fn read(&self) -> Result<T, Error> {
        self.read_contents().and_then(|contents| self.parse(&contents))
    }

    fn read_contents(&self) -> Result<Vec<Vec<u8>>, Error> {
        let read = |path: &PathBuf| {
            let error = |source: io::Error| Error::Unreadable {
                path: path.display().to_string(),
                why: source.to_string(),
            };
            read_file(path, FILE_BYTES_MAX).map_err(error)
        };
        self.paths.iter().map(read).collect()
    }

    fn parse(&self, contents: &[Vec<u8>]) -> Result<T, Error> {
        (self.parse)(contents).map_err(Error::Content)
    }
}

/// SHA-256 of the contents of files. Contents are not kept, because they may be secret.
type Digest = [u8; 32];

fn digest(contents: &[Vec<u8>]) -> Digest {
    let mut hasher = Sha256::new();
    for content in contents {
        hasher.update(content.len().to_le_bytes());
        hasher.update(content);
    }
    hasher.finalize().into()
}

fn read_file(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
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

/// Fails when the files can't be read or used now.
pub fn start<T: Send + Sync + 'static>(
    source: Source<T>,
    metrics: &Metrics,
    tasks: &Tasks,
) -> Result<Reloaded<T>, Error> {
    let contents = source.read_contents()?;
    let value = Reloaded(Arc::new(ArcSwap::from_pointee(source.parse(&contents)?)));
    let purpose = source.purpose;
    let count = |result| metrics.reloads.get_or_create_owned(&Change { purpose, result });
    let follower = Follower {
        reloads: count("ok"),
        failures: count("failed"),
        outdated: metrics.outdated.get(purpose).clone(),
        source: Arc::new(source),
        value: value.clone(),
        changes: Changes { current: Ok(digest(&contents)), candidate: None },
    };
    let token = tasks.token();
    tasks.spawn_essential(purpose, async move {
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = follower.run() => {}
        }
    });
    Ok(value)
}

struct Follower<T> {
    source: Arc<Source<T>>,
    value: Reloaded<T>,
    changes: Changes,
    reloads: Counter,
    failures: Counter,
    outdated: Gauge,
}

impl<T: Send + Sync + 'static> Follower<T> {
    async fn run(mut self) {
        loop {
            tokio::time::sleep(READ_INTERVAL).await;
            // The files may be on a slow or remote disk.
            let source = Arc::clone(&self.source);
            let reading = tokio::task::spawn_blocking(move || source.read_contents());
            let Ok(contents) = reading.await else { continue };
            let reading = contents.as_deref().map(digest).map_err(Clone::clone);
            if self.changes.read(reading) {
                let source = Arc::clone(&self.source);
                let parse = move || contents.and_then(|contents| source.parse(&contents));
                let parsed = tokio::task::spawn_blocking(parse).await;
                let panicked = |_| Err(Error::Content("its parser panicked".to_owned()));
                self.apply(parsed.unwrap_or_else(panicked));
            }
        }
    }

    fn apply(&self, value: Result<T, Error>) {
        let purpose = self.source.purpose;
        match value {
            Ok(value) => {
                self.value.0.store(Arc::new(value));
                self.reloads.inc();
                self.outdated.set(0);
                info!(purpose, "files reloaded");
            }
            Err(error) => {
                self.failures.inc();
                self.outdated.set(1);
                warn!(purpose, %error, "changed files can't be used; their old content stays");
            }
        }
    }
}

/// Decides which readings of the files are changes. Pure.
#[derive(Debug)]
struct Changes {
    current: Reading,
    /// The last reading, if it differs from `current`.
    candidate: Option<Reading>,
}

type Reading = Result<Digest, Error>;

impl Changes {
    /// Returns whether this is a change: it differs from what counts, and two in a row agree.
    fn read(&mut self, reading: Reading) -> bool {
        if reading == self.current {
            self.candidate = None;
            return false;
        }
        if self.candidate.as_ref() != Some(&reading) {
            self.candidate = Some(reading);
            return false;
        }
        (self.current, self.candidate) = (reading, None);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(contents: &[Vec<u8>]) -> Result<u32, String> {
        let text = String::from_utf8_lossy(&contents[0]).into_owned();
        text.trim().parse().map_err(|_| format!("{text:?} is not a number"))
    }

    fn changes() -> Changes {
        Changes { current: Ok([0; 32]), candidate: None }
    }

    #[test]
    fn a_change_counts_once_after_two_equal_readings() {
        let mut changes = changes();
        let read: Vec<bool> =
            [0, 1, 1, 1, 0, 0].map(|content| changes.read(Ok([content; 32]))).into();
        assert_eq!(read, [false, false, true, false, false, true]);
    }

    #[test]
    fn a_file_that_is_being_written_is_not_taken_half() {
        let mut changes = changes();
        for half in [1, 2, 3, 0, 3] {
            assert!(!changes.read(Ok([half; 32])), "{half}");
        }
        assert!(changes.read(Ok([3; 32])));
    }

    #[test]
    fn a_file_that_is_gone_is_told_once() {
        let mut changes = changes();
        let gone = || Err(Error::Content("gone".to_owned()));
        assert_eq!([(); 3].map(|()| changes.read(gone())), [false, true, false]);
    }

    // Tokio's paused clock jumps to the next reading when no task can run.
    #[tokio::test(start_paused = true)]
    async fn overwritten_renamed_and_relinked_files_are_read_and_broken_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("a"), "1").unwrap();
        std::os::unix::fs::symlink(path("a"), path("link")).unwrap();
        let (metrics, tasks) = (Metrics::default(), Tasks::default());
        let source = Source::new("test", vec![path("link")], number);
        let value = start(source, &metrics, &tasks).unwrap();
        let outdated = metrics.outdated.get("test").clone();
        let wait = async |want: (u32, i64)| {
            while (*value.load(), outdated.get()) != want {
                tokio::time::sleep(READ_INTERVAL).await;
            }
        };
        std::fs::write(path("a"), "2").unwrap();
        wait((2, 0)).await;
        std::fs::write(path("b"), "3").unwrap();
        std::fs::rename(path("b"), path("a")).unwrap();
        wait((3, 0)).await;
        std::fs::write(path("c"), "four").unwrap();
        std::os::unix::fs::symlink(path("c"), path("new link")).unwrap();
        std::fs::rename(path("new link"), path("link")).unwrap();
        wait((3, 1)).await;
        std::fs::write(path("c"), "4").unwrap();
        wait((4, 0)).await;
        std::fs::remove_file(path("c")).unwrap();
        wait((4, 1)).await;
        std::fs::write(path("c"), "4").unwrap();
        wait((4, 0)).await;
        tasks.cancel();
    }

    #[test]
    fn a_file_that_is_missing_or_broken_is_named() {
        let source = Source::new("test", vec!["/nonexistent".into()], number);
        assert!(source.read().unwrap_err().to_string().contains("/nonexistent"));
    }

    #[test]
    fn only_regular_files_of_bounded_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read_file(folder.path(), 10).is_err(), "a folder");
        assert!(read_file(Path::new("/dev/zero"), 10).is_err(), "a device");
        let path = folder.path().join("file");
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(read_file(&path, 10).unwrap(), b"0123456789");
        assert!(read_file(&path, 9).is_err(), "one byte too many");
    }
}

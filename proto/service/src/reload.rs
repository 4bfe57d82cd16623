//! Values read from files, and read again whenever the files change: certificates, keys and tokens.
//!
//! A task reads the files every second and compares their content, so it notices files that are
//! overwritten, renamed into place, or reached through a symbolic link that is switched. A content
//! that can't be used leaves the old value in effect: the task logs a warning and sets a metric.
//! Settings aren't reloaded; see `settings`.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use sha2::{Digest as _, Sha256};
use tracing::{info, warn};

use crate::tasks::Tasks;

/// Interval at which the files are read. A rotation takes effect within this time. Reading three
/// files takes some 50 µs.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The longest file, in bytes. A bundle of 300 certificates has about 512 KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why files can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A file can't be read.
    #[error("{path} can't be read: {why}")]
    Unreadable {
        /// The path of the file.
        path: String,
        /// The system's error, or that the file is too long.
        why: String,
    },
    /// The content can't be used.
    #[error("{0}")]
    Content(String),
}

/// The label of the metrics: what the files are for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Purpose {
    purpose: &'static str,
}

/// The metrics of all reloaded files of a process.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    reloads: Family<Purpose, Counter>,
    outdated: Family<Purpose, Gauge>,
}

impl Metrics {
    /// Creates the metrics in `registry`.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Files read again after a change, by what they are for";
        registry.register("file_reloads", help, metrics.reloads.clone());
        let help = "1 while changed files can't be used and their old content is in effect";
        registry.register("file_outdated", help, metrics.outdated.clone());
        metrics
    }
}

/// A value that follows its files. Clones share it.
pub struct Reloaded<T>(Arc<ArcSwap<T>>);

impl<T> Reloaded<T> {
    /// Returns the value that is in effect now.
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

/// Files, and how to make a value of their contents.
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
    /// Describes a value that `parse` makes of the contents of the files `paths`.
    pub fn new(
        purpose: &'static str,
        paths: Vec<PathBuf>,
        parse: impl Fn(&[Vec<u8>]) -> Result<T, String> + Send + Sync + 'static,
    ) -> Self {
        Self { purpose, paths, parse: Box::new(parse) }
    }

    /// Reads the value once.
    ///
    /// # Errors
    /// When a file can't be read or used.
    pub fn read(&self) -> Result<T, Error> {
        self.read_if_changed(None).1.map(|value| value.expect("there is no old content"))
    }

    /// Reads the files, and returns the digest of their contents. Makes a value if the digest
    /// differs from `old_digest`.
    fn read_if_changed(&self, old_digest: Option<Digest>) -> (Option<Digest>, Changed<T>) {
        let contents: Result<Vec<_>, _> = self.paths.iter().map(|path| read_file(path)).collect();
        let contents = match contents {
            Ok(contents) => contents,
            Err(error) => return (None, Err(error)),
        };
        let digest = digest(&contents);
        if old_digest == Some(digest) {
            return (Some(digest), Ok(None));
        }
        let value = (self.parse)(&contents).map(Some).map_err(Error::Content);
        (Some(digest), value)
    }
}

/// SHA-256 of the contents of files. Contents are not kept, because they may be secret.
type Digest = [u8; 32];
/// A new value, nothing if the contents are the old ones, or why there is no value.
type Changed<T> = Result<Option<T>, Error>;

fn digest(contents: &[Vec<u8>]) -> Digest {
    let mut hasher = Sha256::new();
    for content in contents {
        hasher.update(content.len().to_le_bytes());
        hasher.update(content);
    }
    hasher.finalize().into()
}

fn read_file(path: &Path) -> Result<Vec<u8>, Error> {
    let error = |why: String| Error::Unreadable { path: path.display().to_string(), why };
    let length = std::fs::metadata(path).map_err(|source| error(source.to_string()))?.len();
    if length > FILE_BYTES_MAX {
        return Err(error(format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    std::fs::read(path).map_err(|source| error(source.to_string()))
}

/// Reads the value of `source`, and starts a task that reads it again when its files change.
///
/// # Errors
/// When the files can't be read or used now.
pub fn start<T: Send + Sync + 'static>(
    source: Source<T>,
    metrics: &Metrics,
    tasks: &Tasks,
) -> Result<Reloaded<T>, Error> {
    let (digest, value) = source.read_if_changed(None);
    let value = value?.expect("there is no old content");
    let reloaded = Reloaded(Arc::new(ArcSwap::from_pointee(value)));
    let label = Purpose { purpose: source.purpose };
    let follower = Follower {
        reloads: metrics.reloads.get_or_create(&label).clone(),
        outdated: metrics.outdated.get_or_create(&label).clone(),
        source: Arc::new(source),
        value: reloaded.clone(),
        judge: Judge { digest_in_effect: digest, problem: None },
    };
    let token = tasks.token();
    tasks.spawn(async move {
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = follower.run() => {}
        }
    });
    Ok(reloaded)
}

/// The task that follows the files of one value.
struct Follower<T> {
    source: Arc<Source<T>>,
    value: Reloaded<T>,
    judge: Judge,
    reloads: Counter,
    outdated: Gauge,
}

impl<T: Send + Sync + 'static> Follower<T> {
    async fn run(mut self) {
        let mut interval = tokio::time::interval(POLL_INTERVAL);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let (source, old_digest) = (Arc::clone(&self.source), self.judge.digest_in_effect);
            // The files may be on a slow or remote disk.
            let read = tokio::task::spawn_blocking(move || source.read_if_changed(old_digest));
            let Ok((digest, changed)) = read.await else { continue };
            self.apply(digest, changed);
        }
    }

    fn apply(&mut self, digest: Option<Digest>, changed: Changed<T>) {
        let purpose = self.source.purpose;
        let (outcome, new_value) = match changed {
            Ok(new_value) => (Ok(()), new_value),
            Err(error) => (Err(error), None),
        };
        match self.judge.observe(digest, outcome) {
            Verdict::Nothing => {}
            Verdict::Replace => {
                if let Some(value) = new_value {
                    self.value.0.store(Arc::new(value));
                    self.reloads.inc();
                }
                self.outdated.set(0);
                info!(purpose, "files reloaded");
            }
            Verdict::Complain(error) => {
                self.outdated.set(1);
                warn!(purpose, %error, "changed files can't be used; their old content stays");
            }
        }
    }
}

/// Decides what a look at the files means. Pure.
#[derive(Debug)]
struct Judge {
    digest_in_effect: Option<Digest>,
    /// Why the last look found nothing to use, and whether that was reported.
    problem: Option<(Error, bool)>,
}

/// What to do after a look at the files.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Nothing,
    /// The content can be used: it is new, or the old content is back.
    Replace,
    /// The content can't be used.
    Complain(Error),
}

impl Judge {
    /// A problem is reported when two looks in a row see it: several files are often replaced one
    /// after the other, and don't fit together in between.
    fn observe(&mut self, digest: Option<Digest>, outcome: Result<(), Error>) -> Verdict {
        match outcome {
            Ok(()) if digest == self.digest_in_effect => match self.problem.take() {
                Some((_, true)) => Verdict::Replace,
                Some((_, false)) | None => Verdict::Nothing,
            },
            Ok(()) => {
                (self.digest_in_effect, self.problem) = (digest, None);
                Verdict::Replace
            }
            Err(error) => match &mut self.problem {
                Some((old_error, was_reported)) if *old_error == error => {
                    if std::mem::replace(was_reported, true) {
                        Verdict::Nothing
                    } else {
                        Verdict::Complain(error)
                    }
                }
                problem => {
                    *problem = Some((error, false));
                    Verdict::Nothing
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(contents: &[Vec<u8>]) -> Result<u32, String> {
        let text = String::from_utf8_lossy(&contents[0]).into_owned();
        text.trim().parse().map_err(|_| format!("{text:?} is not a number"))
    }

    #[test]
    fn a_problem_is_reported_once_and_only_if_it_stays() {
        let mut judge = Judge { digest_in_effect: Some([1; 32]), problem: None };
        let broken = || Err(Error::Content("x".into()));
        assert_eq!(judge.observe(Some([2; 32]), broken()), Verdict::Nothing);
        assert_eq!(judge.observe(Some([3; 32]), Ok(())), Verdict::Replace);
        assert_eq!(judge.observe(Some([3; 32]), Ok(())), Verdict::Nothing);
        assert_eq!(judge.observe(None, broken()), Verdict::Nothing);
        assert_eq!(judge.observe(None, broken()), Verdict::Complain(Error::Content("x".into())));
        assert_eq!(judge.observe(None, broken()), Verdict::Nothing);
        assert_eq!(judge.observe(Some([3; 32]), Ok(())), Verdict::Replace, "the old one is back");
        assert_eq!(judge.observe(Some([3; 32]), Ok(())), Verdict::Nothing);
    }

    // Tokio's paused clock jumps to the next poll when no task can run.
    #[tokio::test(start_paused = true)]
    async fn overwritten_renamed_and_relinked_files_are_read_and_broken_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("a"), "1").unwrap();
        std::os::unix::fs::symlink(path("a"), path("link")).unwrap();
        let mut registry = Registry::default();
        let (metrics, tasks) = (Metrics::new(&mut registry), Tasks::default());
        let source = Source::new("test", vec![path("link")], number);
        let value = start(source, &metrics, &tasks).unwrap();
        let outdated = metrics.outdated.get_or_create(&Purpose { purpose: "test" }).clone();
        let wait = async |want: (u32, i64)| {
            while (*value.load(), outdated.get()) != want {
                tokio::time::sleep(POLL_INTERVAL).await;
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
        tasks.cancel();
    }

    #[test]
    fn a_file_that_is_missing_or_broken_is_named() {
        let source = Source::new("test", vec!["/nonexistent".into()], number);
        assert!(source.read().unwrap_err().to_string().contains("/nonexistent"));
    }
}

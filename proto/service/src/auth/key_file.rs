//! Reads a key file, and reads it again when it changes.
//!
//! A broken file at the start is a problem of the settings. A file that breaks later changes
//! nothing: the last good keys stay in force, the log says why, and a metric counts it. The keys
//! themselves are in `keys`.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwap;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::keys::{self, KeySet};
use crate::watched_file::{self, WatchedFile};

/// The longest key file, in bytes: 1 KiB for each of its keys.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a key file can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file can't be read.
    #[error("{} can't be read: {source}; name a file of keys", .path.display())]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file has wrong keys.
    #[error("{}: {source}", .path.display())]
    Keys {
        /// The path of the file.
        path: PathBuf,
        /// What is wrong.
        source: keys::Error,
    },
}

/// The keys of a key file, as of its last good state.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    keys: ArcSwap<KeySet>,
    metrics: Metrics,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// What an operator sees of a key file.
#[derive(Debug, Default)]
struct Metrics {
    digests: Gauge,
    reloads: Family<ResultLabel, Counter>,
}

impl Metrics {
    fn register(&self, registry: &mut Registry) {
        registry.register("auth_keys", "Digests in the key file in force", self.digests.clone());
        let help = "Changes of the key file, by result; after a failed one the old keys stay";
        registry.register("auth_key_reloads", help, self.reloads.clone());
    }

    fn count_reload(&self, result: &'static str) {
        self.reloads.get_or_create(&ResultLabel { result }).inc();
    }
}

impl KeyFile {
    /// Reads the file and checks its keys.
    ///
    /// # Errors
    /// When the file can't be read, or its keys are wrong.
    pub fn check(path: &Path) -> Result<(), Error> {
        Self::read(path).map(drop)
    }

    /// Reads the file for the first time. The task that [`Self::follow`] returns reads it again.
    ///
    /// # Errors
    /// When the file can't be read, or its keys are wrong.
    pub fn open(path: &Path, registry: &mut Registry) -> Result<(Arc<Self>, WatchedFile), Error> {
        let (keys, watched) = Self::read(path)?;
        let metrics = Metrics::default();
        metrics.register(registry);
        metrics.digests.set(i64::try_from(keys.len()).unwrap_or(i64::MAX));
        let file = Self { path: path.to_owned(), keys: ArcSwap::from_pointee(keys), metrics };
        Ok((Arc::new(file), watched))
    }

    /// Returns the keys in force.
    #[must_use]
    pub fn keys(&self) -> arc_swap::Guard<Arc<KeySet>> {
        self.keys.load()
    }

    /// Follows the file until `stop` is cancelled.
    pub async fn follow(self: Arc<Self>, watched: WatchedFile, stop: CancellationToken) {
        watched.follow(|content| self.replace(content), stop).await;
    }

    fn read(path: &Path) -> Result<(KeySet, WatchedFile), Error> {
        let (content, watched) = WatchedFile::open(path, FILE_BYTES_MAX)
            .map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let keys =
            parse(&content).map_err(|source| Error::Keys { path: path.to_owned(), source })?;
        Ok((keys, watched))
    }

    /// Takes the new content of the file, if it is good.
    fn replace(&self, content: watched_file::Content<'_>) {
        let keys = content
            .map_err(ToString::to_string)
            .and_then(|content| parse(content).map_err(|error| error.to_string()));
        let path = self.path.display();
        match keys {
            Ok(keys) => {
                let digests = keys.len();
                self.metrics.digests.set(i64::try_from(digests).unwrap_or(i64::MAX));
                self.keys.store(Arc::new(keys));
                self.metrics.count_reload("ok");
                info!(%path, digests, "key file reloaded");
            }
            Err(error) => {
                self.metrics.count_reload("failed");
                warn!(%path, error, "key file is broken, the old keys stay in force");
            }
        }
    }
}

fn parse(content: &[u8]) -> Result<KeySet, keys::Error> {
    let text = std::str::from_utf8(content).map_err(|error| {
        let before = content.get(..error.valid_up_to()).unwrap_or_default();
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        keys::Error::Form { line, message: "the text is not UTF-8".to_owned() }
    })?;
    KeySet::parse(text)
}

//! Gets the public keys of a token issuer, from a file or a URL, and keeps them up to date.
//!
//! A file is followed as key files are. A URL is read every few minutes, and when a token has an
//! unknown key id, but for that at most once a minute: clients can invent ids. If the issuer can't
//! be read, the last good keys stay in force. `jwt` checks tokens with the keys.

mod fetch;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use service::{clock::now, tasks::Tasks, watched_file::WatchedFile};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::fetch::Fetcher;
use super::jwt::Jwks;
use crate::config::jwt::{JWKS_BYTES_MAX, JwksSource, JwtTable};

/// The time between two readings of a URL. Issuers publish a new key hours before they use it.
const REFRESH_INTERVAL: Duration = Duration::from_secs(300);
/// The time between two readings while there are no keys yet.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The time between two readings because of unknown key ids.
const UNKNOWN_KEY_INTERVAL: Duration = Duration::from_secs(60);
/// The longest wait of a request for a reading. A reading takes at most [`fetch::FETCH_TIME_MAX`].
const WAIT_MAX: Duration = fetch::FETCH_TIME_MAX;

/// Why the issuer's keys can't be followed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file of keys can't be used.
    #[error("auth.jwt.jwks: {path} can't be used: {why}; name a JWKS")]
    File {
        /// The path of the file.
        path: String,
        /// Why not.
        why: String,
    },
    /// The client for the URL can't be made.
    #[error("auth.jwt: {0}")]
    Client(String),
}

/// The issuer's keys in force.
#[derive(Debug)]
pub struct JwksStore {
    keys: ArcSwapOption<Jwks>,
    /// Counts the readings of the URL that have ended, well or not.
    readings: watch::Sender<u64>,
    refresh_gate: Mutex<RefreshGate>,
    /// Wakes the task that reads the URL.
    wake: Notify,
    /// Whether the keys are at a URL.
    is_url: bool,
    reloads: Family<ResultLabel, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// Limits how often unknown key ids cause a reading. Pure.
#[derive(Debug, Default)]
struct RefreshGate {
    /// When the last reading was asked for, and how many readings had ended then.
    last: Option<(Instant, u64)>,
}

/// What a request for a reading leads to.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    /// A reading begins.
    New,
    /// A reading that was asked for earlier hasn't ended.
    Pending,
    /// The last reading is too recent.
    TooSoon,
}

impl RefreshGate {
    /// Asks for a reading at `now`, when `ended` readings have ended.
    fn ask(&mut self, now: Instant, ended: u64) -> Asked {
        match self.last {
            Some((_, before)) if before == ended => Asked::Pending,
            Some((at, _)) if now.saturating_duration_since(at) < UNKNOWN_KEY_INTERVAL => {
                Asked::TooSoon
            }
            _ => {
                self.last = Some((now, ended));
                Asked::New
            }
        }
    }
}

impl JwksStore {
    /// Starts to follow the issuer's keys. Keys of a URL are not there yet when this returns.
    ///
    /// # Errors
    /// When the file can't be used, or the client for the URL can't be made.
    pub fn start(
        settings: &JwtTable,
        registry: &mut Registry,
        tasks: &Tasks,
    ) -> Result<Arc<Self>, Error> {
        let source = settings.source();
        let store = Arc::new(Self {
            keys: ArcSwapOption::empty(),
            readings: watch::Sender::new(0),
            refresh_gate: Mutex::default(),
            wake: Notify::new(),
            is_url: matches!(source, Some(JwksSource::Url(_))),
            reloads: Family::default(),
        });
        let help =
            "Readings of the token issuer's keys, by result; after a failed one the old stay";
        registry.register("auth_jwks_reloads", help, store.reloads.clone());
        if let Some(JwksSource::Url(url)) = source {
            let fetcher = Fetcher::new(url, &settings.ca_file).map_err(Error::Client)?;
            tasks.spawn_essential("jwks", Arc::clone(&store).follow_url(fetcher, tasks.token()));
        } else {
            let (keys, watched) = open_file(settings)?;
            store.keys.store(Some(Arc::new(keys)));
            let (follower, stop) = (Arc::clone(&store), tasks.token());
            tasks.spawn_essential("jwks", async move {
                let replace = |content: service::watched_file::Content<'_>| {
                    follower.replace(content.map_err(str::to_owned).and_then(Jwks::parse));
                };
                watched.follow(replace, stop).await;
            });
        }
        Ok(store)
    }

    /// Returns the keys in force, or `None` before the first good reading.
    pub fn keys(&self) -> Option<Arc<Jwks>> {
        self.keys.load_full()
    }

    /// Reads the keys again because a token's key is unknown, and waits for it. Returns whether the
    /// keys may have changed. Does nothing if the last reading for this reason is recent.
    pub async fn refresh(&self) -> bool {
        if !self.is_url {
            return false;
        }
        let mut readings = self.readings.subscribe();
        let ended = *readings.borrow_and_update();
        let asked = self.refresh_gate.lock().ask(now(), ended);
        match asked {
            Asked::TooSoon => return false,
            Asked::New => self.wake.notify_one(),
            Asked::Pending => {}
        }
        let reading = readings.wait_for(|count| *count != ended);
        tokio::time::timeout(WAIT_MAX, reading).await.is_ok_and(|reading| reading.is_ok())
    }

    async fn follow_url(self: Arc<Self>, fetcher: Fetcher, stop: CancellationToken) {
        loop {
            let content = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                content = fetcher.fetch() => content,
            };
            self.replace(content.and_then(|content| Jwks::parse(&content)));
            self.readings.send_modify(|count| *count += 1);
            let has_keys = self.keys.load().is_some();
            let pause = if has_keys { REFRESH_INTERVAL } else { RETRY_INTERVAL };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Puts good keys in force.
    fn replace(&self, keys: Result<Jwks, String>) {
        let result = match keys {
            Ok(keys) => {
                if self.keys.swap(Some(Arc::new(keys))).is_none() {
                    info!("token issuer's keys are there");
                }
                "ok"
            }
            Err(error) => {
                warn!(error, "token issuer's keys can't be read, the old ones stay in force");
                "failed"
            }
        };
        self.reloads.get_or_create(&ResultLabel { result }).inc();
    }
}

fn open_file(settings: &JwtTable) -> Result<(Jwks, WatchedFile), Error> {
    let path = std::path::Path::new(&settings.jwks);
    let wrong = |why: String| Error::File { path: settings.jwks.clone(), why };
    let (content, watched) =
        WatchedFile::open(path, JWKS_BYTES_MAX).map_err(|error| wrong(error.to_string()))?;
    Ok((Jwks::parse(&content).map_err(wrong)?, watched))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invented_key_ids_cause_one_reading_a_minute() {
        let mut gate = RefreshGate::default();
        let start = now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        assert_eq!(gate.ask(at(0), 7), Asked::New);
        assert_eq!(gate.ask(at(1), 7), Asked::Pending);
        assert_eq!(gate.ask(at(100), 7), Asked::Pending, "a reading that takes long is one");
        assert_eq!(gate.ask(at(2), 8), Asked::TooSoon);
        assert_eq!(gate.ask(at(59), 9), Asked::TooSoon);
        assert_eq!(gate.ask(at(60), 9), Asked::New);
        assert_eq!(gate.ask(at(60), 9), Asked::Pending);
    }
}

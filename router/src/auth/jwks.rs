//! Gets the public keys of a token issuer, from a file or a URL, and keeps them up to date.
//!
//! If the issuer can't be read, the last good keys stay in force.

mod fetch;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use service::{
    clock::now,
    metrics::{By, Registrar},
    reload::{self, Reloaded, Source},
    tasks::Tasks,
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::fetch::Fetcher;
use super::jwt::Jwks;
use crate::config::jwt::{JwksSource, JwtTable};

/// Issuers publish a new key hours before they use it.
const REFRESH_INTERVAL: Duration = Duration::from_secs(300);
/// The interval while there are no keys yet.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// A token with an unknown key id causes a reading at most this often: clients can invent ids.
const UNKNOWN_KEY_INTERVAL: Duration = Duration::from_secs(60);
/// The longest wait of a request for a reading.
const WAIT_MAX: Duration = fetch::FETCH_TIME_MAX;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("auth.jwt.jwks: {0}; name a JWKS")]
    File(#[from] reload::Error),
    #[error("auth.jwt: {0}")]
    Client(String),
}

#[derive(Debug)]
pub struct JwksStore(Keys);

#[derive(Debug)]
enum Keys {
    File(Reloaded<Jwks>),
    Url(Arc<UrlKeys>),
}

#[derive(Debug)]
struct UrlKeys {
    /// `None` before the first good reading.
    keys: ArcSwapOption<Jwks>,
    /// Counts readings that have ended, well or not.
    readings: watch::Sender<u64>,
    refresh_gate: Mutex<RefreshGate>,
    wake: Notify,
    metrics: Metrics,
}

service::metrics! {
    pub(crate) struct Metrics {
        /// Readings of the URL of the token issuer's keys, by result; after a failed one the old
        /// keys stay
        reloads: By<Counter> = "auth_jwks_reloads", By::label("result");
    }
}

/// Limits how often unknown key ids cause a reading. Pure.
#[derive(Debug, Default)]
struct RefreshGate {
    /// When the last reading was asked for, and how many readings had ended then.
    last: Option<(Instant, u64)>,
}

#[derive(Debug, PartialEq, Eq)]
enum Asked {
    New,
    /// A reading that was asked for earlier hasn't ended.
    Pending,
    TooSoon,
}

impl RefreshGate {
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
    /// Keys of a URL are not there yet when this returns.
    pub fn start(
        settings: &JwtTable,
        registry: &mut Registrar<'_>,
        file_metrics: &reload::Metrics,
        tasks: &Tasks,
    ) -> Result<Self, Error> {
        let Some(JwksSource::Url(url)) = settings.source() else {
            let keys = reload::start(file_source(&settings.jwks), file_metrics, tasks)?;
            return Ok(Self(Keys::File(keys)));
        };
        let url_keys = Arc::new(UrlKeys {
            keys: ArcSwapOption::empty(),
            readings: watch::Sender::new(0),
            refresh_gate: Mutex::default(),
            wake: Notify::new(),
            metrics: Metrics::new(registry),
        });
        let fetcher = Fetcher::new(url, &settings.ca_file).map_err(Error::Client)?;
        tasks.spawn_essential("jwks", Arc::clone(&url_keys).follow(fetcher, tasks.token()));
        Ok(Self(Keys::Url(url_keys)))
    }

    /// `None` before the first good reading.
    #[must_use]
    pub fn keys(&self) -> Option<Arc<Jwks>> {
        match &self.0 {
            Keys::File(keys) => Some(keys.load()),
            Keys::Url(url_keys) => url_keys.keys.load_full(),
        }
    }

    /// Reads the keys again because a token's key is unknown, and waits for it. Returns whether the
    /// keys may have changed: not if the last such reading is recent, nor for a file, which is read
    /// all the time.
    pub async fn refresh(&self) -> bool {
        match &self.0 {
            Keys::File(_) => false,
            Keys::Url(url_keys) => url_keys.refresh().await,
        }
    }
}

impl UrlKeys {
    async fn refresh(&self) -> bool {
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

    async fn follow(self: Arc<Self>, fetcher: Fetcher, stop: CancellationToken) {
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
        self.metrics.reloads.get(result).inc();
    }
}

fn file_source(path: &str) -> Source<Jwks> {
    let shown = path.to_owned();
    Source::new("jwks", vec![path.into()], move |contents| {
        Jwks::parse(&contents[0]).map_err(|error| format!("{shown} can't be used: {error}"))
    })
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

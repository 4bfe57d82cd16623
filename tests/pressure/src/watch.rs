//! Watches how much of the pool is used, by the router's own account.

use std::time::Duration;

use harness::web::Web;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::outcome::PhysicalUsage;

/// The pause between two looks.
const EVERY: Duration = Duration::from_millis(25);

#[derive(Debug, Default)]
struct Seen {
    peak: f64,
    last: Option<f64>,
}

/// The figures of a router's first worker.
#[derive(Debug)]
pub struct Watch {
    web: Web,
    url: String,
    seen: Mutex<Seen>,
}

impl Watch {
    /// Has no figures yet.
    #[must_use]
    pub fn new(web: Web, router: &str) -> Self {
        Self { web, url: format!("{router}/v1/workers"), seen: Mutex::default() }
    }

    /// Looks again and again. Never returns.
    pub async fn look(&self) {
        loop {
            if let Some(usage) = self.physical_usage().await {
                let mut seen = self.seen.lock();
                *seen = Seen { peak: seen.peak.max(usage), last: Some(usage) };
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    async fn physical_usage(&self) -> Option<f64> {
        let answer = self.web.get(&self.url).await.ok()?.json();
        answer["workers"][0]["load"]["kv_physical_usage"]["value"].as_f64()
    }

    /// Returns the largest figure so far and the newest; `None` before the first.
    #[must_use]
    pub fn usage(&self) -> Option<PhysicalUsage> {
        let seen = self.seen.lock();
        Some(PhysicalUsage { peak: seen.peak, floor: seen.last? })
    }

    /// Returns the newest figure; `None` before the first.
    #[must_use]
    pub fn last(&self) -> Option<f64> {
        self.seen.lock().last
    }

    /// Waits until the figure is at most `usage`, for as long as `patience`. Returns whether it is.
    pub async fn falls_to(&self, usage: f64, patience: Duration) -> bool {
        let began = Instant::now();
        while began.elapsed() < patience {
            if self.last().is_some_and(|last| last <= usage) {
                return true;
            }
            tokio::time::sleep(EVERY / 5).await;
        }
        false
    }
}

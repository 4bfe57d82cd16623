//! Estimates when a refused turn would find a place, from how often turns end while others wait.
//!
//! Each end lets about one waiting turn go on.

use std::time::{Duration, Instant};

/// One eighth, so the mean follows a change within about eight turns.
const NEWEST_WEIGHT: u32 = 8;
/// Over a minute, the libraries of OpenAI and Anthropic wait as they like.
const WAIT_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

#[derive(Debug, Default)]
pub(super) struct QueuePace {
    /// If others waited then. Pauses of an engine without work don't count.
    last_end: Option<Instant>,
    /// The mean between two ends.
    pause: Option<Duration>,
}

impl QueuePace {
    pub(super) fn record_end(&mut self, now: Instant, waiting: usize) {
        if let Some(last_end) = self.last_end {
            let newest = now.saturating_duration_since(last_end);
            let mean = self.pause.unwrap_or(newest);
            self.pause = Some((mean * (NEWEST_WEIGHT - 1) + newest) / NEWEST_WEIGHT);
        }
        self.last_end = (waiting > 0).then_some(now);
    }

    /// Until the last of `queued` turns could go on. `None` while no two turns have ended in a row.
    pub(super) fn estimate_wait(&self, queued: usize) -> Option<Duration> {
        let turns = u32::try_from(queued).unwrap_or(u32::MAX);
        let wait = self.pause?.checked_mul(turns).unwrap_or(WAIT_BOUNDS.1);
        Some(wait.clamp(WAIT_BOUNDS.0, WAIT_BOUNDS.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_is_as_long_as_the_turns_ahead_take() {
        let (start, mut pace) = (service::clock::now(), QueuePace::default());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(pace.estimate_wait(4), None, "nothing is known");
        for ms in [0, 500, 1_000, 1_500] {
            pace.record_end(at(ms), 1);
        }
        assert_eq!(pace.estimate_wait(8), Some(Duration::from_secs(4)), "8 turns of 500 ms");
        assert_eq!(pace.estimate_wait(1), Some(Duration::from_secs(1)), "not at once");
        assert_eq!(pace.estimate_wait(usize::MAX), Some(Duration::from_secs(60)));
        // Nobody waited for an hour, so that hour says nothing.
        pace.record_end(at(2_000), 0);
        pace.record_end(at(3_600_000), 1);
        pace.record_end(at(3_600_500), 1);
        assert_eq!(pace.estimate_wait(8), Some(Duration::from_secs(4)));
    }
}

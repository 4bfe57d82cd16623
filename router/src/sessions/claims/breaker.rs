//! A circuit breaker: says when a store that failed may be asked again. Pure.
//!
//! Without it, each first turn would wait for the deadline of a store that is down.

use std::time::{Duration, Instant};

/// Failures in a row that open the breaker. One slow answer among many opens nothing.
const FAILURES_MAX: u32 = 3;
/// How long an open breaker lets nothing pass. A store that is back is used again after this time.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Breaker {
    /// Counts failures since the last success, up to [`FAILURES_MAX`].
    failures: u32,
    /// When the next call may try the store. Set while the breaker is open.
    retry_at: Option<Instant>,
}

/// An operator wants to hear of these changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// The store is no longer asked.
    Opened,
    /// The store answers again.
    Closed,
}

impl Breaker {
    /// Returns whether the store is trusted to answer: it did the last time. `None`: it must not be
    /// asked now.
    pub(super) fn try_pass(&mut self, now: Instant) -> Option<bool> {
        match self.retry_at {
            None => Some(self.failures == 0),
            Some(retry_at) if now < retry_at => None,
            Some(_) => {
                self.retry_at = Some(now + PAUSE);
                Some(false)
            }
        }
    }

    pub(super) fn record(&mut self, is_success: bool, now: Instant) -> Option<Change> {
        if is_success {
            self.failures = 0;
            return self.retry_at.take().map(|_| Change::Closed);
        }
        self.failures = (self.failures + 1).min(FAILURES_MAX);
        if self.failures < FAILURES_MAX {
            return None;
        }
        let was_closed = self.retry_at.replace(now + PAUSE).is_none();
        was_closed.then_some(Change::Opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::start;

    #[test]
    fn a_store_that_fails_is_asked_once_per_pause_until_it_answers() {
        let (mut breaker, now) = (Breaker::default(), start());
        for failure in 1..=FAILURES_MAX {
            assert_eq!(breaker.try_pass(now), Some(failure == 1), "trusted until it fails");
            let change = breaker.record(false, now);
            assert_eq!(change, (failure == FAILURES_MAX).then_some(Change::Opened));
        }
        assert_eq!(breaker.try_pass(now), None);
        let later = now + PAUSE;
        assert_eq!((breaker.try_pass(later), breaker.try_pass(later)), (Some(false), None));
        assert_eq!(breaker.record(false, later), None, "told once");
        assert_eq!(breaker.try_pass(later), None);
        let much_later = later + PAUSE;
        assert_eq!(breaker.try_pass(much_later), Some(false));
        assert_eq!(breaker.record(true, much_later), Some(Change::Closed));
        assert_eq!(breaker.try_pass(much_later), Some(true));
    }

    #[test]
    fn single_failures_open_nothing() {
        let (mut breaker, now) = (Breaker::default(), start());
        for _ in 0..100 {
            assert_eq!(breaker.record(false, now), None);
            assert_eq!(breaker.record(true, now), None);
        }
        assert_eq!(breaker.try_pass(now), Some(true));
    }
}

//! Decides when a client reads its answer too slowly to be waited for. Pure.
//!
//! While an answer that waits for its client holds a turn of the engine, or memory that others
//! need, the client owes a number of bytes for each second, less those that it reads. It is cut off
//! when it owes more than a whole grace time demands.

use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DrainRate {
    /// Bytes that a client must read per second, on average. 0: any rate will do.
    pub(super) bytes_per_s_min: u64,
    pub(super) grace: Duration,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DrainDebt {
    owed_bytes: u64,
    /// When `owed_bytes` was computed, and how many bytes the client had read then. `None` while
    /// the client holds nothing up.
    computed: Option<(Instant, u64)>,
}

impl DrainDebt {
    /// `read_bytes` counts what the client has read of this answer; `holds_up`: whether the answer
    /// holds something up now. Returns whether the client must be cut off.
    pub(super) fn update(
        &mut self,
        now: Instant,
        read_bytes: u64,
        holds_up: bool,
        rate: DrainRate,
    ) -> bool {
        if !holds_up || rate.bytes_per_s_min == 0 {
            *self = Self::default();
            return false;
        }
        if let Some((computed_at, read_before)) = self.computed {
            let elapsed = now.saturating_duration_since(computed_at);
            let added_bytes = bytes_in(elapsed, rate.bytes_per_s_min);
            let read_since = read_bytes.saturating_sub(read_before);
            self.owed_bytes = (self.owed_bytes + added_bytes).saturating_sub(read_since);
        }
        self.computed = Some((now, read_bytes));
        self.owed_bytes > bytes_in(rate.grace, rate.bytes_per_s_min)
    }
}

fn bytes_in(time: Duration, bytes_per_s: u64) -> u64 {
    let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    time_ms.saturating_mul(bytes_per_s) / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: DrainRate = DrainRate { bytes_per_s_min: 1000, grace: Duration::from_secs(10) };

    /// Returns the second in which a client with this reading rate is cut off.
    fn cut_after(bytes_per_s: u64, holds_up: bool) -> Option<u64> {
        let begin = service_now();
        let mut debt = DrainDebt::default();
        (0..600).find(|&second| {
            let now = begin + Duration::from_secs(second);
            debt.update(now, second * bytes_per_s, holds_up, RATE)
        })
    }

    fn service_now() -> Instant {
        crate::clock::now()
    }

    #[test]
    fn only_a_client_below_the_rate_that_holds_something_up_is_cut_off() {
        assert_eq!(cut_after(0, true), Some(11));
        assert_eq!(cut_after(500, true), Some(21));
        assert_eq!(cut_after(1000, true), None);
        assert_eq!(cut_after(0, false), None);
    }

    #[test]
    fn a_client_that_was_slow_once_starts_again_without_a_debt() {
        let begin = service_now();
        let mut debt = DrainDebt::default();
        let at = |second| begin + Duration::from_secs(second);
        assert!(!debt.update(at(0), 0, true, RATE));
        assert!(!debt.update(at(9), 0, true, RATE));
        assert!(!debt.update(at(9), 0, false, RATE));
        assert!(!debt.update(at(10), 0, true, RATE));
        assert!(!debt.update(at(19), 0, true, RATE));
        assert!(debt.update(at(21), 0, true, RATE));
    }
}

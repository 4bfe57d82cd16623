//! The times of sending: think times, schedules, retries (a pure module).

use std::time::Duration;

/// The longest wait for a retry, even if the server's `Retry-After` is longer.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Returns the time between an answer and the next turn.
pub fn think_time(recorded: Duration, time_scale: f64, max: Duration) -> Duration {
    // Compares before making a `Duration`, so that no scale overflows.
    let scaled = recorded.as_secs_f64() * time_scale;
    if scaled >= max.as_secs_f64() { max } else { Duration::from_secs_f64(scaled) }
}

/// Returns when user `index` of `users` starts.
pub fn user_start(index: usize, users: usize, ramp: Duration) -> Duration {
    let share = u32::try_from(index).unwrap_or(u32::MAX);
    ramp * share / u32::try_from(users.max(1)).unwrap_or(u32::MAX)
}

/// Returns when the trace's time `at` comes in a replay that runs `rate` times as fast.
pub fn scheduled_time(at: Duration, rate: f64) -> Duration {
    Duration::try_from_secs_f64(at.as_secs_f64() / rate).unwrap_or(Duration::MAX)
}

/// Returns how long to wait before the next attempt, or `None` if the answer is final. Only a 429
/// whose `Retry-After` is in seconds is retried, at most `max` times.
pub fn retry_in(status: u16, retry_after: Option<&str>, tried: u32, max: u32) -> Option<Duration> {
    if status != 429 || tried >= max {
        return None;
    }
    let seconds: f64 = retry_after?.trim().parse().ok()?;
    let wait = Duration::try_from_secs_f64(seconds).ok()?;
    Some(wait.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn think_time_is_scaled_then_capped() {
        assert_eq!(think_time(SECOND * 10, 0.5, SECOND * 60), SECOND * 5);
        assert_eq!(think_time(SECOND * 10, 100.0, SECOND * 60), SECOND * 60);
        assert_eq!(think_time(SECOND * 10, 0.0, SECOND * 60), Duration::ZERO);
        assert_eq!(think_time(Duration::MAX, 1e6, SECOND), SECOND);
    }

    #[test]
    fn users_start_evenly_spread() {
        let starts: Vec<_> = (0..4).map(|user| user_start(user, 4, SECOND * 8)).collect();
        assert_eq!(starts, [Duration::ZERO, SECOND * 2, SECOND * 4, SECOND * 6]);
        assert_eq!(scheduled_time(SECOND * 10, 4.0), Duration::from_millis(2500));
    }

    #[test]
    fn only_a_429_with_a_time_is_tried_again() {
        assert_eq!(retry_in(429, Some("2"), 0, 5), Some(SECOND * 2));
        assert_eq!(retry_in(429, Some("86400"), 0, 5), Some(RETRY_AFTER_MAX));
        assert_eq!(retry_in(429, Some("2"), 5, 5), None);
        assert_eq!(retry_in(429, None, 0, 5), None);
        assert_eq!(retry_in(429, Some("Fri, 31 Dec 1999 23:59:59 GMT"), 0, 5), None);
        assert_eq!(retry_in(429, Some("-1"), 0, 5), None);
        assert_eq!(retry_in(503, Some("2"), 0, 5), None);
    }
}

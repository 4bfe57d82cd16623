//! The clocks of a process: monotonic time for decisions, and the wall clock.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Returns the current time by Tokio's clock, which a test can pause. A core takes this time as an
/// argument.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Returns unix time in nanoseconds by the wall clock. The value at a process's start identifies
/// the process: a later process gets a larger value.
#[expect(clippy::disallowed_methods, reason = "process identities and dates need the wall clock")]
#[must_use]
pub fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

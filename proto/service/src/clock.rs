//! Reads the clocks of a process: monotonic time for decisions, and the wall clock.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Returns the current monotonic time by Tokio's clock, which tests can pause.
///
/// Modules that decide without I/O don't call this function. They take the time as an argument.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Returns unix time in nanoseconds by the wall clock.
///
/// The value at a process's start serves as the identity of the process. A process that starts
/// later gets a larger value.
#[expect(clippy::disallowed_methods, reason = "process identities and dates need the wall clock")]
#[must_use]
pub fn unix_ns() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.map_or(0, |elapsed| u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
}

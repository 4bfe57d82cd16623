//! Reads the clocks of a process: monotonic time for decisions, and the wall clock.
//!
//! Only shells (tasks, threads, handlers) call these functions.

use std::{
    fs,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::time::{ClockId, clock_gettime};

const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// Returns the current monotonic time by Tokio's clock, which tests can pause.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[must_use]
pub fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Tells the wall clock's time of a moment, as it was when this value was made plus what has passed
/// since then by the monotonic clock. So a moment has the same time whenever it is asked for.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    made_at: Instant,
    made_at_unix_ns: u64,
}

impl WallClock {
    #[must_use]
    pub fn read() -> Self {
        Self { made_at: now(), made_at_unix_ns: unix_ns() }
    }

    #[must_use]
    pub fn unix_ms(self, at: Instant) -> u64 {
        self.unix_ns(at) / 1_000_000
    }

    #[must_use]
    pub fn unix_ns(self, at: Instant) -> u64 {
        let whole_ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let after = whole_ns(at.saturating_duration_since(self.made_at));
        let before = whole_ns(self.made_at.saturating_duration_since(at));
        self.made_at_unix_ns.saturating_add(after).saturating_sub(before)
    }
}

/// A time on a clock that all processes of a machine share, and that nobody sets. It counts on
/// while the machine sleeps, and begins anew with each boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootTime {
    /// The id of the boot: letters, digits and `-`.
    pub boot_id: String,
    /// The time since the boot, in milliseconds.
    pub ms: u64,
}

impl BootTime {
    /// Reads the clock. Returns `None` where the kernel doesn't name its boot.
    #[must_use]
    pub fn read() -> Option<Self> {
        let boot_id = fs::read_to_string(BOOT_ID_FILE).ok()?;
        let boot_id = boot_id.trim().to_owned();
        let is_id =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let time = Duration::try_from(clock_gettime(ClockId::Boottime)).ok()?;
        (!boot_id.is_empty() && is_id(&boot_id)).then(|| Self { boot_id, ms: whole_millis(time) })
    }
}

/// The value at an agent's start identifies its process (its *epoch*): a process that starts later
/// gets a larger one, unless the clock was set back.
#[expect(clippy::disallowed_methods, reason = "process identities and dates need the wall clock")]
#[must_use]
pub fn unix_ns() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.map_or(0, |elapsed| u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_since_the_boot_goes_on() {
        let first = BootTime::read().expect("Linux names its boot");
        let second = BootTime::read().expect("Linux names its boot");
        assert!(first.boot_id == second.boot_id && first.ms <= second.ms, "{first:?} {second:?}");
    }
}

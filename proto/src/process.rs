//! What the router and the agent are as processes, alike for whoever operates them: named tasks
//! with one policy each, an HTTP server with limits, an admin port, settings, logs, and one shape
//! of refusal. No decision of either lives here.

pub mod admin;
pub mod budget;
pub mod log;
pub mod refusal;
pub mod server;
pub mod settings;
pub mod signal;
pub mod tasks;

/// A number for this process: unix nanoseconds at its start. Later processes have larger ones.
#[expect(clippy::disallowed_methods, reason = "an identity across processes needs the wall clock")]
#[must_use]
pub fn epoch() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

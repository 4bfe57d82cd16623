//! Operations code that the router and the agent share.
//!
//! Named tasks with one policy each, an HTTP server with limits, an admin port, settings, logs, and
//! one format of refusal. No decision of the router or the agent is made here.

pub mod admin;
pub mod budget;
pub mod log;
pub mod refusal;
pub mod server;
pub mod settings;
pub mod signal;
pub mod tasks;

/// Returns the process's identity: unix nanoseconds at this call. A later process gets a larger
/// one.
#[expect(clippy::disallowed_methods, reason = "an identity across processes needs the wall clock")]
#[must_use]
pub fn epoch() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

//! Operations code that the router and the agent share.
//!
//! It depends on `proto` and on no other package of Berth. No decision of the router or the agent is
//! made here.
//!
//! - [`admin`]: the admin port with metrics, readiness and settings.
//! - [`budget`]: the limit on request bodies in memory.
//! - [`log`]: logs on standard error.
//! - [`refusal`]: the format of every HTTP refusal.
//! - [`server`]: an HTTP server with limits.
//! - [`settings`]: settings from a TOML file.
//! - [`signal`]: the signals that stop a process.
//! - [`tasks`]: named tasks with one policy each.

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

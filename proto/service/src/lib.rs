//! Operations code that the router and the agent share.
//!
//! It depends on `proto` and on no other package of Berth. It makes no decision of the router or of
//! the agent.
//!
//! - [`admin`]: the admin port with metrics, readiness and settings.
//! - [`budget`]: the limit on request bodies in memory.
//! - [`clock`]: monotonic time and the wall clock.
//! - [`headers`]: the headers that a proxy must not pass on.
//! - [`log`]: logs on standard error.
//! - [`refusal`]: the format of every HTTP refusal.
//! - [`server`]: an HTTP server with limits.
//! - [`settings`]: settings from a TOML file.
//! - [`signal`]: the signals that stop a process.
//! - [`tasks`]: named tasks with one policy each.

pub mod admin;
pub mod budget;
pub mod clock;
pub mod headers;
pub mod log;
pub mod refusal;
pub mod server;
pub mod settings;
pub mod signal;
pub mod tasks;

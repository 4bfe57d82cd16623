//! The fleet: the agents, their workers, and what they report.
//!
//! - `connect`: one task per agent, which follows the agent's load stream; [`load_stream`] checks
//!   the order of its events.
//! - [`state`]: applies what the agents report; `view` publishes a [`snapshot`] after each batch.
//! - [`agent`], [`worker`], [`sessions`]: the parts of a snapshot. [`worker_table`] has the figures
//!   that every decision reads, [`reuse_forecast`] the KV that sessions will use again.
//! - [`lease`]: what this router has in flight on each worker.
//! - `control`: calls to an agent's control port; [`tokenizer_files`] is what it fetches.
//! - `collector`: metrics of workers and sessions.

pub mod agent;
pub(crate) mod collector;
pub(crate) mod connect;
pub(crate) mod control;
pub mod lease;
pub mod load_stream;
pub mod reuse_forecast;
pub mod sessions;
pub mod snapshot;
pub mod state;
#[cfg(test)]
pub(crate) mod testing;
pub mod tokenizer_files;
pub(crate) mod view;
pub mod worker;
pub mod worker_table;

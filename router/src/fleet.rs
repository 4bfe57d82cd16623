//! Follows the fleet: the agents, their workers (ranks of their engines), and what they report.
//!
//! `lib` starts the tasks of `connect` and `view`. Each decision (`placement`, `turn`, the HTTP
//! API) loads one snapshot from `view`. This folder chooses no workers and sends no turns.
//!
//! - `connect`: follows an agent's load stream, one task per agent.
//! - [`load_stream`]: checks the order of that stream's events.
//! - [`state`]: applies what the agents report, and who is in the fleet.
//! - [`membership`]: decides who is in the fleet, by what the sources of agents say.
//! - [`slot_keeper`]: says when an agent's tasks start, and when its slot may be used again.
//! - `view`: publishes a [`snapshot`] of the state after each batch of reports.
//! - [`agent`], [`worker`], [`sessions`]: the parts of a snapshot.
//! - [`worker_table`]: the figures of each worker that every placement reads.
//! - [`pairing`]: which prefill and decode engines can run turns together.
//! - [`reuse_forecast`]: estimates how much KV the sessions of a worker will use again.
//! - [`lease`]: counts the turns that this router has in flight on each worker.
//! - `dial`: connections to the agents' control ports.
//! - `control`: calls to an agent's control port.
//! - [`tokenizer_files`]: a model's tokenizer and chat template, which `control` fetches.
//! - `collector`: metrics of workers and sessions.

pub mod agent;
pub(crate) mod collector;
pub(crate) mod connect;
pub(crate) mod control;
pub mod conversations;
pub(crate) mod dial;
pub mod lease;
pub mod load_stream;
pub mod membership;
pub mod pairing;
mod prefill_rates;
pub mod reuse_forecast;
pub mod sessions;
pub mod slot_keeper;
pub mod snapshot;
pub mod state;
#[cfg(test)]
pub(crate) mod testing;
pub mod tokenizer_files;
pub(crate) mod view;
pub mod worker;
pub mod worker_table;

//! Follows the fleet: the agents, their workers (ranks of their engines), and what they report.
//!
//! Each decision reads one snapshot. This folder chooses no workers and sends no turns.

pub mod agent;
pub(crate) mod by_slot;
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
pub mod snapshot;
pub mod state;
#[cfg(test)]
pub(crate) mod testing;
pub mod tokenizer_files;
pub(crate) mod view;
pub mod worker;
pub mod worker_table;

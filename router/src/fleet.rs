//! The fleet: the agents, their workers, and what they report.

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

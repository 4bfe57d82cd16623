//! What both processes of Berth, router and agent, need to run: servers, limits, logs, settings.
//!
//! Contains no decisions about sessions, turns or workers.

pub mod abortable_turns;
pub mod admin;
pub mod auth;
pub mod backoff;
pub mod budget;
pub mod clock;
pub mod command_line;
pub mod descriptors;
pub mod headers;
pub mod histogram;
pub mod http_client;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod places;
pub mod private_folder;
pub mod process_metrics;
pub mod proof;
pub mod random;
pub mod refusal;
pub mod reload;
pub mod router_token;
pub mod server;
pub mod settings;
pub mod signal;
pub mod supervisor;
pub mod tasks;
pub mod tls;
pub mod traces;

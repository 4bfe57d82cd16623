//! What both processes of Berth, router and agent, need to run: servers, limits, logs, settings.
//!
//! The *router* places turns (requests to the model) on workers; an *agent* runs beside each
//! engine. This package depends on `proto` and on no other package of Berth. It contains no
//! decisions about sessions, turns or workers.
//!
//! - [`admin`]: the admin port with metrics, readiness and settings.
//! - [`auth`]: API keys, and who may use the admin port.
//! - [`backoff`]: pauses between attempts to reach a peer.
//! - [`budget`]: the limit on request bodies in memory.
//! - [`clock`]: monotonic time and the wall clock.
//! - [`descriptors`]: the limit on file descriptors.
//! - [`headers`]: removes the headers that a router or an agent must not pass on.
//! - [`histogram`]: histograms with classic and native buckets.
//! - [`log`]: logs on standard error.
//! - [`memory`]: the size of the process's memory.
//! - [`places`]: shares out the processors for work on long bodies.
//! - [`private_folder`]: files that only this process's user can read or replace.
//! - [`process_metrics`]: metrics of the process itself.
//! - [`proof`]: by which routers and agents prove to each other that they hold the same token.
//! - [`refusal`]: the format of every HTTP answer by which Berth refuses a request.
//! - [`reload`]: values that follow the content of their files.
//! - [`router_token`]: the file of the tokens that routers and agents share.
//! - [`running_turns`]: the running turns, by the names that their clients gave them.
//! - [`server`]: an HTTP server with limits.
//! - [`settings`]: settings from a TOML file.
//! - [`signal`]: the signals that stop a process.
//! - [`supervisor`]: tells systemd when the process serves, lives and stops.
//! - [`tasks`]: starts and stops the tasks of a process.
//! - [`tls`]: TLS for servers and clients.
//! - [`traces`]: spans of turns for OpenTelemetry.

pub mod admin;
pub mod auth;
pub mod backoff;
pub mod budget;
pub mod clock;
pub mod descriptors;
pub mod headers;
pub mod histogram;
pub mod log;
pub mod memory;
pub mod places;
pub mod private_folder;
pub mod process_metrics;
pub mod proof;
pub mod refusal;
pub mod reload;
pub mod router_token;
pub mod running_turns;
pub mod server;
pub mod settings;
pub mod signal;
pub mod supervisor;
pub mod tasks;
pub mod tls;
pub mod traces;

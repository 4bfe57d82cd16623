//! The tests of routers, agents and simulated engines together, each subject in a file of its own.
//!
//! They are one program. With a program for each file, a build of the tests took 47 s longer (322 s
//! instead of 275, two cores), because each of them was linked with router and agent.

mod access_log;
mod agent;
mod announce;
mod auth;
mod block_locator;
mod cache_isolation;
mod claims;
mod cli;
mod conformance;
mod demotion;
mod deploy;
mod discovery;
mod e2e;
mod engine_sim;
mod framing;
mod gpu;
mod hints;
mod host_tier;
mod init;
mod kv_events;
mod ports;
mod preamble;
mod refusals;
mod replay;
mod resident;
mod restarts;
mod rl;
mod serve;
mod silence;
mod sim;
mod soak;
mod staged_prefill;
mod top;
mod turns;
mod unnamed;

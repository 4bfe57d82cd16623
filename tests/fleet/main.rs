//! Runs fleets of release binaries: agents that come and go, several routers, prefill/decode pairs.
//!
//! - `claims`: several routers that get the first turns of the same sessions.
//! - `discovery`: agents that come and go, by DNS, a file and a Kubernetes API server.
//! - `drain`: processes that are stopped and replaced under load.

mod claims;
mod discovery;
mod drain;

use std::process::ExitCode;

fn main() -> ExitCode {
    let cases = claims::CASES.iter().chain(drain::CASES).chain(discovery::CASES);
    tests::cases::run_chosen(cases)
}

//! Runs fleets of release binaries: agents that come and go, several routers, prefill/decode pairs.
//!
//! - `claims`: several routers that get the first turns of the same sessions.
//! - `discovery`: agents that come and go, by DNS, a file and a Kubernetes API server.
//! - `drain`: processes that are stopped and replaced under load.
//! - `pairs`: prefill and decode engines that run turns together.

mod claims;
mod discovery;
mod drain;
mod pairs;

use std::process::ExitCode;

fn main() -> ExitCode {
    let cases =
        [claims::CASES, claims::stores::CASES, drain::CASES, discovery::CASES, pairs::CASES];
    harness::cases::run_chosen(cases.into_iter().flatten())
}

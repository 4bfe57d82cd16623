//! Runs fleets of release binaries: agents that come and go, several routers, prefill/decode pairs.
//!
//! - `claims`: several routers that get the first turns of the same sessions.
//! - `drain`: processes that are stopped and replaced under load.

mod claims;
mod drain;

use std::process::ExitCode;

fn main() -> ExitCode {
    tests::cases::run_chosen(claims::CASES.iter().chain(drain::CASES))
}

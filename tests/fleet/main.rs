//! Runs fleets of release binaries: agents that come and go, several routers, prefill/decode pairs.
//!
//! - `drain`: processes that are stopped and replaced under load.

mod drain;

use std::process::ExitCode;

fn main() -> ExitCode {
    tests::cases::run_chosen(drain::CASES)
}

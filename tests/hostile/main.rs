//! Attacks the release binaries as hostile clients and failing hosts do; see `tests/hostile/run`.
//!
//! - `users`: the turns of other people, and how long they take.
//! - `attacks`: what a hostile client does. `figures`: from which metric one sees that it does.
//! - `long_bodies`: bodies that take long to read.
//! - `scenarios`: which attack must not be noticed by whom.
//! - `chaos`: processes that are killed, stopped and restarted at random under load.
//! - `disconnects`: clients that go away. `hostile_engine`: an engine whose answers never end.
//! - `lying_agent`: an agent whose description is too large to be true.
//! - `stopped`: an engine that is stopped.

mod attacks;
mod chaos;
mod disconnects;
mod figures;
mod hostile_engine;
mod long_bodies;
mod lying_agent;
mod scenarios;
mod stopped;
mod users;

use std::process::ExitCode;

use crate::scenarios::SCENARIOS;

fn main() -> ExitCode {
    harness::cases::run_chosen(&SCENARIOS)
}

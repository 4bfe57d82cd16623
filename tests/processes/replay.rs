//! `berth-replay`, for tests that run it as a process.

use std::process::ExitCode;

fn main() -> ExitCode {
    replay::program::main()
}

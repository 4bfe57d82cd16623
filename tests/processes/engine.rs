//! `engine-sim`, for tests that run it as a process.

use std::process::ExitCode;

fn main() -> ExitCode {
    engine_sim::program::main()
}

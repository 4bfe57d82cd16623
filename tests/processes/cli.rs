//! `berth`, for tests that run it as a process.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run(std::env::args_os())
}

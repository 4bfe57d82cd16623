//! Starts `berth`: runs the command that the arguments name, and ends with its exit status.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run(std::env::args_os())
}

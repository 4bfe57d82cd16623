//! Starts `berth-replay`.

use std::process::ExitCode;

fn main() -> ExitCode {
    replay::program::main()
}

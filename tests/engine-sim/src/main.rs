//! Starts `engine-sim`.

use std::process::ExitCode;

fn main() -> ExitCode {
    engine_sim::program::main()
}

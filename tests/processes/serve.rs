//! `berth-serve` without its allocator, for tests that run it as a process.

use std::process::ExitCode;

fn main() -> ExitCode {
    serve::main()
}

//! Starts `berth-serve`.

use std::process::ExitCode;

/// As in the router, whose turns it runs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    serve::main()
}

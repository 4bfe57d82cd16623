//! Starts `berth-agent`.

use std::process::ExitCode;

/// Gives freed memory back to the system. The system's allocator keeps what many short bursts of
/// turns and watchers leave behind.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    worker_agent::program::main()
}

//! Real implementations of what surrounds Berth, for tests and measurements.
//!
//! The crate has an engine simulator, a trace replay, key files, certificates, fleets in one
//! process and of many, a placement simulator, and stand-ins for NVML and SGLang's scheduler.

pub mod berth;
pub mod cases;
pub mod certificates;
pub mod cluster;
pub mod demo;
pub mod engine_sim;
pub mod fleet;
pub mod keys;
pub mod loopback;
pub mod nvml;
pub mod process;
pub mod replay;
pub mod scheduler;
pub mod shim;
pub mod sim;
pub mod simulation;
pub mod web;

use std::{
    env,
    io::Write as _,
    path::PathBuf,
    process::{Command, ExitCode},
};

/// BSD's exit status for an invalid command line.
pub const EX_USAGE: u8 = 64;

/// Parses the command line, or prints what is wrong with it and returns the exit status.
///
/// # Errors
/// Returns 64 if the command line is invalid, and 0 if it asks for help.
pub fn parse_flags<T: clap::Parser>() -> Result<T, ExitCode> {
    T::try_parse().map_err(|error| {
        let _ = error.print();
        ExitCode::from(if error.use_stderr() { EX_USAGE } else { 0 })
    })
}

/// Whether there is a Python for the suites of `tests/sglang`; says so if a test is skipped.
#[must_use]
pub fn has_python() -> bool {
    let recent = "import sys; sys.exit(sys.version_info < (3, 11))";
    let found = Command::new("python3").args(["-c", recent]).status();
    let found = found.is_ok_and(|status| status.success());
    if !found {
        let reason = "skipped: the suite needs a python3 of version 3.11 or later on the PATH";
        let _ = writeln!(std::io::stderr(), "{reason}");
    }
    found
}

/// Returns the path of a real trace, or says why a test without it is skipped and returns `None`.
#[must_use]
pub fn trace_path(name: &str) -> Option<PathBuf> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let folder = env::var_os("BERTH_TRACES").map_or_else(beside, PathBuf::from);
    let path = Some(folder.join(name)).filter(|path| path.exists());
    if path.is_none() {
        let folder = folder.display();
        let _ = writeln!(std::io::stderr(), "skipped: no {name} in {folder}; set BERTH_TRACES");
    }
    path
}

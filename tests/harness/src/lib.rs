//! What tests and measurements set up around Berth, such as fleets, keys and simulated GPUs.

pub mod berth;
pub mod cases;
pub mod certificates;
pub mod cluster;
pub mod envelope;
pub mod fleet;
pub mod guide;
pub mod keys;
pub mod nvml;
pub mod process;
pub mod scheduler;
pub mod web;

use std::{env, io::Write as _, path::PathBuf, process::Command};

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
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folder = env::var_os("BERTH_TRACES").map_or_else(beside, PathBuf::from);
    let path = Some(folder.join(name)).filter(|path| path.exists());
    if path.is_none() {
        let folder = folder.display();
        let _ = writeln!(std::io::stderr(), "skipped: no {name} in {folder}; set BERTH_TRACES");
    }
    path
}

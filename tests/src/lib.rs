//! Real implementations of what surrounds Berth, for tests and measurements.
//!
//! The crate has an engine simulator, a trace replay, fleets in one process, a placement simulator,
//! and stand-ins for NVML and SGLang's scheduler.

pub mod cluster;
pub mod demo;
pub mod engine_sim;
pub mod nvml;
pub mod replay;
pub mod scheduler;
pub mod sim;
pub mod simulation;
pub mod web;

use std::{env, io::Write as _, path::PathBuf};

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

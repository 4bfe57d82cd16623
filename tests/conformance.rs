//! The conformance suite of `tests/sglang`, run against the engine simulator.
//!
//! `tests/sglang/run` runs the same cases against the real engine.

use std::{path::Path, process::Command};

use tests::has_python;

#[test]
fn the_simulator_does_what_the_engine_does() {
    if !has_python() {
        return;
    }
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("sglang");
    let output = Command::new("python3")
        .args(["-B", "-m", "conformance", "--engine-sim", env!("CARGO_BIN_EXE_engine-sim")])
        .current_dir(suite)
        .output()
        .expect("python3 has just run");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "\n{said}\n{complained}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.ends_with("passed, 0 failed") && !last.starts_with("0 "), "\n{said}");
}

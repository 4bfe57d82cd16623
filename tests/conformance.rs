//! The conformance suite of `tests/sglang`, run against the engine simulator.
//!
//! `tests/sglang/run` runs the same tests against the real engine.

use std::{io::Write as _, path::Path, process::Command};

#[test]
fn the_simulator_does_what_the_engine_does() {
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("sglang");
    let python = Command::new(suite.join("test-python")).output().expect("bash is installed");
    if !python.status.success() {
        let reason = String::from_utf8_lossy(&python.stderr);
        writeln!(std::io::stdout(), "skipped: the suite needs Python 3.11 and pytest: {reason}")
            .expect("a test has an output");
        return;
    }
    let output = Command::new(suite.join("conformance/run"))
        .args(["--engine-sim", env!("CARGO_BIN_EXE_engine-process")])
        .output()
        .expect("a script next to it has just run");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "\n{said}\n{complained}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.ends_with("passed, 0 failed") && !last.starts_with("0 "), "\n{said}");
}

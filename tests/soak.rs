//! Runs the soak of `tests/sglang/soak` against the engine simulator.
//!
//! Random session operations through router and agent must break nothing, while the same operations
//! directly on the engine must break something. The soak is a Python program because it also runs
//! against the real engine.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{path::Path, process::Output};

use harness::{cluster::Cluster, has_python};
use tokio::process::Command;

/// The number of operations from which every kind of refusal occurs; `guarded.py` requires each.
const OPERATIONS: &str = "300";

/// Runs the soak with these arguments; returns `None` if there is no suitable Python.
async fn soak(arguments: &[&str]) -> Option<Output> {
    if !has_python() {
        return None;
    }
    let programs = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(
        env!("CARGO_BIN_EXE_engine-process"),
        programs.path().join("engine-sim"),
    )
    .unwrap();
    let output = Command::new("python3")
        .args(["-B", "-m", "soak", "--soak-sim", OPERATIONS])
        .args(arguments)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("sglang"))
        .env("BERTH_BIN_DIR", programs.path())
        .kill_on_drop(true)
        .output();
    Some(output.await.unwrap())
}

fn passed(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.trim_end().ends_with(" passed, 0 failed"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_soak_through_berth_breaks_nothing() {
    let started = Cluster::start(1, |settings| {
        settings.engine.core.context_len = 2048;
        // A short idle time, so that sessions are demoted for others during the run.
        settings.agent.sessions.demote_idle_ms = 300;
    });
    let mut cluster = started.await.unwrap();
    let (data, admin) = (cluster.agent().data.to_string(), cluster.agent().admin.to_string());
    let (engine_url, router_url) = (cluster.engine().url(), cluster.url(""));
    let fleet = ["--guarded", "--at", &engine_url, &router_url, &data, &admin];
    let Some(output) = soak(&fleet).await else { return };
    passed(&output);
    cluster.routers.remove(0).stop().await.unwrap();
    cluster.agents.remove(0).stop().await.unwrap();
}

#[tokio::test]
async fn the_same_operations_harm_a_bare_engine() {
    let Some(output) = soak(&["--bare"]).await else { return };
    passed(&output);
}

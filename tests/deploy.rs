//! Checks that the binaries accept every example under `deploy/`.

use std::{fs, io, path::PathBuf, time::Duration};

use clap::Parser;
use worker_agent::config::ABORT_WAIT_MAX;

fn deploy(path: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.parent().expect("tests/ lies in the root").join("deploy").join(path)
}

/// Copies an example, and names the example of a key file in it. Returns the copy with its folder.
fn with_keys(example: &str) -> io::Result<(tempfile::TempDir, PathBuf)> {
    let text = fs::read_to_string(deploy(example))?;
    let keys = deploy("config/keys.toml");
    assert!(text.contains("\"/etc/berth/keys.toml\""), "{example} names no key file");
    let text = text.replace("/etc/berth/keys.toml", &keys.display().to_string());
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("settings.toml");
    fs::write(&path, text)?;
    Ok((folder, path))
}

#[test]
fn the_agent_takes_its_example() {
    let (_folder, path) = with_keys("config/agent.toml").unwrap();
    let args =
        worker_agent::config::Args::parse_from(["berth-agent", "--config", path.to_str().unwrap()]);
    let config = worker_agent::config::Config::load(args).unwrap();
    assert_eq!(config.sessions.rows_reserve, 2, "the example's own value is in force");
}

#[test]
fn the_router_takes_its_example() {
    let (_folder, path) = with_keys("config/router.toml").unwrap();
    let args = ["berth-router", "--config", path.to_str().unwrap()];
    let config = router::config::Config::load(&router::config::Args::parse_from(args)).unwrap();
    assert_eq!(config.workers.len(), 2, "the example's own value is in force");
}

#[test]
fn units_stop_no_sooner_than_the_drain() {
    for unit in ["systemd/berth-agent.service", "systemd/berth-router.service"] {
        let text = fs::read_to_string(deploy(unit)).unwrap();
        let stop = text.lines().find_map(|line| line.strip_prefix("TimeoutStopSec="));
        let stop_ms = stop.unwrap().parse::<u64>().unwrap() * 1000;
        let config = worker_agent::config::Config::default();
        let whole = worker_agent::config::ms(config.shutdown.drain_ms_max) + ABORT_WAIT_MAX;
        assert!(Duration::from_millis(stop_ms) > whole, "{unit}: {stop_ms} ms");
        assert!(text.contains("RestartPreventExitStatus=64"), "{unit} restarts on wrong settings");
    }
}

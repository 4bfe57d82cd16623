//! Tests of the `berth-agent` binary: wrong settings, a taken port, a signal.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Output, Stdio},
};

fn agent(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_berth-agent")).args(args).output().unwrap()
}

#[test]
fn wrong_settings_are_all_listed_and_the_status_is_64() {
    let path = std::env::temp_dir().join(format!("berth-cli-{}.toml", std::process::id()));
    std::fs::write(
        &path,
        "turn_ms = 5\nsessions.rows_reserve = 0\nsessions.pin_budget_ratio = 2.0\n",
    )
    .unwrap();
    let output = agent(&["--config", path.to_str().unwrap(), "--engine", "nonsense"]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(output.status.code(), Some(64));
    let said = String::from_utf8(output.stderr).unwrap();
    for key in ["rows_reserve", "turn_ms", "pin_budget_ratio", "engine"] {
        assert!(said.contains(key), "{key} is missing in: {said}");
    }
    assert_eq!(agent(&["--bogus"]).status.code(), Some(64));
    assert_eq!(agent(&["--version"]).status.code(), Some(0));
}

#[test]
fn a_key_that_no_header_carries_is_a_wrong_setting_and_a_line_s_end_is_no_part_of_one() {
    let check = |key: &str| {
        let mut agent = Command::new(env!("CARGO_BIN_EXE_berth-agent"));
        agent.arg("--check-config").env("BERTH_ENGINE_API_KEY", key).output().unwrap()
    };
    let output = check("two\nlines");
    assert_eq!(output.status.code(), Some(64));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("BERTH_ENGINE_API_KEY") && !said.contains("lines"), "{said}");
    for key in ["key\n", ""] {
        assert_eq!(check(key).status.code(), Some(0), "{key:?}");
    }
}

#[test]
fn a_port_that_other_hosts_reach_needs_routers_that_prove_themselves() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, "t".repeat(40)).unwrap();
    let settings = folder.path().join("agent.toml");
    std::fs::write(&settings, format!("auth.token_file = {tokens:?}\n")).unwrap();
    let (open, with_token) = ("0.0.0.0:0", ["--config", settings.to_str().unwrap()]);
    for port in ["--data-addr", "--control-addr"] {
        let check = ["--check-config", "--worker-id", "w", port, open];
        let output = agent(&check);
        assert_eq!(output.status.code(), Some(64), "{port}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("auth.token_file") && said.contains("tls.client_ca"), "{said}");
        assert_eq!(agent(&[&check[..], &with_token].concat()).status.code(), Some(0), "{port}");
    }
    std::fs::write(&tokens, "short").unwrap();
    let output = agent(&[&["--check-config"], &with_token[..]].concat());
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8(output.stderr).unwrap().contains("openssl rand -hex 32"));
}

#[test]
fn shown_settings_are_settings_again() {
    let shown = agent(&["--check-config", "--worker-id", "gpu-7"]);
    assert!(shown.status.success());
    let path = std::env::temp_dir().join(format!("berth-shown-{}.toml", std::process::id()));
    std::fs::write(&path, &shown.stdout).unwrap();
    let again = agent(&["--check-config", "--config", path.to_str().unwrap()]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(again.stdout, shown.stdout);
}

#[test]
fn a_taken_port_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let output = agent(&["--data-addr", &addr]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(&addr), "{said}");
}

#[test]
fn a_signal_ends_it_well_also_without_an_engine() {
    // A state folder of this test's own, because only one agent per engine and machine can run.
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("agent.toml");
    let state = folder.path().join("state");
    std::fs::write(&settings, format!("files.state_dir = {state:?}\n")).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_berth-agent"))
        .args(["--config", settings.to_str().unwrap()])
        .args(["--engine", "http://127.0.0.1:9", "--data-addr", "127.0.0.1:0"])
        .args(["--control-addr", "127.0.0.1:0", "--admin-addr", "127.0.0.1:0"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The first line of output shows that the signal handlers are installed.
    let mut first = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut first).unwrap();
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(0), "after {first}");
}

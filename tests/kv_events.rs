//! The engine simulator's KV events as libzmq receives them.
//!
//! The conformance suite compares events, their numbers and replays with the engine's. Batches that
//! the simulator loses on purpose are tested with the agent (`resident.rs`) and the router
//! (`block_locator.rs`).

use engine_sim::{Config, EngineSim, kv::KvEventsConfig};
use harness::{cluster::ids_turn, web::Web};
use serde_json::Value;
use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

#[tokio::test]
async fn unsupported_configurations_are_refused() {
    let remote = KvEventsConfig { bind: None, ..KvEventsConfig::local() };
    let config = Config { kv_events: Some(remote), ..Config::default() };
    let error = EngineSim::start_local(config).await.expect_err("it would have to connect");
    assert!(error.to_string().contains("set bind"), "{error}");
}

/// Returns the Python of the engine's own environment, if it has libzmq.
fn python_with_libzmq() -> Option<PathBuf> {
    let named = std::env::var_os("BERTH_SGLANG_HOME").map(PathBuf::from);
    let cache = || Some(Path::new(&std::env::var_os("HOME")?).join(".cache/berth/sglang-0.5.23"));
    let python = named.or_else(cache)?.join("venv/bin/python");
    let check = Command::new(&python).args(["-c", "import zmq"]).status();
    check.is_ok_and(|status| status.success()).then_some(python)
}

const LIBZMQ: &str = "
import sys, zmq
events, replay = sys.argv[1:]
context = zmq.Context()
sub = context.socket(zmq.SUB)
sub.heartbeat_ivl = 50
sub.subscribe(b'')
sub.connect(events)
dealer = context.socket(zmq.DEALER)
dealer.connect(replay)
print('ready', flush=True)
topic, number, payload = sub.recv_multipart()
dealer.send_multipart([b'', number])
print(dealer.recv_multipart() == [b'', topic, number, payload])
while dealer.recv_multipart()[2] != b'\\xff' * 8:
    pass
print(sub.recv_multipart()[1] > number)
";

#[tokio::test]
async fn libzmq_receives_the_events() {
    let Some(python) = python_with_libzmq() else {
        let reason = "skipped: no libzmq to ask; tests/sglang/install brings one";
        writeln!(std::io::stdout(), "{reason}").expect("a test has an output");
        return;
    };
    let config = Config { kv_events: Some(KvEventsConfig::local()), ..Config::default() };
    let (engine, web) = (EngineSim::start_local(config).await.expect("free ports"), Web::default());
    let post = async |path: &str, body: Value| {
        web.post(&format!("{}{path}", engine.url()), &[], &body).await.expect("an answer").status
    };
    let info = web.get(&format!("{}/server_info", engine.url())).await.expect("an answer").json();
    let info = &info["kv_events"];
    let endpoints = ["endpoint_port_base", "replay_endpoint_port_base"].map(|key| {
        let host = info["endpoint_host"].as_str().expect("a host");
        format!("tcp://{host}:{}", info[key])
    });
    let child = tokio::process::Command::new(python)
        .args(["-c", LIBZMQ])
        .args(endpoints)
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("python has just run");
    let mut ended = Box::pin(child.wait_with_output());
    // A batch that is published before libzmq has subscribed never reaches it, so publish until it
    // ends.
    let mut turns = 0;
    let output = loop {
        tokio::select! {
            output = &mut ended => break output.expect("its output"),
            status = post("/generate", ids_turn(&[turns % 250; 32], 1)) => {
                assert_eq!(status, 200);
                turns += 1;
                post("/flush_cache", Value::Null).await;
            }
        }
    };
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ready\nTrue\nTrue\n");
}

//! Tests of `berth serve`: one process with a router and agents, which starts engines.
//!
//! Here it is a process, with engine simulators as its engines.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{
    io::Read as _,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::unix::process::ExitStatusExt as _,
    process::{Child, Command, ExitStatus, Stdio},
};

use harness::{
    cluster::{eventually, text_turn},
    web::{Answer, Web},
};
use http::StatusCode;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const SERVE: &str = env!("CARGO_BIN_EXE_serve-process");
const ENGINE: &str = env!("CARGO_BIN_EXE_engine-process");

/// A running `berth serve`; killed when dropped, with its engines.
struct Serve {
    child: Child,
    data: SocketAddr,
    engine_port: u16,
    web: Web,
    folder: tempfile::TempDir,
}

fn free_ports<const N: usize>() -> [u16; N] {
    let held = [(); N].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    held.map(|listener| listener.local_addr().unwrap().port())
}

/// The engine's command, with ports that no other test has.
fn engine_at(port: u16) -> Vec<String> {
    let [events, replay] = free_ports();
    let kv_events = cli::flags::kv_events_config(events, replay);
    let words = [ENGINE, "--port", &port.to_string(), "--kv-events-config", &kv_events];
    words.map(str::to_owned).into()
}

impl Serve {
    fn start(flags: &[&str], command: &[String]) -> Self {
        let [data, admin, engine_port] = free_ports();
        Self::start_at([data, admin], engine_port, flags, command)
    }

    fn start_with_engine(flags: &[&str], engine_flags: &[&str]) -> Self {
        let [data, admin, engine_port] = free_ports();
        let mut command = engine_at(engine_port);
        command.extend(engine_flags.iter().map(|&flag| flag.to_owned()));
        Self::start_at([data, admin], engine_port, flags, &command)
    }

    fn start_at(
        [data, admin]: [u16; 2],
        engine_port: u16,
        flags: &[&str],
        command: &[String],
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = |port| format!("127.0.0.1:{port}");
        let (config, log) = (folder.path().join("agent.toml"), folder.path().join("log"));
        let state = folder.path().join("state");
        let free = "127.0.0.1:0";
        let settings = format!(
            "[files]\nstate_dir = {state:?}\n[gpu]\nnvml_library = \"no-nvml\"\n[listen]\n\
             data_addr = \"{free}\"\ncontrol_addr = \"{free}\"\nadmin_addr = \"{free}\"\n"
        );
        std::fs::write(&config, settings).unwrap();
        let child = Command::new(SERVE)
            .arg("--agent-config")
            .arg(&config)
            .args(["--data-addr", &address(data), "--admin-addr", &address(admin)])
            .args(flags)
            .args(if command.is_empty() { None } else { Some("--") })
            .args(command)
            .stderr(std::fs::File::create(log).unwrap())
            .spawn()
            .unwrap();
        let data = SocketAddr::from((Ipv4Addr::LOCALHOST, data));
        Self { child, data, engine_port, web: Web::default(), folder }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    async fn says(&self, text: &str) {
        eventually(text, || async { self.log().contains(text).then_some(()) }).await;
    }

    async fn turn(&self, headers: &[(&str, &str)]) -> anyhow::Result<Answer> {
        let url = format!("http://{}/generate", self.data);
        self.web.post(&url, headers, &text_turn("Once upon a time", 4)).await
    }

    async fn turn_succeeds(&self) -> Answer {
        eventually("a turn", || async {
            let answer = self.turn(&[("x-berth-session-id", "s")]).await.ok()?;
            (answer.status == StatusCode::OK).then_some(answer)
        })
        .await
    }

    async fn workers(&self) -> Value {
        let url = format!("http://{}/v1/workers", self.data);
        self.web.get(&url).await.unwrap().json()["workers"].clone()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The engines' processes, by their numbers.
    fn engines(&self) -> Vec<Pid> {
        let pid = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().map(|it| Pid::from_raw(it.parse().unwrap()).unwrap()).collect()
    }

    async fn end(&mut self) -> ExitStatus {
        let child = parking_lot::Mutex::new(&mut self.child);
        eventually("the end", || async { child.lock().try_wait().unwrap() }).await
    }

    /// The exit status and the log of one that ends by itself.
    async fn ends(mut self) -> (Option<i32>, String) {
        let status = self.end().await;
        (status.code(), self.log())
    }

    async fn engine_is_gone(&self) {
        let address = (Ipv4Addr::LOCALHOST, self.engine_port);
        eventually("the engine's end", || async { TcpStream::connect(address).err() }).await;
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_command_becomes_an_engine_with_its_flags_and_ctrl_c_ends_everything() {
    let mut serve = Serve::start_with_engine(&[], &["--enable-cache-report"]);
    serve.says("berth: ready").await;
    let log = serve.log();
    assert!(log.contains("added --enable-streaming-session"), "{log}");
    assert!(!log.contains("added --enable-cache-report"), "the user's own flag: {log}");
    let turn = serve.turn_succeeds().await;
    assert_eq!(turn.header("x-berth-session-turn"), "tagged");
    let url = format!("http://{}/v1/sessions", serve.data);
    let wanted = serde_json::json!({"session_id": "p", "retention": "pinned"});
    serve.web.post(&url, &[], &wanted).await.unwrap();
    let turn = serve.turn(&[("x-berth-session-id", "p")]).await.unwrap();
    assert_eq!((turn.status, turn.header("x-berth-session-turn")), (StatusCode::OK, "pinned"));
    assert_eq!(serve.workers().await.as_array().unwrap().len(), 1);
    serve.signal(Signal::INT);
    let status = serve.end().await;
    assert_eq!(status.code(), Some(0), "{}", serve.log());
    serve.engine_is_gone().await;
}

#[tokio::test]
async fn an_engine_that_is_killed_ends_everything_with_its_status() {
    let serve = Serve::start_with_engine(&[], &[]);
    serve.says("berth: ready").await;
    kill_process(serve.engines()[0], Signal::KILL).unwrap();
    let (code, log) = serve.ends().await;
    assert_eq!(code, Some(128 + 9), "{log}");
    assert!(log.contains("engine ended with signal 9"), "{log}");
}

#[tokio::test]
async fn with_a_restart_policy_turns_run_again_after_an_engine_was_killed() {
    let serve = Serve::start_with_engine(&["--restart", "on-failure"], &[]);
    serve.says("berth: ready").await;
    serve.turn_succeeds().await;
    let first = serve.engines()[0];
    kill_process(first, Signal::KILL).unwrap();
    serve.says("it starts again in 1 s").await;
    eventually("another engine", || async {
        serve.engines().first().filter(|it| **it != first).map(drop)
    })
    .await;
    serve.turn_succeeds().await;
}

#[tokio::test]
async fn no_engine_outlives_the_process_that_started_it() {
    let mut serve = Serve::start_with_engine(&[], &[]);
    serve.says("berth: ready").await;
    serve.child.kill().unwrap();
    assert_eq!(serve.end().await.signal(), Some(9));
    serve.engine_is_gone().await;
}

#[tokio::test]
async fn an_engine_that_ends_at_its_start_says_why() {
    let (code, log) = Serve::start_with_engine(&[], &["--page-size", "3"]).ends().await;
    assert_eq!(code, Some(64), "{log}");
    assert!(log.contains("before it was ready"), "{log}");
    assert!(log.contains("| --page-size must be a power of two"), "its last lines: {log}");
    let unknown = Serve::start_with_engine(&[], &["--unknown-flag"]).ends().await;
    assert!(unknown.0 != Some(0) && unknown.1.contains("--unknown-flag"), "{}", unknown.1);
    let [port] = free_ports();
    let missing = ["no-such-program", "--port", &port.to_string()].map(str::to_owned);
    let (code, log) = Serve::start(&[], &missing).ends().await;
    assert_eq!(code, Some(127), "{log}");
    assert!(log.contains("can't start no-such-program"), "{log}");
}

#[tokio::test]
async fn a_part_that_fails_is_named_and_ends_everything() {
    let first = Serve::start_with_engine(&[], &[]);
    first.says("berth: ready").await;
    // A second agent of the same engine, with the same folder.
    let state = first.folder.path().join("state");
    let config = first.folder.path().join("second.toml");
    let free = "127.0.0.1:0";
    let settings = format!(
        "files.state_dir = {state:?}\nlisten.data_addr = \"{free}\"\nlisten.control_addr = \
         \"{free}\"\nlisten.admin_addr = \"{free}\"\n"
    );
    std::fs::write(&config, settings).unwrap();
    let [data, admin] = free_ports();
    let second = Command::new(SERVE)
        .args(["--engine", &format!("http://127.0.0.1:{}", first.engine_port)])
        .arg("--agent-config")
        .arg(&config)
        .args(["--data-addr", &format!("127.0.0.1:{data}")])
        .args(["--admin-addr", &format!("127.0.0.1:{admin}")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains("berth: an agent ended: "), "{said}");
    first.turn_succeeds().await;
}

#[tokio::test]
async fn all_that_an_engine_started_is_killed_if_it_does_not_stop() {
    let [port] = free_ports();
    let command = engine_at(port).join("' '");
    let script = format!("trap '' TERM; '{command}'; true");
    let shell = ["bash", "-c", &script].map(str::to_owned);
    let [data, admin] = free_ports();
    let flags = ["--no-flags", "--stop-seconds-max", "1"];
    // The script takes these words as its own $0 and $1: they tell berth the port.
    let mut shell = Vec::from(shell);
    shell.extend(["--port".to_owned(), port.to_string()]);
    let mut serve = Serve::start_at([data, admin], port, &flags, &shell);
    serve.says("berth: ready").await;
    serve.signal(Signal::INT);
    assert_eq!(serve.end().await.code(), Some(0), "{}", serve.log());
    serve.engine_is_gone().await;
}

#[tokio::test]
async fn a_port_that_is_taken_is_named_before_anything_starts() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let (code, log) = Serve::start(&[], &engine_at(port)).ends().await;
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains(&format!("port {port} of the engine is taken")), "{log}");
    let [admin, engine] = free_ports();
    let serve = Serve::start_at([port, admin], engine, &[], &engine_at(engine));
    let (code, log) = serve.ends().await;
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("--data-addr") && !log.contains("starting engine"), "{log}");
}

#[tokio::test]
async fn two_engines_get_a_worker_each_and_lines_of_their_logs_are_told_apart() {
    // The ports of these engines are chosen by berth.
    let mut serve = Serve::start(&["--gpus", "0,1"], &[ENGINE.to_owned()]);
    serve.says("berth: ready").await;
    let workers = serve.workers().await;
    let names = workers.as_array().unwrap().iter().map(|it| it["agent"].as_str().unwrap());
    assert_eq!(names.collect::<std::collections::BTreeSet<_>>().len(), 2, "{workers}");
    assert_eq!(serve.engines().len(), 2);
    let log = serve.log();
    assert!(log.contains("engine 0 | listening") && log.contains("engine 1 | listening"), "{log}");
    serve.turn_succeeds().await;
    serve.signal(Signal::INT);
    assert_eq!(serve.end().await.code(), Some(0));
}

#[tokio::test]
async fn an_engine_that_runs_is_served_and_told_what_it_lacks() {
    let [port] = free_ports();
    let mut engine = Command::new(ENGINE)
        .args(["--port", &port.to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut serve = Serve::start(&["--engine", &format!("http://127.0.0.1:{port}")], &[]);
    serve.says("berth: ready").await;
    let log = serve.log();
    assert!(log.contains("engine lacks --enable-streaming-session"), "{log}");
    serve.turn_succeeds().await;
    serve.signal(Signal::INT);
    assert_eq!(serve.end().await.code(), Some(0), "{}", serve.log());
    assert!(engine.try_wait().unwrap().is_none(), "the engine isn't berth's to end");
    engine.kill().unwrap();
    engine.wait().unwrap();
}

#[tokio::test]
async fn wrong_arguments_say_what_to_give() {
    for (flags, part) in [
        (&[][..], "--engine URL"),
        (&["--engine", "ftp://x"], "engine.url"),
        (&["--engine", "http://127.0.0.1:1", "--data-addr", "x"], "data-addr"),
    ] {
        let mut command = Command::new(SERVE).args(flags).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        command.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(command.wait().unwrap().code(), Some(64), "{said}");
        assert!(said.contains(part), "{said}");
    }
}

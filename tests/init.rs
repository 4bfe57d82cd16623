//! End-to-end tests of `berth init`: agent and router take what it writes, and serve with it.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Stdio},
};

use axum::{Json, Router, routing::get};
use clap::Parser as _;
use engine_sim::{Config, EngineSim, kv::KvEventsConfig, loopback::own_addr};
use harness::{
    berth::{BerthCommand, Said},
    cluster::{Agent, agent_config, ready, router_config, text_turn},
    web::Web,
};
use serde_json::{Value, json};

fn berth() -> BerthCommand {
    BerthCommand::new(env!("CARGO_BIN_EXE_cli-process"), &[])
}

/// Runs `berth init` for an engine, into a folder.
async fn init(engine: &str, folder: &Path, more: &[&str]) -> Said {
    let args = ["init", "--engine", engine, "--out", folder.to_str().unwrap()];
    berth().run(&[&args, more].concat()).await.unwrap()
}

fn agent_settings(path: &Path) -> worker_agent::config::Config {
    let args = ["berth-agent", "--config", path.to_str().unwrap()];
    let args = worker_agent::config::Args::parse_from(args);
    worker_agent::config::Config::load(args).unwrap()
}

fn router_settings(path: &Path) -> router::config::Config {
    let args = ["berth-router", "--config", path.to_str().unwrap()];
    router::config::Config::load(&router::config::Args::parse_from(args)).unwrap()
}

/// Returns settings of an engine with all flags that Berth wants.
fn complete_engine() -> Config {
    let mut config = Config { kv_events: Some(KvEventsConfig::local()), ..Config::default() };
    config.core.session_radix_cache = true;
    config
}

#[tokio::test]
async fn agent_and_router_serve_with_what_is_written() {
    let engine = EngineSim::start_local(complete_engine()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let said = init(&engine.url(), folder.path(), &["--json"]).await;
    assert_eq!(said.status, 0, "{said:?}");
    let found = &said.json()["engines"][0];
    assert_eq!((&found["version"], &found["missing"]), (&json!("0.5.23"), &json!([])));
    assert_eq!(found["pid"], std::process::id(), "the engine is a part of this process");

    let mut agent = agent_settings(&folder.path().join("agent.toml"));
    let mut router = router_settings(&folder.path().join("router.toml"));
    assert_eq!(router.workers, [format!("http://{}", agent.listen.control_addr)]);
    let port = engine.addr().port();
    assert!(agent.worker_id.ends_with(&format!("-{port}")), "{}", agent.worker_id);
    // Free ports, and no folder of this user, for several tests run at once.
    agent.listen = agent_config("", "").listen;
    agent.engine.vocabulary = 320;
    let agent = Agent::start(agent).unwrap();
    router.workers = router_config(&[&agent]).workers;
    router.listen = router_config(&[]).listen;
    let router = harness::cluster::Router::start(router).await.unwrap();
    let web = Web::default();
    ready(&web, router.admin).await;
    let turn = web.post(&router.url("/generate"), &[], &text_turn("hi", 4)).await.unwrap();
    assert_eq!(turn.status, 200, "{}", turn.text());
}

#[tokio::test]
async fn flags_that_the_engine_lacks_are_named_with_the_line_to_add() {
    let mut config = Config { enable_cache_report: false, ..Config::default() };
    config.core.streaming_sessions = false;
    let engine = EngineSim::start_local(config).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let said = init(&engine.url(), folder.path(), &[]).await;
    let text = fs::read_to_string(folder.path().join("agent.toml")).unwrap();
    for flag in [
        "--enable-streaming-session",
        "--enable-session-radix-cache",
        "--enable-cache-report",
        "--kv-events-config '{\"publisher\": \"zmq\"",
    ] {
        assert!(text.contains(&format!("#   {flag}")), "{flag}: {text}");
        assert!(said.out.contains(flag), "{flag}: {said:?}");
    }
    agent_settings(&folder.path().join("agent.toml"));
}

#[tokio::test]
async fn a_fleet_s_agents_share_a_token_that_only_their_user_reads() {
    let engine = EngineSim::start_local(complete_engine()).await.unwrap();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let said = init(&engine.url(), first.path(), &["--address", "node-1"]).await;
    assert_eq!(said.status, 0, "{said:?}");
    let token_file = first.path().join("router-token");
    let token = fs::read_to_string(&token_file).unwrap();
    assert_eq!(fs::metadata(&token_file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(token.trim().len(), 64);
    let agent = agent_settings(&first.path().join("agent.toml"));
    assert_eq!((agent.auth.token_file.as_path(), agent.file_problems()), (&*token_file, vec![]));
    assert!(!agent.listen.control_addr.ip().is_loopback());
    assert_eq!(agent.advertise.host, "node-1");

    let given = token_file.to_str().unwrap();
    let more = ["--address", "10.0.0.8", "--token-file", given, "--other-agent", "node-1:31001"];
    let said = init(&engine.url(), second.path(), &more).await;
    assert_eq!(said.status, 0, "{said:?}");
    assert_eq!(fs::read_to_string(second.path().join("router-token")).unwrap(), token);
    let router = router_settings(&second.path().join("router.toml"));
    assert_eq!(router.workers, ["http://10.0.0.8:31001", "http://node-1:31001"]);
    for said in [said, init(&engine.url(), first.path(), &["--address=a", "--print"]).await] {
        assert!(!format!("{said:?}").contains(token.trim()), "{said:?}");
    }
}

#[tokio::test]
async fn files_are_replaced_only_on_demand() {
    let engine = EngineSim::start_local(complete_engine()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let router = folder.path().join("router.toml");
    fs::write(&router, "# mine\n").unwrap();
    let said = init(&engine.url(), folder.path(), &[]).await;
    assert_eq!(said.status, 66, "{said:?}");
    assert!(said.err.contains("router.toml") && said.err.contains("--force"), "{said:?}");
    assert_eq!(fs::read_to_string(&router).unwrap(), "# mine\n");
    assert!(!folder.path().join("agent.toml").exists(), "all files or none");
    let printed = init(&engine.url(), folder.path(), &["--print"]).await;
    assert_eq!(printed.status, 0, "{printed:?}");
    assert!(printed.out.contains("# ---- router.toml\n"), "{printed:?}");
    assert_eq!(fs::read_to_string(&router).unwrap(), "# mine\n");
    assert_eq!(init(&engine.url(), folder.path(), &["--force"]).await.status, 0);
    router_settings(&router);
    let said = init(&engine.url(), &router, &[]).await;
    assert_eq!(said.status, 74, "no folder can be made where a file is: {said:?}");
    assert!(said.err.contains("--out"), "{said:?}");
}

/// Starts a server that has this `/server_info`. Returns its URL.
async fn start_other(info: Value) -> String {
    let routes = Router::new().route("/server_info", get(async || Json(info)));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    service::tasks::Tasks::default().spawn(async {
        axum::serve(listener, routes).await.unwrap();
    });
    url
}

#[tokio::test]
async fn the_error_says_why_there_is_no_engine_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    // Nobody else has this address.
    let nothing = SocketAddr::new(own_addr().ip(), 9);
    let config = Config { api_key: Some("right".into()), ..complete_engine() };
    let locked = EngineSim::start_local(config).await.unwrap();
    let other = start_other(json!({ "version": "9", "status": "ok" })).await;
    for (engine, status, words) in [
        (format!("http://{nothing}"), 69, "start the engine"),
        (other, 70, "is no SGLang engine"),
        (locked.url(), 77, "BERTH_ENGINE_API_KEY"),
        ("https://127.0.0.1:1".into(), 64, "http://"),
    ] {
        let said = init(&engine, folder.path(), &[]).await;
        assert_eq!(said.status, status, "{said:?}");
        assert!(said.err.contains(words), "{said:?}");
    }
    let with_key = berth().with_variable("BERTH_ENGINE_API_KEY", "right");
    let out = format!("--out={}", folder.path().display());
    let said = with_key.run(&["init", "--engine", &locked.url(), &out]).await.unwrap();
    assert_eq!(said.status, 0, "{said:?}");
    let text = fs::read_to_string(folder.path().join("agent.toml")).unwrap();
    assert!(text.contains("BERTH_ENGINE_API_KEY") && !text.contains("right"), "{text}");
    let two = berth().run(&["init", "--address", "a b"]).await.unwrap();
    assert_eq!(two.status, 64, "{two:?}");
}

/// A process that is killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn an_engine_is_found_at_any_port_by_its_process() {
    let folder = tempfile::tempdir().unwrap();
    // A process whose command line is that of SGLang's own program.
    let program = folder.path().join("sglang");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_engine-process"), &program).unwrap();
    let mut command = Command::new(program);
    command.arg("--port=0").env("CUDA_VISIBLE_DEVICES", "GPU-a").args(["--device", "cuda"]);
    let mut engine = Killed(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(engine.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().strip_prefix("listening on ").unwrap();
    let out = format!("--out={}", folder.path().join("out").display());
    let said = berth().run(&["init", "--json", &out]).await.unwrap();
    assert_eq!(said.status, 0, "{said:?}");
    let said = said.json();
    let engines = said["engines"].as_array().unwrap();
    let found = engines.iter().find(|found| found["url"] == url).unwrap();
    assert_eq!((&found["pid"], &found["devices"]), (&json!(engine.0.id()), &json!(["GPU-a"])));
    for agent in engines {
        agent_settings(Path::new(agent["agent"]["settings"].as_str().unwrap()));
    }
    let none = berth().run(&["init", "--engine", url, "--print", "--for", "helm"]).await.unwrap();
    assert!(none.out.contains("enginePort"), "{none:?}");
}

//! Tests that the engine's API key helps only those who proved to be routers.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

use contract::v1::worker_agent_client::WorkerAgentClient;
use engine_sim::{Config, EngineSim};
use harness::{
    certificates::token,
    cluster::{Cluster, Router, ready, router_config, text_turn},
    web::Web,
};
use http::Method;
use serde_json::Value;
use tonic::transport::Endpoint;

use crate::{PROOF, sign, signer};

const KEY: &str = "engine-secret";

/// A process that is killed on drop.
struct Agent {
    child: Child,
    data: String,
    control: String,
    _folder: tempfile::TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Agent {
    /// Starts an agent as a process, because it reads the engine's key from its environment.
    async fn start(engine: &EngineSim, settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let text = format!(
            "worker_id = \"w0\"\nfiles.state_dir = {state:?}\nengine.vocabulary = 320\n\
             gpu.nvml_library = \"no-nvml\"\n{settings}"
        );
        std::fs::write(folder.path().join("agent.toml"), text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_agent-process"));
        command.arg("--config").arg(folder.path().join("agent.toml"));
        command.args(["--engine", &engine.url()]);
        for port in ["--data-addr", "--control-addr", "--admin-addr"] {
            command.args([port, "127.0.0.1:0"]);
        }
        command.env("BERTH_ENGINE_API_KEY", KEY).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let starting = tokio::task::spawn_blocking(move || {
            let starting = lines.by_ref().map_while(Result::ok).find_map(|line| {
                let line: Value = serde_json::from_str(&line).ok()?;
                (line["message"] == "agent starting").then_some(line)
            });
            std::thread::spawn(move || lines.for_each(drop));
            starting
        });
        let starting = starting.await.unwrap().expect("the agent says where it listens");
        let addr = |port: &str| starting[port].as_str().unwrap().to_owned();
        let agent = Self { child, data: addr("data"), control: addr("control"), _folder: folder };
        ready(&Web::default(), addr("admin").parse().unwrap()).await;
        agent
    }
}

fn engine() -> Config {
    Config { api_key: Some(KEY.to_owned()), ..Config::default() }
}

/// Sends a turn to the agent with these headers, and returns the status of its answer.
async fn turn(agent: &Agent, headers: &[(&str, &str)]) -> u16 {
    let url = format!("http://{}/generate", agent.data);
    let answer = Web::default().post(&url, headers, &text_turn("hello", 4)).await.unwrap();
    answer.status.as_u16()
}

#[tokio::test]
async fn an_open_port_on_loopback_opens_no_protected_engine() {
    let engine = EngineSim::start_local(engine()).await.unwrap();
    let agent = Agent::start(&engine, "").await;
    assert_eq!(turn(&agent, &[]).await, 401);
    assert_eq!(turn(&agent, &[("authorization", "Bearer wrong")]).await, 401);
    let own = format!("Bearer {KEY}");
    assert_eq!(turn(&agent, &[("authorization", &own)]).await, 200);
    let mut config = router_config(&[]);
    config.workers = vec![format!("http://{}", agent.control)];
    let routers = vec![Router::start(config).await.unwrap()];
    let cluster = Cluster { engines: vec![engine], agents: vec![], routers, web: Web::default() };
    ready(&cluster.web, cluster.routers[0].admin).await;
    let through = cluster.post("/generate", &[], &text_turn("hello", 4)).await;
    assert_eq!(through.status, 401, "{}", through.text());
}

#[tokio::test]
async fn a_router_s_turns_get_the_engine_s_key_whatever_their_client_sent() {
    let engine = EngineSim::start_local(engine()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, token('a')).unwrap();
    let agent = Agent::start(&engine, &format!("auth.token_file = {tokens:?}\n")).await;
    let own = format!("Bearer {KEY}");
    assert_eq!(turn(&agent, &[("authorization", &own)]).await, 401, "the key is no router's proof");
    let channel = Endpoint::from_shared(format!("http://{}", agent.control)).unwrap();
    let mut control = WorkerAgentClient::new(channel.connect_lazy());
    let signer = signer(&tokens, &mut control).await;
    for credential in ["Bearer client", &own] {
        let proof = sign(&signer, &Method::POST, "/generate", &[]);
        let headers = [(PROOF, proof.as_str()), ("authorization", credential)];
        assert_eq!(turn(&agent, &headers).await, 200, "{credential}");
    }
    let mut config = router_config(&[]);
    config.workers = vec![format!("http://{}", agent.control)];
    config.agents.token_file = tokens;
    let routers = vec![Router::start(config).await.unwrap()];
    let cluster = Cluster { engines: vec![engine], agents: vec![], routers, web: Web::default() };
    ready(&cluster.web, cluster.routers[0].admin).await;
    cluster.turn("/generate", &[], &text_turn("hello", 4)).await;
    let headers = [("authorization", "Bearer client")];
    cluster.turn("/generate", &headers, &text_turn("hello", 4)).await;
}

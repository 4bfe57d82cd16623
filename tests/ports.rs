//! Tests of ports against slow and silent peers: each is a fault that once took a process down.
//!
//! Agents that a test stops, or whose descriptors or memory it limits, run as processes of their
//! own. Everything else runs in the test's process.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::Duration,
};

use contract::v1::{self, worker_agent_client::WorkerAgentClient};
use engine_sim::{Config, EngineSim};
use harness::{
    cluster::{Cluster, Router, eventually, ready, router_config, text_turn},
    web::Web,
};
use http::Method;
use http_body_util::BodyExt as _;
use serde_json::Value;
use service::clock::now;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpSocket, TcpStream},
};
use tonic::transport::{Channel, Endpoint};

/// The most time between a fault and the answer to a turn that it hits.
///
/// A router takes up to nine seconds, and a loaded machine longer. Without its look at the agent, a
/// turn would last half an hour.
const FAULT_TIME_MAX: Duration = Duration::from_secs(60);

/// An agent in a process of its own. It is killed on drop.
struct AgentProcess {
    child: Child,
    data: SocketAddr,
    control: SocketAddr,
    admin: SocketAddr,
    _folder: tempfile::TempDir,
}

impl AgentProcess {
    /// Starts an agent beside an engine, with at most this many file descriptors.
    async fn start(engine: &EngineSim, descriptors: u32) -> Self {
        Self::start_with(engine, descriptors, &[]).await
    }

    /// Starts an agent with these variables in its environment.
    async fn start_with(engine: &EngineSim, descriptors: u32, variables: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("agent.toml");
        let state_dir = folder.path().join("state");
        let settings = format!(
            "worker_id = \"w0\"\nengine.vocabulary = 320\ngpu.nvml_library = \"no-nvml\"\n\
             files.state_dir = {state_dir:?}\n"
        );
        std::fs::write(&config, settings).unwrap();
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {descriptors} && exec \"$0\" \"$@\"");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_agent-process")]);
        command.arg("--config").arg(&config).args(["--engine", &engine.url()]);
        for port in ["--data-addr", "--control-addr", "--admin-addr"] {
            command.args([port, "127.0.0.1:0"]);
        }
        command.envs(variables.iter().copied());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = child.stderr.take().unwrap();
        let started = tokio::task::spawn_blocking(move || started_line(log)).await.unwrap();
        let addr = |name: &str| started[name].as_str().unwrap().parse().unwrap();
        let agent = Self {
            data: addr("data"),
            control: addr("control"),
            admin: addr("admin"),
            child,
            _folder: folder,
        };
        ready(&Web::default(), agent.admin).await;
        agent
    }

    /// Sends a signal to the process.
    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([name, &pid]).status().unwrap();
        assert!(status.success());
    }

    /// Returns the bytes of memory that the process uses.
    fn rss_bytes(&self) -> u64 {
        self.status("VmRSS:").trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// Returns a value that the system has for the process.
    fn status(&self, name: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        value.trim().to_owned()
    }

    async fn control_client(&self) -> WorkerAgentClient<Channel> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.control)).unwrap();
        WorkerAgentClient::new(endpoint.connect().await.unwrap())
    }

    /// Starts a router before this agent.
    async fn cluster(&self, engine: EngineSim) -> Cluster {
        let mut config = router_config(&[]);
        config.workers = vec![format!("http://{}", self.control)];
        let router = Router::start(config).await.unwrap();
        let web = Web::default();
        ready(&web, router.admin).await;
        Cluster { engines: vec![engine], agents: vec![], routers: vec![router], web }
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the line of the log that has the ports; later lines are read and dropped.
fn started_line(log: std::process::ChildStderr) -> Value {
    let mut lines = BufReader::new(log).lines();
    let line = lines.by_ref().map_while(Result::ok).find_map(|line| {
        let line: Value = serde_json::from_str(&line).ok()?;
        (line["message"] == "agent starting").then_some(line)
    });
    std::thread::spawn(move || lines.for_each(drop));
    line.expect("the agent says it")
}

/// Starts an engine whose passes take `step_ms`, with room for long answers.
async fn engine(step_ms: f64) -> EngineSim {
    let mut config = Config::default();
    long_answers(&mut config);
    config.core.decode_ms_per_step = step_ms;
    EngineSim::start_local(config).await.unwrap()
}

fn long_answers(config: &mut Config) {
    config.core.session_radix_cache = true;
    config.core.context_len = 4096;
    config.core.max_total_tokens = 1 << 16;
    config.core.decode_ms_per_step = 1.0;
}

/// Sends a streamed turn from a client that has little room for the answer and reads nothing.
async fn send_without_reading(addr: SocketAddr, tokens: u32) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut client = socket.connect(addr).await.unwrap();
    let mut body = text_turn("hello", tokens);
    body["stream"] = true.into();
    let body = body.to_string();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all((head + &body).as_bytes()).await.unwrap();
    client
}

#[tokio::test]
async fn clients_that_read_nothing_do_not_hold_the_engine() {
    let cluster = Cluster::start(1, |settings| {
        long_answers(&mut settings.engine);
        settings.agent.limits.turns_in_flight_max = 4;
        // An agent in the router's process has no buffers of its own.
        let connections = &mut settings.router.as_mut().unwrap().connections;
        connections.answer_buffer_bytes_max = 8 << 20;
    });
    let cluster = cluster.await.unwrap();
    let mut silent = vec![];
    for _ in 0..4 {
        silent.push(send_without_reading(cluster.routers[0].data, 1500).await);
    }
    let sent = || async { (cluster.turns_seen("/generate")[0] == 4).then_some(()) };
    eventually("the engine has all of their turns", sent).await;
    // The engine takes a fifth turn when one of the four has ended.
    cluster.turn("/generate", &[], &text_turn("hi", 2)).await;
    let metrics = cluster.web.get(&cluster.routers[0].admin_url("/metrics")).await.unwrap().text();
    let buffered = metrics.lines().find_map(|line| {
        line.strip_prefix("berth_router_answer_buffer_bytes ")?.parse::<u64>().ok()
    });
    assert!(buffered > Some(100_000), "{buffered:?} bytes wait for the clients");
}

#[tokio::test]
async fn the_turns_of_a_frozen_agent_end_and_say_so() {
    let engine = engine(20.0).await;
    let agent = AgentProcess::start(&engine, 4096).await;
    let cluster = agent.cluster(engine).await;
    let mut stream = cluster.stream("/generate", &[], text_turn("hello", 3000)).await;
    let body = text_turn("hello", 3000);
    let waiting = cluster.post("/generate", &[], &body);
    let freeze = async {
        let sent = || async { (cluster.turns_seen("/generate")[0] == 2).then_some(()) };
        eventually("the engine has both turns", sent).await;
        agent.signal("-STOP");
        let frozen_at = now();
        while let Some(Ok(_)) = stream.body_mut().frame().await {}
        frozen_at
    };
    let (waiting, frozen_at) = tokio::join!(waiting, freeze);
    let took = frozen_at.elapsed();
    assert_eq!(waiting.refusal(), (503, "worker_silent".to_owned()));
    assert_eq!(waiting.header("x-should-retry"), "true", "it has its whole history");
    assert!(took < FAULT_TIME_MAX, "the turns of a frozen agent ended after {took:?}");
    // New turns are refused while the agent is frozen, and served when it goes on.
    let next = cluster.post("/generate", &[], &text_turn("hi", 2)).await;
    assert_eq!(next.status.as_u16(), 503, "{}", next.text());
    agent.signal("-CONT");
    eventually("a served turn", || async {
        let answer = cluster.post("/generate", &[], &text_turn("hi", 2)).await;
        answer.status.is_success().then_some(())
    })
    .await;
}

#[tokio::test]
async fn idle_connections_take_no_agent_with_few_descriptors_down() {
    service::descriptors::raise_limit();
    let engine = engine(1.0).await;
    let agent = AgentProcess::start(&engine, 1024).await;
    let web = Web::default();
    let mut idle = vec![];
    for _ in 0..1100 {
        for addr in [agent.admin, agent.data, agent.control] {
            idle.push(TcpStream::connect(addr).await.unwrap());
        }
    }
    for url in [format!("http://{}/readyz", agent.admin), format!("http://{}/health", agent.data)] {
        let answer = web.get(&url).await.unwrap();
        assert_eq!(answer.status.as_u16(), 200, "{url}: {}", answer.text());
    }
    let url = format!("http://{}/generate", agent.data);
    let turn = web.post(&url, &[], &text_turn("hi", 2)).await.unwrap();
    assert_eq!(turn.status.as_u16(), 200, "{}", turn.text());
    let metrics = web.get(&format!("http://{}/metrics", agent.admin)).await.unwrap().text();
    assert!(metrics.contains("berth_agent_engine_up 1"), "{metrics}");
}

#[tokio::test]
async fn a_list_of_sessions_comes_in_pages() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    for number in 0..5 {
        let body = serde_json::json!({"session_id": format!("s{number}")});
        let opened = cluster.post("/v1/sessions", &[], &body).await;
        assert!(opened.status.is_success(), "{}", opened.text());
    }
    let (mut ids, mut after) = (vec![], String::new());
    loop {
        let page = cluster.get(&format!("/v1/sessions?limit=2&after={after}")).await.json();
        let sessions = page["sessions"].as_array().unwrap();
        assert!(sessions.len() <= 2);
        ids.extend(sessions.iter().map(|one| one["session_id"].as_str().unwrap().to_owned()));
        if page["more"] == false {
            break;
        }
        after = page["next"].as_str().unwrap().to_owned();
    }
    assert_eq!(ids, ["s0", "s1", "s2", "s3", "s4"]);
    assert_eq!(cluster.get("/v1/sessions").await.json()["sessions"].as_array().unwrap().len(), 5);
    let wrong = cluster.get("/v1/sessions?limit=two").await;
    assert_eq!(wrong.refusal(), (400, "invalid_field".to_owned()));
}

#[tokio::test]
async fn an_agent_takes_no_huge_pages() {
    let engine = engine(1.0).await;
    let agent = AgentProcess::start(&engine, 4096).await;
    assert_eq!(agent.status("THP_enabled:"), "0");
}

/// Number of sessions. An agent keeps four times as many, but a debug build checks its whole table
/// after each change.
const SESSIONS: usize = 4096;
/// The most memory that a hundred watchers take.
const WATCHERS_BYTES_MAX: u64 = 24 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_that_do_not_read_cost_an_agent_little_memory() {
    let engine = engine(1.0).await;
    let agent = AgentProcess::start(&engine, 4096).await;
    let client = agent.control_client().await;
    let opens = (0..64).map(|part| {
        let mut client = client.clone();
        async move {
            for number in (part..SESSIONS).step_by(64) {
                let key = v1::SessionKey {
                    principal: "0123456789abcdef0123456789abcdef".to_owned(),
                    id: format!("{number:036}"),
                };
                let request = v1::OpenSessionRequest { key: Some(key), ..Default::default() };
                client.open_session(request).await.unwrap();
            }
        }
    });
    let mut opens: tokio::task::JoinSet<()> = opens.collect();
    while let Some(opened) = opens.join_next().await {
        opened.unwrap();
    }
    let alone_bytes = agent.rss_bytes();
    let mut watchers = vec![];
    for _ in 0..100 {
        let mut watcher = agent.control_client().await;
        watchers.push(watcher.watch_load(v1::WatchLoadRequest {}).await.unwrap());
    }
    // The agent has sent each of them all that it sends without being read.
    let mut listed = 0;
    let mut request = v1::ListSessionsRequest { page_size: 500, ..Default::default() };
    loop {
        let page = client.clone().list_sessions(request.clone()).await.unwrap().into_inner();
        listed += page.sessions.len();
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(listed, SESSIONS);
    let watched_bytes = agent.rss_bytes();
    let watchers_bytes = watched_bytes.saturating_sub(alone_bytes);
    assert!(watchers_bytes <= WATCHERS_BYTES_MAX, "{watchers_bytes} bytes for the watchers");
}

#[tokio::test]
async fn an_engine_that_wants_a_key_gets_its_clients_and_a_refusal_says_why_not() {
    let config = Config { api_key: Some("right".to_owned()), ..Config::default() };
    let engine = EngineSim::start_local(config).await.unwrap();
    let agent = AgentProcess::start_with(&engine, 4096, &[("BERTH_ENGINE_API_KEY", "right")]).await;
    let cluster = agent.cluster(engine).await;
    let body = text_turn("hello", 1);
    let with_key = [("authorization", "Bearer right")];
    let served = cluster.post("/generate", &with_key, &body).await;
    assert_eq!(served.status, 200, "{}", served.text());
    for headers in [&[][..], &[("authorization", "Bearer wrong")]] {
        for path in ["/generate", "/v1/models"] {
            let method = if path == "/generate" { Method::POST } else { Method::GET };
            let refused = cluster.request(method, path, headers, body.to_string()).await;
            assert_eq!(refused.refusal(), (401, "engine_key".to_owned()), "{}", refused.text());
            assert!(refused.text().contains("auth.token_file"), "{}", refused.text());
        }
    }
    let served = cluster.post("/generate", &with_key, &body).await;
    assert_eq!(served.status, 200, "the refused turns have ended: {}", served.text());
}

//! Tests of agents that announce themselves to routers, as their settings say.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use engine_sim::{EngineSim, loopback::own_addr};
use harness::{
    cluster::{Agent, Router, agent_config, eventually, router_config, text_turn as turn},
    keys::{KeyFixture, TestKey, key_text},
    web::Web,
};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use worker_agent::{config::Config, owner::Ending};

const OPS: (&str, &str) = ("authorization", "Bearer sk-ops");
/// With this time between announcements, nothing but a withdrawal ends one during a test.
const LONG_INTERVAL_MS: u64 = 100_000;

/// A mapped port: passes each connection on to another address.
struct MappedPort {
    listener: TcpListener,
    connections: Arc<AtomicUsize>,
}

impl MappedPort {
    async fn bind(ip: IpAddr) -> Self {
        let listener = TcpListener::bind(SocketAddr::new(ip, 0)).await.unwrap();
        Self { listener, connections: Arc::default() }
    }

    fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// Starts to pass connections on. Returns their number so far.
    #[expect(clippy::disallowed_methods, reason = "a process of its own, here as a task")]
    fn map_to(self, target: SocketAddr) -> Arc<AtomicUsize> {
        let connections = Arc::clone(&self.connections);
        tokio::spawn(async move {
            loop {
                let (mut client, _) = self.listener.accept().await.unwrap();
                self.connections.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    // Either side may be gone at any time.
                    if let Ok(mut server) = TcpStream::connect(target).await {
                        drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
                    }
                });
            }
        });
        connections
    }
}

/// A router that takes announcements, with its keys.
struct Fleet {
    keys: KeyFixture,
    /// The key of the agents.
    key_file: PathBuf,
    engine: EngineSim,
    router: Router,
    web: Web,
}

fn keys(right: &str) -> [TestKey<'_>; 2] {
    [("ops", "sk-ops", "admin = true"), ("agents", "sk-agents", right)]
}

impl Fleet {
    /// Starts a router with a key for agents that has `right`, and an engine.
    async fn start(right: &str) -> Self {
        Self::start_with(right, |_| ()).await
    }

    /// Starts as [`Self::start`], with other settings of the router.
    async fn start_with(right: &str, change: impl FnOnce(&mut router::config::Config)) -> Self {
        let keys = KeyFixture::new(&keys(right)).unwrap();
        let key_file = keys.folder().join("announce-key");
        fs::write(&key_file, "sk-agents\n").unwrap();
        let engine = EngineSim::start_local(engine_sim::Config::default()).await.unwrap();
        let mut config = Self::router_config(&keys);
        change(&mut config);
        let router = Router::start(config).await.unwrap();
        Self { keys, key_file, engine, router, web: Web::default() }
    }

    fn router_config(keys: &KeyFixture) -> router::config::Config {
        let mut config = router_config(&[]);
        config.listen.data_addr = own_addr();
        (config.discovery.announce, config.auth.keys_file) = (true, keys.path());
        config
    }

    /// Starts the router anew, at the same address.
    async fn restart_router(&mut self) {
        let mut config = Self::router_config(&self.keys);
        let stopped =
            std::mem::replace(&mut self.router, Router::start(router_config(&[])).await.unwrap());
        config.listen.data_addr = stopped.data;
        stopped.stop().await.unwrap();
        self.router = Router::start(config).await.unwrap();
    }

    /// Returns the settings of an agent that announces itself to the router.
    fn agent_config(&self, interval_ms: u64) -> Config {
        let mut config = agent_config(&self.engine.url(), "w0");
        config.announce.routers = vec![self.router.url("")];
        config.announce.key_file.clone_from(&self.key_file);
        config.announce.interval_ms = interval_ms;
        config
    }

    /// Announces an agent by a request. Returns the refusal, if there is one.
    async fn announce(&self, id: &str, control: &str) -> Option<(u16, String)> {
        let body = json!({ "agent_id": id, "control": control, "ttl_ms": 300_000 });
        let key = [("authorization", "Bearer sk-agents")];
        let answer = self.web.post(&self.router.url("/v1/agents"), &key, &body).await.unwrap();
        (answer.status != 200).then(|| answer.refusal())
    }

    /// Waits until the router says this of an agent that it has not accepted.
    async fn wait_for_rejection(&self, reason: &str) {
        eventually("the rejection", async || {
            let unheard = self.listed("unheard").await;
            let is_there = |agent: &Value| agent["reason"].as_str() == Some(reason);
            unheard.iter().any(is_there).then_some(())
        })
        .await;
    }

    async fn workers(&self) -> Vec<Value> {
        self.listed("workers").await
    }

    async fn listed(&self, member: &str) -> Vec<Value> {
        let url = self.router.url("/v1/workers");
        let answer = self.web.request("GET".parse().unwrap(), &url, &[OPS], String::new()).await;
        answer.unwrap().json()[member].as_array().unwrap().clone()
    }

    /// Waits until the router shows the agent as serving, or shows none. Returns the worker.
    async fn wait_for(&self, is_there: bool) -> Value {
        eventually("the worker", async || {
            let workers = self.workers().await;
            let serves = |worker: &&Value| worker["state"] == "fresh" && worker["leaving"] == false;
            match workers.iter().find(serves) {
                Some(worker) if is_there => Some(worker.clone()),
                None if !is_there && workers.is_empty() => Some(Value::Null),
                Some(_) | None => None,
            }
        })
        .await
    }

    /// Returns the value of an agent's metric, with the label of this router.
    async fn metric(&self, agent: &Agent, name: &str, labels: &str) -> u64 {
        let text = self.web.get(&agent.admin_url("/metrics")).await.unwrap().text();
        let line = format!("berth_agent_{name}{{router=\"{}\"{labels}}} ", self.router.url(""));
        let value = text.lines().find_map(|text| text.strip_prefix(&line).map(str::to_owned));
        value.map_or(0, |value| value.parse().unwrap())
    }
}

#[tokio::test]
async fn an_agent_behind_mapped_ports_announces_itself_and_gets_turns() {
    let ip = own_addr().ip();
    let (data, control) = (MappedPort::bind(ip).await, MappedPort::bind(ip).await);
    let right =
        format!("announce = {{ agents = [\"w*\"], addresses = [\"{ip}:{}\"] }}", control.port());
    let mut fleet = Fleet::start(&right).await;
    let mut config = fleet.agent_config(1_000);
    config.advertise.host = ip.to_string();
    (config.advertise.data_port, config.advertise.control_port) = (data.port(), control.port());
    let addresses = [&data, &control].map(|mapped| format!("{ip}:{}", mapped.port()));
    let agent = Agent::start(config).unwrap();
    let (turns, _) = (data.map_to(agent.data), control.map_to(agent.control));
    let worker = fleet.wait_for(true).await;
    assert_eq!(worker["data"], addresses[0], "{worker}");
    assert_eq!(worker["control"], format!("http://{}", addresses[1]));
    assert_eq!(worker["sources"], json!(["announce"]));
    let answer = fleet.web.post(&fleet.router.url("/generate"), &[OPS], &turn("hello", 2)).await;
    assert_eq!(answer.unwrap().status, 200);
    assert!(turns.load(Ordering::Relaxed) > 0, "the turn took another way");
    // Each announcement holds for three intervals. After more of them, the agent is still there.
    eventually("further announcements", async || {
        let count = fleet.metric(&agent, "announcements_total", ",result=\"ok\"").await;
        (count > 4).then_some(())
    })
    .await;
    assert_eq!(fleet.workers().await[0]["leaving"], false);
    // A router that restarts knows the agent again.
    fleet.restart_router().await;
    fleet.wait_for(true).await;
    assert!(fleet.metric(&agent, "announcements_total", ",result=\"ok\"").await > 4);
}

#[tokio::test]
async fn an_agent_that_ends_withdraws_its_announcement() {
    let fleet =
        Fleet::start("announce = { agents = [\"w0\"], addresses = [\"127.0.0.0/8\"] }").await;
    let agent = Agent::start(fleet.agent_config(LONG_INTERVAL_MS)).unwrap();
    fleet.wait_for(true).await;
    assert_eq!(fleet.metric(&agent, "announced", "").await, 1);
    agent.stop().await.unwrap();
    fleet.wait_for(false).await;
}

#[tokio::test]
async fn an_agent_that_hands_its_sessions_over_stays_announced() {
    let fleet =
        Fleet::start("announce = { agents = [\"w0\"], addresses = [\"127.0.0.0/8\"] }").await;
    let agent = Agent::start(fleet.agent_config(LONG_INTERVAL_MS)).unwrap();
    fleet.wait_for(true).await;
    agent.stop.send(Ending::HandOver).unwrap();
    let workers = eventually("the loss of the agent", async || {
        let workers = fleet.workers().await;
        (workers.is_empty() || workers[0]["state"] == "lost").then_some(workers)
    })
    .await;
    assert_eq!(workers.len(), 1, "the router waits for the next agent process");
    assert_eq!(workers[0]["leaving"], false);
}

#[tokio::test]
async fn an_agent_says_that_a_router_refuses_it_until_an_operator_allows_it() {
    let fleet =
        Fleet::start("announce = { agents = [\"x*\"], addresses = [\"127.0.0.0/8\"] }").await;
    let agent = Agent::start(fleet.agent_config(200)).unwrap();
    eventually("the refusal", async || {
        let refused = fleet.metric(&agent, "announcements_total", ",result=\"refused\"").await;
        (refused > 1).then_some(())
    })
    .await;
    assert_eq!(fleet.metric(&agent, "announced", "").await, 0);
    assert!(fleet.workers().await.is_empty(), "a refused agent is listed");
    let allowed = "announce = { agents = [\"w0\"], addresses = [\"127.0.0.0/8\"] }";
    fleet.keys.replace(&key_text(&keys(allowed))).unwrap();
    fleet.wait_for(true).await;
    assert_eq!(fleet.metric(&agent, "announced", "").await, 1);
}

#[tokio::test]
async fn a_key_announces_no_more_than_its_share() {
    let right = "announce = { agents = [\"w*\"], addresses = [\"127.0.0.0/8\"] }";
    let fleet = Fleet::start_with(right, |config| config.discovery.announced_per_key_max = 2).await;
    assert_eq!(fleet.announce("w0", "http://127.0.0.1:1").await, None);
    assert_eq!(fleet.announce("w1", "http://127.0.0.1:2/").await, None);
    let limit = Some((429, "announce_limit".to_owned()));
    assert_eq!(fleet.announce("w2", "http://127.0.0.1:3").await, limit);
    assert_eq!(fleet.announce("w1", "http://127.0.0.1:2").await, None, "a heartbeat");
}

#[tokio::test]
async fn a_rogue_announcement_never_gets_a_prompt_nor_takes_an_agent_away() {
    let right = "announce = { agents = [\"w*\"], addresses = [\"127.0.0.0/8\"] }";
    let fleet = Fleet::start(right).await;
    let engine = EngineSim::start_local(engine_sim::Config::default()).await.unwrap();
    // One agent is announced under the id of another, one wants its turns at another host.
    let impostor = Agent::start(agent_config(&engine.url(), "rogue")).unwrap();
    let mut config = agent_config(&engine.url(), "w1");
    config.advertise.host = "127.99.99.99".to_owned();
    // Only one agent at a time may use an engine.
    let second = EngineSim::start_local(engine_sim::Config::default()).await.unwrap();
    config.engine.url = second.url();
    let detour = Agent::start(config).unwrap();
    assert_eq!(fleet.announce("w0", &impostor.control_url()).await, None);
    fleet.wait_for_rejection("announced as w0, but it says that it is rogue").await;
    assert_eq!(fleet.announce("w1", &detour.control_url()).await, None);
    let (host, port) = (detour.control.ip(), detour.data.port());
    let reason = format!("announced at {host}, but it wants its turns at 127.99.99.99:{port}");
    fleet.wait_for_rejection(&reason).await;
    let honest = Agent::start(fleet.agent_config(LONG_INTERVAL_MS)).unwrap();
    fleet.wait_for(true).await;
    assert_eq!(fleet.announce("w9", &honest.control_url()).await, None);
    for _ in 0..6 {
        let url = fleet.router.url("/generate");
        let answer = fleet.web.post(&url, &[OPS], &turn("hello", 2)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(fleet.workers().await.len(), 1);
    for engine in [&engine, &second] {
        assert!(engine.bodies_seen("/generate").is_empty(), "a rogue has got a prompt");
    }
}

#[tokio::test]
async fn a_host_joins_a_fleet_by_berth_serve() {
    let right = "announce = { agents = [\"w0\"], addresses = [\"127.0.0.0/8\"] }";
    let fleet = Fleet::start(right).await;
    let config = fleet.keys.folder().join("agent.toml");
    let free = "127.0.0.1:0";
    let settings = format!(
        "worker_id = \"w0\"\nannounce.key_file = {:?}\nannounce.interval_ms = 1000\n\
         files.state_dir = {:?}\ngpu.nvml_library = \"no-nvml\"\nlisten.data_addr = \"{free}\"\n\
         listen.control_addr = \"{free}\"\nlisten.admin_addr = \"{free}\"\n",
        fleet.key_file,
        fleet.keys.folder().join("state"),
    );
    fs::write(&config, settings).unwrap();
    let mut joined = std::process::Command::new(env!("CARGO_BIN_EXE_serve-process"))
        .args(["--engine", &fleet.engine.url(), "--join", &fleet.router.url("")])
        .args(["--address", "127.0.0.1", "--agent-config", config.to_str().unwrap()])
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let worker = fleet.wait_for(true).await;
    assert_eq!(worker["sources"], json!(["announce"]), "{worker}");
    let answer = fleet.web.post(&fleet.router.url("/generate"), &[OPS], &turn("hello", 2)).await;
    assert_eq!(answer.unwrap().status, 200);
    let pid = rustix::process::Pid::from_child(&joined);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    fleet.wait_for(false).await;
    assert!(joined.wait().unwrap().success());
}

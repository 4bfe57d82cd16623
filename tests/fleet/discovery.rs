//! Agents that routers discover: by DNS, by a real Kubernetes API server, and under churn.
//!
//! Routers and agents run in this process, because a case starts and stops dozens of them. The API
//! server and etcd are processes; `kubernetes` starts them.

mod churn;
mod dns;
mod kubernetes;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use engine_sim::EngineSim;
use harness::{
    case,
    cases::Case,
    cluster::{Agent, Router, agent_config, router_config, text_turn},
    fleet::Place,
    web::Web,
};
use http::Method;
use serde_json::{Value, json};
use service::clock::now;
use tokio::task::JoinSet;

use self::{
    dns::DnsServer,
    kubernetes::{Cluster, slice},
};

/// The cases, in the order in which they run.
pub(crate) const CASES: &[Case] = &[
    case!("discovery: dns", true, names_are_followed),
    case!("discovery: churn by a file", true, churn::of_listed_workers),
    case!("discovery: churn by announcements", true, churn::of_announced_workers),
    case!("discovery: kubernetes", false, slices_are_followed),
];

/// The key of those who send turns and look at workers, where a router asks for one.
const USER: (&str, &str) = ("authorization", "Bearer sk-users");
/// The longest wait for a state.
const PATIENCE: Duration = Duration::from_secs(60);

/// An engine with its agent.
struct Worker {
    engine: EngineSim,
    agent: Agent,
}

impl Worker {
    /// Starts an engine on loopback with an agent at `host`, or at a loopback address of its own.
    async fn start(name: &str, host: Option<(IpAddr, &Path)>) -> anyhow::Result<Self> {
        let engine = EngineSim::start_local(engine_sim::Config::default()).await?;
        let mut config = agent_config(&engine.url(), name);
        if let Some((ip, token_file)) = host {
            let free = SocketAddr::new(ip, 0);
            (config.listen.data_addr, config.listen.control_addr) = (free, free);
            config.auth.token_file = token_file.to_owned();
        }
        Ok(Self { engine, agent: Agent::start(config)? })
    }

    async fn stop(self) -> anyhow::Result<()> {
        self.agent.stop().await?;
        self.engine.shutdown().await;
        Ok(())
    }
}

/// Returns the agents that a router shows, with whether each is fresh and not leaving.
async fn shown(web: &Web, router: &Router) -> anyhow::Result<BTreeMap<String, bool>> {
    let url = router.url("/v1/workers");
    let workers = web.request(Method::GET, &url, &[USER], String::new()).await?.json();
    let workers = workers["workers"].as_array().context("no list of workers")?.clone();
    let one = |worker: &Value| {
        let is_serving = worker["state"] == "fresh" && worker["leaving"] == false;
        (worker["agent"].as_str().unwrap_or_default().to_owned(), is_serving)
    };
    Ok(workers.iter().map(one).collect())
}

/// Waits until a router shows exactly these agents, and all serve. Returns the time in ms.
async fn wait_for(web: &Web, router: &Router, agents: &[&str]) -> anyhow::Result<u128> {
    let began = now();
    let wanted: BTreeMap<String, bool> =
        agents.iter().map(|agent| ((*agent).to_owned(), true)).collect();
    loop {
        let shown = shown(web, router).await?;
        if shown == wanted {
            return Ok(began.elapsed().as_millis());
        }
        ensure!(began.elapsed() < PATIENCE, "waited for {wanted:?}, there are {shown:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Users that send turns of their sessions until they are stopped.
struct Load {
    is_over: Arc<AtomicBool>,
    turns: Arc<AtomicU64>,
    users: JoinSet<anyhow::Result<()>>,
}

impl Load {
    fn start(router: &Router, web: impl Fn() -> Web, users: usize) -> Self {
        let (is_over, turns) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let mut load = Self { is_over, turns, users: JoinSet::new() };
        for user in 0..users {
            let (is_over, turns) = (Arc::clone(&load.is_over), Arc::clone(&load.turns));
            let (web, url) = (web(), router.url("/generate"));
            load.users.spawn(async move {
                let id = format!("user-{user}");
                let headers = [USER, ("x-berth-session-id", id.as_str())];
                while !is_over.load(Ordering::Relaxed) {
                    let answer = web.post(&url, &headers, &text_turn("hello", 4)).await?;
                    ensure!(answer.status == 200, "{}: {}", answer.status, answer.text());
                    turns.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        load
    }

    fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Stops the users. Fails if a turn failed.
    async fn stop(mut self) -> anyhow::Result<u64> {
        self.is_over.store(true, Ordering::Relaxed);
        while let Some(user) = self.users.join_next().await {
            user??;
        }
        Ok(self.turns.load(Ordering::Relaxed))
    }
}

/// Names of addresses and of services are followed, and a server that fails changes nothing.
async fn names_are_followed(_place: Place) -> anyhow::Result<String> {
    let workers = [Worker::start("w0", None).await?, Worker::start("w1", None).await?];
    let [first, second] = [&workers[0].agent.control, &workers[1].agent.control];
    let server = DnsServer::start().await?;
    server.set_service("_control._tcp.fleet.test", &[*first]);
    let mut config = router_config(&[]);
    config.discovery.dns.names = vec!["srv+http://_control._tcp.fleet.test".to_owned()];
    config.discovery.dns.servers = vec![server.address];
    (config.discovery.dns.ttl_ms_min, config.discovery.dns.ttl_ms_max) = (200, 5_000);
    let (router, web) = (Router::start(config).await?, Web::default());
    let joined_ms = wait_for(&web, &router, &["w0"]).await?;
    let load = Load::start(&router, Web::default, 4);
    server.set_service("_control._tcp.fleet.test", &[*first, *second]);
    let second_ms = wait_for(&web, &router, &["w0", "w1"]).await?;
    server.set_failing(true);
    let metric = "berth_router_source_failing{source=\"dns\"} 1";
    let began = now();
    while !web.get(&router.admin_url("/metrics")).await?.text().contains(metric) {
        ensure!(began.elapsed() < PATIENCE, "no failure was shown");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ensure!(shown(&web, &router).await?.len() == 2, "a failing server took agents away");
    server.set_failing(false);
    server.set_service("_control._tcp.fleet.test", &[*second]);
    let left_ms = wait_for(&web, &router, &["w1"]).await?;
    let turns = load.stop().await?;
    let asked = server.questions();
    router.stop().await?;
    for worker in workers {
        worker.stop().await?;
    }
    Ok(format!(
        "joined after {joined_ms} and {second_ms} ms, left after {left_ms} ms, {turns} turns, \
         {asked} questions"
    ))
}

/// Slices of a real API server are followed: created, changed and removed, with the server's memory
/// of versions compacted, and with the server restarted under load.
async fn slices_are_followed(place: Place) -> anyhow::Result<String> {
    let mut cluster = Cluster::start(place.folder()).await?;
    cluster.apply_rbac().await?;
    let host = kubernetes::own_ip().await?;
    let token_file = place.folder().join("token");
    std::fs::write(&token_file, "a-token-of-32-characters-for-agents\n")?;
    let mut workers = vec![];
    for name in ["w0", "w1", "w2"] {
        workers.push(Worker::start(name, Some((host, &token_file))).await?);
    }
    let address = |number: usize| workers[number].agent.control;
    let put = async |cluster: &Cluster, name: &str, number: usize, conditions: Value| {
        cluster.put_slice(&slice(name, address(number), &conditions)).await
    };
    let ready = || json!({ "ready": true, "serving": true, "terminating": false });
    put(&cluster, "s0", 0, ready()).await?;
    let mut config = router_config(&[]);
    config.agents.token_file.clone_from(&token_file);
    config.discovery.kubernetes.selector = "kubernetes.io/service-name=berth-agents".to_owned();
    config.discovery.kubernetes.kubeconfig = cluster.router_kubeconfig()?;
    let (router, web) = (Router::start(config).await?, Web::default());
    wait_for(&web, &router, &["w0"]).await?;
    let load = Load::start(&router, Web::default, 4);
    put(&cluster, "s1", 1, ready()).await?;
    let joined_ms = wait_for(&web, &router, &["w0", "w1"]).await?;
    // Not ready: no member. Terminating: drains. Ready again: a member.
    put(&cluster, "s2", 2, json!({ "ready": false, "serving": false })).await?;
    put(&cluster, "s1", 1, json!({ "ready": false, "serving": true, "terminating": true })).await?;
    let drained_ms = wait_for(&web, &router, &["w0"]).await?;
    put(&cluster, "s2", 2, ready()).await?;
    wait_for(&web, &router, &["w0", "w2"]).await?;
    cluster.delete_slice("s1").await?;
    // The server is away, and after its return it has forgotten the version that the router saw.
    let before = load.turns();
    cluster.stop_api_server().await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    ensure!(shown(&web, &router).await?.len() == 2, "the list was lost with the server");
    cluster.change_and_compact("s1").await?;
    cluster.start_api_server().await?;
    put(&cluster, "s1", 1, ready()).await?;
    cluster.delete_slice("s0").await?;
    let relisted_ms = wait_for(&web, &router, &["w1", "w2"]).await?;
    let after = load.turns();
    let turns = load.stop().await?;
    ensure!(after > before, "no turns ran while the API server was away");
    let metrics = web.get(&router.admin_url("/metrics")).await?.text();
    let expiries = "berth_router_source_expiries_total{source=\"kubernetes\"} ";
    ensure!(metrics.contains(expiries), "the API server answered no watch with 410");
    ensure!(cluster.router_may_not("pods").await?, "the router's account may list pods");
    router.stop().await?;
    for worker in workers {
        worker.stop().await?;
    }
    cluster.stop().await?;
    Ok(format!(
        "joined after {joined_ms} ms, drained after {drained_ms} ms, listed anew {relisted_ms} ms \
         after the API server's restart, {turns} turns, 0 failed"
    ))
}

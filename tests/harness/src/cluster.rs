//! Engine simulators, agents and routers in this process, and what tests do with them.
//!
//! Agents and routers run the same code as the binaries, on free loopback ports. The methods of
//! [`Cluster`] panic where a test can't go on: it has no other use for the error.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use axum::body::Body;
use contract::v1::worker_agent_client::WorkerAgentClient;
use http::{Method, Response, StatusCode, uri::Authority};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};
use service::{
    server::{LocalPort, LocalPorts},
    tasks::Tasks,
};
use tokio::{sync::oneshot, task::JoinHandle};
use tonic::transport::{Channel, Endpoint};
use worker_agent::{
    Listeners,
    config::{Config, tables::ListenTable},
    owner::Ending,
};

use crate::web::{Answer, Headers, Web};
use engine_sim::{EngineSim, loopback::own_addr};

/// The longest wait of a test for any state. A state is usually reached within seconds; a loaded
/// machine takes several times as long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// With this variable, the routers of a [`Cluster`] call its agents as those of `berth serve` do.
const ONE_PROCESS: &str = "BERTH_TEST_ONE_PROCESS";

/// A running agent. If dropped without [`Agent::stop`], its tasks end with the runtime.
#[derive(Debug)]
pub struct Agent {
    /// The address for turns.
    pub data: SocketAddr,
    /// The address for routers.
    pub control: SocketAddr,
    /// The address of metrics and health.
    pub admin: SocketAddr,
    /// The socket on which the agent listens for the engine's shim.
    pub shim_socket: PathBuf,
    has_tls: bool,
    local: LocalPort,
    /// Ends the agent, as a signal would.
    pub stop: oneshot::Sender<Ending>,
    ended: JoinHandle<Result<(), worker_agent::Error>>,
    /// The state folder, removed with the agent; `None` if the settings name one.
    _state: Option<tempfile::TempDir>,
}

fn scheme(has_tls: bool) -> &'static str {
    if has_tls { "https" } else { "http" }
}

/// Returns settings for tests: free ports of an own address, frequent reports, the toy model's
/// vocabulary, and no GPU, even if the machine has one.
#[must_use]
pub fn agent_config(engine: &str, worker_id: &str) -> Config {
    let free = own_addr();
    let mut config = Config { worker_id: worker_id.to_owned(), ..Config::default() };
    config.engine.url = engine.to_owned();
    config.engine.load_interval_ms = 50;
    config.engine.vocabulary = 320;
    // Tests fill an engine of few rows with pinned sessions.
    config.sessions.pin_rows_ratio = 1.0;
    config.listen = ListenTable { data_addr: free, control_addr: free, admin_addr: free };
    config.reports.interval_ms = 100;
    config.gpu.nvml_library = "no-nvml".into();
    config
}

impl Agent {
    /// Starts an agent. The agent may not have reached its engine yet when this returns.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    #[expect(clippy::disallowed_methods, reason = "a process of its own, here as a task")]
    pub fn start(mut config: Config) -> anyhow::Result<Self> {
        let named = !config.files.state_dir.as_os_str().is_empty();
        let state = if named { None } else { Some(tempfile::tempdir()?) };
        if let Some(state) = &state {
            config.files.state_dir = state.path().to_owned();
        }
        let listeners = Listeners::bind(&config)?;
        let (data, control, admin) = (
            listeners.data.local_addr()?,
            listeners.control.local_addr()?,
            listeners.admin.local_addr()?,
        );
        let shim_socket = config.shim_socket();
        let (has_tls, local) = (config.tls.server_files().is_some(), listeners.local.clone());
        let (stop, stopped) = oneshot::channel();
        let stopped = async {
            match stopped.await {
                Ok(ending) => ending,
                // Nobody stops the agent any more.
                Err(_) => std::future::pending().await,
            }
        };
        let epoch = service::clock::unix_ns();
        let ended = tokio::spawn(worker_agent::run(config, listeners, epoch, stopped));
        Ok(Self { data, control, admin, shim_socket, has_tls, local, stop, ended, _state: state })
    }

    /// Returns the URL of a data route.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("{}://{}{path}", scheme(self.has_tls), self.data)
    }

    /// Returns the URL of the control port, as in a router's settings.
    #[must_use]
    pub fn control_url(&self) -> String {
        format!("{}://{}", scheme(self.has_tls), self.control)
    }

    /// Returns the URL of an admin route.
    #[must_use]
    pub fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin)
    }

    fn local_port(&self) -> (Authority, LocalPort) {
        let authority = self.data.to_string().parse().expect("an address is an authority");
        (authority, self.local.clone())
    }

    /// Connects to the control port, as a router does.
    ///
    /// # Errors
    /// Fails if the port accepts no connection.
    pub async fn control_client(&self) -> anyhow::Result<WorkerAgentClient<Channel>> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.control))?;
        Ok(WorkerAgentClient::new(endpoint.connect().await?))
    }

    /// Stops the agent as a signal would, and waits for its end.
    ///
    /// # Errors
    /// Returns the error of `run`.
    pub async fn stop(self) -> anyhow::Result<()> {
        let _ = self.stop.send(Ending::Close);
        Ok(tokio::time::timeout(PATIENCE, self.ended).await???)
    }
}

/// A running router. If dropped without [`Router::stop`], its tasks end with the runtime.
#[derive(Debug)]
pub struct Router {
    /// The address for clients.
    pub data: SocketAddr,
    /// The address of metrics and health.
    pub admin: SocketAddr,
    has_tls: bool,
    tasks: Tasks,
    ended: JoinHandle<Result<(), router::Error>>,
}

/// Returns settings for tests: all addresses on port 0, and the agents' control ports. Limits are
/// long enough that a slow machine makes no agent stale or unreachable.
#[must_use]
pub fn router_config(agents: &[&Agent]) -> router::config::Config {
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut config = router::config::Config {
        workers: agents.iter().map(|agent| agent.control_url()).collect(),
        ..router::config::Config::default()
    };
    (config.listen.data_addr, config.listen.admin_addr) = (free, free);
    config.timeouts.load_report_age_ms_max = 60_000;
    // A pinned session of an agent that is gone waits this long for the agent's return.
    config.timeouts.connect_ms_max = 5_000;
    config
}

impl Router {
    /// Starts a router. The router may not have heard from its agents yet when this returns.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    pub async fn start(config: router::config::Config) -> anyhow::Result<Self> {
        Self::start_beside(config, LocalPorts::default()).await
    }

    /// Starts a router in one process with agents, whose data ports are `agents`.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    #[expect(clippy::disallowed_methods, reason = "a process of its own, here as a task")]
    pub async fn start_beside(
        config: router::config::Config,
        agents: LocalPorts,
    ) -> anyhow::Result<Self> {
        let data = tokio::net::TcpListener::bind(config.listen.data_addr).await?;
        let admin = std::net::TcpListener::bind(config.listen.admin_addr)?;
        let addrs = (data.local_addr()?, admin.local_addr()?);
        let (tasks, has_tls) = (Tasks::default(), config.tls.server_files().is_some());
        let listeners = router::Listeners { data, admin, agents };
        let ended = tokio::spawn(router::run(config, listeners, tasks.clone()));
        Ok(Self { data: addrs.0, admin: addrs.1, has_tls, tasks, ended })
    }

    /// Returns the URL of a data route.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("{}://{}{path}", scheme(self.has_tls), self.data)
    }

    /// Returns the URL of an admin route.
    #[must_use]
    pub fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin)
    }

    /// Stops the router as a signal would, and waits for its end.
    ///
    /// # Errors
    /// Returns the error of `run`.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.tasks.cancel();
        Ok(tokio::time::timeout(PATIENCE, self.ended).await???)
    }
}

/// The settings from which a [`Cluster`] starts.
#[derive(Debug)]
pub struct ClusterSettings {
    /// Each engine's settings; the number of the engine is added to the seed.
    pub engine: engine_sim::Config,
    /// Each agent's settings; its engine, id and addresses are filled in.
    pub agent: Config,
    /// The router's settings; its workers are filled in. `None` starts no router.
    pub router: Option<router::config::Config>,
}

/// Engines with an agent each, and a router. Workers are named `w0`, `w1` and so on.
#[derive(Debug)]
pub struct Cluster {
    /// The engines.
    pub engines: Vec<EngineSim>,
    /// The agents, in the order of their engines.
    pub agents: Vec<Agent>,
    /// The routers; more than one if a test starts another.
    pub routers: Vec<Router>,
    /// A client of all of them.
    pub web: Web,
}

impl Cluster {
    /// Starts `workers` engines with agents and a router, and waits until all are ready.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    pub async fn start(
        workers: usize,
        change: impl FnOnce(&mut ClusterSettings),
    ) -> anyhow::Result<Self> {
        let mut settings = ClusterSettings {
            engine: engine_sim::Config::default(),
            agent: agent_config("", ""),
            router: Some(router_config(&[])),
        };
        settings.engine.core.session_radix_cache = true;
        change(&mut settings);
        let web = Web::default();
        let mut cluster = Self { engines: vec![], agents: vec![], routers: vec![], web };
        for number in 0..workers {
            let mut config = settings.engine.clone();
            config.core.seed += number as u64;
            let engine = EngineSim::start_local(config).await?;
            let mut config = settings.agent.clone();
            config.engine.url = engine.url();
            config.worker_id = format!("w{number}");
            config.listen = agent_config("", "").listen;
            let agent = Agent::start(config)?;
            ready(&cluster.web, agent.admin).await;
            cluster.engines.push(engine);
            cluster.agents.push(agent);
        }
        if let Some(router) = settings.router {
            cluster.start_router(router).await?;
        }
        Ok(cluster)
    }

    /// Starts one worker, without a router: requests go to the agent.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    pub async fn start_worker(change: impl FnOnce(&mut ClusterSettings)) -> anyhow::Result<Self> {
        let change = |settings: &mut ClusterSettings| {
            settings.router = None;
            change(settings);
        };
        Self::start(1, change).await
    }

    /// Starts one more router over all agents, and waits until it is ready.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    pub async fn start_router(&mut self, config: router::config::Config) -> anyhow::Result<()> {
        let agents: Vec<&Agent> = self.agents.iter().collect();
        self.start_router_before(router_config(&agents).workers, config).await
    }

    /// Starts one more router over agents at these control addresses, and waits until it is ready.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    pub async fn start_router_before(
        &mut self,
        workers: Vec<String>,
        config: router::config::Config,
    ) -> anyhow::Result<()> {
        let config = router::config::Config { workers, ..config };
        let is_one_process = std::env::var_os(ONE_PROCESS).is_some_and(|set| !set.is_empty());
        let agents = self.agents.iter().filter(|_| is_one_process).map(Agent::local_port);
        let router = Router::start_beside(config, LocalPorts::new(agents)).await?;
        ready(&self.web, router.admin).await;
        self.routers.push(router);
        Ok(())
    }

    /// Returns the first engine.
    #[must_use]
    pub fn engine(&self) -> &EngineSim {
        &self.engines[0]
    }

    /// Returns the first agent.
    #[must_use]
    pub fn agent(&self) -> &Agent {
        &self.agents[0]
    }

    /// Returns the URL of a route for clients: at the first router, or else at the first agent.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        self.routers.first().map_or_else(|| self.agent().url(path), |router| router.url(path))
    }

    /// Sends a request with a body that is passed on byte for byte.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        headers: Headers<'_>,
        body: impl Into<Body>,
    ) -> Answer {
        self.web.request(method, &self.url(path), headers, body).await.expect("an answer")
    }

    /// Sends a POST request with a JSON body.
    pub async fn post(&self, path: &str, headers: Headers<'_>, body: &Value) -> Answer {
        self.web.post(&self.url(path), headers, body).await.expect("an answer")
    }

    /// Sends a turn that must be answered.
    pub async fn turn(&self, path: &str, headers: Headers<'_>, body: &Value) -> Answer {
        let answer = self.post(path, headers, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer
    }

    /// Starts a streamed turn; returns the answer after its first event has arrived.
    pub async fn stream(
        &self,
        path: &str,
        headers: Headers<'_>,
        mut body: Value,
    ) -> Response<Incoming> {
        body["stream"] = true.into();
        let headers = [&[("content-type", "application/json")], headers].concat();
        let url = self.url(path);
        let sent = self.web.send(Method::POST, &url, &headers, body.to_string()).await;
        let mut answer = sent.expect("an answer");
        let first = answer.body_mut().frame().await.expect("a first event");
        assert!(first.is_ok(), "{first:?}");
        answer
    }

    /// Sends a GET request.
    pub async fn get(&self, path: &str) -> Answer {
        self.request(Method::GET, path, &[], Body::empty()).await
    }

    /// Sends a DELETE request.
    pub async fn delete(&self, path: &str) -> Answer {
        self.request(Method::DELETE, path, &[], Body::empty()).await
    }

    /// Opens a pinned session.
    pub async fn open_pinned(&self, id: &str) {
        let body = json!({"session_id": id, "retention": "pinned"});
        let opened = self.post("/v1/sessions", &[], &body).await;
        assert_eq!(opened.status, StatusCode::CREATED, "{}", opened.text());
        assert_eq!(opened.json()["retention"], "pinned");
    }

    /// Returns what the router shows of worker `w{number}`, or null.
    pub async fn worker(&self, number: usize) -> Value {
        let shown = self.get("/v1/workers").await.json();
        let name = format!("w{number}");
        let mut workers = shown["workers"].as_array().into_iter().flatten();
        workers.find(|worker| worker["agent"] == name).cloned().unwrap_or_default()
    }

    /// Returns what the router shows of worker `w{number}` once it satisfies `fits`.
    pub async fn wait_for_worker(
        &self,
        number: usize,
        what: &str,
        fits: impl Fn(&Value) -> bool,
    ) -> Value {
        eventually(what, || async { Some(self.worker(number).await).filter(|shown| fits(shown)) })
            .await
    }

    /// Returns the router's record of a turn's placement.
    pub async fn placement_record(&self, turn: &Answer) -> Value {
        let path = format!("/v1/placements/{}", turn.header("x-berth-turn"));
        self.get(&path).await.json()["placements"][0].clone()
    }

    /// Returns the first agent's metrics page.
    pub async fn agent_metrics(&self) -> String {
        self.web.get(&self.agent().admin_url("/metrics")).await.expect("metrics").text()
    }

    /// Returns how many turns each engine got at `path`.
    #[must_use]
    pub fn turns_seen(&self, path: &str) -> Vec<usize> {
        self.engines.iter().map(|engine| engine.bodies_seen(path).len()).collect()
    }

    /// Makes every pass of the engines `seconds` longer. With 0, running turns end soon.
    pub async fn slow_down(&self, seconds: f64) {
        for engine in &self.engines {
            let url = format!("{}/slow_down", engine.url());
            let slowed = self.web.post(&url, &[], &json!({"forward_sleep_time": seconds})).await;
            assert_eq!(slowed.expect("an answer").status, StatusCode::OK);
        }
    }

    /// Waits until the engines hold nothing for sessions or running turns.
    pub async fn nothing_held(&self) {
        eventually("empty pools", || async {
            for engine in &self.engines {
                let facts = engine.pool(0).await?;
                if facts.used() > 0 || facts.held_rows > 0 || !facts.sessions.is_empty() {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }
}

/// Returns a greedy turn for `/generate` with an answer of exactly `tokens` tokens.
#[must_use]
pub fn text_turn(text: &str, tokens: u32) -> Value {
    json!({"text": text, "sampling_params": greedy(tokens)})
}

/// Returns a greedy turn for `/generate` whose prompt is token ids.
#[must_use]
pub fn ids_turn(prompt: &[u32], tokens: u32) -> Value {
    json!({"input_ids": prompt, "sampling_params": greedy(tokens)})
}

fn greedy(tokens: u32) -> Value {
    json!({"max_new_tokens": tokens, "temperature": 0, "ignore_eos": true})
}

/// Waits until an agent or router reports that it is ready.
///
/// # Panics
/// Panics if it isn't ready within [`PATIENCE`].
pub async fn ready(web: &crate::web::Web, admin: SocketAddr) {
    let url = format!("http://{admin}/readyz");
    eventually("readiness", || async {
        let answer = web.get(&url).await.ok()?;
        (answer.status == http::StatusCode::OK).then_some(())
    })
    .await;
}

/// Polls `ask` until it returns `Some`; tests wait in this way for a state of another process.
///
/// # Panics
/// Panics if `ask` returns no `Some` within [`PATIENCE`]; the message names `what`.
pub async fn eventually<T, F>(what: &str, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(tokio::time::Instant::now() < deadline, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

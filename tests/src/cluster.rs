//! Starts agents and routers in this process, on free loopback ports, beside engines of any kind.
//!
//! They run the same code as the binaries.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use proto::v1::worker_agent_client::WorkerAgentClient;
use service::tasks::Tasks;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use worker_agent::{Listeners, config::Config};

/// The longest wait of a test for any state. A state is usually reached within seconds; a loaded
/// machine takes several times as long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A running agent. If dropped without [`Agent::stop`], its tasks end with the runtime.
#[derive(Debug)]
pub struct Agent {
    /// The address for turns.
    pub data: SocketAddr,
    /// The address for routers.
    pub control: SocketAddr,
    /// The address of metrics and health.
    pub admin: SocketAddr,
    stop: CancellationToken,
    ended: JoinHandle<Result<(), worker_agent::Error>>,
    /// The state folder, removed with the agent; `None` if the settings name one.
    _state: Option<tempfile::TempDir>,
}

/// Returns port 0 of a loopback address that no other call in this process returns. After its
/// listener has ended, no other process listens there, except that one in 250 may use the same
/// addresses.
pub fn own_addr() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let net = u8::try_from(1 + std::process::id() % 250).expect("at most 250");
    SocketAddr::from(([127, net, high, low], 0))
}

/// Returns settings for tests: free ports of an own address, frequent reports, the toy model's
/// vocabulary, and no GPU, even if the machine has one.
#[must_use]
pub fn agent_config(engine: &str, worker_id: &str) -> Config {
    let free = own_addr();
    Config {
        engine: engine.to_owned(),
        worker_id: worker_id.to_owned(),
        data_addr: free,
        control_addr: free,
        admin_addr: free,
        report_interval_ms: 100,
        load_interval_ms: 50,
        vocabulary: 320,
        nvml_library: "no-nvml".into(),
        ..Config::default()
    }
}

impl Agent {
    /// Starts an agent. The agent may not have reached its engine yet when this returns.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    #[expect(clippy::disallowed_methods, reason = "a process of its own, here as a task")]
    pub fn start(mut config: Config) -> anyhow::Result<Self> {
        let named = !config.state_dir.as_os_str().is_empty();
        let state = if named { None } else { Some(tempfile::tempdir()?) };
        if let Some(state) = &state {
            config.state_dir = state.path().to_owned();
        }
        let listeners = Listeners::bind(&config)?;
        let (data, control, admin) = (
            listeners.data.local_addr()?,
            listeners.control.local_addr()?,
            listeners.admin.local_addr()?,
        );
        let stop = CancellationToken::new();
        let epoch = service::clock::unix_ns();
        let ended = tokio::spawn(worker_agent::run(config, listeners, epoch, stop.clone()));
        Ok(Self { data, control, admin, stop, ended, _state: state })
    }

    /// Returns the URL of a data route.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.data)
    }

    /// Returns the URL of an admin route.
    #[must_use]
    pub fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin)
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
        self.stop.cancel();
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
    tasks: Tasks,
    ended: JoinHandle<Result<(), router::Error>>,
}

/// Returns settings for tests: all addresses on port 0, and the agents' control ports. Limits are
/// long enough that a slow machine makes no agent stale or unreachable.
#[must_use]
pub fn router_config(agents: &[&Agent]) -> router::config::Config {
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    router::config::Config {
        workers: agents.iter().map(|agent| format!("http://{}", agent.control)).collect(),
        data_addr: free,
        admin_addr: free,
        load_report_age_ms_max: 60_000,
        // A pinned session of an agent that is gone waits this long for the agent's return.
        connect_ms_max: 5_000,
        ..router::config::Config::default()
    }
}

impl Router {
    /// Starts a router. The router may not have heard from its agents yet when this returns.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    #[expect(clippy::disallowed_methods, reason = "a process of its own, here as a task")]
    pub async fn start(config: router::config::Config) -> anyhow::Result<Self> {
        let data = tokio::net::TcpListener::bind(config.data_addr).await?;
        let admin = std::net::TcpListener::bind(config.admin_addr)?;
        let addrs = (data.local_addr()?, admin.local_addr()?);
        let tasks = Tasks::default();
        let listeners = router::Listeners { data, admin };
        let ended = tokio::spawn(router::run(config, listeners, tasks.clone()));
        Ok(Self { data: addrs.0, admin: addrs.1, tasks, ended })
    }

    /// Returns the URL of a data route.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.data)
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

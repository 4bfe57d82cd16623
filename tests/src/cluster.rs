//! Agents and routers in this process, on free ports of the loopback address, beside engines of any
//! kind. What runs is what the binaries run.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use proto::process::tasks::Tasks;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use worker_agent::{Listeners, config::Config};

/// Whatever a test waits for comes within this time or never: it takes seconds at most, and on a
/// loaded machine several times that.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A running agent. Dropped without [`Agent::stop`], its tasks end with the runtime.
#[derive(Debug)]
pub struct Agent {
    /// Turns.
    pub data: SocketAddr,
    /// Routers.
    pub control: SocketAddr,
    /// Metrics and health.
    pub admin: SocketAddr,
    stop: CancellationToken,
    ended: JoinHandle<Result<(), worker_agent::Error>>,
    /// Goes with the agent, unless the settings named one.
    _state: Option<tempfile::TempDir>,
}

/// Port 0 of a loopback address of its own: when who listened there is gone, nobody else does, but
/// for one process in 250 beside this one.
pub fn own_addr() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let net = u8::try_from(1 + std::process::id() % 250).expect("at most 250");
    SocketAddr::from(([127, net, high, low], 0))
}

/// Settings that suit tests: free ports of its own address, quick reports, the toy model's
/// vocabulary, and no GPU, whatever this machine has.
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
    /// Starts an agent. It need not have reached its engine when this returns.
    ///
    /// # Errors
    /// When a port can't be bound.
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
        let epoch = proto::process::epoch();
        let ended = tokio::spawn(worker_agent::run(config, listeners, epoch, stop.clone()));
        Ok(Self { data, control, admin, stop, ended, _state: state })
    }

    /// URL of a data route.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.data)
    }

    /// URL of an admin route.
    #[must_use]
    pub fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin)
    }

    /// Stops it as a signal would, and waits for its end.
    ///
    /// # Errors
    /// What `run` returned.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.stop.cancel();
        Ok(tokio::time::timeout(PATIENCE, self.ended).await???)
    }
}

/// A running router. Dropped without [`Router::stop`], its tasks end with the runtime.
#[derive(Debug)]
pub struct Router {
    /// Clients.
    pub data: SocketAddr,
    /// Metrics and health.
    pub admin: SocketAddr,
    tasks: Tasks,
    ended: JoinHandle<Result<(), router::Error>>,
}

/// Settings that suit tests: everything on port 0, these agents' control ports. No agent is silent
/// or out of reach because the whole machine is slow.
#[must_use]
pub fn router_config(agents: &[&Agent]) -> router::config::Config {
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    router::config::Config {
        workers: agents.iter().map(|agent| format!("http://{}", agent.control)).collect(),
        data_addr: free,
        admin_addr: free,
        load_report_age_ms_max: 60_000,
        // A pinned session of an agent that is gone waits so long for its return.
        connect_ms_max: 5_000,
        ..router::config::Config::default()
    }
}

impl Router {
    /// Starts a router. It need not have heard of its agents when this returns.
    ///
    /// # Errors
    /// When a port can't be bound.
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

    /// URL of a data route.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.data)
    }

    /// URL of an admin route.
    #[must_use]
    pub fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin)
    }

    /// Stops it as a signal would, and waits for its end.
    ///
    /// # Errors
    /// What `run` returned.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.tasks.cancel();
        Ok(tokio::time::timeout(PATIENCE, self.ended).await???)
    }
}

/// Waits until an agent or router says that it is ready.
///
/// # Panics
/// When it doesn't in time.
pub async fn ready(web: &crate::web::Web, admin: SocketAddr) {
    let url = format!("http://{admin}/readyz");
    eventually("readiness", || async {
        let answer = web.get(&url).await.ok()?;
        (answer.status == http::StatusCode::OK).then_some(())
    })
    .await;
}

/// Asks again and again until the answer is `Some`, which is how a state of another process is
/// waited for.
///
/// # Panics
/// When it doesn't come in time; `what` says what was waited for.
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

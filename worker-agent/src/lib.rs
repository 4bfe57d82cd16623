//! Runs Berth's worker agent: one process that keeps the sessions of one SGLang engine beside it.
//!
//! The agent passes turns from routers to the engine, keeps sessions' KV there, accounts for the KV
//! pool, and reports to routers. It doesn't place turns on workers, doesn't know other workers, and
//! stores no prompts. CONTRIBUTING.md shows the path of a turn.

mod admin_actions;
mod announcer;
pub mod audit;
pub mod config;
pub mod control_port;
pub mod data_port;
pub mod engine;
pub mod gpu;
pub mod guard;
pub mod incarnation;
pub mod kv_events;
pub mod ledger;
pub mod metrics;
pub mod owner;
pub mod program;
pub mod session;
pub mod shim;
pub mod staged_prefill;
pub mod staged_prefill_queue;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use prometheus_client::registry::Registry;
use service::{
    admin::{self, AdminData},
    auth::{gate::Gate, key_file},
    budget::BodyBudget,
    clock,
    descriptors::{self, DescriptorPlan},
    metrics::Registrar,
    process_metrics,
    proof::agent::AgentProofs,
    reload,
    router_token::Tokens,
    server::{self, LocalPort, PortLimits},
    settings,
    supervisor::{self, Watchdog},
    tasks::Tasks,
    tls::server::ServerTls,
    traces::{self, Traces, TracesEnd, record::Exported},
};
use tokio::sync::{Notify, mpsc, watch};

use crate::{
    announcer::Announcer,
    config::{Config, ms},
    control_port::ControlListener,
    data_port::{PortAccess, RouterAuth, TurnContext},
    engine::EngineClient,
    gpu::{Gpus, tracker::Snapshot},
    guard::Guards,
    ledger::Limits,
    metrics::{Metrics, readiness},
    owner::{AgentHandle, Ending, engine_monitor::EngineMonitor},
    session::{ShareSettings, TableSettings, journal::Journal},
    shim::ShimHandle,
    staged_prefill::StagedPrefillRunner,
    staged_prefill_queue::StagedPrefillQueues,
};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// To the data port, however many turns may run and wait. With the default settings, eight GPUs run
/// and queue fewer turns.
const CLIENT_CONNECTIONS_MAX: usize = 8192;
/// Each router has two or three.
const CONTROL_CONNECTIONS_MAX: usize = 1024;
/// The engine is on this host, so a connection takes microseconds or fails.
const ENGINE_CONNECT_TIME_MAX: Duration = Duration::from_secs(1);
/// A small queue is enough: while it is full, the reader of the shim's messages keeps only the
/// newest state of the pool and of each session.
const SHIM_EVENTS_QUEUED_MAX: usize = 64;
/// The owner task takes microseconds for each of the trimmer's messages.
const TRIMMER_EVENTS_QUEUED_MAX: usize = 64;
const SHUTDOWN_TIME_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Listeners {
    /// For turns (HTTP).
    pub data: std::net::TcpListener,
    /// For routers (gRPC).
    pub control: std::net::TcpListener,
    /// For metrics and health (HTTP).
    pub admin: std::net::TcpListener,
    /// For turns of a router in the same process.
    pub local: LocalPort,
}

impl Listeners {
    pub fn bind(config: &Config) -> Result<Self, Error> {
        let bind = |addr| server::bind(addr).map_err(|error| Error::Bind { addr, source: error });
        Ok(Self {
            data: bind(config.listen.data_addr)?,
            control: bind(config.listen.control_addr)?,
            admin: bind(config.listen.admin_addr)?,
            local: LocalPort::default(),
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("can't listen on {addr}")]
    Bind {
        /// In use, or not local.
        addr: std::net::SocketAddr,
        source: std::io::Error,
    },
    /// The journal can't be used, or another agent holds it.
    #[error(transparent)]
    Journal(#[from] session::journal::Error),
    #[error(transparent)]
    Shim(#[from] shim::Error),
    /// A thread or a runtime could not be created.
    #[error("can't start")]
    Start(#[from] std::io::Error),
    #[error("can't use a file named in [tls], [auth] or [announce]")]
    File(#[from] reload::Error),
    #[error(transparent)]
    Traces(#[from] traces::Error),
    #[error("an essential task ended; the log says which and why")]
    TaskEnded,
}

/// Runs one agent until `stop` ends, then drains it: takes no new turns, lets running turns end,
/// and closes every session at the engine or hands them over to the next agent, as `stop` says.
///
/// `epoch` must differ from that of every earlier run of the same agent. Several agents may run in
/// one process.
pub async fn run(
    mut config: Config,
    listeners: Listeners,
    epoch: u64,
    stop: impl Future<Output = Ending>,
) -> Result<(), Error> {
    let tasks = Tasks::default();
    let mut root = Registry::default();
    let registry = &mut process_metrics::register(&mut root, "berth_agent", VERSION);
    let (metrics, port_limits) = (Metrics::new(registry), limit_ports(&mut config, registry));
    let engine = engine_client(&config);
    log_start(&config, &listeners)?;
    let gpus = gpu::start((&config).into())?;
    let file_metrics = reload::Metrics::new(registry);
    let control = listeners.control.local_addr()?;
    let access = start_access(&config, control, &file_metrics, &tasks)?;
    let announcer = announcer::start(&config, control, &access, &file_metrics, registry, &tasks)?;
    let (agent, shim, queues) =
        start_agent(&config, &gpus, &listeners, epoch, &engine, &metrics, &tasks)?;
    let (traces, traces_end) = start_traces(&config, control, registry, &file_metrics, &tasks)?;
    let kv_events = start_kv_events(&config, epoch, shim, registry, &tasks)?;
    let (found_files_sender, found_files) = watch::channel(None);
    control_port::start(
        agent.clone(),
        kv_events.clone(),
        epoch,
        found_files,
        port_limits.control_listener(listeners.control, access.clone(), registry),
        tasks.token(),
    )?;
    let ready = readiness::track(agent.report.clone(), &metrics, &tasks);
    gpu::metrics::register(registry, gpus.subscribe(), agent.report.clone());
    let gate = admin_gate(&config, &listeners.admin, &file_metrics, &tasks)?;
    let (text, actions) = (settings::to_toml(&config), admin_actions::routes(agent.clone()));
    let data = AdminData { registry: Arc::new(root), ready, config: text, gate, actions };
    admin::start(data, listeners.admin, port_limits.admin, tasks.token())?;
    let (limits, wake_monitor) = (&config.limits, Arc::new(Notify::new()));
    let monitor = EngineMonitor {
        engine: engine.clone(),
        owner: agent.clone(),
        kv_events,
        sample_interval: ms(config.engine.load_interval_ms),
        wake: Arc::clone(&wake_monitor),
        bootstrap_host: Some(config.engine.bootstrap_host.clone()).filter(|host| !host.is_empty()),
        configured_vocabulary_size: Some(config.engine.vocabulary).filter(|size| *size > 0),
        found_files_sender,
    };
    tasks.spawn_essential("engine monitor", owner::engine_monitor::run(monitor, tasks.clone()));
    let context = Arc::new(TurnContext {
        agent: agent.clone(),
        router_auth: access.router_auth,
        engine,
        body_budget: BodyBudget::new(limits.body_bytes_max, limits.body_bytes_in_flight_max),
        reading: Arc::default(),
        turn_time_max: ms(limits.turn_ms_max),
        wake_monitor,
        tasks: tasks.clone(),
        turns: data_port::aborts::AgentTurns::default(),
        metrics,
        traces,
    });
    serve_turns((listeners.data, listeners.local), context, queues, access.tls, port_limits.data)?;
    tokio::select! {
        ending = stop => drain(&agent, &announcer, ms(config.shutdown.drain_ms_max), ending).await,
        () = tasks.cancelled() => {}
    }
    let ended_cleanly = tasks.stop(SHUTDOWN_TIME_MAX).await;
    traces_end.flush().await;
    if ended_cleanly { Ok(()) } else { Err(Error::TaskEnded) }
}

/// Registers what [`run`] registers with one setting or another, for the page of metrics.
pub fn register_metrics(registry: &mut Registrar<'_>) {
    reload::Metrics::new(registry);
    server::Metrics::new(registry);
    traces::Metrics::new(registry);
    Metrics::new(registry);
    announcer::Metrics::new(registry);
    control_port::Metrics::new(registry);
    kv_events::metrics::Metrics::new(registry);
    let snapshot = Snapshot::without_devices(clock::now());
    let (_, snapshot) = watch::channel(Arc::new(snapshot));
    let (_, report) = watch::channel(Arc::default());
    gpu::metrics::register(registry, snapshot, report);
}

fn start_traces(
    config: &Config,
    control: SocketAddr,
    registry: &mut Registrar<'_>,
    file_metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<(Traces, TracesEnd), traces::Error> {
    let (service, version) = ("berth-agent", VERSION);
    let exported = Exported { service, version, instance: config.agent_id(control) };
    traces::start(&config.traces, exported, registry, file_metrics, tasks)
}

fn start_kv_events(
    config: &Config,
    epoch: u64,
    shim: ShimHandle,
    registry: &mut Registrar<'_>,
    tasks: &Tasks,
) -> std::io::Result<kv_events::KvHandle> {
    let republish_interval = ms(config.engine.republish_interval_ms);
    let metrics = kv_events::metrics::Metrics::new(registry);
    let setup = kv_events::KvSetup { epoch, shim, republish_interval, metrics };
    kv_events::start(setup, tasks.token())
}

struct AgentPortLimits {
    data: PortLimits,
    admin: PortLimits,
    control_connections_max: usize,
    metrics: server::Metrics,
}

impl AgentPortLimits {
    fn control_listener(
        &self,
        socket: std::net::TcpListener,
        access: PortAccess,
        registry: &mut Registrar<'_>,
    ) -> ControlListener {
        ControlListener {
            socket,
            access,
            connections_max: self.control_connections_max,
            port_metrics: self.metrics.clone(),
            metrics: control_port::Metrics::new(registry),
        }
    }
}

/// With few file descriptors, lowers the limits on turns too.
fn limit_ports(config: &mut Config, registry: &mut Registrar<'_>) -> AgentPortLimits {
    let plan = DescriptorPlan::new(descriptors::raise_limit(), server::DESCRIPTORS_RESERVED);
    let metrics = server::Metrics::new(registry);
    let described_turns = plan.turns.min(CLIENT_CONNECTIONS_MAX);
    if config.limits.fit_to_connections(described_turns) {
        let (in_flight, queued) =
            (config.limits.turns_in_flight_max, config.limits.turns_queued_max);
        tracing::warn!(in_flight, queued, "few file descriptors, so fewer turns may run and wait");
    }
    let data = PortLimits::data(&config.connections, turns_max(config), described_turns, &metrics);
    AgentPortLimits {
        data: data.behind_routers(),
        admin: PortLimits::admin(&metrics),
        control_connections_max: plan.fleet.min(CONTROL_CONNECTIONS_MAX),
        metrics,
    }
}

/// Called last, because it tells the supervisor that the agent is ready.
fn serve_turns(
    (listener, local): (std::net::TcpListener, LocalPort),
    context: Arc<TurnContext>,
    queues: Option<Arc<StagedPrefillQueues>>,
    tls: Option<ServerTls>,
    port_limits: PortLimits,
) -> Result<(), Error> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let staged_prefill_routes = queues.map_or_else(Router::new, |queues| {
        StagedPrefillRunner::new(queues, Arc::clone(&context)).routes()
    });
    let tasks = context.tasks.clone();
    let app = data_port::app(context, staged_prefill_routes);
    local.open(app.for_own_router(), tasks.token());
    let data_server = server::serve(listener, app, port_limits, tls, tasks.clone());
    tasks.spawn_essential("data port", data_server);
    supervisor::tell_ready();
    Ok(())
}

fn admin_gate(
    config: &Config,
    listener: &std::net::TcpListener,
    metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<Gate, Error> {
    let source = config.auth.keys_path().map(key_file::source);
    let keys = source.map(|source| reload::start(source, metrics, tasks)).transpose()?;
    let address = listener.local_addr()?.ip();
    Ok(Gate::new(keys, config.auth.metrics_auth, address))
}

/// The turns and staged prompts that may run and wait. Each has a connection.
fn turns_max(config: &Config) -> usize {
    let turns_max = limits(config).turns_max_over_ranks() + config.limits.turns_queued_max;
    turns_max + staged_prefill_queue::PROMPTS_MAX
}

/// Running turns may continue for `grace_period`.
async fn drain(agent: &AgentHandle, announcer: &Announcer, grace_period: Duration, ending: Ending) {
    supervisor::tell_stopping();
    // The next agent process takes up sessions that are handed over, so routers wait for it.
    let withdrawal = async {
        if ending == Ending::Close {
            announcer.withdraw().await;
        }
    };
    // After `grace_period`, aborting the remaining turns and closing the sessions takes time too.
    let total_time_max = grace_period + config::ABORT_WAIT_MAX;
    let drain = tokio::time::timeout(total_time_max, agent.drain(grace_period, ending));
    if tokio::join!(drain, withdrawal).0.is_err() {
        tracing::warn!("the drain timed out; some sessions may be left open at the engine");
    }
}

fn engine_client(config: &Config) -> EngineClient {
    EngineClient::new(
        config.engine_uri(),
        config::engine_api_key().expect("checked when the settings were loaded"),
        ENGINE_CONNECT_TIME_MAX,
        ms(config.engine.call_ms_max),
    )
    .with_admin_key(config::engine_admin_key().expect("checked when the settings were loaded"))
}

fn start_access(
    config: &Config,
    control: SocketAddr,
    metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<PortAccess, Error> {
    let tls = config.tls.server_files().map(|files| files.start(metrics, tasks)).transpose()?;
    let tokens = config::path_if_set(&config.auth.token_file).map(Tokens::source);
    let tokens = tokens.map(|source| reload::start(source, metrics, tasks)).transpose()?;
    let proofs = tokens.map(|tokens| Arc::new(AgentProofs::new(config.agent_id(control), tokens)));
    let has_mutual_tls = config.tls.demands_certificates();
    let own_names = [config.advertise.host.clone()].into();
    let router_auth = RouterAuth { proofs, has_mutual_tls, own_names };
    if !router_auth.is_demanded() {
        tracing::info!("routers aren't authenticated: every process of this host may act as one");
        if config::engine_api_key().is_ok_and(|key| key.is_some()) {
            tracing::warn!(
                "turns don't get the engine's API key, because their router isn't authenticated; \
                 set auth.token_file or tls.client_ca"
            );
        }
    }
    Ok(PortAccess { router_auth, tls })
}

fn log_start(config: &Config, listeners: &Listeners) -> Result<(), Error> {
    let (data, control) = (listeners.data.local_addr()?, listeners.control.local_addr()?);
    tracing::info!(
        version = VERSION,
        engine = config.engine.url,
        %data,
        %control,
        admin = %listeners.admin.local_addr()?,
        "agent starting"
    );
    if data.ip().is_loopback() && !control.ip().is_loopback() {
        tracing::warn!(
            "routers on other hosts can reach the control port but not the data port; set data_addr"
        );
    }
    Ok(())
}

fn start_agent(
    config: &Config,
    gpus: &Gpus,
    listeners: &Listeners,
    epoch: u64,
    engine: &EngineClient,
    metrics: &Metrics,
    tasks: &Tasks,
) -> Result<(AgentHandle, ShimHandle, Option<Arc<StagedPrefillQueues>>), Error> {
    let (data_addr, control_addr) = (listeners.data.local_addr()?, listeners.control.local_addr()?);
    let agent_id = config.agent_id(control_addr);
    let data_tls = config.tls.server_files().is_some();
    let table_settings = table_settings(config, &agent_id, epoch);
    // The journal must be opened first, because it is a lock: only one agent at a time can hold it,
    // and only that agent may use the engine and its shim.
    let journal = Journal::open(&config.state_dir(), &format!("engine-{}", config.engine_port()))?;
    let (shim_sender, shim_events) = mpsc::channel(SHIM_EVENTS_QUEUED_MAX);
    let shim = shim::listen(&config.shim_socket(), shim_sender, tasks)?;
    let (trimmer_sender, trimmer_events) = mpsc::channel(TRIMMER_EVENTS_QUEUED_MAX);
    let trimmer = shim::trim::listen(&config.shim_socket(), trimmer_sender, tasks)?;
    let queues = (config.engine.prefill_stage_ms > 0)
        .then(|| Arc::new(StagedPrefillQueues::new(config.engine.prefill_stage_ms)));
    let reporter = owner::ReporterSetup {
        agent_id,
        epoch,
        advertised: config.advertise.resolve(data_addr, control_addr, data_tls),
        data_tls,
        staged_prefill_queues: queues.clone(),
        report_interval: ms(config.reports.interval_ms),
        watchdog: Watchdog::start()?,
    };
    let setup = owner::OwnerSetup {
        reporter,
        shim: shim.clone(),
        trimmer,
        engine: engine.clone(),
        gpus: gpus.clone(),
        limits: limits(config),
        table_settings,
        journal,
        metrics: metrics.clone(),
        audit_interval: (config.audit.interval_s > 0)
            .then(|| Duration::from_secs(config.audit.interval_s)),
        engine_patience: owner::EnginePatience {
            stall_max: ms(config.engine.stall_ms_max),
            silent_max: ms(config.engine.silent_ms_max),
        },
    };
    Ok((owner::start(setup, shim_events, trimmer_events, tasks), shim, queues))
}

fn table_settings(config: &Config, agent_id: &str, epoch: u64) -> TableSettings {
    TableSettings {
        incarnation_prefix: incarnation::prefix(agent_id, epoch),
        idle_max: ms(config.sessions.idle_ms_max),
        demote_idle: ms(config.sessions.demote_idle_ms),
        turns_queued_per_session_max: config.sessions.turns_queued_per_session_max,
        turns_queued_max: config.limits.turns_queued_max,
        queue_wait_max: ms(config.limits.queue_wait_ms_max),
        stuck_after: config::ABORT_WAIT_MAX * 2,
        auto_pin: config.sessions.auto_pin,
        answer_tokens_min: session::ANSWER_TOKENS_MIN,
        shim_requests_max: session::SHIM_REQUESTS_MAX,
        shares: ShareSettings {
            sessions_max: config.limits.sessions_max,
            principal_sessions_max: config.limits.principal_sessions_max,
            idle_cap: ms(config.sessions.idle_ms_cap),
            turns_milli: config::to_milli(config.limits.principal_turns_ratio),
        },
        guards: Guards::default(),
    }
}

fn limits(config: &Config) -> Limits {
    Limits {
        rows_reserve: config.sessions.rows_reserve,
        pin_rows_ratio: config.sessions.pin_rows_ratio,
        pin_budget_ratio: config.sessions.pin_budget_ratio,
        turns_max: config.limits.turns_in_flight_max,
        host_load_bytes_per_s: config.engine.host_load_bytes_per_s,
    }
}

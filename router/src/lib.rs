//! Berth's router: places turns on workers, sticky to their KV, and streams the answers.
//!
//! It stores nothing on disk, and nothing in memory that it can't relearn from the agents. It talks
//! to agents only, never to an engine itself. Each module uses only those after it in this list:
//!
//! `http`, `agent_tasks`, [`turn`], `claims`, [`placement`], [`residency`], [`prompt`],
//! `discovery`, [`fleet`]. Every module may use [`config`], `metrics`, [`auth`], and `shares`.

mod agent_tasks;
pub mod auth;
pub mod config;
mod discovery;
pub mod fleet;
mod http;
mod metrics;
pub mod placement;
pub mod prompt;
pub mod residency;
pub mod sessions;
mod shares;
pub mod turn;

pub use self::http::openapi::build_document as openapi_document;

use std::{net::IpAddr, sync::Arc};

use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use service::{
    abortable_turns::AbortableTurns,
    admin::{self, AdminData},
    auth::{
        gate::{self, Gate},
        key_file,
        keys::KeySet,
    },
    descriptors::{self, DescriptorPlan},
    metrics::Registrar,
    process_metrics,
    reload::{self, Reloaded},
    router_token::Tokens,
    server::{self, LocalPorts, PortLimits},
    settings::{self, Problems},
    supervisor::{self, Watchdog},
    tasks::Tasks,
    tls::server::ServerTls,
    traces::{self, Traces, TracesEnd, record::Exported},
};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::{
    agent_tasks::{AgentTasks, FollowSettings},
    auth::{
        Authenticator,
        jwks::{self, JwksStore},
    },
    config::{Config, jwt::JwtTable, tables::LimitsTable},
    discovery::announce::Announcements,
    fleet::{
        collector::FleetCollector,
        control::ControlClients,
        dial::AgentCredentials,
        state::State,
        view::{self, UpdateSender, View},
    },
    metrics::Metrics,
    prompt::models::{self, Models},
    residency::{block_locator::BlockLocator, collector::KvIndexCollector, kv_index::KvIndex},
    sessions::{
        bindings::Bindings,
        claims::{self, OpenStore, PlacementClaims},
        directory::SessionDirectory,
        lifecycle::Lifecycle,
        renewal, split_sessions,
    },
    shares::{PoolSizes, Shares, collector::SharesCollector},
    turn::{
        access_log::{AccessLog, LogEnd},
        body::Bodies,
        ended::{self, RecentTurns},
        model_names::ModelNames,
        placer::Placer,
        session_names::SessionHeaders,
        shared::Shared,
        upstream::{Pulses, UpstreamClient, UpstreamConnections},
    },
};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Names that came once and may be the names of requests have a table of their own, so that they
/// take no session's place. With 100 such requests a second, a name is known for two minutes; a
/// place takes about half a KiB.
const NAMES_SEEN_ONCE_MAX: usize = 16_384;

/// The most lists of sources that wait for the view task. Each source waits for a place.
const SOURCE_NEWS_MAX: usize = 16;

/// A larger fleet may need more descriptors for idle connections than planned, until idle ones are
/// closed after 10 s.
const DISCOVERED_AGENTS_EXPECTED: usize = 256;

#[derive(Debug)]
pub struct Listeners {
    pub data: tokio::net::TcpListener,
    pub admin: std::net::TcpListener,
    /// The data ports of agents in this process.
    pub agents: LocalPorts,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the router can't start with invalid settings")]
    Settings(#[source] Problems),
    #[error("can't use a file named in [tls], [agents], [claims] or [auth]")]
    File(#[from] reload::Error),
    /// Also stands for an address of a port that can't be read.
    #[error("the admin port can't be served")]
    Admin(#[source] std::io::Error),
    #[error("can't write to the file that log.access names")]
    AccessLog(#[source] std::io::Error),
    #[error(transparent)]
    Traces(#[from] traces::Error),
    #[error("the thread for systemd's watchdog can't be created")]
    Watchdog(#[source] std::io::Error),
    #[error(transparent)]
    Tokens(#[from] jwks::Error),
    #[error(transparent)]
    Claims(#[from] claims::SetupError),
    #[error("an essential task ended; see the log entries before this")]
    TaskEnded,
}

/// Runs a router until `tasks` leaves, and for the setting `lame_duck_ms` after that, or until
/// `tasks` is cancelled. Then running turns get the setting `drain_ms_max` to end.
pub async fn run(mut config: Config, listeners: Listeners, tasks: Tasks) -> Result<(), Error> {
    let problems = config.problems();
    if !problems.is_empty() {
        return Err(Error::Settings(Problems(problems)));
    }
    let mut root = Registry::default();
    let registry = &mut process_metrics::register(&mut root, "berth_router", VERSION);
    let file_metrics = reload::Metrics::new(registry);
    let (tls, credentials) = start_access(&config, &file_metrics, &tasks)?;
    let state = State::new(&config);
    let view = Arc::new(View::new(state.snapshot(), state.conversations()));
    let (metrics, port_metrics) = (Metrics::new(registry), server::Metrics::new(registry));
    let claim_store = open_claim_store(&config, registry, &file_metrics, &tasks)?;
    let descriptors = DescriptorPlan::new(descriptors::raise_limit(), server::DESCRIPTORS_RESERVED);
    fit_limits(&mut config.limits, &descriptors);
    let data_limits = data_limits(&config, &descriptors, &port_metrics);
    let shares = Shares::new(PoolSizes::new(&config.limits, data_limits.shared_requests()));
    let kv_index = Arc::new(KvIndex::new(config.limits.overlap_bytes_max));
    add_collectors(registry, &view, &shares, &kv_index);
    let (data_ip, admin_ip) = port_ips(&listeners).map_err(Error::Admin)?;
    let keys = follow_keys(&config, &file_metrics, &tasks)?;
    let tokens = follow_tokens(&config, registry, &file_metrics, &tasks)?;
    let auth = Authenticator::new(keys.clone(), tokens, data_ip, config.agents.proves_itself());
    log_auth(&config, data_ip);
    let (ready_sender, ready) = watch::channel(Err("starting".to_owned()));
    let (updates, mailbox) = mpsc::channel(view::MAILBOX_UPDATES_MAX);
    let (news_sender, news) = mpsc::channel(SOURCE_NEWS_MAX);
    let sources = discovery::Metrics::new(registry);
    let announcements = discovery::start(&config, &credentials, &news_sender, &sources, &tasks);
    let (access_log, _log_end) = start_access_log(&config, registry)?.unzip();
    let (traces, traces_end) = start_traces(&config, registry, &file_metrics, &tasks)?;
    let watchdog = Watchdog::start().map_err(Error::Watchdog)?;
    tasks.spawn_essential(
        "view",
        view::run(state, mailbox, news, Arc::clone(&view), ready_sender, watchdog, tasks.clone()),
    );
    let parts = FleetParts {
        view,
        kv_index,
        metrics,
        claim_store,
        shares,
        credentials,
        updates,
        idle_connections_max: descriptors.fleet,
        local_ports: listeners.agents,
        announcements,
        access_log,
        traces,
    };
    let shared = start_fleet(&config, parts, auth, &tasks);
    let admin_data = AdminData {
        registry: Arc::new(root),
        ready,
        config: settings::to_toml(&config),
        gate: Gate::new(keys, config.auth.metrics_auth, admin_ip),
        actions: http::dashboard::start(&shared, &tasks),
    };
    // The admin port stays open during the drain, so that the drain can be watched.
    let admin_token = tokio_util::sync::CancellationToken::new();
    let _admin_stop_guard = admin_token.clone().drop_guard();
    let admin_limits = PortLimits::admin(&port_metrics);
    admin::start(admin_data, listeners.admin, admin_limits, admin_token).map_err(Error::Admin)?;
    log_listening(&config, &listeners.data);
    let app = http::build_app(shared, &config.listen);
    let data_server = server::serve(listeners.data, app, data_limits, tls, tasks.clone());
    tasks.spawn_essential("data", data_server);
    supervisor::tell_ready();
    leave(&config, &tasks, traces_end).await
}

fn data_limits(config: &Config, plan: &DescriptorPlan, metrics: &server::Metrics) -> PortLimits {
    let turns_max = config.limits.turns_in_flight_max;
    PortLimits::data(&config.connections, turns_max, plan.turns, metrics)
}

async fn leave(config: &Config, tasks: &Tasks, traces_end: TracesEnd) -> Result<(), Error> {
    tasks.leave_token().cancelled().await;
    supervisor::tell_stopping();
    info!(lame_duck_ms = config.lame_duck().as_millis(), "leaving: not ready, serving on");
    // A second signal ends the wait.
    let _ = tokio::time::timeout(config.lame_duck(), tasks.cancelled()).await;
    info!(drain_ms_max = config.drain_max().as_millis(), "draining");
    let ended_cleanly = tasks.stop(config.drain_max()).await;
    traces_end.flush().await;
    info!("stopped");
    if ended_cleanly { Ok(()) } else { Err(Error::TaskEnded) }
}

/// Registers what [`run`] registers with one setting or another, for the page of metrics.
pub fn register_metrics(registry: &mut Registrar<'_>) {
    reload::Metrics::new(registry);
    server::Metrics::new(registry);
    traces::Metrics::new(registry);
    Metrics::new(registry);
    claims::metrics::Metrics::new(registry);
    jwks::Metrics::new(registry);
    discovery::Metrics::new(registry);
    turn::access_log::Metrics::new(registry);
    let config = Config::default();
    let state = State::new(&config);
    let view = Arc::new(View::new(state.snapshot(), state.conversations()));
    let shares = Shares::new(PoolSizes::new(&config.limits, 0));
    let kv_index = Arc::new(KvIndex::new(config.limits.overlap_bytes_max));
    add_collectors(registry, &view, &shares, &kv_index);
}

fn add_collectors(
    registry: &mut Registrar<'_>,
    view: &Arc<View>,
    shares: &Arc<Shares>,
    kv_index: &Arc<KvIndex>,
) {
    let (view, kv_index) = (Arc::clone(view), Arc::clone(kv_index));
    registry.add_collector(SharesCollector(Arc::clone(shares)));
    registry.add_collector(FleetCollector(Arc::clone(&view)));
    registry.add_collector(KvIndexCollector { view, kv_index });
}

fn fit_limits(limits: &mut LimitsTable, descriptors: &DescriptorPlan) {
    if limits.fit_to_connections(descriptors.turns) {
        let turns = limits.turns_in_flight_max;
        warn!(turns, "few file descriptors, so fewer turns may be in flight");
    }
}

fn port_ips(listeners: &Listeners) -> std::io::Result<(IpAddr, IpAddr)> {
    Ok((listeners.data.local_addr()?.ip(), listeners.admin.local_addr()?.ip()))
}

fn follow_keys(
    config: &Config,
    metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<Option<Reloaded<KeySet>>, reload::Error> {
    let source = config.auth.keys_path().map(key_file::source);
    source.map(|source| reload::start(source, metrics, tasks)).transpose()
}

/// `None` if no tokens are accepted.
fn follow_tokens(
    config: &Config,
    registry: &mut Registrar<'_>,
    metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<Option<(JwtTable, JwksStore)>, jwks::Error> {
    let settings = &config.auth.jwt;
    if !settings.is_on() {
        return Ok(None);
    }
    let store = JwksStore::start(settings, registry, metrics, tasks)?;
    Ok(Some((settings.clone(), store)))
}

fn log_listening(config: &Config, listener: &tokio::net::TcpListener) {
    let address = listener.local_addr().map(|address| address.to_string());
    info!(address = address.unwrap_or_default(), agents = config.workers.len(), "router listens");
}

fn log_auth(config: &Config, data_ip: IpAddr) {
    if config.auth.needs_credential() {
        return;
    }
    if gate::is_local(data_ip) {
        info!("no keys are set: the router serves this host only, and everybody on it");
    } else {
        warn!("no keys are set: the router serves everybody who reaches it");
    }
}

fn start_access(
    config: &Config,
    metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<(Option<ServerTls>, AgentCredentials), Error> {
    let server_files = config.tls.server_files();
    let server = server_files.map(|files| files.start(metrics, tasks)).transpose()?;
    let client_files = config.agents.client_files();
    let tls = client_files.map(|files| files.start(metrics, tasks)).transpose()?;
    let token_file = config.agents.token_file();
    let tokens =
        token_file.map(|path| reload::start(Tokens::source(path), metrics, tasks)).transpose()?;
    Ok((server, AgentCredentials { tls, tokens }))
}

struct FleetParts {
    view: Arc<View>,
    kv_index: Arc<KvIndex>,
    metrics: Metrics,
    claim_store: OpenStore,
    shares: Arc<Shares>,
    credentials: AgentCredentials,
    updates: UpdateSender,
    idle_connections_max: usize,
    local_ports: LocalPorts,
    announcements: Option<Arc<Announcements>>,
    access_log: Option<AccessLog>,
    traces: Traces,
}

fn open_claim_store(
    config: &Config,
    registry: &mut Registrar<'_>,
    file_metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<OpenStore, Error> {
    let files = config.claims.client_files();
    let tls = files.map(|files| files.start(file_metrics, tasks)).transpose()?;
    let metrics = claims::metrics::Metrics::new(registry);
    Ok(OpenStore::open(&config.claims, tls, metrics, tasks)?)
}

fn start_fleet(
    config: &Config,
    parts: FleetParts,
    auth: Authenticator,
    tasks: &Tasks,
) -> Arc<Shared> {
    let follow_settings = FollowSettings {
        connect_max: config.connect_max(),
        sessions_max: config.limits.sessions_max,
        credentials: parts.credentials.clone(),
    };
    let (view, updates) = (Arc::clone(&parts.view), parts.updates.clone());
    let control_clients = Arc::new(ControlClients::default());
    let shared = build_shared(config, parts, &control_clients, auth, tasks);
    let followed = Arc::clone(&shared);
    let agent_tasks =
        AgentTasks::new(follow_settings, view, followed, control_clients, updates, tasks.clone());
    tasks.spawn_essential("agents", agent_tasks.run());
    shared
}

fn start_access_log(
    config: &Config,
    registry: &mut Registrar<'_>,
) -> Result<Option<(AccessLog, LogEnd)>, Error> {
    let path = config.log.access.as_path();
    let is_on = !path.as_os_str().is_empty();
    is_on.then(|| AccessLog::start(path, registry)).transpose().map_err(Error::AccessLog)
}

fn start_traces(
    config: &Config,
    registry: &mut Registrar<'_>,
    file_metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<(Traces, TracesEnd), traces::Error> {
    let (service, version) = ("berth-router", VERSION);
    let exported = Exported { service, version, instance: format!("{:016x}", fastrand::u64(..)) };
    traces::start(&config.traces, exported, registry, file_metrics, tasks)
}

/// These agents share the idle connections.
fn agents_expected(config: &Config) -> usize {
    let others = if config.discovery.is_on() { DISCOVERED_AGENTS_EXPECTED } else { 0 };
    config.workers.len() + others
}

fn start_models(
    shares: &Shares,
    metrics: &Arc<Metrics>,
    view: &Arc<View>,
    control_clients: &Arc<ControlClients>,
    tasks: &Tasks,
) -> Arc<Models> {
    let models = Arc::new(Models::new(shares, Arc::clone(metrics)));
    if cfg!(feature = "text") {
        let (models, view) = (Arc::clone(&models), Arc::clone(view));
        tasks.spawn(models::run(models, view, Arc::clone(control_clients), tasks.token()));
    }
    models
}

fn build_shared(
    config: &Config,
    parts: FleetParts,
    control_clients: &Arc<ControlClients>,
    auth: Authenticator,
    tasks: &Tasks,
) -> Arc<Shared> {
    let FleetParts { view, kv_index, metrics, claim_store, shares, local_ports, .. } = parts;
    let connections = UpstreamConnections {
        connect_max: config.connect_max(),
        idle_max: parts.idle_connections_max,
        agents_expected: agents_expected(config),
        credentials: parts.credentials,
        local_ports,
    };
    let upstream = UpstreamClient::new(connections, Arc::new(Pulses::new()), parts.updates);
    let metrics = Arc::new(metrics);
    let models = start_models(&shares, &metrics, &view, control_clients, tasks);
    let new_table = || Bindings::new(config.limits.sessions_max, config.affinity_idle_max());
    let bytes_max = config.limits.overlap_bytes_max;
    let block_locator = Arc::new(BlockLocator::new(Arc::clone(&kv_index), models, bytes_max));
    let (seen, clients, own) = (Arc::clone(&view), Arc::clone(control_clients), tasks.clone());
    let claims = PlacementClaims::new(&config.claims, claim_store, seen, clients, own);
    let claims = Arc::new(claims);
    let directory = Arc::new(SessionDirectory::new(view, new_table(), config.connect_max()));
    let (placer, renewal_queue) = Placer::new(
        Arc::clone(&directory),
        Arc::clone(&claims),
        Arc::clone(&block_locator),
        new_table(),
        Bindings::new(NAMES_SEEN_ONCE_MAX, config.affinity_idle_max()),
        Arc::clone(&metrics),
    );
    let sessions = Arc::new(Lifecycle::new(
        Arc::clone(&directory),
        Arc::clone(&claims),
        Arc::clone(control_clients),
        Arc::clone(&metrics),
        tasks.clone(),
    ));
    tasks.spawn(renewal::run(renewal_queue, Arc::clone(&directory), claims, tasks.token()));
    tasks.spawn(split_sessions::run(Arc::clone(&directory), Arc::clone(&sessions), tasks.token()));
    Arc::new(Shared {
        auth,
        directory,
        kv_index,
        block_locator,
        placer,
        sessions,
        upstream: Arc::new(upstream),
        metrics,
        recent_turns: Arc::new(Mutex::new(RecentTurns::new(ended::RECORDS_MAX))),
        process_id: fastrand::u32(..),
        unanswered_turns: AbortableTurns::default(),
        bodies: Bodies::new(Arc::clone(&shares.body_bytes), config.limits.body_bytes_max),
        shares,
        turn_max: config.turn_max(),
        bootstrap_max: config.bootstrap_max(),
        tasks: tasks.clone(),
        waiting_comment: config.waiting_comment(),
        preamble: config.placement.preamble,
        session_headers: SessionHeaders::new(config.placement.session_header_names()),
        model_names: ModelNames::new(&config.models),
        cache_isolation: config.auth.cache_isolation,
        leaves: tasks.leave_token(),
        announcements: parts.announcements,
        access_log: parts.access_log,
        traces: parts.traces,
    })
}

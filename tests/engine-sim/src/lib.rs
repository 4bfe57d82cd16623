//! An HTTP server that behaves towards its callers as SGLang 0.5.23 does.
//!
//! A pure core per DP rank ([`core`]) reproduces the engine's mechanics, faults included. One task
//! drives the cores in real time, and an HTTP shell implements the engine's API. The simulator has
//! no weights: an answer is a function of the token ids that the pages of the request's row hold,
//! so a wrong page gives a wrong answer. The simulator keeps nothing on disk and does not tick
//! while idle.

pub mod core;
pub mod hand_off;
mod http;
pub mod kv;
pub mod loopback;
mod owner;
mod pool;
pub mod program;
mod radix;
pub mod request;
mod session;
pub mod shim;
pub mod tokenizer;

use self::{
    core::{CoreConfig, PoolFacts},
    hand_off::{EngineMode, HandOffConfig, HandOffs},
    http::{App, RequestLog},
    kv::{
        KvEventsConfig,
        publisher::{self, Listeners, Publisher},
    },
    owner::Owner,
};
use crate::loopback::own_addr;
use clap::{Args as _, FromArgMatches as _};
use std::{io, net::SocketAddr, path::Path, sync::Arc, time::Duration};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The SGLang version that is simulated.
pub const VERSION: &str = "0.5.23";

/// The settings of the simulated server.
#[derive(Clone, Debug, PartialEq, clap::Args)]
pub struct Config {
    #[command(flatten)]
    pub core: CoreConfig,
    #[command(flatten)]
    pub hand_off: HandOffConfig,
    #[arg(long, default_value_t = 1)]
    pub dp_size: usize,
    #[arg(long, default_value = "tiny")]
    pub model_path: String,
    /// Default: the last part of the model path.
    #[arg(long)]
    pub served_model_name: Option<String>,
    /// The key that requests must have as `Authorization: Bearer`. Not given: any request passes.
    #[arg(long)]
    pub api_key: Option<String>,
    #[arg(long)]
    pub enable_metrics: bool,
    #[arg(long)]
    pub enable_cache_report: bool,
    #[arg(long)]
    pub enable_response_store: bool,
    /// Says that requests are taken by their priority; the simulator takes them in order.
    #[arg(long)]
    pub enable_priority_scheduling: bool,
    /// Says that the hierarchical cache has this storage back end; the simulator stores nothing.
    #[arg(long)]
    pub hicache_storage_backend: Option<String>,
    /// How the engine copies KV to the host, which makes no difference here. So for the next one.
    #[arg(long)]
    pub hicache_io_backend: Option<String>,
    #[arg(long)]
    pub hicache_mem_layout: Option<String>,
    /// Loads, unloads and lists LoRA adapters; answers ignore them.
    #[arg(long)]
    pub enable_lora: bool,
    /// The device type that the server says it runs on; the simulator runs on none.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// The interval, counted from a request's start, at which the server notices that the client of
    /// a non-streaming request has gone, in milliseconds.
    #[arg(long = "disconnect-poll-ms", default_value = "4000", value_parser = millis)]
    pub disconnect_poll: Duration,
    /// How long the port of a crashed server still accepts connections without answering, in
    /// milliseconds.
    #[arg(long = "crash-linger-ms", default_value = "5000", value_parser = millis)]
    pub crash_linger: Duration,
    /// How long `/health` takes to answer, in milliseconds; 0 answers at once.
    #[arg(long = "health-ms", default_value = "1000", value_parser = millis)]
    pub health_wait: Duration,
    /// The most requests kept for [`EngineSim::bodies_seen`]; the oldest are dropped first.
    #[arg(skip)]
    pub requests_seen_max: usize,
    /// The prompt tokens that every answer of `/generate` reports. `None`: those that it has.
    #[arg(skip)]
    pub prompt_tokens_said: Option<u64>,
    /// Whether all load snapshots have the time of the first, as if the scheduler took no others.
    #[arg(skip)]
    pub snapshots_stand_still: bool,
    /// Whether [`EngineSim::set_role`] may switch the role in a pair.
    #[arg(skip)]
    pub can_switch_role: bool,
    /// The publisher of KV events, as JSON: publisher, endpoint, replay_endpoint, buffer_steps,
    /// topic, bind; and `arrays` for the encoding of older releases.
    #[arg(long = "kv-events-config", value_parser = kv_events)]
    pub kv_events: Option<KvEventsConfig>,
}

impl Default for Config {
    /// Returns the defaults of the command line, with metrics, cache reports and recorded requests.
    fn default() -> Config {
        let command = Self::augment_args(clap::Command::new("engine-sim"));
        let matches = command.get_matches_from(["engine-sim"]);
        let config = Self::from_arg_matches(&matches).expect("all have defaults");
        let core = CoreConfig::default();
        let (enable_metrics, enable_cache_report, requests_seen_max) = (true, true, 4096);
        Config { core, enable_metrics, enable_cache_report, requests_seen_max, ..config }
    }
}

impl Config {
    /// Returns the model's name for clients.
    pub fn model_name(&self) -> &str {
        let path = Path::new(&self.model_path);
        let last = path.file_name().and_then(|name| name.to_str()).unwrap_or(&self.model_path);
        self.served_model_name.as_deref().unwrap_or(last)
    }
}

fn millis(text: &str) -> Result<Duration, std::num::ParseIntError> {
    text.parse().map(Duration::from_millis)
}

fn kv_events(json: &str) -> Result<KvEventsConfig, String> {
    let config: KvEventsConfig = serde_json::from_str(json).map_err(|error| error.to_string())?;
    config.problem().map_or(Ok(config), Err)
}

/// A running simulator. Dropping the value kills the server, as a crash would.
#[derive(Debug)]
pub struct EngineSim {
    addr: SocketAddr,
    app: Arc<App>,
    seen: Arc<RequestLog>,
    publishers: Vec<publisher::PublisherHandle>,
    tasks: TaskTracker,
    killed: CancellationToken,
}

impl EngineSim {
    /// Serves on the caller's listener until the server is shut down, is killed or crashes.
    ///
    /// # Errors
    /// Fails if a port for KV events is taken or `kv_events` can't be simulated.
    pub fn start(mut config: Config, listener: TcpListener) -> io::Result<EngineSim> {
        let addr = listener.local_addr()?;
        let killed = CancellationToken::new();
        let tasks = TaskTracker::new();
        let seen = Arc::new(RequestLog::new(config.requests_seen_max));
        let publishers = publishers(&mut config, &tasks, &killed)?;
        let keeps_kv =
            config.hand_off.mode != EngineMode::Decode || config.hand_off.decode_radix_cache;
        config.core.disable_radix_cache |= !keeps_kv;
        let hand_offs = (config.hand_off.mode != EngineMode::Null)
            .then(|| HandOffs::start(&config.hand_off, config.dp_size, addr.ip(), &tasks, &killed))
            .transpose()?;
        let (owner, handle) = Owner::new(&config, &publishers, killed.clone());
        let app = App::new(config, handle, addr.port(), hand_offs, tasks.clone(), killed.clone());
        let app = Arc::new(app);
        tasks.spawn(owner.run());
        let router = http::router(Arc::clone(&app));
        tasks.spawn(http::serve(listener, router, Arc::clone(&seen), killed.clone()));
        Ok(EngineSim { addr, app, seen, publishers, tasks, killed })
    }

    /// Serves on a free port of a loopback address of its own.
    pub async fn start_local(config: Config) -> io::Result<EngineSim> {
        EngineSim::start(config, TcpListener::bind(own_addr()).await?)
    }

    /// Ends as a crash does, then starts again at the same addresses with empty caches.
    pub async fn restart(self) -> io::Result<EngineSim> {
        let (addr, config) = (self.addr, self.app.config.clone());
        self.shutdown().await;
        EngineSim::start(config, TcpListener::bind(addr).await?)
    }

    /// Applies `fault` to a rank's KV event stream; does nothing if the rank has no publisher.
    pub async fn kv_fault(&self, rank: usize, fault: kv::Fault) {
        if let Some(publisher) = self.publishers.get(rank) {
            publisher.fault(fault).await;
        }
    }

    /// Publishes `batch` as a KV event batch that no turn caused.
    pub fn kv_publish(&self, rank: usize, batch: Vec<kv::KvEvent>) {
        if let Some(publisher) = self.publishers.get(rank) {
            publisher.publish(batch);
        }
    }

    /// Sets which LoRA adapters `/v1/models` lists.
    pub fn set_adapters(&self, names: &[&str]) {
        self.app.set_adapters(names.iter().map(|name| (*name).to_owned()).collect());
    }

    /// Sets the role in a pair that `/server_info` names as the scheduler's present one. The
    /// simulator goes on in its first role.
    pub fn set_role(&self, mode: hand_off::EngineMode) {
        self.app.set_role(mode.as_str());
    }

    /// Lets requests to close a session fail from now on, or succeed again.
    pub fn set_fails_closes(&self, fails: bool) {
        self.app.set_fails_closes(fails);
    }

    /// Sets the fault of hand-offs, and the share of them that has it, in thousandths. Does nothing
    /// in an engine that runs whole requests.
    pub fn set_hand_off_fault(&self, fault: hand_off::HandOffFault, per_mille: u32) {
        if let Some(hand_offs) = &self.app.hand_offs {
            hand_offs.set_fault(fault, per_mille);
        }
    }

    /// Ends a prefill engine's bootstrap server; the engine goes on.
    pub fn stop_bootstrap(&self) {
        if let Some(hand_offs) = &self.app.hand_offs {
            hand_offs.stop_bootstrap();
        }
    }

    /// Returns how many hand-offs have begun and not ended.
    pub fn hand_offs_running(&self) -> u64 {
        self.app.hand_offs.as_ref().map_or(0, |hand_offs| hand_offs.running())
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the server's base URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Ends as a crash does: drops every connection at once.
    pub fn kill(&self) {
        self.killed.cancel();
    }

    /// Waits until the server has ended, by a crash or by [`EngineSim::kill`].
    pub async fn gone(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Stops serving and waits for the end of all tasks.
    pub async fn shutdown(self) {
        self.killed.cancel();
        self.gone().await;
    }

    /// Returns how often the weights have changed.
    pub fn weight_changes(&self) -> u64 {
        self.app.weights.changes()
    }

    /// Demotes a session on one rank, as the shim does. Returns whether it was idle; `None` if the
    /// engine has ended.
    pub async fn demote(&self, rank: usize, id: &str) -> Option<bool> {
        self.app.handle.demote(rank, id.to_owned()).await
    }

    /// Loads a session's KV from the host on one rank. Returns the tokens or the shim's refusal;
    /// `None` if the engine has ended.
    pub async fn prefetch(
        &self,
        rank: usize,
        id: &str,
        tokens_max: usize,
    ) -> Option<Result<usize, &'static str>> {
        self.app.handle.prefetch(rank, id.to_owned(), tokens_max).await
    }

    /// Checks a rank's invariants and returns its exact account; `None` if the engine has ended.
    pub async fn pool(&self, rank: usize) -> Option<PoolFacts> {
        self.app.handle.facts(rank).await
    }

    /// Returns the longest prefixes in a rank's radix cache; `None` if the engine has ended.
    pub async fn cached(&self, rank: usize) -> Option<Vec<(request::Space, Vec<u32>)>> {
        self.app.handle.cached(rank).await
    }

    /// Returns the bodies of the recorded requests to `path`, oldest first and byte for byte.
    pub fn bodies_seen(&self, path: &str) -> Vec<bytes::Bytes> {
        self.seen.bodies(path)
    }

    /// Returns the headers of the recorded requests to `path`, oldest first.
    pub fn headers_seen(&self, path: &str) -> Vec<::http::HeaderMap> {
        self.seen.headers(path)
    }
}

/// Binds and starts one KV event publisher per rank, if publishing is configured.
fn publishers(
    config: &mut Config,
    tasks: &TaskTracker,
    killed: &CancellationToken,
) -> io::Result<Vec<publisher::PublisherHandle>> {
    let ranks = config.dp_size;
    let Some(events) = config.kv_events.as_mut().filter(|events| events.publisher != "null") else {
        return Ok(Vec::new());
    };
    if let Some(problem) = events.problem() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    config.core.kv_events = true;
    let listeners = Listeners::bind(events, ranks)?;
    let start = |(rank, sockets)| {
        let (publisher, handle) = Publisher::new(events, rank);
        tasks.spawn(publisher.run(sockets, killed.clone()));
        handle
    };
    Ok((0..).zip(listeners.each()).map(start).collect())
}

impl Drop for EngineSim {
    fn drop(&mut self) {
        self.killed.cancel();
    }
}

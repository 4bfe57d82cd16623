//! An HTTP server that behaves as SGLang 0.5.23 does to an outside caller.
//!
//! A pure core per DP rank ([`core`]) keeps the engine's mechanics, faults included; one task
//! drives the cores in real time; an HTTP shell speaks the engine's dialect. It has no weights:
//! the answer is a function of the token ids that the pages of a request's row really hold, so a
//! wrong page gives a wrong answer. It keeps nothing on disk and never ticks while idle.

pub mod core;
mod http;
pub mod kv;
mod owner;
mod pool;
mod radix;
pub mod request;
mod session;
pub mod tokenizer;

use self::{
    core::{CoreConfig, PoolFacts},
    http::{App, SeenLog},
    kv::{
        KvEventsConfig,
        publisher::{self, Listeners, Publisher},
    },
    owner::Owner,
};
use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::http::Seen;

/// The SGLang version whose behaviour this is.
pub const VERSION: &str = "0.5.23";

/// How the server is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub core: CoreConfig,
    pub dp_size: usize,
    pub served_model_name: String,
    pub model_path: String,
    pub enable_metrics: bool,
    pub enable_cache_report: bool,
    /// A vanished client that does not stream is noticed at multiples of this after its start.
    pub disconnect_poll: Duration,
    /// After a crash the port still takes connections for this long and answers nothing.
    pub crash_linger: Duration,
    /// `/health` takes this long; 0 answers at once.
    pub health_wait: Duration,
    /// Requests kept for [`EngineSim::requests_seen`]; the oldest goes first.
    pub requests_seen_max: usize,
    pub kv_events: Option<KvEventsConfig>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            core: CoreConfig::default(),
            dp_size: 1,
            served_model_name: "tiny".to_owned(),
            model_path: "tiny".to_owned(),
            enable_metrics: true,
            enable_cache_report: true,
            disconnect_poll: Duration::from_secs(4),
            crash_linger: Duration::from_secs(5),
            health_wait: Duration::from_secs(1),
            requests_seen_max: 4096,
            kv_events: None,
        }
    }
}

/// A running simulator. Dropping it is a crash.
#[derive(Debug)]
pub struct EngineSim {
    addr: SocketAddr,
    app: Arc<App>,
    seen: Arc<SeenLog>,
    publishers: Vec<publisher::Handle>,
    tasks: TaskTracker,
    killed: CancellationToken,
}

impl EngineSim {
    /// Serves on the caller's listener until it is shut down, killed or crashes.
    ///
    /// # Errors
    /// When a port for KV events is taken, or their setting can't be simulated.
    pub fn start(mut config: Config, listener: TcpListener) -> io::Result<EngineSim> {
        let addr = listener.local_addr()?;
        let killed = CancellationToken::new();
        let tasks = TaskTracker::new();
        let seen = Arc::new(SeenLog::new(config.requests_seen_max));
        let publishers = publishers(&mut config, &tasks, &killed)?;
        let (owner, handle) = Owner::new(&config, &publishers, killed.clone());
        let app = Arc::new(App::new(config, handle, addr.port(), tasks.clone()));
        tasks.spawn(owner.run());
        let router = http::router(Arc::clone(&app));
        tasks.spawn(http::serve(listener, router, Arc::clone(&seen), killed.clone()));
        Ok(EngineSim { addr, app, seen, publishers, tasks, killed })
    }

    /// Serves on a free loopback port.
    pub async fn start_local(config: Config) -> io::Result<EngineSim> {
        EngineSim::start(config, TcpListener::bind("127.0.0.1:0").await?)
    }

    /// Ends as a crash does, and comes back at the same addresses with nothing in its caches.
    pub async fn restart(self) -> io::Result<EngineSim> {
        let (addr, config) = (self.addr, self.app.config.clone());
        self.shutdown().await;
        EngineSim::start(config, TcpListener::bind(addr).await?)
    }

    /// Lets a rank's KV events go astray; without a publisher there are none that could.
    pub async fn kv_fault(&self, rank: usize, fault: kv::Fault) {
        if let Some(publisher) = self.publishers.get(rank) {
            publisher.fault(fault).await;
        }
    }

    /// Publishes what no turn has left in the cache: more than anyone would wait for.
    pub fn kv_publish(&self, rank: usize, batch: Vec<kv::Event>) {
        if let Some(publisher) = self.publishers.get(rank) {
            publisher.publish(batch);
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://` and the address.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Ends as a crash does: every connection is dropped where it is.
    pub fn kill(&self) {
        self.killed.cancel();
    }

    /// Waits until the server is gone, by a crash or by [`EngineSim::kill`].
    pub async fn gone(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Stops serving and waits for the end of all tasks.
    pub async fn shutdown(self) {
        self.killed.cancel();
        self.gone().await;
    }

    /// Exact account of a rank after checking its invariants; None once the engine is gone.
    pub async fn pool(&self, rank: usize) -> Option<PoolFacts> {
        self.app.handle.facts(rank).await
    }

    /// The longest prefixes in a rank's radix cache; None once the engine is gone.
    pub async fn cached(&self, rank: usize) -> Option<Vec<(request::Space, Vec<u32>)>> {
        self.app.handle.cached(rank).await
    }

    /// What reached the server, oldest first: method, path with query, exact body.
    pub fn requests_seen(&self) -> Vec<Seen> {
        self.seen.all()
    }

    /// Those of [`EngineSim::requests_seen`] to one path.
    pub fn bodies_seen(&self, path: &str) -> Vec<bytes::Bytes> {
        self.seen.all().into_iter().filter(|s| s.path == path).map(|s| s.body).collect()
    }
}

/// Binds and starts what publishes KV events, one for each rank, if that is configured.
fn publishers(
    config: &mut Config,
    tasks: &TaskTracker,
    killed: &CancellationToken,
) -> io::Result<Vec<publisher::Handle>> {
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

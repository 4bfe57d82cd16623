//! The demo: simulated engines with an agent each, one router, and agent conversations through it.
//!
//! Each engine has a simulated shim and a simulated GPU, so that every figure has a source. The GPU
//! shows the memory that a real engine would have taken there. The demo checks that no turn fails,
//! no session is left open, and no KV stays held.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::Serialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use engine_sim::{Config, EngineSim, core::PoolFacts, shim::SimShim};
use harness::{
    cluster::{Agent, Cluster, agent_config, ready, router_config},
    nvml::Machine,
};
use replay::{
    Api, ReplayControl, ReplayOptions, Report, SessionHeaders, SessionOpen, Workload, shape::Shape,
};

/// The number of engines, agents and workers, if nobody says another.
pub const WORKERS: usize = 4;
/// GPUs of a simulated machine, each with one engine.
const MACHINE_GPUS: usize = 8;
/// The memory of a simulated GPU, and what of it an engine takes for weights and its pool. Bytes.
const GPU_BYTES: [u64; 2] = [144 << 30, 127 << 30];
/// The workers up to which each adds conversations, and each is asked as often as in a test. A
/// larger fleet shares one computer's cores, so its engines report less often.
const BUSY_WORKERS_MAX: usize = 16;
/// The pause between two reports of an engine or a shim in a fleet of up to that size.
const REPORT_PAUSE: Duration = Duration::from_millis(50);
/// The tokens of each pool: about a third of what the conversations could use, so that the radix
/// cache evicts while the demo runs.
const POOL_TOKENS: usize = 24_576;
/// The most tokens of a prompt and its answer, as the conversations plan them.
const CONTEXT_TOKENS: u64 = 4_032;
/// The engines' context in tokens: half as much again, because a chat client sends answers back as
/// text, and the toy tokenizer then needs up to three times as many tokens for them.
const ENGINE_CONTEXT_TOKENS: usize = 6_144;
/// The number of concurrent conversations of each worker on pinned sessions, which send only their
/// new tokens.
const PINNED_USERS: usize = 2;
/// The number of concurrent conversations of each worker on tagged sessions, which send their full
/// history.
const TAGGED_USERS: usize = 4;
/// The longest time until KV is freed. A close is answered before its engine has received it, and
/// an abort before its turn has ended. KV held for longer counts as leaked.
const FREED_WITHIN: Duration = Duration::from_secs(30);

/// The results of the demo.
#[derive(Debug, Clone, Serialize)]
pub struct DemoSummary {
    /// The turns answered.
    pub turns: u64,
    /// The turns and session calls that failed.
    pub errors: u64,
    /// The failures by kind, for people.
    #[serde(skip)]
    pub errors_by_kind: BTreeMap<String, u64>,
    /// The median time to the first token, in milliseconds.
    pub ttft_ms_p50: f64,
    /// The 99th percentile of the time to the first token, in milliseconds.
    pub ttft_ms_p99: f64,
    /// The share of prompt tokens whose KV was resident.
    pub cached_ratio: f64,
    /// The sessions opened.
    pub sessions_opened: u64,
    /// The sessions closed.
    pub sessions_closed: u64,
    /// The sessions left open in an engine at the end.
    pub sessions_leaked: u64,
    /// The tokens left in the engines at the end that only a close would free.
    pub held_tokens_end: u64,
}

impl DemoSummary {
    /// Whether turns were answered, nothing failed and nothing leaked.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.turns > 0
            && self.errors == 0
            && self.sessions_leaked == 0
            && self.sessions_opened == self.sessions_closed
            && self.held_tokens_end == 0
    }
}

/// The state of one worker.
#[derive(Debug, Clone)]
pub struct WorkerLine {
    /// The worker's name.
    pub name: String,
    /// The engine's own account.
    pub pool: PoolFacts,
    /// The worker's entry in the router's `/v1/workers`, from Berth's ledger.
    pub ledger: serde_json::Value,
}

/// A fleet that is ready for traffic.
#[derive(Debug)]
pub struct Demo {
    /// The agents and the router.
    cluster: Cluster,
    engines: Vec<Arc<EngineSim>>,
    shims: Vec<SimShim>,
    /// The machines whose GPUs the agents read.
    _machines: Vec<Machine>,
}

impl Demo {
    /// Starts everything and waits until the router knows all workers.
    ///
    /// # Errors
    /// Fails if a port can't be bound.
    pub async fn start(workers: usize) -> anyhow::Result<Self> {
        let slowness = u32::try_from(workers.div_ceil(BUSY_WORKERS_MAX))?;
        let pause = REPORT_PAUSE * slowness;
        let mut cluster = Cluster::start(0, |settings| settings.router = None).await?;
        let (mut engines, mut shims, mut machines) = (vec![], vec![], vec![]);
        for number in 0..workers {
            if number % MACHINE_GPUS == 0 {
                machines.push(machine(number..workers.min(number + MACHINE_GPUS))?);
            }
            let mut config = engine_config();
            config.core.seed += number as u64;
            let engine = Arc::new(EngineSim::start_local(config).await?);
            let mut config = agent_config(&engine.url(), &format!("w{number}"));
            config.engine.load_interval_ms = u64::try_from(pause.as_millis())?;
            config.gpu.nvml_library = machines[number / MACHINE_GPUS].library();
            config.gpu.devices = vec![gpu_uuid(number)];
            let agent = Agent::start(config)?;
            ready(&cluster.web, agent.admin).await;
            let socket = agent.shim_socket.clone();
            shims.push(SimShim::start_paced(Arc::clone(&engine), socket, pause));
            engines.push(engine);
            cluster.agents.push(agent);
        }
        cluster.start_router(router_config(&[])).await?;
        Ok(Self { cluster, engines, shims, _machines: machines })
    }

    /// Returns the address of the router's dashboard.
    #[must_use]
    pub fn dashboard_url(&self) -> String {
        self.cluster.routers[0].admin_url("/dashboard")
    }

    /// Returns the addresses of the agents' control ports, for another router.
    #[must_use]
    pub fn control_urls(&self) -> Vec<String> {
        self.cluster.agents.iter().map(|agent| format!("http://{}", agent.control)).collect()
    }

    /// Runs conversations for `time`; `control.live` can be read meanwhile.
    ///
    /// # Errors
    /// Fails if the options of the replay contradict each other.
    pub async fn drive(
        &self,
        time: Duration,
        control: ReplayControl,
    ) -> Result<Report, replay::Error> {
        let workload = || Workload::Synthetic { conversations: u64::MAX };
        let busy_workers = self.engines.len().min(BUSY_WORKERS_MAX);
        let run =
            |api, open, users| options(self.cluster.url(""), time, api, open, users * busy_workers);
        let pinned = run(Api::Generate, SessionOpen::Pinned, PINNED_USERS);
        let tagged = run(Api::Chat, SessionOpen::Tagged, TAGGED_USERS);
        let started = tokio::time::Instant::now();
        let both = tokio::join!(
            replay::drive(pinned, workload(), control.clone(), |_| {}),
            replay::drive(tagged, workload(), control.clone(), |_| {}),
        );
        both.0.and(both.1)?;
        // Both replays count into one live report, which is complete only now.
        Ok(control.live.final_report(started.elapsed()))
    }

    /// Returns the current state of the workers.
    pub async fn workers(&self) -> Vec<WorkerLine> {
        let mut lines = vec![];
        for (number, engine) in self.engines.iter().enumerate() {
            if let Some(pool) = engine.pool(0).await {
                let ledger = self.cluster.worker(number).await;
                lines.push(WorkerLine { name: format!("worker-{number}"), pool, ledger });
            }
        }
        lines
    }

    /// Stops the router and the agents as signals would, and checks what the engines still hold.
    ///
    /// # Errors
    /// Fails if the router or an agent ended with an error.
    pub async fn finish(self, report: &Report) -> anyhow::Result<DemoSummary> {
        let Self { cluster: Cluster { agents, routers, .. }, engines, shims, _machines } = self;
        for router in routers {
            router.stop().await?;
        }
        // Checks before the agents close the remaining sessions: a leak is what the clients' closes
        // did not free.
        let (sessions_leaked, held_tokens_end) = held_at_end(&engines).await;
        for agent in agents {
            agent.stop().await?;
        }
        for shim in shims {
            shim.stop().await;
        }
        for engine in engines.into_iter().filter_map(Arc::into_inner) {
            engine.shutdown().await;
        }
        Ok(DemoSummary {
            turns: report.turns,
            errors: report.errors,
            errors_by_kind: report.errors_by_kind.clone(),
            ttft_ms_p50: report.ttft_ms_p50,
            ttft_ms_p99: report.ttft_ms_p99,
            cached_ratio: report.cached_ratio.unwrap_or(0.0),
            sessions_opened: report.sessions_opened,
            sessions_closed: report.sessions_closed,
            sessions_leaked,
            held_tokens_end,
        })
    }
}

/// Returns the sessions and tokens that engines hold, once they are zero or after [`FREED_WITHIN`].
async fn held_at_end(engines: &[Arc<EngineSim>]) -> (u64, u64) {
    let deadline = tokio::time::Instant::now() + FREED_WITHIN;
    loop {
        let (mut sessions, mut tokens) = (0, 0);
        for engine in engines {
            let Some(pool) = engine.pool(0).await else { continue };
            sessions += pool.sessions.len() as u64;
            tokens += (pool.session_held + pool.protected + pool.uncached) as u64;
        }
        if (sessions, tokens) == (0, 0) || tokio::time::Instant::now() >= deadline {
            return (sessions, tokens);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn gpu_uuid(worker: usize) -> String {
    format!("GPU-{worker}")
}

/// Makes a machine with the GPUs of these workers.
fn machine(workers: std::ops::Range<usize>) -> anyhow::Result<Machine> {
    let [total, used] = GPU_BYTES;
    let gpu =
        |worker| json!({ "uuid": gpu_uuid(worker), "memory_total": total, "memory_used": used });
    let gpus: serde_json::Map<_, _> =
        workers.enumerate().map(|(index, worker)| (index.to_string(), gpu(worker))).collect();
    Machine::new(&gpus.into())
}

fn engine_config() -> Config {
    let mut config = Config::default();
    config.core.max_total_tokens = POOL_TOKENS;
    config.core.context_len = ENGINE_CONTEXT_TOKENS;
    config.core.max_running_requests = 24;
    config.core.session_radix_cache = true;
    // A mid-sized model on one GPU, with the orders of magnitude that placement studies use.
    config.core.prefill_tokens_per_s = 20_000.0;
    config.core.decode_ms_per_step = 10.0;
    config
}

fn options(
    url: String,
    time: Duration,
    api: Api,
    open: SessionOpen,
    users: usize,
) -> ReplayOptions {
    ReplayOptions {
        url,
        api,
        model: "tiny".to_owned(),
        // Conversations of coding agents, at a fortieth of their size and a hundredth of their
        // pauses.
        shape: Shape {
            scale: 0.025,
            context_tokens_max: Some(CONTEXT_TOKENS),
            output_tokens_max: Some(64),
        },
        sessions: SessionHeaders::Header,
        session_open: Some(open),
        run_id: format!("demo-{}", open.retention()),
        users: Some(users),
        time_scale: Some(0.01),
        think_cap_s: Some(1.0),
        ramp_s: Some(1.0),
        seconds: Some(time.as_secs_f64()),
        ..ReplayOptions::default()
    }
}

/// Runs the demo with so many workers, and calls `show` about twice per second while traffic flows.
///
/// # Errors
/// Fails if something could not be started or ended with an error.
pub async fn run(
    workers: usize,
    time: Duration,
    stop: CancellationToken,
    begun: impl FnOnce(&Demo),
    mut show: impl FnMut(&[WorkerLine], &Report),
) -> anyhow::Result<DemoSummary> {
    let demo = Demo::start(workers).await?;
    begun(&demo);
    let control = ReplayControl { stop, ..ReplayControl::default() };
    let live = Arc::clone(&control.live);
    let started = tokio::time::Instant::now();
    let report = {
        let mut driving = std::pin::pin!(demo.drive(time, control));
        let mut ticks = tokio::time::interval(Duration::from_millis(500));
        loop {
            tokio::select! {
                biased;
                report = &mut driving => break report?,
                _ = ticks.tick() => {
                    show(&demo.workers().await, &live.report(started.elapsed()));
                }
            }
        }
    };
    show(&demo.workers().await, &report);
    demo.finish(&report).await
}

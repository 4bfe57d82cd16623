//! The demo: simulated engines with an agent each, one router, agents' conversations through it. It
//! checks what it shows: no turn fails, no session is left, no KV stays held.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{Agent, Router, agent_config, ready, router_config},
    engine_sim::{Config, EngineSim, core::PoolFacts},
    replay::{
        self, Api, Control, Options, Report, SessionHeaders, SessionOpen, Workload, options::Pace,
        shape::Shape,
    },
    web::Web,
};

/// Engines, and so agents and workers.
const ENGINES: usize = 4;
/// Tokens of each pool: about a third of what the conversations would like to keep, so that the
/// radix cache evicts while the demo runs.
const POOL_TOKENS: usize = 24_576;
/// Longest prompt and answer together, as the conversations plan them.
const CONTEXT_TOKENS: u64 = 4_032;
/// What the engines take: half as much again, because the toy tokenizer's answers come back up to
/// three times as long when a chat client sends them again as text.
const ENGINE_CONTEXT_TOKENS: usize = 6_144;
/// Conversations side by side on pinned sessions; they send only their new tokens.
const PINNED_USERS: usize = 8;
/// Conversations side by side on tagged sessions; they send their whole history.
const TAGGED_USERS: usize = 16;
/// A close is answered before its engine has it, and an abort before its turn has ended. What is
/// held for longer is held for good.
const FREED_WITHIN: Duration = Duration::from_secs(30);

/// What the demo did and what was left at its end.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Turns answered.
    pub turns: u64,
    /// Turns and session calls that failed.
    pub errors: u64,
    /// The same by kind, for people.
    #[serde(skip)]
    pub errors_by_kind: BTreeMap<String, u64>,
    /// Milliseconds to the first token, median.
    pub ttft_ms_p50: f64,
    /// Milliseconds to the first token, 99th percentile.
    pub ttft_ms_p99: f64,
    /// Share of prompt tokens whose KV was there.
    pub cached_ratio: f64,
    /// Sessions opened.
    pub sessions_opened: u64,
    /// Sessions closed.
    pub sessions_closed: u64,
    /// Sessions left open in an engine at the end.
    pub sessions_leaked: u64,
    /// Tokens that nothing but a close would free, left in the engines at the end.
    pub held_tokens_end: u64,
}

impl Summary {
    /// Did everything go as promised?
    #[must_use]
    pub fn good(&self) -> bool {
        self.turns > 0
            && self.errors == 0
            && self.sessions_leaked == 0
            && self.sessions_opened == self.sessions_closed
            && self.held_tokens_end == 0
    }
}

/// How one worker stands.
#[derive(Debug, Clone)]
pub struct WorkerLine {
    /// Its name.
    pub name: String,
    /// The engine's own account.
    pub pool: PoolFacts,
    /// What Berth's ledger says, from the router's `/v1/workers`.
    pub ledger: serde_json::Value,
}

/// A fleet ready for traffic.
#[derive(Debug)]
pub struct Demo {
    engines: Vec<EngineSim>,
    agents: Vec<Agent>,
    router: Router,
    web: Web,
}

impl Demo {
    /// Starts everything and waits until the router knows all workers.
    ///
    /// # Errors
    /// When a port can't be bound.
    pub async fn start() -> anyhow::Result<Self> {
        let web = Web::default();
        let mut engines = vec![];
        let mut agents = vec![];
        for number in 0..ENGINES {
            let engine = EngineSim::start_local(engine_config(number)).await?;
            let agent = Agent::start(agent_config(&engine.url(), &format!("worker-{number}")))?;
            ready(&web, agent.admin).await;
            engines.push(engine);
            agents.push(agent);
        }
        let router = Router::start(router_config(&agents.iter().collect::<Vec<_>>())).await?;
        ready(&web, router.admin).await;
        Ok(Self { engines, agents, router, web })
    }

    /// Where a client would send its turns.
    #[must_use]
    pub fn url(&self) -> String {
        self.router.url("")
    }

    /// Drives conversations for so long; `live` can be read meanwhile.
    ///
    /// # Errors
    /// When the options of the replay contradict each other.
    pub async fn drive(&self, time: Duration, control: Control) -> Result<Report, replay::Error> {
        let made = || Workload::Made { conversations: u64::MAX };
        let pinned = options(self.url(), time, Api::Generate, SessionOpen::Pinned, PINNED_USERS);
        let tagged = options(self.url(), time, Api::Chat, SessionOpen::Tagged, TAGGED_USERS);
        let started = tokio::time::Instant::now();
        let both = tokio::join!(
            replay::drive(pinned, made(), control.clone(), |_| {}),
            replay::drive(tagged, made(), control.clone(), |_| {}),
        );
        both.0.and(both.1)?;
        // Both count into one live report; only now is it whole.
        Ok(control.live.end(started.elapsed()))
    }

    /// How the workers stand now.
    pub async fn workers(&self) -> Vec<WorkerLine> {
        let ledger = match self.web.get(&self.router.url("/v1/workers")).await {
            Ok(answer) => answer.json(),
            Err(_) => serde_json::Value::Null,
        };
        let mut lines = vec![];
        for (number, engine) in self.engines.iter().enumerate() {
            let name = format!("worker-{number}");
            let of = |worker: &&serde_json::Value| {
                worker["worker"].as_str().is_some_and(|id| id.starts_with(&name))
            };
            let workers = ledger["workers"].as_array();
            let ledger = workers.and_then(|workers| workers.iter().find(of)).cloned();
            if let Some(pool) = engine.pool(0).await {
                lines.push(WorkerLine { name, pool, ledger: ledger.unwrap_or_default() });
            }
        }
        lines
    }

    /// Stops router and agents as signals would, and looks at what the engines still hold.
    ///
    /// # Errors
    /// When one of them did not end well.
    pub async fn finish(self, report: &Report) -> anyhow::Result<Summary> {
        self.router.stop().await?;
        // Before the agents close what is left: a leak is what clients' closes did not free.
        let (sessions_leaked, held_tokens_end) = left(&self.engines).await;
        for agent in self.agents {
            agent.stop().await?;
        }
        for engine in self.engines {
            engine.shutdown().await;
        }
        Ok(Summary {
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

/// Sessions and tokens that engines hold once nothing more comes free.
async fn left(engines: &[EngineSim]) -> (u64, u64) {
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

fn engine_config(number: usize) -> Config {
    let mut config = Config::default();
    config.core.max_total_tokens = POOL_TOKENS;
    config.core.context_len = ENGINE_CONTEXT_TOKENS;
    config.core.max_running_requests = 24;
    config.core.session_radix_cache = true;
    // A mid-sized model on one GPU, by the orders of magnitude that placement studies use.
    config.core.prefill_tokens_per_s = 20_000.0;
    config.core.decode_ms_per_step = 10.0;
    config.core.seed = number as u64;
    config
}

fn options(url: String, time: Duration, api: Api, open: SessionOpen, users: usize) -> Options {
    Options {
        url,
        api,
        model: "tiny".to_owned(),
        // Coding agents' conversations at a fortieth of their size, a hundredth of their pauses.
        shape: Shape {
            scale: 0.025,
            context_tokens_max: Some(CONTEXT_TOKENS),
            output_tokens_max: Some(64),
        },
        sessions: SessionHeaders::Header,
        session_open: Some(open),
        run_id: format!("demo-{}", open.retention()),
        pace: Pace::Closed {
            users,
            time_scale: 0.01,
            think_max: Duration::from_secs(1),
            ramp: Duration::from_secs(1),
        },
        duration_max: Some(time),
        ..Options::default()
    }
}

/// Runs the demo; `show` is called about twice a second while traffic flows.
///
/// # Errors
/// When something could not be started or did not end well.
pub async fn run(
    time: Duration,
    stop: CancellationToken,
    mut show: impl FnMut(&[WorkerLine], &Report),
) -> anyhow::Result<Summary> {
    let demo = Demo::start().await?;
    let control = Control { stop, ..Control::default() };
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

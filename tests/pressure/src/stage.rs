//! A simulated engine with an agent and a router before it.

use std::{sync::Arc, time::Duration};

use clap::{Args as _, FromArgMatches as _};
use engine_sim::{Config, EngineSim, kv::KvEventsConfig, shim::SimShim};
use harness::cluster::{Agent, Cluster, agent_config, ready, router_config};

use crate::{
    arms::{Arm, ENGINE_FLAGS},
    run::Target,
};

/// Tokens of the pool: few, so that a run is short.
const POOL_TOKENS: usize = 8192;
const PAGE_TOKENS: usize = 16;
/// The simulated engine's speed is that of a mid-sized model on one GPU, with less of a pause
/// between the tokens of an answer.
const SIMULATOR_FLAGS: [&str; 4] = [
    "--max-running-requests=24",
    "--chunked-prefill-size=2048",
    "--prefill-tokens-per-s=40000",
    "--decode-ms-per-step=2",
];
/// What the engine loads from the host, as PCIe does for such a model.
const HOST_LOAD: &str = "--host-load-tokens-per-s=250000";
/// The pause between two reports of the engine, its shim or the agent.
const REPORT_PAUSE: Duration = Duration::from_millis(50);
/// The time after which an idle pinned session gives way: ten times the longest pause of a tool.
const DEMOTE_IDLE_MS: u64 = 1000;
/// How long no turn may get on. The slowest takes a second.
const STALL_MAX: Duration = Duration::from_secs(20);

/// What an arm runs on.
#[derive(Debug)]
pub struct Stage {
    cluster: Cluster,
    engine: Arc<EngineSim>,
    shim: SimShim,
}

impl Stage {
    /// Starts an engine with the arm's flags, and waits until the router knows its pool.
    ///
    /// # Errors
    /// Fails if a port can't be bound or the engine doesn't know a flag.
    pub async fn start(arm: Arm) -> anyhow::Result<Self> {
        let mut cluster = Cluster::start(0, |settings| settings.router = None).await?;
        let engine = Arc::new(EngineSim::start_local(engine_config(arm)?).await?);
        let mut config = agent_config(&engine.url(), "w0");
        config.engine.load_interval_ms = u64::try_from(REPORT_PAUSE.as_millis())?;
        config.reports.interval_ms = config.engine.load_interval_ms;
        // The shares of an agent in production.
        config.sessions = worker_agent::config::Config::default().sessions;
        config.sessions.demote_idle_ms = DEMOTE_IDLE_MS;
        let agent = Agent::start(config)?;
        ready(&cluster.web, agent.admin).await;
        let socket = agent.shim_socket.clone();
        let shim = SimShim::start_paced(Arc::clone(&engine), socket, REPORT_PAUSE);
        cluster.agents.push(agent);
        cluster.start_router(router_config(&[])).await?;
        let is_known = |shown: &serde_json::Value| shown["load"]["kv_physical_usage"].is_object();
        cluster.wait_for_worker(0, "the pool's figures", is_known).await;
        Ok(Self { cluster, engine, shim })
    }

    /// Returns where turns go.
    #[must_use]
    pub fn target(&self) -> Target {
        Target {
            engine: self.engine.url(),
            router: self.cluster.url(""),
            pool_tokens: POOL_TOKENS as u64,
            page_tokens: PAGE_TOKENS as u64,
            stall_max: STALL_MAX,
        }
    }

    /// Ends all of it.
    ///
    /// # Errors
    /// Fails if the router or the agent ended with an error.
    pub async fn stop(self) -> anyhow::Result<()> {
        let Cluster { agents, routers, .. } = self.cluster;
        for router in routers {
            router.stop().await?;
        }
        // A wedged engine answers no close: the agent needn't wait for it.
        self.engine.kill();
        for agent in agents {
            agent.stop().await?;
        }
        self.shim.stop().await;
        Ok(())
    }
}

fn engine_config(arm: Arm) -> anyhow::Result<Config> {
    let command = Config::augment_args(clap::Command::new("engine-sim"));
    let sizes = [
        format!("--max-total-tokens={POOL_TOKENS}"),
        format!("--context-length={POOL_TOKENS}"),
        format!("--page-size={PAGE_TOKENS}"),
    ];
    let flags =
        ["engine-sim"].into_iter().chain(ENGINE_FLAGS).chain(SIMULATOR_FLAGS).chain([HOST_LOAD]);
    let flags = flags.chain(sizes.iter().map(String::as_str));
    let flags = flags.chain(arm.engine_flags.iter().copied());
    let mut config = Config::from_arg_matches(&command.try_get_matches_from(flags)?)?;
    config.kv_events = Some(KvEventsConfig::local());
    Ok(config)
}

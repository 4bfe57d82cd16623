//! Goodput at saturation: the same load directly on a simulated engine, and through an agent.
//!
//! The two alternate, so that disturbances of the machine affect both. There are more users than
//! the engine has rows or KV for, so the effect of the agent's queue shows in turns and tokens per
//! second.

use std::time::Duration;

use serde::Serialize;

use crate::{
    cluster::{Agent, agent_config, ready},
    engine_sim::{Config, EngineSim},
    replay::{
        self, Api, ReplayControl, ReplayOptions, Report, Workload, options::Pace, shape::Shape,
    },
    web::Web,
};

/// The number of concurrent users: four times as many as the engine has rows.
const USERS: usize = 64;
const ROWS: usize = 16;
/// About half of what sixteen conversations hold, so that KV runs out before rows do.
const POOL_TOKENS: usize = 16_384;

/// One period of load.
#[derive(Debug, Clone, Serialize)]
pub struct Stretch {
    /// Whether the load went through the agent.
    pub guarded: bool,
    /// The turns answered per second.
    pub turns_per_s: f64,
    /// The tokens generated per second.
    pub tokens_per_s: f64,
    /// The median time to the first token, in milliseconds.
    pub ttft_ms_p50: f64,
    /// The 99th percentile of the time to the first token, in milliseconds.
    pub ttft_ms_p99: f64,
    /// The turns that failed.
    pub errors: u64,
}

/// The results of all periods.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// The periods, in the order in which they ran.
    pub stretches: Vec<Stretch>,
    /// The median tokens per second of the guarded periods, divided by that of the bare periods.
    pub goodput_ratio: f64,
}

/// Runs `rounds` of bare, guarded, guarded, bare periods of length `stretch`; calls `show` after
/// each.
///
/// # Errors
/// Fails if the engine or the agent can't be started or stopped.
pub async fn compare(
    rounds: u32,
    stretch: Duration,
    mut show: impl FnMut(&Stretch),
) -> anyhow::Result<Comparison> {
    let web = Web::default();
    let engine = EngineSim::start_local(engine_config()).await?;
    let mut settings = agent_config(&engine.url(), "saturated");
    settings.load_interval_ms = 200;
    let agent = Agent::start(settings)?;
    ready(&web, agent.admin).await;
    let mut stretches = vec![];
    for _ in 0..rounds {
        for guarded in [false, true, true, false] {
            let url = if guarded { agent.url("") } else { engine.url() };
            let options = options(url, stretch, stretches.len() as u64);
            let workload = Workload::Synthetic { conversations: u64::MAX };
            let report = replay::drive(options, workload, ReplayControl::default(), |_| {}).await?;
            let line = line(guarded, &report);
            show(&line);
            stretches.push(line);
        }
    }
    agent.stop().await?;
    engine.shutdown().await;
    let goodput_ratio = median(&stretches, true) / median(&stretches, false);
    Ok(Comparison { stretches, goodput_ratio })
}

fn line(guarded: bool, report: &Report) -> Stretch {
    Stretch {
        guarded,
        turns_per_s: report.turns_per_s,
        tokens_per_s: report.output_tokens_per_s,
        ttft_ms_p50: report.ttft_ms_p50,
        ttft_ms_p99: report.ttft_ms_p99,
        errors: report.errors,
    }
}

fn median(stretches: &[Stretch], guarded: bool) -> f64 {
    let selected = stretches.iter().filter(|stretch| stretch.guarded == guarded);
    let mut rates: Vec<f64> = selected.map(|stretch| stretch.tokens_per_s).collect();
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn engine_config() -> Config {
    let mut config = Config::default();
    config.core.max_total_tokens = POOL_TOKENS;
    config.core.context_len = 4096;
    config.core.max_running_requests = ROWS;
    config.core.session_radix_cache = true;
    config.core.prefill_tokens_per_s = 40_000.0;
    config.core.decode_ms_per_step = 10.0;
    config
}

fn options(url: String, stretch: Duration, seed: u64) -> ReplayOptions {
    ReplayOptions {
        url,
        api: Api::Chat,
        model: "tiny".to_owned(),
        shape: Shape { scale: 0.02, context_tokens_max: Some(3000), output_tokens_max: Some(64) },
        run_id: format!("saturation-{seed}"),
        pace: Pace::Closed {
            users: USERS,
            time_scale: 0.0,
            think_max: Duration::ZERO,
            ramp: Duration::ZERO,
        },
        // Each pair of periods has the same conversations.
        seed: seed / 2,
        duration_max: Some(stretch),
        ..ReplayOptions::default()
    }
}

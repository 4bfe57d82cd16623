//! Prefill and decode engines that run turns together.
//!
//! - `answers`: what clients get, streamed or not, and where their sessions go.
//! - `failures`: what ends the halves of a turn, and what clients hear of it.
//! - `random`: many hand-offs with random failures.
//! - `overhead`: what a pair adds to a turn.

mod answers;
mod failures;
mod overhead;
mod random;

use std::time::Duration;

use engine_sim::{
    self, EngineSim,
    hand_off::{EngineMode, HandOffFault},
};
use harness::{
    case,
    cases::Case,
    cluster::{Agent, Cluster, Router, agent_config, eventually, ready, router_config},
    web::{Answer, Web},
};
use serde_json::{Value, json};

/// The cases, in the order in which they run.
pub(crate) const CASES: &[Case] = &[
    case!("pairs answer as one engine does", true, answers::as_one_engine),
    case!("pairs keep sessions on their decode engine", true, answers::sessions_stay),
    case!("pairs merge the prompt's log probabilities", true, answers::logprobs_are_merged),
    case!("pairs refuse what they can't run", true, answers::unpaired_is_refused),
    case!("pairs fit or whole engines serve", true, answers::only_engines_that_fit),
    case!("pairs: processes with two prefill ranks", true, answers::processes),
    case!("pairs: prefill fails", true, failures::prefill_fails),
    case!("pairs: decode fails", true, failures::decode_fails),
    case!("pairs: the client leaves", true, failures::client_leaves),
    case!("pairs: neither connects", true, failures::neither_connects),
    case!("pairs: an engine dies", true, failures::engine_dies),
    case!("pairs: a bootstrap server is gone", true, failures::bootstrap_server_gone),
    case!("pairs: a full half is tried elsewhere", true, failures::tried_elsewhere),
    case!("pairs: random failures leak nothing", true, random::nothing_leaks),
    case!("pairs: overhead", true, overhead::beside_one_engine),
];

/// The engines of a fleet, in the order of their numbers.
#[derive(Debug, Clone, Copy, Default)]
struct Engines {
    prefill: usize,
    decode: usize,
    whole: usize,
}

/// Starts engines with agents and a router. Prefill engines have the first numbers, then decode
/// engines. `change` changes the settings of an engine, `change_router` those of the router.
async fn start(
    engines: Engines,
    change: impl Fn(usize, &mut engine_sim::Config),
    change_router: impl FnOnce(&mut router::config::Config),
) -> anyhow::Result<Cluster> {
    let mut cluster = start_engines(engines, change).await?;
    let mut config = router_config(&[]);
    change_router(&mut config);
    cluster.start_router(config).await?;
    Ok(cluster)
}

/// Starts engines with agents, without a router.
async fn start_engines(
    engines: Engines,
    change: impl Fn(usize, &mut engine_sim::Config),
) -> anyhow::Result<Cluster> {
    let mut cluster =
        Cluster { engines: vec![], agents: vec![], routers: vec![], web: Web::default() };
    for number in 0..engines.prefill + engines.decode + engines.whole {
        let mut config = engine_sim::Config::default();
        config.core.session_radix_cache = true;
        config.health_wait = Duration::ZERO;
        config.hand_off.bootstrap_port = 0;
        config.hand_off.mode = if number < engines.prefill {
            EngineMode::Prefill
        } else if number < engines.prefill + engines.decode {
            EngineMode::Decode
        } else {
            EngineMode::Null
        };
        change(number, &mut config);
        let engine = EngineSim::start_local(config).await?;
        let mut config = agent_config(&engine.url(), &format!("w{number}"));
        // The agents have addresses of their own, unlike the agents of a real host.
        config.engine.bootstrap_host = engine.addr().ip().to_string();
        let agent = Agent::start(config)?;
        ready(&cluster.web, agent.admin).await;
        cluster.engines.push(engine);
        cluster.agents.push(agent);
    }
    Ok(cluster)
}

/// Starts engines with their usual settings.
async fn start_plain(prefill: usize, decode: usize, whole: usize) -> anyhow::Result<Cluster> {
    start(Engines { prefill, decode, whole }, |_, _| {}, |_| {}).await
}

/// Starts engines of which the router may not be ready.
async fn start_unready(
    engines: Engines,
    change: impl Fn(usize, &mut engine_sim::Config),
) -> anyhow::Result<Cluster> {
    let mut cluster = start_engines(engines, change).await?;
    let agents: Vec<_> = cluster.agents.iter().collect();
    let config = router_config(&agents);
    cluster.routers.push(Router::start(config).await?);
    eventually("reports of all agents", || async {
        let shown = cluster.get("/v1/workers").await.json();
        let workers = shown["workers"].as_array()?;
        let has_report = |worker: &Value| !worker["load"].is_null();
        (workers.len() == cluster.agents.len() && workers.iter().all(has_report)).then_some(())
    })
    .await;
    Ok(cluster)
}

/// Waits until neither engine, agent nor router holds anything for a turn.
async fn nothing_held(cluster: &Cluster) {
    eventually("no hand-off", || async {
        cluster.engines.iter().all(|engine| engine.hand_offs_running() == 0).then_some(())
    })
    .await;
    cluster.nothing_held().await;
    eventually("no turn", || async {
        let shown = cluster.get("/v1/workers").await.json();
        let mut workers = shown["workers"].as_array()?.iter();
        let is_idle = |worker: &Value| {
            worker["turns_in_flight_here"] == 0 && worker["load"]["turns_running"] == 0
        };
        workers.all(is_idle).then_some(())
    })
    .await;
}

/// A turn whose answer has `tokens` tokens.
fn turn(text: &str, tokens: u32) -> Value {
    json!({
        "model": "tiny", "text": text,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": true},
    })
}

/// Returns the worker that computed an answer's prompt, and the one that made the answer.
fn workers(answer: &Answer) -> (&str, &str) {
    let optional = answer.headers.get("x-berth-prefill-worker");
    let prefill = optional.and_then(|name| name.to_str().ok()).unwrap_or_default();
    (prefill, answer.header("x-berth-worker"))
}

/// Sets a fault of all engines' hand-offs.
fn set_fault(cluster: &Cluster, fault: HandOffFault) {
    cluster.engines.iter().for_each(|engine| engine.set_hand_off_fault(fault, 1000));
}

//! Many hand-offs with random failures.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::ensure;
use engine_sim::{core::is_model_answer, hand_off::HandOffFault, tokenizer};
use harness::{cluster::Cluster, fleet::Place};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{Engines, nothing_held, start, turn};

/// How many hand-offs run at once.
const CLIENTS: u32 = 16;

/// What became of the turns.
#[derive(Debug, Default)]
struct Outcomes {
    answered: AtomicU32,
    refused: AtomicU32,
    left: AtomicU32,
}

/// After random faults, refusals and clients that leave, no part holds anything, and every answer
/// was made from its own prompt.
pub(super) async fn nothing_leaks(place: Place) -> anyhow::Result<String> {
    let turns = if place.is_quick { 600 } else { 10_000 };
    let engines = Engines { prefill: 2, decode: 2, whole: 0 };
    let change = |_: usize, config: &mut engine_sim::Config| {
        config.core.max_total_tokens = 4096;
        config.hand_off.bootstrap_timeout = Duration::from_millis(1600);
        config.requests_seen_max = 0;
    };
    let change_router = |config: &mut router::config::Config| {
        config.timeouts.bootstrap_ms_max = 1000;
        // If turns kept their places, this few would be used up soon.
        config.limits.turns_in_flight_max = 64;
    };
    let cluster = Arc::new(start(engines, change, change_router).await?);
    let faults = [
        HandOffFault::None,
        HandOffFault::Bootstrap,
        HandOffFault::Transfer,
        HandOffFault::Memory,
        HandOffFault::Rank,
    ];
    let (outcomes, next) = (Arc::new(Outcomes::default()), Arc::new(AtomicU32::new(0)));
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (cluster, outcomes, next) = (cluster.clone(), outcomes.clone(), next.clone());
        let mut random = fastrand::Rng::with_seed(place.seed ^ u64::from(client));
        clients.spawn(async move {
            while next.fetch_add(1, Ordering::Relaxed) < turns {
                if random.u32(..10) == 0 {
                    let fault = faults[random.usize(..faults.len())];
                    cluster.engines[random.usize(..4)].set_hand_off_fault(fault, 200);
                }
                one_turn(&cluster, &mut random, &outcomes).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    nothing_held(&cluster).await;
    let count = |outcome: &AtomicU32| outcome.load(Ordering::Relaxed);
    let (answered, refused) = (count(&outcomes.answered), count(&outcomes.refused));
    let left = count(&outcomes.left);
    ensure!(answered > turns / 4 && refused > 0 && left > 0, "{outcomes:?}");
    Ok(format!("{answered} answered, {refused} failed, {left} left; nothing is held"))
}

/// Sends one random turn, and checks its answer if there is one.
async fn one_turn(
    cluster: &Cluster,
    random: &mut fastrand::Rng,
    outcomes: &Outcomes,
) -> anyhow::Result<()> {
    let text: String = (0..random.usize(1..200)).map(|_| random.alphabetic()).collect();
    let session = format!("s{}", random.u32(..40));
    let headers = [("x-berth-session-id", session.as_str())];
    let headers = if random.bool() { &headers[..] } else { &[] };
    let mut body = turn(&text, random.u32(1..12));
    body["stream"] = random.bool().into();
    if random.u32(..6) == 0 {
        (body["return_logprob"], body["logprob_start_len"]) = (json!(true), json!(0));
    }
    let url = cluster.url("/generate");
    let patience = if random.u32(..8) == 0 { random.u64(..40) } else { 60_000 };
    let sent = cluster.web.post(&url, headers, &body);
    let Ok(answer) = tokio::time::timeout(Duration::from_millis(patience), sent).await else {
        outcomes.left.fetch_add(1, Ordering::Relaxed);
        return Ok(());
    };
    let answer = answer?;
    let events = answer.text();
    let last = events.lines().filter_map(|line| line.strip_prefix("data: {")).next_back();
    let whole = last.map_or_else(|| events.clone(), |event| format!("{{{event}"));
    let value: Value = serde_json::from_str(&whole)?;
    let is_answer = answer.status == 200 && value["meta_info"]["finish_reason"]["type"] == "length";
    if !is_answer {
        outcomes.refused.fetch_add(1, Ordering::Relaxed);
        return Ok(());
    }
    let ids: Vec<u32> = serde_json::from_value(value["output_ids"].clone())?;
    let is_own = is_model_answer(&tokenizer::encode(&text), &ids, 0);
    ensure!(is_own && !ids.is_empty(), "the answer to {text:?} was made of another prompt");
    outcomes.answered.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

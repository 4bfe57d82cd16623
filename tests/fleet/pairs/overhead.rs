//! What a pair adds to a turn, beside an engine that runs whole turns.

use std::time::{Duration, Instant};

use harness::{cluster::Cluster, fleet::Place};
use service::clock::now;

use super::{Engines, start, turn};

/// Measures turns through pairs and through one engine by turns, and compares their medians.
pub(super) async fn beside_one_engine(place: Place) -> anyhow::Result<String> {
    let rounds = if place.is_quick { 60 } else { 1_000 };
    let fast = |_: usize, config: &mut engine_sim::Config| {
        config.core.decode_ms_per_step = 0.0;
        config.core.prefill_tokens_per_s = 1e9;
    };
    let pairs = start(Engines { prefill: 1, decode: 1, whole: 0 }, fast, |_| {}).await?;
    let whole = start(Engines { prefill: 0, decode: 0, whole: 1 }, fast, |_| {}).await?;
    let (mut of_pairs, mut of_one) = (vec![], vec![]);
    for round in 0..rounds + 20 {
        let text = format!("{round} a prompt that no cache has");
        let (pair, one) = (time(&pairs, &text).await, time(&whole, &text).await);
        // The first turns open connections.
        if round >= 20 {
            of_pairs.push(pair);
            of_one.push(one);
        }
    }
    let (pair, one) = (median(of_pairs), median(of_one));
    let ratio = pair.as_secs_f64() / one.as_secs_f64();
    Ok(format!("median {pair:.1?} by a pair, {one:.1?} by one engine: {ratio:.2} times"))
}

async fn time(cluster: &Cluster, text: &str) -> Duration {
    let began: Instant = now();
    cluster.turn("/generate", &[], &turn(text, 1)).await;
    began.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

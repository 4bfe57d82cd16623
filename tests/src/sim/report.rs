//! What runs counted, as a table for people and as JSON for programs.

use std::fmt::Write as _;

use serde::Serialize;

use super::tally::Tally;

/// One policy over all seeds: means, unless a name says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The policy.
    pub name: &'static str,
    /// Milliseconds to the first token.
    pub ttft_ms_mean: f64,
    /// Of the seeds' means, the least.
    pub ttft_ms_mean_min: f64,
    /// Of the seeds' means, the greatest.
    pub ttft_ms_mean_max: f64,
    /// Median.
    pub ttft_ms_p50: f64,
    /// 90th percentile.
    pub ttft_ms_p90: f64,
    /// 99th percentile.
    pub ttft_ms_p99: f64,
    /// Prompt tokens found resident, of all.
    pub token_hit_ratio: f64,
    /// Prompt tokens computed by the busiest worker, of the mean.
    pub prefill_imbalance: f64,
    /// Turns placed elsewhere than their session's turn before.
    pub rebinds: f64,
    /// Times that nothing could go on but by force.
    pub wedges: f64,
    /// Turns that fit into no pool.
    pub dropped: f64,
    /// Turns sent again because their worker was lost.
    pub retried: f64,
    /// Turns whose answer began.
    pub turns: f64,
    /// Mean milliseconds to the first token, by seed.
    pub seeds: Vec<f64>,
}

impl Summary {
    /// Sums up the runs of one policy, a run a seed.
    #[must_use]
    pub fn new(name: &'static str, tallies: &[Tally]) -> Self {
        let mean = |figure: &dyn Fn(&Tally) -> f64| {
            tallies.iter().map(figure).sum::<f64>() / tallies.len().max(1) as f64
        };
        let seeds: Vec<f64> = tallies.iter().map(Tally::ttft_ms_mean).collect();
        Self {
            name,
            ttft_ms_mean: mean(&Tally::ttft_ms_mean),
            ttft_ms_mean_min: seeds.iter().copied().fold(f64::INFINITY, f64::min),
            ttft_ms_mean_max: seeds.iter().copied().fold(0.0, f64::max),
            ttft_ms_p50: mean(&|tally| tally.ttft_ms_percentile(50)),
            ttft_ms_p90: mean(&|tally| tally.ttft_ms_percentile(90)),
            ttft_ms_p99: mean(&|tally| tally.ttft_ms_percentile(99)),
            token_hit_ratio: mean(&Tally::token_hit_ratio),
            prefill_imbalance: mean(&Tally::prefill_imbalance),
            rebinds: mean(&|tally| tally.rebinds as f64),
            wedges: mean(&|tally| tally.wedges as f64),
            dropped: mean(&|tally| tally.dropped as f64),
            retried: mean(&|tally| tally.retried as f64),
            turns: mean(&|tally| tally.ttft.len() as f64),
            seeds,
        }
    }
}

/// A table, best mean first.
#[must_use]
pub fn table(summaries: &[Summary]) -> String {
    let mut sorted: Vec<&Summary> = summaries.iter().collect();
    sorted.sort_by(|a, b| a.ttft_ms_mean.total_cmp(&b.ttft_ms_mean));
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<16} {:>9} {:>19} {:>8} {:>9} {:>9} {:>7} {:>6} {:>8} {:>7} {:>7} {:>7}",
        "policy",
        "ttft ms",
        "min..max of seeds",
        "p50",
        "p90",
        "p99",
        "hit",
        "imbal.",
        "rebinds",
        "wedges",
        "dropped",
        "turns",
    );
    for one in sorted {
        let range = format!("{:.1}..{:.1}", one.ttft_ms_mean_min, one.ttft_ms_mean_max);
        let _ = writeln!(
            text,
            "{:<16} {:>9.1} {:>19} {:>8.1} {:>9.1} {:>9.1} {:>7.4} {:>6.2} {:>8.1} {:>7.1} {:>7.1} \
             {:>7.0}",
            one.name,
            one.ttft_ms_mean,
            range,
            one.ttft_ms_p50,
            one.ttft_ms_p90,
            one.ttft_ms_p99,
            one.token_hit_ratio,
            one.prefill_imbalance,
            one.rebinds,
            one.wedges,
            one.dropped,
            one.turns,
        );
    }
    text
}

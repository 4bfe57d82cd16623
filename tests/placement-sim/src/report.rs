//! The results of runs, as a table for people and as JSON for programs.

use std::fmt::Write as _;

use serde::Serialize;

use super::{policy::PolicyKind, stats::RunStats};

/// The results of one policy over all seeds; means over the seeds, unless the name says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PolicySummary {
    /// The policy.
    pub name: PolicyKind,
    /// Mean milliseconds to the first token.
    pub ttft_ms_mean: f64,
    /// The least mean of a seed.
    pub ttft_ms_mean_min: f64,
    /// The greatest mean of a seed.
    pub ttft_ms_mean_max: f64,
    /// Median milliseconds to the first token.
    pub ttft_ms_p50: f64,
    /// 90th percentile of the milliseconds to the first token.
    pub ttft_ms_p90: f64,
    /// 99th percentile of the milliseconds to the first token.
    pub ttft_ms_p99: f64,
    /// The share of prompt tokens that were resident.
    pub token_hit_ratio: f64,
    /// The prompt tokens computed by the busiest worker, as a multiple of the mean.
    pub prefill_imbalance: f64,
    /// Turns placed on another worker than their session's previous turn.
    pub rebinds: f64,
    /// How often an engine was blocked by pins and the oldest pin was dropped by force.
    pub wedges: f64,
    /// Turns that no pool can hold.
    pub dropped: f64,
    /// Turns sent again because their worker crashed.
    pub retried: f64,
    /// Turns whose answer started.
    pub turns: f64,
    /// Mean milliseconds to the first token, by seed.
    pub seeds: Vec<f64>,
}

impl PolicySummary {
    /// Summarizes the runs of one policy, one per seed.
    #[must_use]
    pub fn new(name: PolicyKind, stats: &[RunStats]) -> Self {
        let mean = |figure: &dyn Fn(&RunStats) -> f64| {
            stats.iter().map(figure).sum::<f64>() / stats.len().max(1) as f64
        };
        let seeds: Vec<f64> = stats.iter().map(RunStats::ttft_ms_mean).collect();
        Self {
            name,
            ttft_ms_mean: mean(&RunStats::ttft_ms_mean),
            ttft_ms_mean_min: seeds.iter().copied().fold(f64::INFINITY, f64::min),
            ttft_ms_mean_max: seeds.iter().copied().fold(0.0, f64::max),
            ttft_ms_p50: mean(&|stats| stats.ttft_ms_percentile(50)),
            ttft_ms_p90: mean(&|stats| stats.ttft_ms_percentile(90)),
            ttft_ms_p99: mean(&|stats| stats.ttft_ms_percentile(99)),
            token_hit_ratio: mean(&RunStats::token_hit_ratio),
            prefill_imbalance: mean(&RunStats::prefill_imbalance),
            rebinds: mean(&|stats| stats.rebinds as f64),
            wedges: mean(&|stats| stats.wedges as f64),
            dropped: mean(&|stats| stats.dropped as f64),
            retried: mean(&|stats| stats.retried as f64),
            turns: mean(&|stats| stats.ttft.len() as f64),
            seeds,
        }
    }
}

/// Formats a table, best mean first.
#[must_use]
pub fn table(summaries: &[PolicySummary]) -> String {
    let mut sorted: Vec<&PolicySummary> = summaries.iter().collect();
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
            one.name.name(),
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

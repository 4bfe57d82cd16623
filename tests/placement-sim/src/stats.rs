//! The counts of a run.

use std::time::Duration;

/// The counts of one run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunStats {
    /// The times to first token, in the order of first tokens.
    pub ttft: Vec<Duration>,
    /// The prompt tokens of turns whose answer started.
    pub input_tokens: u64,
    /// The part of `input_tokens` that was resident.
    pub matched_tokens: u64,
    /// The prompt tokens computed, by worker.
    pub prefilled_tokens: Vec<u64>,
    /// Turns placed on another worker than their session's previous turn.
    pub rebinds: u64,
    /// How often an engine was blocked by pins and the oldest pin was dropped by force.
    pub wedges: u64,
    /// Turns that no pool can hold.
    pub dropped: u64,
    /// Turns sent again because their worker crashed.
    pub retried: u64,
    /// Turns that ended.
    pub ended: u64,
    /// Sessions that were closed.
    pub closed: u64,
}

impl RunStats {
    /// Creates zero counts for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self { prefilled_tokens: vec![0; workers], ..Self::default() }
    }

    /// Returns the mean milliseconds to the first token.
    #[must_use]
    pub fn ttft_ms_mean(&self) -> f64 {
        let sum: f64 = self.ttft.iter().map(Duration::as_secs_f64).sum();
        sum * 1e3 / self.ttft.len().max(1) as f64
    }

    /// Returns the `percent`-th percentile of the milliseconds to the first token.
    #[must_use]
    pub fn ttft_ms_percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.ttft.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    }

    /// Returns the share of prompt tokens that were resident.
    #[must_use]
    pub fn token_hit_ratio(&self) -> f64 {
        self.matched_tokens as f64 / self.input_tokens.max(1) as f64
    }

    /// Returns the most prompt tokens that one worker computed, as a multiple of the mean.
    #[must_use]
    pub fn prefill_imbalance(&self) -> f64 {
        let most = self.prefilled_tokens.iter().max().copied().unwrap_or(0);
        let sum: u64 = self.prefilled_tokens.iter().sum();
        most as f64 * self.prefilled_tokens.len() as f64 / sum.max(1) as f64
    }
}

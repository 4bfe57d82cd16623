//! What a run counts.

use std::time::Duration;

/// Counts of one run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tally {
    /// Times to first token, in order of their ends.
    pub ttft: Vec<Duration>,
    /// Prompt tokens of turns whose answer began.
    pub input_tokens: u64,
    /// Of them, found resident.
    pub matched_tokens: u64,
    /// Of them, computed, by worker.
    pub prefilled_tokens: Vec<u64>,
    /// Turns placed elsewhere than their session's turn before.
    pub rebinds: u64,
    /// Times that nothing could go on but by force.
    pub wedges: u64,
    /// Turns that fit into no pool.
    pub dropped: u64,
    /// Turns sent again because their worker was lost.
    pub retried: u64,
    /// Turns that ended.
    pub ended: u64,
    /// Sessions closed.
    pub closed: u64,
}

impl Tally {
    /// Nothing yet, of so many workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self { prefilled_tokens: vec![0; workers], ..Self::default() }
    }

    /// Mean milliseconds to the first token.
    #[must_use]
    pub fn ttft_ms_mean(&self) -> f64 {
        let sum: f64 = self.ttft.iter().map(Duration::as_secs_f64).sum();
        sum * 1e3 / self.ttft.len().max(1) as f64
    }

    /// Milliseconds within which so many of a hundred first tokens came.
    #[must_use]
    pub fn ttft_ms_percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.ttft.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    }

    /// Matched tokens of all prompt tokens.
    #[must_use]
    pub fn token_hit_ratio(&self) -> f64 {
        self.matched_tokens as f64 / self.input_tokens.max(1) as f64
    }

    /// The most that a worker computed, of the mean.
    #[must_use]
    pub fn prefill_imbalance(&self) -> f64 {
        let most = self.prefilled_tokens.iter().max().copied().unwrap_or(0);
        let sum: u64 = self.prefilled_tokens.iter().sum();
        most as f64 * self.prefilled_tokens.len() as f64 / sum.max(1) as f64
    }
}

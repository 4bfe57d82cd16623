//! The options of a run: fleet, load, faults (values only).

use std::time::Duration;

/// What happens on the engine when a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Close {
    /// Nothing: the session's KV stays until it is evicted.
    None,
    /// The engine frees the blocks that only this session used.
    Free,
}

/// How engines keep the KV of open sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Evicted like all other KV.
    None,
    /// Evicted after the KV of no session.
    Tagged,
    /// Not evicted, up to the pin budget.
    Pinned,
}

/// What happens to workers during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Churn {
    /// Nothing.
    None,
    /// One worker crashes and returns empty; another drains and returns.
    Once,
}

/// The faults in the delivery of block changes and session ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeliveryFaults {
    /// The delay between a change of blocks and its report to the router.
    pub lag: Duration,
    /// The share of block changes that are lost.
    pub loss_ratio: f64,
    /// The share of closes that are lost.
    pub close_loss_ratio: f64,
    /// The share of closes that are delivered twice.
    pub close_twice_ratio: f64,
}

impl DeliveryFaults {
    /// No delay, no loss, no duplicates.
    pub const NONE: Self = Self {
        lag: Duration::ZERO,
        loss_ratio: 0.0,
        close_loss_ratio: 0.0,
        close_twice_ratio: 0.0,
    };
}

/// The options of a run except its policy and seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimOptions {
    /// The number of engines.
    pub workers: usize,
    /// The tokens of each pool; `None` for unlimited pools.
    pub pool_tokens: Option<u64>,
    /// The number of concurrent users, unless the trace times its sessions.
    pub users: usize,
    /// The factor on the speed of a timed trace.
    pub rate: f64,
    /// The end of the run, because users would continue forever.
    pub horizon: Duration,
    /// The longest pause between two turns.
    pub think_max: Duration,
    /// The period over which users start.
    pub ramp: Duration,
    /// What happens at a session's end, under every policy.
    pub close: Close,
    /// How engines keep KV, under every policy.
    pub mode: Mode,
    /// The share of the pool that pins may hold.
    pub pin_budget_ratio: f64,
    /// The tokens of a prefill chunk, if prompts alternate; `None` for whole prompts.
    pub chunk_tokens: Option<u64>,
    /// The faults in what the router hears.
    pub delivery_faults: DeliveryFaults,
    /// What happens to workers.
    pub churn: Churn,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            workers: 8,
            pool_tokens: Some(1_000_000),
            users: 64,
            rate: 1.0,
            horizon: Duration::from_secs(2 * 3600),
            think_max: Duration::from_secs(600),
            ramp: Duration::from_secs(600),
            close: Close::None,
            mode: Mode::None,
            pin_budget_ratio: 0.5,
            chunk_tokens: None,
            delivery_faults: DeliveryFaults::NONE,
            churn: Churn::None,
        }
    }
}

//! What a run is of: fleet, load, faults. Values only.

use std::time::Duration;

/// How a session's end reaches its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Close {
    /// Not at all: its KV ages.
    None,
    /// What only the session used is freed.
    Free,
}

/// How engines keep the KV of open sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// As all KV.
    None,
    /// Evicted after that of no session.
    Tagged,
    /// Not evicted, within the pin budget.
    Pinned,
}

/// What happens to the fleet during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Churn {
    /// Nothing.
    None,
    /// One worker crashes and returns empty, another drains and returns.
    Once,
}

/// The faults of the channel on which the router hears of blocks and ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hearing {
    /// Between a change of blocks and the router's knowing.
    pub lag: Duration,
    /// Share of changes never heard.
    pub loss_ratio: f64,
    /// Share of closes never heard.
    pub close_loss_ratio: f64,
    /// Share of closes told twice.
    pub close_twice_ratio: f64,
}

impl Hearing {
    /// Everything is heard at once.
    pub const PERFECT: Self = Self {
        lag: Duration::ZERO,
        loss_ratio: 0.0,
        close_loss_ratio: 0.0,
        close_twice_ratio: 0.0,
    };
}

/// A run without its policy and seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// Engines.
    pub workers: usize,
    /// Tokens of each pool; none: no end.
    pub pool_tokens: Option<u64>,
    /// Users side by side, where sessions are not timed by the trace.
    pub users: usize,
    /// Factor on the speed of a timed trace.
    pub rate: f64,
    /// When the run ends, where users would go on for ever.
    pub horizon: Duration,
    /// Longest pause between two turns.
    pub think_max: Duration,
    /// Over which time users begin.
    pub ramp: Duration,
    /// The close mode, of every policy.
    pub close: Close,
    /// The retention, of every policy.
    pub mode: Mode,
    /// Share of the pool that pins may hold.
    pub pin_budget_ratio: f64,
    /// Tokens of a piece of prefill, where prompts take turns.
    pub chunk_tokens: Option<u64>,
    /// What the router hears.
    pub hearing: Hearing,
    /// What happens to workers.
    pub churn: Churn,
}

impl Default for Options {
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
            hearing: Hearing::PERFECT,
            churn: Churn::None,
        }
    }
}

//! The options of a run: fleet, load, faults (values only).

use std::time::Duration;

use clap::{Args, FromArgMatches as _, builder::RangedU64ValueParser};

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
    /// One worker joins the others at a third of the run.
    Join,
    /// The first prompt of one engine takes ten times as long as it should.
    Cold,
}

/// The faults in the delivery of block changes and session ends.
#[derive(Debug, Clone, Copy, PartialEq, Args)]
pub struct DeliveryFaults {
    /// The delay until the router hears of a change of blocks, in milliseconds
    #[arg(long = "event-lag-ms", default_value = "0", value_parser = millis)]
    pub lag: Duration,
    /// The share of block changes that the router never hears of
    #[arg(long = "event-loss-ratio", default_value_t = 0.0)]
    pub loss_ratio: f64,
    /// The share of closes that are lost
    #[arg(long, default_value_t = 0.0)]
    pub close_loss_ratio: f64,
    /// The share of closes that are delivered twice
    #[arg(long, default_value_t = 0.0)]
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
#[derive(Debug, Clone, Copy, PartialEq, Args)]
pub struct SimOptions {
    /// The number of engines
    #[arg(long, default_value = "8", value_parser = up_to(1024))]
    pub workers: usize,
    /// The tokens of each engine's pool; a run of a test may have unlimited pools.
    #[arg(long, default_value = "1000000")]
    pub pool_tokens: Option<u64>,
    /// The tokens of each engine's host tier, as a multiple of its pool's
    #[arg(long, default_value_t = 0.0)]
    pub host_ratio: f64,
    /// The tokens that an engine loads from its host tier in a second
    #[arg(long, default_value_t = 250_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub host_load_tokens_per_s: u64,
    /// Compute nothing while KV is loaded; SGLang computes one layer while it loads the next
    #[arg(long)]
    pub no_host_overlap: bool,
    /// Keep from the policies what is on the host
    #[arg(long)]
    pub host_unseen: bool,
    /// The number of concurrent users, if the trace has no arrival times
    #[arg(long, default_value = "64", value_parser = up_to(100_000))]
    pub users: usize,
    /// The factor on the arrival rate of a trace with times
    #[arg(long, default_value_t = 1.0)]
    pub rate: f64,
    /// The seconds of virtual time after which a run with users ends
    #[arg(long = "horizon-s", default_value = "7200", value_parser = seconds)]
    pub horizon: Duration,
    /// The longest pause between two turns, in seconds
    #[arg(long = "think-s-max", default_value = "600", value_parser = seconds)]
    pub think_max: Duration,
    /// The period over which users start.
    #[arg(skip = Duration::from_secs(600))]
    pub ramp: Duration,
    /// What happens on the engine when a session ends, under every policy
    #[arg(long, value_enum, default_value = "none")]
    pub close: Close,
    /// How engines keep the KV of open sessions, under every policy
    #[arg(long, value_enum, default_value = "none")]
    pub mode: Mode,
    /// The share of a pool that pinned sessions may hold; 1 means all of it
    #[arg(long, default_value_t = 0.5)]
    pub pin_budget_ratio: f64,
    /// Prefill in chunks of this many tokens, alternating between waiting prompts
    #[arg(long)]
    pub chunk_tokens: Option<u64>,
    /// The faults in what the router hears.
    #[command(flatten)]
    pub delivery_faults: DeliveryFaults,
    /// What happens to workers
    #[arg(long, value_enum, default_value = "none")]
    pub churn: Churn,
}

impl Default for SimOptions {
    /// Returns the defaults of the command line.
    fn default() -> Self {
        let matches = Self::augment_args(clap::Command::new("sim")).get_matches_from(["sim"]);
        Self::from_arg_matches(&matches).expect("all have defaults")
    }
}

fn up_to(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

fn seconds(text: &str) -> Result<Duration, std::num::ParseIntError> {
    text.parse().map(Duration::from_secs)
}

fn millis(text: &str) -> Result<Duration, std::num::ParseIntError> {
    text.parse().map(Duration::from_millis)
}

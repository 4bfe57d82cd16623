//! What a run showed (a pure module).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::workload::Scenario;

/// One answered turn.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TurnOutcome {
    /// Whether its agent was started by another one.
    pub is_subagent: bool,
    /// Its number among its agent's turns, from 0.
    pub index: usize,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that an earlier turn of the agent had computed, in whole pages.
    pub known_tokens: u64,
    /// Tokens of the prompt that the engine took from a cache or a session.
    pub cached_tokens: u64,
    /// The time to the first token, in milliseconds, retries included.
    pub ttft_ms: f64,
}

impl TurnOutcome {
    /// Returns the tokens that were computed again.
    #[must_use]
    pub fn recomputed_tokens(&self) -> u64 {
        self.known_tokens.saturating_sub(self.cached_tokens)
    }
}

/// The part of the pool that is not free, cached KV included.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PhysicalUsage {
    /// The largest figure of the run.
    pub peak: f64,
    /// The figure after all agents have ended.
    pub floor: f64,
}

impl PhysicalUsage {
    /// Returns the part of the peak that was given back; `None` if nothing was used.
    #[must_use]
    pub fn reclaimed(self) -> Option<f64> {
        (self.peak > 0.0).then(|| (self.peak - self.floor) / self.peak)
    }
}

/// How an engine's run ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All agents have ended.
    #[default]
    Complete,
    /// The engine answered no request any more.
    Wedged,
    /// The engine's process ended.
    Died,
}

/// One run of an arm.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// What was played.
    pub scenario: Scenario,
    /// The arm's name.
    pub arm: String,
    /// The seed of the plan.
    pub seed: u64,
    /// Tokens of the pool.
    pub pool_tokens: u64,
    /// The answered turns.
    pub turns: Vec<TurnOutcome>,
    /// The planned turns that got no answer.
    pub turns_lost: usize,
    /// The pool's use, at a wedge or the run's end; `None` if the agent doesn't know it.
    pub physical: Option<PhysicalUsage>,
    /// The milliseconds from a close until the session's KV was free, where no turn ran meanwhile.
    pub freed_ms: Vec<f64>,
    /// The closes after which it was not free in time.
    pub not_freed: usize,
    /// The sessions that were refused. Their agents went on without.
    pub opens_refused: usize,
    /// The sessions that an agent gave up because a turn of theirs failed. It went on without.
    pub given_up: usize,
    /// The failed calls, by kind.
    pub failures: BTreeMap<String, usize>,
    /// How it ended.
    pub ending: Ending,
    /// The seconds that it took.
    pub seconds: f64,
    /// When and where.
    pub measured: String,
}

impl Outcome {
    /// Returns the tokens that were computed again, of all turns.
    #[must_use]
    pub fn recomputed_tokens(&self) -> u64 {
        self.turns.iter().map(TurnOutcome::recomputed_tokens).sum()
    }

    /// Returns the tokens of all turns that an earlier turn had computed.
    #[must_use]
    pub fn known_tokens(&self) -> u64 {
        self.turns.iter().map(|turn| turn.known_tokens).sum()
    }
}

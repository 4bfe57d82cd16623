//! Defines a worker's identity and the states that decide what turns a worker may take. Pure.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use crate::config::AGENTS_MAX;

/// Ranks per agent that have a number in the overlap index. A node has eight GPUs.
const RANKS_INDEXED_MAX: usize = 16;
/// The workers' numbers in the overlap index are below it.
pub const WORKER_NUMBERS_MAX: usize = AGENTS_MAX * RANKS_INDEXED_MAX;
const _: () = assert!(WORKER_NUMBERS_MAX == blocks::index::WORKERS_MAX);

/// One agent's stay in the fleet, whatever its name. Each agent that gets a slot has its own
/// generation, so the key of one that has left never means the next.
///
/// Keys are ordered by slot, and those of one slot from its first agent to its newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentKey {
    slot: u32,
    generation: u32,
}

impl AgentKey {
    /// No agent ever has this key.
    pub(super) const NOBODY: Self = Self { slot: u32::MAX, generation: 0 };

    /// Of the first agent that has the slot. The settings' agents have the first slots, in their
    /// order.
    #[must_use]
    pub fn first(slot: usize) -> Self {
        let slot = u32::try_from(slot).expect("there are fewer slots than AGENTS_MAX");
        Self { slot, generation: 0 }
    }

    /// The key of this slot's next agent.
    pub(crate) fn next(self) -> Self {
        // A slot that is given away each second has used every number after a century.
        Self { generation: self.generation.wrapping_add(1), ..self }
    }

    /// The agent's index in tables. Compare whole keys where a former agent's can turn up.
    #[must_use]
    pub fn slot(self) -> usize {
        self.slot as usize
    }

    /// In the overlap index. The slot's next agent has the same.
    pub(crate) fn worker_numbers(self) -> Range<usize> {
        let first = self.slot() * RANKS_INDEXED_MAX;
        first..first + RANKS_INDEXED_MAX
    }

    /// Differs between the agents of one slot, and is never 0.
    #[must_use]
    pub(crate) fn stamp(self) -> u64 {
        u64::from(self.generation) + 1
    }
}

/// Is the same in every snapshot that has the agent, even if the agent changes its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerRef {
    pub agent: AgentKey,
    pub dp_rank: u32,
}

impl WorkerRef {
    /// The worker's number in the overlap index; `None` for a rank beyond `RANKS_INDEXED_MAX`. A
    /// worker of the slot's next agent has the same.
    #[must_use]
    pub fn number(self) -> Option<usize> {
        let rank = self.dp_rank as usize;
        self.agent.worker_numbers().nth(rank)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkerState {
    /// The agent was heard within the setting `load_report_age_ms_max`. The worker takes all turns.
    Fresh,
    /// The agent is connected but was silent for too long, has sent no load report yet, or has a
    /// data port that turns can't reach. See [`Self::is_usable`].
    Stale,
    /// The agent is not connected, or was never heard.
    Lost,
    Unhealthy,
    /// The engine runs no turns by its operator's wish, such as a pause. Turns wait in the agent.
    Held,
    Draining,
    /// The engine runs only a part of each turn, and its agent doesn't say how it hands over KV, so
    /// the worker can form no pair.
    Disaggregated,
}

impl WorkerState {
    pub const ALL: [Self; 7] = [
        Self::Fresh,
        Self::Stale,
        Self::Lost,
        Self::Unhealthy,
        Self::Held,
        Self::Draining,
        Self::Disaggregated,
    ];

    /// In JSON and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Stale => "stale",
            Self::Lost => "lost",
            Self::Unhealthy => "unhealthy",
            Self::Held => "held",
            Self::Draining => "draining",
            Self::Disaggregated => "disaggregated",
        }
    }

    /// A stale or held worker takes new sessions only if no worker is fresh.
    #[must_use]
    pub fn is_usable(self) -> bool {
        matches!(self, Self::Fresh | Self::Stale | Self::Held)
    }

    /// `Lost` and `Disaggregated` never become `Stale`.
    pub(super) fn stale_if_silent(
        self,
        heard_at: Option<Instant>,
        now: Instant,
        report_age_max: Duration,
    ) -> Self {
        let silence = heard_at.map(|heard_at| now.saturating_duration_since(heard_at));
        let is_silent = silence.is_none_or(|silence| silence > report_age_max);
        let can_become_stale = !matches!(self, Self::Lost | Self::Disaggregated);
        if is_silent && can_become_stale { Self::Stale } else { self }
    }
}

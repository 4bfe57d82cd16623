//! Defines a worker's identity and the states that decide what turns a worker may take. Pure.

use std::time::{Duration, Instant};

use crate::config::AGENTS_MAX;

/// Ranks per agent that have a number in the overlap index. A node has eight GPUs.
const RANKS_INDEXED_MAX: usize = 16;
/// The workers' numbers in the overlap index are below it.
pub const WORKER_NUMBERS_MAX: usize = AGENTS_MAX * RANKS_INDEXED_MAX;
const _: () = assert!(WORKER_NUMBERS_MAX == blocks::index::WORKERS_MAX);

/// Is the same in every snapshot, even if the agent changes its name. Another agent gets the slot
/// only after the last reference to this one is gone; see [`super::membership`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerRef {
    /// The agent's slot.
    pub agent: usize,
    pub dp_rank: u32,
}

impl WorkerRef {
    /// The worker's number in the overlap index; `None` for a rank beyond `RANKS_INDEXED_MAX`.
    #[must_use]
    pub fn number(self) -> Option<usize> {
        let rank = self.dp_rank as usize;
        (rank < RANKS_INDEXED_MAX).then_some(self.agent * RANKS_INDEXED_MAX + rank)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkerState {
    /// The agent was heard within the setting `load_report_age_ms_max`. The worker takes all turns.
    Fresh,
    /// The agent is connected but was silent for too long, has sent no load report yet, or has a
    /// data port that turns can't reach. The worker takes no new sessions.
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

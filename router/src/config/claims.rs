//! The settings of `[claims]`: where routers agree on the workers of new sessions.
//!
//! `claims` reads them. Its documentation says what a claim is.

use std::time::Duration;

use proto::placement_claim::TTL_MAX;
use serde::{Deserialize, Serialize};

/// The default deadline of one store or agent. In one network a claim takes a millisecond; a first
/// turn computes its whole prompt, so that it hardly notices 20 ms.
pub const DEADLINE_MS: u64 = 20;
/// The default life of a claim. It must cover the time from a session's placement until its agent
/// has reported it, which is milliseconds after the turn has reached the agent. Turns may wait for
/// seconds before that, while their prompts are computed in stages.
pub const TTL_MS: u64 = 30_000;

/// Where claims are held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreName {
    /// At the agents. Nothing else has to run.
    #[default]
    Agents,
    /// In this process, which must be the only router.
    Memory,
}

/// The table `[claims]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClaimsTable {
    /// Where claims are held. All routers of a fleet must have the same setting.
    pub store: StoreName,
    /// How long the store, and each agent, may take for a claim. Then the next is asked.
    pub deadline_ms: u64,
    /// How long a claim holds, unless it is renewed.
    pub ttl_ms: u64,
}

impl Default for ClaimsTable {
    fn default() -> Self {
        Self { store: StoreName::default(), deadline_ms: DEADLINE_MS, ttl_ms: TTL_MS }
    }
}

impl ClaimsTable {
    /// Returns the problems of these settings, a sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = vec![];
        // A turn waits for at most four deadlines: the store's, and those of three agents.
        if !(1..=10_000).contains(&self.deadline_ms) {
            problems.push("claims.deadline_ms: must be 1 to 10000 ms".to_owned());
        }
        let ttl_ms_max = u64::try_from(TTL_MAX.as_millis()).unwrap_or(u64::MAX);
        if !(1_000..=ttl_ms_max).contains(&self.ttl_ms) {
            problems.push(format!("claims.ttl_ms: must be 1000 to {ttl_ms_max} ms"));
        }
        problems
    }

    /// Returns how long the store, and each agent, may take.
    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// Returns how long a claim holds.
    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }
}

//! Says which agents are silent: their process or host has stopped answering.
//!
//! `liveness` writes this. Requests and answers look at it once in a while, and end if their agent
//! is silent.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::config::AGENTS_MAX;

/// How often turns look whether their agent is silent. Also the least time between two probes of a
/// quiet agent.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// By the agents' slots.
#[derive(Debug)]
pub(crate) struct Pulses(Vec<AtomicBool>);

impl Pulses {
    pub(crate) fn new() -> Self {
        Self((0..AGENTS_MAX).map(|_| AtomicBool::new(false)).collect())
    }

    pub(super) fn is_silent(&self, agent: usize) -> bool {
        self.0[agent].load(Ordering::Relaxed)
    }

    pub(super) async fn wait_until_silent(&self, agent: usize) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            if self.is_silent(agent) {
                return;
            }
        }
    }

    /// Returns whether the agent was silent before.
    pub(crate) fn set_silent(&self, agent: usize, is_silent: bool) -> bool {
        self.0[agent].swap(is_silent, Ordering::Relaxed)
    }
}

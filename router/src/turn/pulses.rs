//! Says which agents are silent: their process or host has stopped answering.
//!
//! `liveness` finds that out and writes it here. Requests to agents (`upstream`) and their answers
//! (`proxy`) look at it once in a while, and end when their agent is silent.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// Interval at which turns check whether their agent is silent, and at which a quiet agent is
/// probed.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Which agents are silent, by their index in the settings.
#[derive(Debug)]
pub(crate) struct Pulses(Vec<AtomicBool>);

impl Pulses {
    /// Creates the pulses of agents none of which is silent.
    pub(crate) fn new(agent_count: usize) -> Self {
        Self((0..agent_count).map(|_| AtomicBool::new(false)).collect())
    }

    pub(super) fn agent_count(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_silent(&self, agent: usize) -> bool {
        self.0[agent].load(Ordering::Relaxed)
    }

    /// Waits until the agent is silent.
    pub(super) async fn wait_until_silent(&self, agent: usize) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            if self.is_silent(agent) {
                return;
            }
        }
    }

    /// Sets whether the agent is silent. Returns whether it was before.
    pub(super) fn set_silent(&self, agent: usize, is_silent: bool) -> bool {
        self.0[agent].swap(is_silent, Ordering::Relaxed)
    }
}

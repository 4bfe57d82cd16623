//! Says which agents are silent: their process or host has stopped answering.
//!
//! `liveness` finds that out and writes it here. Requests to agents (`upstream`) and their answers
//! (`proxy`) look at it once in a while, and end when their agent is silent.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::config::AGENTS_MAX;

/// Interval at which turns check whether their agent is silent, and at which a quiet agent is
/// probed.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Which agents are silent, by their slot.
#[derive(Debug)]
pub(crate) struct Pulses(Vec<AtomicBool>);

impl Pulses {
    /// Creates the pulses of all slots, none of which is silent.
    pub(crate) fn new() -> Self {
        Self((0..AGENTS_MAX).map(|_| AtomicBool::new(false)).collect())
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
    pub(crate) fn set_silent(&self, agent: usize, is_silent: bool) -> bool {
        self.0[agent].swap(is_silent, Ordering::Relaxed)
    }
}

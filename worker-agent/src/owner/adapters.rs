//! Follows which LoRA adapters the engine has loaded.
//!
//! Routers send a turn (one request and its answer) to a worker that has its adapter. The engine
//! says in `/v1/models` what it has. `engine_monitor` reads that with the engine's description, and
//! again from time to time, because others may load adapters too. Whoever loads or unloads one
//! through this agent calls [`refresh`], so that routers know at once.

use std::time::{Duration, Instant};

use super::{AgentHandle, EngineNews};
use crate::engine::{self, EngineClient};

/// The time between two readings of the adapters.
const READ_INTERVAL: Duration = Duration::from_secs(10);

/// Reads the engine's adapters, and tells the owner task, which describes them to routers.
///
/// # Errors
/// When the engine can't be reached or its answer is invalid.
pub async fn refresh(engine: &EngineClient, owner: &AgentHandle) -> Result<(), engine::Error> {
    let adapters = engine.read_adapters().await?;
    owner.report_engine(EngineNews::Adapters(adapters)).await;
    Ok(())
}

/// When to read the adapters of an engine again.
#[derive(Debug, Clone, Copy)]
pub(super) struct AdapterWatch {
    /// `None` if the engine can't load any.
    next_due: Option<Instant>,
}

impl AdapterWatch {
    /// Begins with adapters that were read at `now`.
    pub(super) fn new(has_lora: bool, now: Instant) -> Self {
        Self { next_due: has_lora.then(|| now + READ_INTERVAL) }
    }

    /// Whether it is time to read the adapters. Then the next reading is due an interval later.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next_due.is_some_and(|due| due <= now);
        if is_due {
            self.next_due = Some(now + READ_INTERVAL);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_read_again_after_each_interval_if_the_engine_has_any() {
        let start = service::clock::now();
        assert!(!AdapterWatch::new(false, start).is_due(start + READ_INTERVAL * 9));
        let mut watch = AdapterWatch::new(true, start);
        assert!(!watch.is_due(start + READ_INTERVAL / 2));
        assert!(watch.is_due(start + READ_INTERVAL));
        assert!(!watch.is_due(start + READ_INTERVAL));
        assert!(watch.is_due(start + READ_INTERVAL * 2));
    }
}

//! Follows which LoRA adapters the engine has loaded.
//!
//! The adapters are read from time to time, because others may load some too. Whoever loads or
//! unloads one through this agent calls [`refresh`], so that routers know at once.

use std::time::{Duration, Instant};

use super::{AgentHandle, EngineNews};
use crate::engine::{self, EngineClient};

const READ_INTERVAL: Duration = Duration::from_secs(10);

pub async fn refresh(engine: &EngineClient, owner: &AgentHandle) -> Result<(), engine::Error> {
    let adapters = engine.read_adapters().await?;
    owner.report_engine(EngineNews::Adapters(adapters)).await;
    Ok(())
}

#[derive(Debug, Clone, Copy)]
pub(super) struct AdapterWatch {
    /// `None` if the engine can't load any.
    next_due: Option<Instant>,
}

impl AdapterWatch {
    pub(super) fn new(has_lora: bool, now: Instant) -> Self {
        Self { next_due: has_lora.then(|| now + READ_INTERVAL) }
    }

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

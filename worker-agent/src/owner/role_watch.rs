//! Follows the role of an engine that may be switched while it runs: prefill or decode.
//!
//! With `--enable-pd-role-switch`, others can switch the role, and nothing tells the agent. An
//! engine in another role is described anew, as another instance.

use std::time::{Duration, Instant};

use tracing::{debug, info};

use crate::engine::{EngineClient, EngineInfo};

/// A switch itself takes seconds, of an idle engine.
const READ_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub(super) struct RoleWatch {
    role: String,
    next_due: Option<Instant>,
}

impl RoleWatch {
    pub(super) fn new(info: &EngineInfo, now: Instant) -> Self {
        let next_due = info.can_switch_role.then(|| now + READ_INTERVAL);
        Self { role: info.facts.disaggregation.clone(), next_due }
    }

    pub(super) async fn was_switched(&mut self, now: Instant, engine: &EngineClient) -> bool {
        if self.next_due.is_none_or(|due| now < due) {
            return false;
        }
        self.next_due = Some(now + READ_INTERVAL);
        match engine.read_role().await {
            Ok(role) if role != self.role => {
                info!(from = self.role, to = role, "the engine's role was switched");
                true
            }
            Ok(_) => false,
            Err(error) => {
                debug!(%error, "can't read the engine's role");
                false
            }
        }
    }
}

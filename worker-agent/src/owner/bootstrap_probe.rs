//! Checks whether decode engines can reach a prefill engine's bootstrap server.
//!
//! Decode engines find the KV of prompts through this server. An engine that answers `/health` and
//! whose bootstrap port accepts no connection can't hand over anything. Until a first probe has
//! succeeded, and after one that failed, the engine counts as unhealthy.

use std::time::{Duration, Instant};

use tokio::net::TcpStream;

use super::{AgentHandle, EngineNews};
use crate::engine::EngineInfo;
use contract::load::EngineRole;

/// Routers learn of a dead bootstrap server after this time at most.
const INTERVAL: Duration = Duration::from_secs(1);
const CONNECT_MAX: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct BootstrapProbe {
    /// `None` if the engine has no bootstrap server.
    address: Option<(String, u16)>,
    next_at: Option<Instant>,
    /// `None` before the first probe.
    reported: Option<Result<(), String>>,
}

impl BootstrapProbe {
    pub(super) fn new(info: &EngineInfo, host: &str) -> Self {
        let transfer = info.facts.transfer.as_ref();
        let transfer = transfer.filter(|_| info.facts.role() == EngineRole::Prefill);
        let address = transfer.map(|transfer| (host.to_owned(), transfer.bootstrap_port));
        Self { address, next_at: None, reported: None }
    }

    /// A result is only reported if it is another than before.
    pub(super) async fn check(&mut self, now: Instant, owner: &AgentHandle) {
        let Some((host, port)) = &self.address else { return };
        if self.next_at.is_some_and(|next_at| now < next_at) {
            return;
        }
        self.next_at = Some(now + INTERVAL);
        let connecting = TcpStream::connect((host.as_str(), *port));
        let result = match tokio::time::timeout(CONNECT_MAX, connecting).await {
            Ok(Ok(_)) => Ok(()),
            // The agent's own lack of descriptors says nothing about the engine.
            Ok(Err(error)) if service::descriptors::is_shortage(&error) => return,
            Ok(Err(error)) => Err(describe(host, *port, &error.to_string())),
            Err(_) => Err(describe(host, *port, "it doesn't answer")),
        };
        if self.reported.as_ref() != Some(&result) {
            self.reported = Some(result.clone());
            owner.report_engine(EngineNews::Bootstrap(result)).await;
        }
    }
}

fn describe(host: &str, port: u16, why: &str) -> String {
    format!(
        "the engine's bootstrap server at {host}:{port} takes no connection, so it can hand over \
         no KV: {why}"
    )
}

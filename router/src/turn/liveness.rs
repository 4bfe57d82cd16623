//! Notices agents whose process or host has stopped answering, so that their turns end soon.
//!
//! A stopped process (by SIGSTOP, or in a host that hangs) keeps its connections: its kernel
//! acknowledges everything, so TCP's keepalive sees no fault, and a turn there would wait until its
//! time limit. No report and no answer of the *data port* together mean that the agent is *silent*.
//! A lost control connection alone does not: turns may well run on.

use std::{sync::Arc, time::Duration};

use service::clock::now;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::upstream::{CHECK_INTERVAL, UpstreamClient};
use crate::{fleet::worker::AgentKey, sessions::directory::SessionDirectory};

/// After so long without a message the data port is probed. Agents report every 500 ms by default,
/// so eight reports are missing.
const QUIET_MAX: Duration = Duration::from_secs(4);
/// An agent answers in milliseconds. With [`QUIET_MAX`] and [`CHECK_INTERVAL`], the turns of a
/// silent agent end within 9 s.
const PROBE_TIME_MAX: Duration = Duration::from_secs(3);

pub(crate) async fn run(
    agent: AgentKey,
    directory: Arc<SessionDirectory>,
    upstream: Arc<UpstreamClient>,
    token: CancellationToken,
) {
    tokio::select! {
        biased;
        () = token.cancelled() => {}
        () = watch(agent, &directory, &upstream) => {}
    }
}

async fn watch(agent: AgentKey, directory: &SessionDirectory, upstream: &UpstreamClient) {
    loop {
        let view = directory.view();
        let state = view.agent_with(agent);
        let (Some(heard_at), Some(facts)) = (state.heard_at, &state.facts) else {
            // Never heard, so it has no turns.
            tokio::time::sleep(QUIET_MAX).await;
            continue;
        };
        let quiet_time = now().saturating_duration_since(heard_at);
        let is_silent =
            quiet_time >= QUIET_MAX && !upstream.probe(facts, now() + PROBE_TIME_MAX).await;
        let name = state.name();
        match (upstream.pulses().set_silent(agent, is_silent), is_silent) {
            (false, true) => warn!(agent = name, "agent silent, its turns end"),
            (true, false) => info!(agent = name, "agent answers again"),
            _ => {}
        }
        let pause = QUIET_MAX.checked_sub(quiet_time).unwrap_or_default().max(CHECK_INTERVAL);
        drop(view);
        tokio::time::sleep(pause).await;
    }
}

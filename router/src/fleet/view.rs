//! The view task: applies the agents' messages and publishes snapshots of the fleet for requests.
//!
//! The task is the only writer of the fleet's state. It applies all updates that wait in its
//! mailbox, then publishes one snapshot.

use std::{sync::Arc, time::Instant};

use arc_swap::ArcSwap;
use contract::load::Description;
use parking_lot::Mutex;
use service::{clock::now, supervisor::Watchdog, tasks::Tasks};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use super::{
    agent::{Agent, Link},
    conversations::Conversations,
    snapshot::Snapshot,
    state::{SourceNews, State, Update},
    worker::AgentKey,
};

/// A full mailbox slows the load watchers down. No update is lost silently: if a watcher falls
/// behind, its agent ends the stream, and the next stream begins with the agent's whole state.
pub(crate) const MAILBOX_UPDATES_MAX: usize = 1024;

/// An agent, an update, and when the update arrived.
pub(crate) type UpdateSender = mpsc::Sender<(AgentKey, Update, Instant)>;

#[derive(Debug)]
pub(crate) struct View {
    newest: ArcSwap<Snapshot>,
    pub(crate) conversations: Arc<Mutex<Conversations>>,
    changed: watch::Sender<()>,
}

impl View {
    pub(crate) fn new(first_snapshot: Snapshot, conversations: Arc<Mutex<Conversations>>) -> Self {
        let newest = ArcSwap::from_pointee(first_snapshot);
        Self { newest, conversations, changed: watch::Sender::new(()) }
    }

    pub(crate) fn load(&self) -> Arc<Snapshot> {
        self.newest.load_full()
    }

    /// Waits for the predicate at most until `deadline`. Returns the newest snapshot.
    pub(crate) async fn wait_for(
        &self,
        deadline: Instant,
        mut predicate: impl FnMut(&Snapshot) -> bool,
    ) -> Arc<Snapshot> {
        let mut changed = self.changed.subscribe();
        loop {
            // The signal is cleared before the snapshot is loaded, so that a change after the load
            // ends the wait.
            changed.mark_unchanged();
            let view = self.load();
            if predicate(&view) {
                return view;
            }
            let next_change = tokio::time::timeout_at(deadline.into(), changed.changed());
            if !matches!(next_change.await, Ok(Ok(()))) {
                return self.load();
            }
        }
    }

    fn publish(&self, snapshot: Snapshot) {
        self.newest.store(Arc::new(snapshot));
        self.changed.send_replace(());
    }
}

/// Sends to `readiness_sender` whether the router can serve turns, or why it can't. Feeds the
/// `watchdog`: without this task no turn is placed.
pub(crate) async fn run(
    mut state: State,
    mut mailbox: mpsc::Receiver<(AgentKey, Update, Instant)>,
    mut news: mpsc::Receiver<SourceNews>,
    view: Arc<View>,
    readiness_sender: watch::Sender<Result<(), String>>,
    mut watchdog: Watchdog,
    tasks: Tasks,
) {
    let (token, leave_token) = (tasks.token(), tasks.leave_token());
    let mut leaves = false;
    let mut batch = Vec::with_capacity(MAILBOX_UPDATES_MAX);
    loop {
        let deadlines = [state.next_deadline(now()), watchdog.next_due()];
        let deadline = deadlines.into_iter().flatten().min();
        tokio::select! {
            biased;
            () = token.cancelled() => break,
            update_count = mailbox.recv_many(&mut batch, MAILBOX_UPDATES_MAX) => {
                if update_count == 0 {
                    break;
                }
            }
            Some(source_news) = news.recv() => {
                for (agent, why) in state.apply_news(source_news, now()) {
                    warn!(agent = state.agent_with(agent).name(), why, "agent rejected");
                }
            }
            () = leave_token.cancelled(), if !leaves => leaves = true,
            () = sleep_until(deadline) => {}
        }
        for (agent, update, arrived_at) in batch.drain(..) {
            log_loss_or_restart(&state, agent, &update);
            let stream_began = matches!(update, Update::StreamBegan { .. });
            if let Some(warning) = state.apply(agent, update, arrived_at) {
                warn!(agent = state.agent_with(agent).name(), warning, "view incomplete");
            }
            if stream_began {
                log_stream_begin(state.agent_with(agent));
            }
        }
        for agent in state.end_leaving(now()) {
            info!(agent, "agent left");
        }
        let snapshot = state.snapshot();
        let readiness =
            if leaves { Err("stopping".to_owned()) } else { snapshot.check_ready(now()) };
        view.publish(snapshot);
        readiness_sender.send_if_modified(|published| {
            let has_changed = *published != readiness;
            published.clone_from(&readiness);
            has_changed
        });
        watchdog.feed(now());
    }
    drop(readiness_sender.send_replace(Err("stopping".to_owned())));
}

fn log_stream_begin(agent: &Agent) {
    if let (true, Some(facts)) = (agent.is_up(), &agent.facts) {
        let Description { agent_id, epoch, ranks, .. } = &*facts.description;
        info!(agent = agent_id, epoch, ranks = ranks.len(), "agent heard");
    }
}

/// `state` is the state before the update, so that only the first of several losses is logged.
fn log_loss_or_restart(state: &State, key: AgentKey, update: &Update) {
    let agent = state.agent_with(key);
    if !agent.phase.is_followed() {
        return;
    }
    match update {
        Update::EngineRestarted(description) => {
            info!(agent = description.agent_id, "engine restarted");
        }
        Update::AgentLost(why) => {
            if agent.is_up() || agent.link == Link::Dialing {
                warn!(agent = agent.name(), control = agent.control_url, why, "agent lost");
            }
        }
        Update::DataPortUnreachable(why) => {
            if agent.is_up() && agent.data_port_failure.is_none() {
                warn!(agent = agent.name(), why, "data port unreachable");
            }
        }
        Update::StreamBegan { .. }
        | Update::Report(_)
        | Update::SessionChanged(_)
        | Update::SessionRemoved(_)
        | Update::TasksEnded => {}
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

//! The view task: applies updates from the load watchers and publishes snapshots.
//!
//! It is the only writer of the view. It applies a batch of updates, then publishes one snapshot.

use std::{sync::Arc, time::Instant};

use arc_swap::ArcSwap;
use proto::load::Description;
use service::clock::now;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    agent::{Agent, Link},
    snapshot::Snapshot,
    state::{State, Update},
};

/// Capacity of the mailbox, in updates. A full mailbox slows the load watchers. An agent ends the
/// stream of a watcher that falls behind, so no update is lost silently.
pub(crate) const MAILBOX: usize = 1024;

/// The published snapshot, and a signal for its changes.
#[derive(Debug)]
pub(crate) struct View {
    current: ArcSwap<Snapshot>,
    changed: watch::Sender<()>,
}

impl View {
    pub(crate) fn new(first: Snapshot) -> Self {
        Self { current: ArcSwap::from_pointee(first), changed: watch::Sender::new(()) }
    }

    pub(crate) fn load(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Waits until a snapshot satisfies the predicate or `limit` passes. Returns the newest
    /// snapshot.
    pub(crate) async fn wait_for(
        &self,
        limit: Instant,
        mut predicate: impl FnMut(&Snapshot) -> bool,
    ) -> Arc<Snapshot> {
        let mut changed = self.changed.subscribe();
        loop {
            // Reset before the snapshot is loaded, so that a change after loading ends the wait.
            changed.mark_unchanged();
            let view = self.load();
            if predicate(&view) {
                return view;
            }
            let next = tokio::time::timeout_at(limit.into(), changed.changed());
            if !matches!(next.await, Ok(Ok(()))) {
                return self.load();
            }
        }
    }

    fn publish(&self, view: Snapshot) {
        self.current.store(Arc::new(view));
        self.changed.send_replace(());
    }
}

/// Runs the view task until it is cancelled.
pub(crate) async fn run(
    mut state: State,
    mut mailbox: mpsc::Receiver<(usize, Update, Instant)>,
    view: Arc<View>,
    ready: watch::Sender<Result<(), String>>,
    token: CancellationToken,
) {
    let mut batch = Vec::with_capacity(MAILBOX);
    loop {
        let deadline = state.next_deadline(now());
        tokio::select! {
            biased;
            () = token.cancelled() => break,
            count = mailbox.recv_many(&mut batch, MAILBOX) => {
                if count == 0 {
                    break;
                }
            }
            () = sleep_until(deadline) => {}
        }
        for (index, update, at) in batch.drain(..) {
            note(&state, index, &update);
            let began = matches!(update, Update::Began { .. });
            if let Some(warning) = state.apply(index, update, at) {
                warn!(agent = state.agent_at(index).name(), warning, "view incomplete");
            }
            if began {
                note_began(state.agent_at(index));
            }
        }
        let snapshot = state.snapshot();
        let readiness = snapshot.ready(now());
        view.publish(snapshot);
        ready.send_if_modified(|held| {
            let differs = *held != readiness;
            held.clone_from(&readiness);
            differs
        });
    }
    drop(ready.send_replace(Err("stopping".to_owned())));
}

/// Logs that an agent's stream began, unless the agent was rejected as a duplicate agent id.
fn note_began(agent: &Agent) {
    if let (true, Some(facts)) = (agent.is_up(), &agent.facts) {
        let Description { agent_id, epoch, ranks, .. } = &*facts.description;
        info!(agent = agent_id, epoch, ranks = ranks.len(), "agent heard");
    }
}

/// Logs changes in the agents' lifecycle for the operator.
fn note(state: &State, index: usize, update: &Update) {
    match update {
        Update::Described(description) => info!(agent = description.agent_id, "engine restarted"),
        Update::Lost(why) => {
            let view = state.agent_at(index);
            if view.is_up() || view.link == Link::Dialing {
                warn!(agent = view.name(), control = view.control, why, "agent lost");
            }
        }
        Update::Unreachable(why) => {
            let view = state.agent_at(index);
            if view.is_up() && view.unreachable.is_none() {
                warn!(agent = view.name(), why, "data port unreachable");
            }
        }
        Update::Began { .. } | Update::Report(_) | Update::Upsert(_) | Update::Removed(_) => {}
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

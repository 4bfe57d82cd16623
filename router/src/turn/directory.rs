//! Knows each session's status and worker: what the agents report, and this router's bindings.
//!
//! A session is a sequence of turns (requests and their answers) that share a growing prefix. The
//! agents hold the sessions and report them in tables. A binding says to which worker this router
//! sends a session's turns, and shows what the tables can't show yet.
//!
//! `placer` and `sessions` look up sessions here before they place a turn, or open or close a
//! session. What they do with a session's binding is one [`step`](SessionDirectory::step): whatever
//! the step reads is true until it has written. A [`BindingHold`] keeps the binding while a turn
//! runs.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use proto::id::SessionKey;
use service::clock::now;

use crate::{
    fleet::{
        agent::Link, conversations::Conversations, snapshot::Snapshot, view::View,
        worker::WorkerRef,
    },
    placement::{
        affinity::{Affinity, Binding},
        session_status::{self, SessionStatus},
    },
};

/// How long a turn that its agent broke off waits for the news of the agent's end.
const END_NEWS_MAX: Duration = Duration::from_millis(500);

/// The status and the worker of each session.
#[derive(Debug)]
pub(crate) struct SessionDirectory {
    /// What the agents report: their workers, loads and sessions.
    view: Arc<View>,
    /// The worker of each session.
    affinity: Mutex<Affinity>,
    /// Until this time, requests wait for the agents' first session tables.
    settle_deadline: Instant,
    /// How long a request waits for an agent whose connection has just been lost.
    reconnect_max: Duration,
}

impl SessionDirectory {
    /// Creates a directory without bindings. `connect_max` is the time limit of connecting to an
    /// agent.
    pub(crate) fn new(view: Arc<View>, affinity: Affinity, connect_max: Duration) -> Self {
        Self {
            view,
            affinity: Mutex::new(affinity),
            settle_deadline: now() + connect_max,
            reconnect_max: connect_max,
        }
    }

    /// Returns the newest snapshot of the fleet.
    pub(crate) fn view(&self) -> Arc<Snapshot> {
        self.view.load()
    }

    /// Takes one step on the table of bindings, which is locked meanwhile. The step takes no other
    /// lock.
    pub(super) fn step<T>(&self, step: impl FnOnce(&mut Affinity, Instant) -> T) -> T {
        let mut affinity = self.affinity.lock();
        step(&mut affinity, now())
    }

    /// Like [`Self::view`], but shortly after the router's start, waits for a snapshot in which
    /// every agent has reported or failed.
    pub(crate) async fn settled_view(&self) -> Arc<Snapshot> {
        let view = self.view();
        if view.is_settled() || now() >= self.settle_deadline {
            return view;
        }
        self.view.wait_for(self.settle_deadline, Snapshot::is_settled).await
    }

    /// Waits for a snapshot for which `holds` is true. Returns the newest one at the deadline.
    pub(super) async fn wait_for(
        &self,
        deadline: Instant,
        holds: impl Fn(&Snapshot) -> bool,
    ) -> Arc<Snapshot> {
        self.view.wait_for(deadline, holds).await
    }

    /// Removes the bindings to an agent that has left the fleet. Returns whether none is left.
    pub(crate) fn forget_agent(&self, agent: usize) -> bool {
        self.step(|affinity, _| affinity.forget_agent(agent))
    }

    /// Returns the status of a session.
    pub(super) fn status(&self, key: &SessionKey, view: &Snapshot) -> SessionStatus {
        self.step(|affinity, now| {
            session_status::determine_status(key, view, affinity.get(key, now), now)
        })
    }

    /// Returns the table of conversations without a name.
    pub(super) fn conversations(&self) -> Arc<Mutex<Conversations>> {
        Arc::clone(&self.view.conversations)
    }

    /// Like [`Self::status`], but if the session is lost because its agent has just been
    /// disconnected, waits for the agent first. A short interruption must not cost a session its
    /// history.
    pub(super) async fn status_after_reconnect(&self, key: &SessionKey) -> SessionStatus {
        let view = self.settled_view().await;
        let status = self.status(key, &view);
        let SessionStatus::Lost { worker, is_agent_up: false, .. } = status else { return status };
        // An agent that leaves the fleet doesn't come back.
        if view.agent(worker).lost_for(now()).is_none() {
            return status;
        }
        let Link::Lost { since, .. } = view.agent(worker).link else { return status };
        let reconnect_deadline = since + self.reconnect_max;
        if now() >= reconnect_deadline {
            return status;
        }
        let view = self.view.wait_for(reconnect_deadline, |view| view.agent(worker).is_up()).await;
        self.status(key, &view)
    }

    /// Whether a worker's agent is about to end as planned, or has done so. The news may come a
    /// moment after the agent has closed its connections: waits for it.
    ///
    /// An agent that crashes while its operator drains it counts as well. Then a turn may be
    /// computed twice, but no pinned session gets a turn twice: the next agent closes what a
    /// crashed one has left.
    pub(super) async fn has_ended_as_planned(&self, worker: WorkerRef) -> bool {
        let is_known = |view: &Snapshot| {
            let agent = view.agent(worker);
            agent.was_draining || !agent.is_up()
        };
        let view = self.view.wait_for(now() + END_NEWS_MAX, is_known).await;
        view.agent(worker).was_draining
    }
}

/// Keeps a session bound to its worker while a turn runs. Dropped when the turn ends.
#[derive(Debug)]
pub(crate) struct BindingHold {
    directory: Arc<SessionDirectory>,
    key: SessionKey,
    /// Whether the agent closes the session when this turn ends.
    closes_session: bool,
    /// Whether the affinity table knows that the answer began.
    is_answer_recorded: bool,
    /// The worker from which this turn moves its session, until the new worker takes the turn.
    old_worker: Option<WorkerRef>,
    /// Size of the turn's body, in bytes.
    body_bytes: u64,
}

impl BindingHold {
    /// Creates the hold of a turn that the affinity table counts already. `old_worker` is the
    /// worker from which the turn moves its session.
    pub(super) fn new(
        directory: &Arc<SessionDirectory>,
        key: SessionKey,
        old_worker: Option<WorkerRef>,
        body_bytes: u64,
    ) -> Self {
        Self {
            directory: Arc::clone(directory),
            key,
            closes_session: false,
            is_answer_recorded: false,
            old_worker,
            body_bytes,
        }
    }

    /// Records that the agent closes the session when this turn ends. From then on, the router
    /// treats the session as closed, even if the agent's table doesn't show the close yet.
    pub(super) fn close_at_end(&mut self) {
        self.closes_session = true;
    }

    /// Records that the turn's move of its session failed. The session may still need its KV on the
    /// worker that it was on before.
    pub(super) fn forget_old_worker(&mut self) {
        self.old_worker = None;
    }

    /// Whether a client has asked to close the session since the turn was placed.
    pub(super) fn is_closing(&self) -> bool {
        self.directory
            .step(|affinity, now| affinity.get(&self.key, now).is_some_and(Binding::is_close_asked))
    }

    /// Records that the head of the answer has come. `is_success`: whether its status is 2xx.
    /// Called at most once.
    ///
    /// Returns the session and the worker at which to close it, if this turn has moved the session
    /// away from there. The session's KV there is of no use. Closed, it is evicted first.
    pub(super) fn record_answer(&mut self, is_success: bool) -> Option<(SessionKey, WorkerRef)> {
        self.is_answer_recorded = true;
        let key = &self.key;
        self.directory.step(|affinity, now| {
            affinity.record_answer(key);
            if !is_success {
                return None;
            }
            affinity.record_body_size(key, self.body_bytes);
            // Another turn of the session may still run on the old worker, or may have moved the
            // session back there. Then the old worker still needs the session.
            let (old_worker, binding) = (self.old_worker?, affinity.get(key, now)?);
            (binding.turns == 1 && binding.worker.agent != old_worker.agent)
                .then(|| (key.clone(), old_worker))
        })
    }
}

impl Drop for BindingHold {
    fn drop(&mut self) {
        self.directory.step(|affinity, now| {
            if !self.is_answer_recorded {
                affinity.record_answer(&self.key);
            }
            affinity.end_turn(&self.key, now);
            if self.closes_session {
                affinity.record_close(&self.key, false, now);
            }
        });
    }
}

//! Knows each session's status and worker: what the agents report, and this router's bindings.
//!
//! The agents report the sessions that they hold; a binding says to which worker this router sends
//! a session's turns, and shows what the reports can't show yet. Whatever a
//! [`step`](SessionDirectory::step) on the bindings reads is true until it has written.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use contract::id::SessionKey;
use parking_lot::Mutex;
use service::clock::now;

use super::{
    bindings::{Binding, Bindings},
    status::{self, SessionStatus},
};
use crate::fleet::{
    agent::Link, conversations::Conversations, snapshot::Snapshot, view::View, worker::WorkerRef,
};

/// Limits the wait, after an agent has broken off a turn, for the news of the agent's end.
const END_NEWS_MAX: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct SessionDirectory {
    view: Arc<View>,
    bindings: Mutex<Bindings>,
    /// Until then, requests wait for the agents' first session tables.
    settle_deadline: Instant,
    /// Limits the wait for an agent whose connection has just been lost.
    reconnect_max: Duration,
}

impl SessionDirectory {
    pub(crate) fn new(view: Arc<View>, bindings: Bindings, connect_max: Duration) -> Self {
        Self {
            view,
            bindings: Mutex::new(bindings),
            settle_deadline: now() + connect_max,
            reconnect_max: connect_max,
        }
    }

    pub(crate) fn view(&self) -> Arc<Snapshot> {
        self.view.load()
    }

    /// The table of bindings is locked during the step, which takes no other lock.
    pub(crate) fn step<T>(&self, step: impl FnOnce(&mut Bindings, Instant) -> T) -> T {
        let mut bindings = self.bindings.lock();
        step(&mut bindings, now())
    }

    /// Shortly after the router's start, waits for a snapshot in which every agent has reported or
    /// failed.
    pub(crate) async fn settled_view(&self) -> Arc<Snapshot> {
        let view = self.view();
        if view.is_settled() || now() >= self.settle_deadline {
            return view;
        }
        self.view.wait_for(self.settle_deadline, Snapshot::is_settled).await
    }

    /// Returns the newest snapshot at the deadline.
    pub(crate) async fn wait_for(
        &self,
        deadline: Instant,
        holds: impl Fn(&Snapshot) -> bool,
    ) -> Arc<Snapshot> {
        self.view.wait_for(deadline, holds).await
    }

    pub(crate) fn status(&self, key: &SessionKey, view: &Snapshot) -> SessionStatus {
        self.step(|bindings, now| {
            status::determine_status(key, view, bindings.resolve(key, view, now), now)
        })
    }

    pub(crate) fn conversations(&self) -> Arc<Mutex<Conversations>> {
        Arc::clone(&self.view.conversations)
    }

    /// Waits for the agent of a session that is lost because its agent has just been disconnected.
    /// A short interruption must not cost a session its history.
    pub(crate) async fn status_after_reconnect(&self, key: &SessionKey) -> SessionStatus {
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

    /// Waits a moment for the news that an agent ends as planned, which may come after the agent
    /// has closed its connections. An agent that crashes while it is drained counts as well: a turn
    /// may be computed twice, but no pinned session gets one twice, as the next agent closes what
    /// is left.
    pub(crate) async fn has_ended_as_planned(&self, worker: WorkerRef) -> bool {
        let is_known = |view: &Snapshot| {
            let agent = view.agent(worker);
            agent.was_draining || !agent.is_up()
        };
        let view = self.view.wait_for(now() + END_NEWS_MAX, is_known).await;
        view.agent(worker).was_draining
    }
}

#[derive(Debug)]
pub(crate) struct BindingHold {
    directory: Arc<SessionDirectory>,
    key: SessionKey,
    closes_session: bool,
    is_answer_recorded: bool,
    /// The worker that the session leaves, until the new worker takes the turn.
    old_worker: Option<WorkerRef>,
    body_bytes: u64,
}

impl BindingHold {
    /// The bindings table counts the turn already.
    pub(crate) fn new(
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

    /// From the turn's end on, the session counts as closed, even if the agent's table lags.
    pub(crate) fn close_at_end(&mut self) {
        self.closes_session = true;
    }

    /// After a failed move, the session may still need its KV on the worker that it was on before.
    pub(crate) fn forget_old_worker(&mut self) {
        self.old_worker = None;
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.directory
            .step(|bindings, now| bindings.get(&self.key, now).is_some_and(Binding::is_close_asked))
    }

    /// Called at most once, when the head of the answer has come. Returns where to close a session
    /// that this turn has moved away: its KV there is of no use, and once closed, is evicted first.
    pub(crate) fn record_answer(&mut self, is_success: bool) -> Option<(SessionKey, WorkerRef)> {
        self.is_answer_recorded = true;
        let key = &self.key;
        self.directory.step(|bindings, now| {
            bindings.record_answer(key);
            if !is_success {
                return None;
            }
            bindings.record_body_size(key, self.body_bytes);
            // Another turn of the session may still run on the old worker, or may have moved the
            // session back there. Then the old worker still needs the session.
            let (old_worker, binding) = (self.old_worker?, bindings.get(key, now)?);
            (binding.turns == 1 && binding.worker.agent != old_worker.agent)
                .then(|| (key.clone(), old_worker))
        })
    }
}

impl Drop for BindingHold {
    fn drop(&mut self) {
        self.directory.step(|bindings, now| {
            if !self.is_answer_recorded {
                bindings.record_answer(&self.key);
            }
            bindings.end_turn(&self.key, now);
            if self.closes_session {
                bindings.record_close(&self.key, false, now);
            }
        });
    }
}

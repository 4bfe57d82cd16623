//! Opens, closes and looks up sessions for clients.
//!
//! The agents hold the sessions. The router chooses the worker and remembers what the agents'
//! tables can't show yet. Opens and closes run in tasks of their own: if a client leaves in the
//! middle, no session may be left behind, and a close must still happen.

use std::{collections::BTreeMap, sync::Arc};

use proto::{
    id::SessionKey,
    load::{Retention, Session},
};
use service::clock::now;
use tokio::sync::oneshot;
use tonic::Code;

use super::{error::Error, shared::Shared};
use crate::{
    fleet::{control::OpenRequest, worker::WorkerRef},
    placement::{
        self, PlacementRequest, Sticky, affinity,
        session_status::{self, SessionStatus},
    },
};

/// Maximum number of sessions in a list. A caller with more is told that the list is incomplete.
pub(crate) const LISTED_MAX: usize = 1000;

/// A session as shown to its owner.
#[derive(Debug, Clone)]
pub(crate) struct SessionView {
    pub(crate) key: SessionKey,
    pub(crate) worker: WorkerRef,
    /// `None` if the session is placed but no agent has reported it.
    pub(crate) session: Option<Arc<Session>>,
    pub(crate) lost: bool,
}

/// The result of an open.
#[derive(Debug)]
pub(crate) struct OpenedSession {
    pub(crate) worker: WorkerRef,
    pub(crate) session: Arc<Session>,
    /// Whether the session was not open before.
    pub(crate) new: bool,
}

impl Shared {
    /// Opens a session, or returns the one that is already open.
    pub(crate) async fn open(
        self: &Arc<Self>,
        open_request: OpenRequest,
    ) -> Result<OpenedSession, Error> {
        let shared = Arc::clone(self);
        self.detached(async move { Box::pin(shared.open_now(open_request)).await }).await
    }

    /// Closes a session. Returns once the agent has agreed; a turn may still be running then.
    pub(crate) async fn close(self: &Arc<Self>, key: SessionKey) -> Result<(), Error> {
        self.settled_view().await;
        // Recorded before the first await, so that the second of two closes finds the session
        // closing.
        let (worker, bound_only) = {
            let view = self.view.load();
            let mut affinity = self.affinity.lock();
            let at = now();
            let status = session_status::determine_status(&key, &view, affinity.get(&key, at), at);
            let (worker, bound_only) = match status {
                // A binding to a worker whose agent has forgotten the session is not a session.
                SessionStatus::Unknown
                | SessionStatus::Closing
                | SessionStatus::Bound { recent: false, placement_only: false, .. } => {
                    return Err(Error::SessionUnknown);
                }
                SessionStatus::Bound { worker, placement_only, .. } => (worker, placement_only),
                SessionStatus::Open { worker, .. } | SessionStatus::Lost { worker, .. } => {
                    (worker, false)
                }
            };
            affinity.record_close_request(&key, worker, at)?;
            (worker, bound_only)
        };
        let shared = Arc::clone(self);
        self.detached(async move { shared.close_now(&key, worker, bound_only).await }).await
    }

    /// Returns one session of its owner.
    pub(crate) async fn find_session(&self, key: &SessionKey) -> Option<SessionView> {
        let view = self.settled_view().await;
        self.to_view(key, self.session_status(key, &view))
    }

    /// Returns the owner's sessions, ordered by id, and whether there are more than [`LISTED_MAX`].
    pub(crate) async fn list(&self, principal: &str) -> (Vec<SessionView>, bool) {
        let view = self.settled_view().await;
        let mut keys: BTreeMap<String, SessionKey> = view
            .sessions
            .iter()
            .map(|one| &one.session.key)
            .filter(|key| key.principal() == principal)
            .map(|key| (key.id().to_owned(), key.clone()))
            .collect();
        {
            let affinity = self.affinity.lock();
            let bound = affinity.keys_of_principal(principal, now());
            keys.extend(bound.map(|key| (key.id().to_owned(), key.clone())));
        }
        let mut views = keys.into_values().filter_map(|key| {
            let status = self.session_status(&key, &view);
            self.to_view(&key, status)
        });
        let listed = views.by_ref().take(LISTED_MAX).collect();
        (listed, views.next().is_some())
    }

    /// Closes what is left of a lost session, so that it can be opened again.
    pub(crate) async fn close_lost(
        &self,
        key: &SessionKey,
        worker: WorkerRef,
    ) -> Result<(), Error> {
        let closed = self.controls[worker.agent].close(key).await;
        match closed {
            Err(status) if !matches!(status.code(), Code::NotFound | Code::Unavailable) => {
                return Err(Error::agent(status));
            }
            Ok(_) | Err(_) => {}
        }
        let mut affinity = self.affinity.lock();
        // Hides the session until the agent's table shows the close, or while the agent is gone.
        if affinity.record_close_request(key, worker, now()).is_ok() {
            affinity.record_close(key, false, now());
        }
        Ok(())
    }

    fn to_view(&self, key: &SessionKey, status: SessionStatus) -> Option<SessionView> {
        let key = key.clone();
        match status {
            SessionStatus::Unknown
            | SessionStatus::Closing
            | SessionStatus::Bound { recent: false, placement_only: false, .. } => None,
            SessionStatus::Bound { worker, .. } => {
                Some(SessionView { key, worker, session: None, lost: false })
            }
            SessionStatus::Open { worker, session, .. } => {
                Some(SessionView { key, worker, session: Some(session), lost: false })
            }
            SessionStatus::Lost { worker, .. } => {
                let view = self.view.load();
                let located = view.sessions.locate(&key);
                let session = located.iter().find(|one| one.worker == worker);
                let session = session.map(|one| Arc::clone(&one.session));
                Some(SessionView { key, worker, session, lost: true })
            }
        }
    }

    async fn open_now(self: Arc<Self>, open_request: OpenRequest) -> Result<OpenedSession, Error> {
        let key = &open_request.key;
        if let SessionStatus::Lost { worker, .. } = self.session_status_after_reconnect(key).await {
            self.close_lost(key, worker).await?;
        }
        let (first, was_open, may_move) = self.place_for_open(&open_request, None)?;
        let answered = self.controls[first.agent].open(&open_request, first.dp_rank).await;
        let (worker, answered) = match answered {
            // The agent is full or unreachable. Try one other worker, unless the session is tied to
            // this one.
            Err(status)
                if may_move
                    && matches!(status.code(), Code::ResourceExhausted | Code::Unavailable) =>
            {
                match self.place_for_open(&open_request, Some(first)) {
                    Ok((second, ..)) => {
                        self.metrics.retried("open");
                        let control = &self.controls[second.agent];
                        (second, control.open(&open_request, second.dp_rank).await)
                    }
                    Err(_) => (first, Err(status)),
                }
            }
            answered => (first, answered),
        };
        let epoch = self.view.load().agent(worker).epoch();
        let mut affinity = self.affinity.lock();
        affinity.end_turn(key, now());
        match answered {
            Ok(session) => {
                let worker = WorkerRef { dp_rank: session.dp_rank, ..worker };
                let new = !was_open && session.turns == 0;
                let session = Arc::new(session);
                let opened =
                    affinity::OpenAnswer { session: Arc::clone(&session), epoch, at: now() };
                affinity.record_open(worker, opened, now())?;
                Ok(OpenedSession { worker, session, new })
            }
            Err(status) => {
                if !was_open {
                    affinity.forget(key);
                }
                Err(Error::agent(status))
            }
        }
    }

    /// Chooses where to open a session and holds the binding, so that turns sent meanwhile go there
    /// too. With `exclude`, moves a binding that is already held. Returns the worker, whether the
    /// session was open, and whether it may go to another worker.
    fn place_for_open(
        &self,
        open_request: &OpenRequest,
        exclude: Option<WorkerRef>,
    ) -> Result<(WorkerRef, bool, bool), Error> {
        let key = &open_request.key;
        let view = self.view.load();
        let at = now();
        let mut affinity = self.affinity.lock();
        let status = session_status::determine_status(key, &view, affinity.get(key, at), at);
        let (bound, was_open) = match status {
            SessionStatus::Closing => {
                return Err(Error::OpenWhileClosing);
            }
            SessionStatus::Unknown | SessionStatus::Lost { .. } => (None, false),
            SessionStatus::Bound { worker, .. } => (Some(worker), false),
            SessionStatus::Open { worker, .. } => (Some(worker), true),
        };
        let pinned = open_request.retention == Some(Retention::Pinned);
        let sticky = bound
            .filter(|_| exclude.is_none())
            .map(|worker| Sticky { fixed: was_open && pinned, ..Sticky::new(worker) });
        let request = PlacementRequest {
            digest: key.digest(),
            expects_more_turns: true,
            sticky,
            prefer: None,
            // An open has no prompt.
            prompt: None,
            retention: if was_open { None } else { open_request.retention },
            model: None,
            exclude,
        };
        let placement = placement::place(&request, &view, at)?;
        self.metrics.placed(placement.reason.as_str());
        if bound.is_none() {
            view.agent(placement.worker).in_flight[placement.worker.dp_rank as usize].note_open();
        }
        match exclude {
            None => {
                affinity.begin_turn(key, placement.worker, false, at)?;
                // An open isn't a turn, so it doesn't make the session busy.
                affinity.record_answer(key);
            }
            Some(_) => affinity.rebind(key, placement.worker),
        }
        Ok((placement.worker, was_open, bound.is_none()))
    }

    async fn close_now(
        self: Arc<Self>,
        key: &SessionKey,
        worker: WorkerRef,
        bound_only: bool,
    ) -> Result<(), Error> {
        // Closes copies that the session left on other workers, too. Otherwise one could reappear.
        let view = self.view.load();
        let others = view.sessions.locate(key).iter().map(|one| one.worker);
        others
            .filter(|other| other.agent != worker.agent && view.agent(*other).is_up())
            .for_each(|other| self.close_detached(key.clone(), other));
        let answered = self.controls[worker.agent].close(key).await;
        let mut affinity = self.affinity.lock();
        match answered {
            Ok(deferred) => {
                affinity.record_close(key, deferred, now());
                Ok(())
            }
            Err(status) if status.code() == Code::NotFound => {
                affinity.record_close(key, false, now());
                // Only the router held the placement; the agent had nothing to close.
                if bound_only { Ok(()) } else { Err(Error::SessionUnknown) }
            }
            Err(status) => {
                affinity.record_close_failure(key);
                Err(Error::agent(status))
            }
        }
    }

    /// Runs `work` to its end in a task, even if the caller goes away.
    async fn detached<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let (answer, answered) = oneshot::channel();
        self.tasks.spawn(async move {
            // Fails if the client is gone; then nobody waits for the answer.
            drop(answer.send(work.await));
        });
        answered.await.unwrap_or(Err(Error::Internal))
    }
}

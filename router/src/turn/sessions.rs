//! Opens, closes and looks up sessions for clients.
//!
//! A session is a sequence of turns (requests and their answers) that share a growing prefix. The
//! agents hold the sessions and report them in tables. The router chooses a session's worker, and
//! remembers in a binding what the agents' tables can't show yet.
//!
//! `http` calls the methods here for its session routes, and makes JSON of the results. `turn` uses
//! `close_lost` before a turn opens a lost session again. A session that a turn opens or closes is
//! not handled here: the turn's claim tells the agent. Opens and closes run in tasks of their own,
//! so that they are completed even if the client leaves before that.

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

/// Maximum number of sessions in a list. If there are more, the answer says so.
pub(crate) const SESSIONS_LISTED_MAX: usize = 1000;

/// A session as shown to its owner.
#[derive(Debug, Clone)]
pub(crate) struct SessionView {
    pub(crate) key: SessionKey,
    pub(crate) worker: WorkerRef,
    /// The session as its agent reports it. `None` if no agent has reported it.
    pub(crate) session: Option<Arc<Session>>,
    /// Whether the session's KV and history are lost.
    pub(crate) is_lost: bool,
}

impl SessionView {
    /// Returns what the owner sees of a session with this status. `None` if it doesn't exist.
    fn new(key: SessionKey, status: SessionStatus) -> Option<Self> {
        let worker = status.owned_worker()?;
        let is_lost = matches!(status, SessionStatus::Lost { .. });
        let session = match status {
            SessionStatus::Open { session, .. } | SessionStatus::Lost { session, .. } => {
                Some(session)
            }
            SessionStatus::Unknown | SessionStatus::Closing | SessionStatus::Bound { .. } => None,
        };
        Some(Self { key, worker, session, is_lost })
    }
}

/// The result of an open.
#[derive(Debug)]
pub(crate) struct OpenedSession {
    pub(crate) worker: WorkerRef,
    pub(crate) session: Arc<Session>,
    /// Whether the session was not open before.
    pub(crate) is_new: bool,
}

/// The worker chosen to open a session.
struct OpenPlacement {
    worker: WorkerRef,
    /// Whether the session was open already.
    was_open: bool,
    /// Whether another worker may open the session instead, because no worker has the session.
    can_move: bool,
}

impl Shared {
    /// Opens a session, or returns the one that is already open.
    pub(crate) async fn open(
        self: &Arc<Self>,
        open_request: OpenRequest,
    ) -> Result<OpenedSession, Error> {
        let shared = Arc::clone(self);
        self.run_detached(async move { Box::pin(shared.open_at_agent(open_request)).await }).await
    }

    /// Closes a session. Returns once the agent has agreed. If a turn of the session is still
    /// running then, the agent closes the session after that turn.
    pub(crate) async fn close(self: &Arc<Self>, key: SessionKey) -> Result<(), Error> {
        self.settled_view().await;
        // One step under the lock, so that the second of two closes finds the session closing.
        let (worker, is_placement_only) = {
            let view = self.view.load();
            let mut affinity = self.affinity.lock();
            let now = now();
            let binding = affinity.get(&key, now);
            let status = session_status::determine_status(&key, &view, binding, now);
            let worker = status.owned_worker().ok_or(Error::SessionUnknown)?;
            let is_placement_only =
                matches!(status, SessionStatus::Bound { placement_only: true, .. });
            affinity.record_close_request(&key, worker, now)?;
            (worker, is_placement_only)
        };
        let shared = Arc::clone(self);
        self.run_detached(
            async move { shared.close_at_agent(&key, worker, is_placement_only).await },
        )
        .await
    }

    /// Returns a session to show it to its owner. `None` if there is no such session.
    pub(crate) async fn find_session(&self, key: &SessionKey) -> Option<SessionView> {
        let view = self.settled_view().await;
        SessionView::new(key.clone(), self.session_status(key, &view))
    }

    /// Returns the sessions of `principal`, ordered by id, and whether there are more than
    /// [`SESSIONS_LISTED_MAX`].
    pub(crate) async fn list(&self, principal: &str) -> (Vec<SessionView>, bool) {
        let view = self.settled_view().await;
        let mut keys_by_id: BTreeMap<String, SessionKey> = view
            .sessions
            .iter()
            .map(|located| &located.session.key)
            .filter(|key| key.principal() == principal)
            .map(|key| (key.id().to_owned(), key.clone()))
            .collect();
        {
            let affinity = self.affinity.lock();
            let bound_keys = affinity.keys_of_principal(principal, now());
            keys_by_id.extend(bound_keys.map(|key| (key.id().to_owned(), key.clone())));
        }
        let mut session_views = keys_by_id.into_values().filter_map(|key| {
            let status = self.session_status(&key, &view);
            SessionView::new(key, status)
        });
        let listed = session_views.by_ref().take(SESSIONS_LISTED_MAX).collect();
        (listed, session_views.next().is_some())
    }

    /// Closes a lost session at its agent, so that the session can be opened again.
    pub(crate) async fn close_lost(
        &self,
        key: &SessionKey,
        worker: WorkerRef,
    ) -> Result<(), Error> {
        let result = self.control_clients[worker.agent].close(key).await;
        match result {
            Err(status) if !matches!(status.code(), Code::NotFound | Code::Unavailable) => {
                return Err(Error::from_agent(status));
            }
            Ok(_) | Err(_) => {}
        }
        let mut affinity = self.affinity.lock();
        // Hides the session as long as the agent's last table still shows it.
        if affinity.record_close_request(key, worker, now()).is_ok() {
            affinity.record_close(key, false, now());
        }
        Ok(())
    }

    /// Opens a session at an agent. If that agent can't open it, tries another agent once.
    async fn open_at_agent(
        self: Arc<Self>,
        open_request: OpenRequest,
    ) -> Result<OpenedSession, Error> {
        let key = &open_request.key;
        if let SessionStatus::Lost { worker, .. } = self.session_status_after_reconnect(key).await {
            self.close_lost(key, worker).await?;
        }
        let OpenPlacement { worker: first_worker, was_open, can_move } =
            self.place_for_open(&open_request, None)?;
        let result = self.control_clients[first_worker.agent]
            .open(&open_request, first_worker.dp_rank)
            .await;
        let (worker, result) = match result {
            // The agent is full or unreachable.
            Err(status)
                if can_move
                    && matches!(status.code(), Code::ResourceExhausted | Code::Unavailable) =>
            {
                match self.place_for_open(&open_request, Some(first_worker)) {
                    Ok(OpenPlacement { worker: second_worker, .. }) => {
                        self.metrics.count_retry("open");
                        let control = &self.control_clients[second_worker.agent];
                        (second_worker, control.open(&open_request, second_worker.dp_rank).await)
                    }
                    Err(_) => (first_worker, Err(status)),
                }
            }
            result => (first_worker, result),
        };
        let epoch = self.view.load().agent(worker).epoch();
        let mut affinity = self.affinity.lock();
        affinity.end_turn(key, now());
        match result {
            Ok(session) => {
                let worker = WorkerRef { dp_rank: session.dp_rank, ..worker };
                let is_new = !was_open && session.turns == 0;
                let session = Arc::new(session);
                let open_answer = affinity::OpenAnswer {
                    session: Arc::clone(&session),
                    epoch,
                    answered_at: now(),
                };
                affinity.record_open(worker, open_answer, now())?;
                Ok(OpenedSession { worker, session, is_new })
            }
            Err(status) => {
                if !was_open {
                    affinity.forget(key);
                }
                Err(Error::from_agent(status))
            }
        }
    }

    /// Chooses the worker that opens a session, and binds the session to it, so that turns sent
    /// meanwhile go there too. The binding counts a running turn, which the caller must end.
    ///
    /// `failed_worker` is the worker that has just failed to open the session. If it is set, the
    /// session is bound already, and the binding moves to another worker.
    fn place_for_open(
        &self,
        open_request: &OpenRequest,
        failed_worker: Option<WorkerRef>,
    ) -> Result<OpenPlacement, Error> {
        let key = &open_request.key;
        let view = self.view.load();
        let now = now();
        let mut affinity = self.affinity.lock();
        let status = session_status::determine_status(key, &view, affinity.get(key, now), now);
        let (bound_worker, was_open) = match status {
            SessionStatus::Closing => {
                return Err(Error::OpenWhileClosing);
            }
            SessionStatus::Unknown | SessionStatus::Lost { .. } => (None, false),
            SessionStatus::Bound { worker, .. } => (Some(worker), false),
            SessionStatus::Open { worker, .. } => (Some(worker), true),
        };
        let is_pinned = open_request.retention == Some(Retention::Pinned);
        let sticky = bound_worker
            .filter(|_| failed_worker.is_none())
            .map(|worker| Sticky { fixed: was_open && is_pinned, ..Sticky::new(worker) });
        let request = PlacementRequest {
            digest: key.digest(),
            expects_more_turns: true,
            sticky,
            prefer: None,
            // An open has no prompt.
            prompt: None,
            retention: if was_open { None } else { open_request.retention },
            model: None,
            exclude: failed_worker,
        };
        let placement = placement::place(&request, &view, now)?;
        self.metrics.count_placement(placement.reason.as_str());
        if bound_worker.is_none() {
            view.agent(placement.worker).in_flight[placement.worker.dp_rank as usize]
                .count_open_request();
        }
        match failed_worker {
            None => {
                affinity.begin_turn(key, placement.worker, false, now)?;
                // An unanswered turn can make the session busy, and an open must not.
                affinity.record_answer(key);
            }
            Some(_) => affinity.rebind(key, placement.worker),
        }
        Ok(OpenPlacement { worker: placement.worker, was_open, can_move: bound_worker.is_none() })
    }

    /// Closes a session at its agent. `is_placement_only`: whether the client asked only that the
    /// session's turns go to one worker, so that no agent knows the session.
    async fn close_at_agent(
        self: Arc<Self>,
        key: &SessionKey,
        worker: WorkerRef,
        is_placement_only: bool,
    ) -> Result<(), Error> {
        // After a move, other workers may still have the session. Close it there, too. Otherwise it
        // would seem to be open there.
        let view = self.view.load();
        let other_workers = view.sessions.locate(key).iter().map(|located| located.worker);
        other_workers
            .filter(|other| other.agent != worker.agent && view.agent(*other).is_up())
            .for_each(|other| self.close_detached(key.clone(), other));
        let result = self.control_clients[worker.agent].close(key).await;
        let mut affinity = self.affinity.lock();
        match result {
            Ok(is_deferred) => {
                affinity.record_close(key, is_deferred, now());
                Ok(())
            }
            Err(status) if status.code() == Code::NotFound => {
                affinity.record_close(key, false, now());
                // A placement is known only to the router, so the agent had nothing to close.
                if is_placement_only { Ok(()) } else { Err(Error::SessionUnknown) }
            }
            Err(status) => {
                affinity.record_close_failure(key);
                Err(Error::from_agent(status))
            }
        }
    }

    /// Runs `work` to its end in a task, even if the caller goes away.
    async fn run_detached<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let (sender, receiver) = oneshot::channel();
        self.tasks.spawn(async move {
            // Sending fails if the client is gone. Then nothing waits for the result.
            drop(sender.send(work.await));
        });
        receiver.await.unwrap_or(Err(Error::Internal))
    }
}

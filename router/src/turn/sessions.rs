//! Opens, closes, demotes and looks up sessions for clients.
//!
//! A session is a sequence of turns (requests and their answers) that share a growing prefix. The
//! agents hold the sessions and report them in tables. The router chooses a session's worker, and
//! remembers in a binding what the agents' tables can't show yet.
//!
//! `http` calls the methods here for its session routes, and makes JSON of the results. `turn` uses
//! `close_lost` before a turn opens a lost session again. A session that a turn opens or closes is
//! not handled here: the turn's claim tells the agent. Opens and closes run in tasks of their own,
//! so that they are completed even if the client leaves before that. `demotion` demotes sessions.

mod demotion;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use proto::{id::SessionKey, load::Session};
use service::{clock::now, tasks::Tasks};
use tokio::sync::{Semaphore, oneshot};
use tonic::{Code, Status};
use tracing::{debug, warn};

use super::{
    decide::{self, OpenDecision},
    directory::SessionDirectory,
};
use crate::{
    claims::{Claims, Settled, Wish},
    fleet::{
        control::{ControlClients, OpenRequest, OpenedAtAgent},
        snapshot::Snapshot,
        worker::WorkerRef,
    },
    metrics::Metrics,
    placement::{
        affinity::{Claimed, OpenAnswer},
        session_status::{self, SessionStatus},
    },
};

/// Why a session can't be opened, closed or demoted. Each message is for the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No worker can take the session, or its status doesn't allow the open or close.
    #[error(transparent)]
    Decision(#[from] decide::Error),
    /// The session to close is not open.
    #[error("no session is open under this id; open it with POST /v1/sessions")]
    Unknown,
    /// The session's agent doesn't have the call to demote a session. Carries the worker's name.
    #[error(
        "the agent of worker {0} is of an earlier version, which can't demote sessions; upgrade \
         the agent, or close the session to free its KV"
    )]
    NoDemotion(String),
    /// The agent refused or failed a call on its control port.
    #[error("{}", .0.message())]
    Agent(Status),
    /// A task of the router panicked.
    #[error("the router failed; see its log")]
    Internal,
}

impl Error {
    /// Converts an agent's gRPC error. Logs the error if no client can act on it.
    fn from_agent(status: Status) -> Self {
        let is_for_client = matches!(
            status.code(),
            Code::ResourceExhausted
                | Code::FailedPrecondition
                | Code::NotFound
                | Code::InvalidArgument
                | Code::DeadlineExceeded
                | Code::Unavailable
        );
        if !is_for_client {
            warn!(code = ?status.code(), message = status.message(), "agent failed");
        }
        Self::Agent(status)
    }
}

/// Maximum number of sessions in a list, also if the request names no limit. If there are more, the
/// answer says so.
pub(crate) const SESSIONS_LISTED_MAX: usize = 1000;

/// The longest wait for an agent that gave an open no answer. Agents restart within seconds.
const HEARD_AGAIN_MAX: Duration = Duration::from_secs(60);
/// Maximum number of sessions that are to be closed at an agent as soon as it is heard.
const WAITING_CLOSES_MAX: usize = 256;

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

/// Opens, closes and looks up sessions.
#[derive(Debug)]
pub(crate) struct SessionService {
    directory: Arc<SessionDirectory>,
    claims: Arc<Claims>,
    control_clients: Arc<ControlClients>,
    metrics: Arc<Metrics>,
    tasks: Tasks,
    /// The places for tasks that wait for an agent, to close a session there.
    places_to_wait: Arc<Semaphore>,
}

impl SessionService {
    /// Creates the service.
    pub(crate) fn new(
        directory: Arc<SessionDirectory>,
        claims: Arc<Claims>,
        control_clients: Arc<ControlClients>,
        metrics: Arc<Metrics>,
        tasks: Tasks,
    ) -> Self {
        let places_to_wait = Arc::new(Semaphore::new(WAITING_CLOSES_MAX));
        Self { directory, claims, control_clients, metrics, tasks, places_to_wait }
    }

    /// Opens a session, or returns the one that is already open.
    ///
    /// # Errors
    /// If the session is closing, or if no agent can open it.
    pub(crate) async fn open(
        self: &Arc<Self>,
        open_request: OpenRequest,
    ) -> Result<OpenedSession, Error> {
        let service = Arc::clone(self);
        self.run_detached(async move { Box::pin(service.open_at_agent(open_request)).await }).await
    }

    /// Closes a session. Returns once the agent has agreed. If a turn of the session is still
    /// running then, the agent closes the session after that turn.
    ///
    /// # Errors
    /// If there is no such session, or if the agent fails.
    pub(crate) async fn close(self: &Arc<Self>, key: SessionKey) -> Result<(), Error> {
        self.directory.settled_view().await;
        let view = self.directory.view();
        // One step, so that the second of two closes finds the session closing.
        let (worker, is_placement_only) = self.directory.step(|affinity, now| {
            let binding = affinity.get(&key, now);
            let status = session_status::determine_status(&key, &view, binding, now);
            let worker = status.owned_worker().ok_or(Error::Unknown)?;
            affinity.record_close_request(&key, worker, now).map_err(decide::Error::from)?;
            let is_placement_only =
                matches!(status, SessionStatus::Bound { placement_only: true, .. });
            Ok::<_, Error>((worker, is_placement_only))
        })?;
        let service = Arc::clone(self);
        self.run_detached(
            async move { service.close_at_agent(&key, worker, is_placement_only).await },
        )
        .await
    }

    /// Closes what an open without an answer has left of a session on other agents than its own.
    pub(super) fn close_strays(&self, key: &SessionKey) {
        let view = self.directory.view();
        if view.sessions.locate(key).len() < 2 {
            return;
        }
        if let SessionStatus::Open { worker, .. } = self.directory.status(key, &view) {
            for stray in session_status::strays(key, &view, worker) {
                self.close_detached(key.clone(), stray);
            }
        }
    }

    /// Closes what an open without an answer may have left at an agent, as soon as the agent is
    /// heard again. Nothing is lost without that: the agent closes the session after its idle
    /// limit, and [`Self::close_strays`] does it with the session's next turn.
    fn close_when_heard(self: &Arc<Self>, key: SessionKey, worker: WorkerRef) {
        let Ok(place) = Arc::clone(&self.places_to_wait).try_acquire_owned() else { return };
        let service = Arc::clone(self);
        // Kept while the task waits, so that no other agent gets the slot.
        let agent = Arc::clone(&self.directory.view().agents[worker.agent]);
        self.tasks.spawn(async move {
            let (_place, _agent) = (place, agent);
            let is_left = |view: &Snapshot| session_status::is_unused_at(&key, view, worker);
            let view = service.directory.wait_for(now() + HEARD_AGAIN_MAX, is_left).await;
            let owner = service.directory.status(&key, &view).owned_worker();
            if is_left(&view) && owner.is_some_and(|owner| owner.agent != worker.agent) {
                service.close_detached(key, worker);
            }
        });
    }

    /// Starts a task that closes a session at an agent. The task goes on even if the turn or client
    /// that wanted the close is gone.
    pub(super) fn close_detached(&self, key: SessionKey, worker: WorkerRef) {
        // An agent that has left the fleet closes its sessions itself.
        let Ok(control) = self.control_clients.get(worker.agent) else { return };
        self.tasks.spawn(async move {
            if let Err(status) = control.close(&key).await
                && status.code() != Code::NotFound
            {
                // The agent will close the session anyway, after its idle limit.
                warn!(session = %key.digest(), code = ?status.code(), "close failed");
            }
        });
    }

    /// Starts a task that closes a session at one of several agents that have it, unless a turn of
    /// it runs there.
    pub(super) fn close_split(&self, key: SessionKey, worker: WorkerRef) {
        let Ok(control) = self.control_clients.get(worker.agent) else { return };
        let claims = Arc::clone(&self.claims);
        self.tasks.spawn(async move {
            match control.close_if_idle(&key).await {
                Ok(true) => claims.count_mended(),
                // Another router was faster, or a turn has come. The next look shows it.
                Ok(false) => {}
                Err(status) => {
                    debug!(session = %key.digest(), code = ?status.code(), "not mended");
                }
            }
        });
    }

    /// Returns a session to show it to its owner.
    ///
    /// # Errors
    /// If there is no such session.
    pub(crate) async fn find(&self, key: SessionKey) -> Result<SessionView, Error> {
        let view = self.directory.settled_view().await;
        let status = self.directory.status(&key, &view);
        SessionView::new(key, status).ok_or(Error::Unknown)
    }

    /// Returns sessions of `principal` in the order of their ids, from the first one after the id
    /// `after`, at most `limit`, and whether there are more.
    ///
    /// This reads the agents' tables of all sessions, which takes milliseconds. So it is for a
    /// thread for blocking work. This router's own table is locked for the listed sessions only.
    pub(crate) fn list(
        &self,
        view: &Snapshot,
        principal: &str,
        mut after: Option<String>,
        limit: usize,
    ) -> (Vec<SessionView>, bool) {
        let mut listed = vec![];
        loop {
            let keys = self.keys_after(view, principal, after.as_deref(), limit + 1);
            let is_last_batch = keys.len() <= limit;
            after = keys.last().map(|key| key.id().to_owned());
            // A key may belong to a session that has just been closed.
            listed.extend(keys.into_iter().filter_map(|key| {
                let status = self.directory.status(&key, view);
                SessionView::new(key, status)
            }));
            let has_more = listed.len() > limit;
            if has_more || is_last_batch {
                listed.truncate(limit);
                return (listed, has_more);
            }
        }
    }

    /// Returns the keys of `principal` with the smallest ids above `after`, in their order, at most
    /// `count_max`.
    fn keys_after(
        &self,
        view: &Snapshot,
        principal: &str,
        after: Option<&str>,
        count_max: usize,
    ) -> BTreeSet<SessionKey> {
        let mut smallest = BTreeSet::new();
        let mut offer = |key: &SessionKey| {
            let is_too_small = after.is_some_and(|after| key.id() <= after);
            let is_too_large = smallest.len() == count_max
                && smallest.last().is_some_and(|largest: &SessionKey| key >= largest);
            if is_too_small || is_too_large || key.principal() != principal {
                return;
            }
            smallest.insert(key.clone());
            if smallest.len() > count_max {
                smallest.pop_last();
            }
        };
        view.sessions.iter().for_each(|located| offer(&located.session.key));
        let after_key = after.and_then(|id| SessionKey::new(principal, id).ok());
        self.directory.step(|affinity, now| {
            let own = affinity.keys_of_principal(principal, after_key.as_ref(), now);
            // An id that no session can have is no key to begin after.
            let later = own.filter(|key| after.is_none_or(|after| key.id() > after));
            later.take(count_max).for_each(&mut offer);
        });
        smallest
    }

    /// Closes a lost session at its agent, so that the session can be opened again.
    ///
    /// # Errors
    /// If the agent fails. An agent that can't be reached doesn't matter.
    pub(super) async fn close_lost(
        &self,
        key: &SessionKey,
        worker: WorkerRef,
    ) -> Result<(), Error> {
        match self.close_once(key, worker).await {
            Err(status) if !matches!(status.code(), Code::NotFound | Code::Unavailable) => {
                return Err(Error::from_agent(status));
            }
            Ok(_) | Err(_) => {}
        }
        self.directory.step(|affinity, now| {
            // Hides the session as long as the agent's last table still shows it.
            if affinity.record_close_request(key, worker, now).is_ok() {
                affinity.record_close(key, false, now);
            }
        });
        Ok(())
    }

    /// Opens a session at an agent. If that agent can't open it, tries another agent once.
    async fn open_at_agent(
        self: Arc<Self>,
        open_request: OpenRequest,
    ) -> Result<OpenedSession, Error> {
        let key = &open_request.key;
        if let SessionStatus::Lost { worker, .. } = self.directory.status_after_reconnect(key).await
        {
            let view = self.directory.view();
            if view.agent(worker).may_hand_over(now()) {
                let worker = view.name(worker);
                return Err(decide::Error::AgentRestarts { worker }.into());
            }
            self.close_lost(key, worker).await?;
        }
        let OpenDecision { worker, was_open, can_move, wish, .. } =
            self.place(&open_request, None)?;
        let first_worker = self.settle(key, worker, wish).await;
        let (worker, result) = match self.ask_to_open(&open_request, first_worker).await {
            // The agent is full or unreachable.
            Err(status)
                if can_move
                    && matches!(status.code(), Code::ResourceExhausted | Code::Unavailable) =>
            {
                match self.place(&open_request, Some(first_worker)) {
                    Ok(OpenDecision { worker, wish, .. }) => {
                        let second_worker = self.settle(key, worker, wish).await;
                        self.metrics.count_retry("open");
                        if status.code() == Code::Unavailable {
                            self.close_when_heard(key.clone(), first_worker);
                        }
                        (second_worker, self.ask_to_open(&open_request, second_worker).await)
                    }
                    Err(_) => (first_worker, Err(status)),
                }
            }
            result => (first_worker, result),
        };
        let result = result.map_err(Error::from_agent);
        let epoch = self.directory.view().agent(worker).epoch();
        self.directory.step(|affinity, now| {
            affinity.end_turn(key, now);
            if result.is_err() && !was_open {
                affinity.forget(key);
            }
            let OpenedAtAgent { session, was_open: agent_had_it } = result?;
            let session = Arc::new(session);
            let worker = WorkerRef { dp_rank: session.dp_rank, ..worker };
            let open_answer = OpenAnswer { session: Arc::clone(&session), epoch, answered_at: now };
            affinity.record_open(worker, open_answer, now).map_err(decide::Error::from)?;
            Ok(OpenedSession {
                worker,
                is_new: !was_open && !agent_had_it && session.turns == 0,
                session,
            })
        })
    }

    /// Claims the worker that is to open a session, if other routers may not know it. Returns the
    /// worker that all routers know.
    async fn settle(&self, key: &SessionKey, chosen: WorkerRef, wish: Option<Wish>) -> WorkerRef {
        let Some(wish) = wish else { return chosen };
        let settled = self.claims.settle(wish).await;
        let Settled { worker, generation, valid_until, .. } = settled;
        self.directory.step(|affinity, _| {
            affinity.record_claim(key, worker, Claimed { generation, valid_until });
        });
        worker
    }

    /// Asks the agent of a worker to open a session.
    async fn ask_to_open(
        &self,
        open_request: &OpenRequest,
        worker: WorkerRef,
    ) -> Result<OpenedAtAgent, Status> {
        self.control_clients.get(worker.agent)?.open(open_request, worker.dp_rank).await
    }

    /// Asks the agent of a worker to close a session. Returns whether the agent closes it later.
    async fn close_once(&self, key: &SessionKey, worker: WorkerRef) -> Result<bool, Status> {
        self.control_clients.get(worker.agent)?.close(key).await
    }

    /// Chooses the worker that opens a session, and binds the session to it; see
    /// [`decide::decide_open`].
    fn place(
        &self,
        open_request: &OpenRequest,
        failed_worker: Option<WorkerRef>,
    ) -> Result<OpenDecision, Error> {
        let view = self.directory.view();
        let decision = self.directory.step(|affinity, now| {
            decide::decide_open(affinity, open_request, failed_worker, &view, now)
        })?;
        self.metrics.count_placement(decision.reason.as_str());
        Ok(decision)
    }

    /// Closes a session at its agent. `is_placement_only`: whether the client asked only that the
    /// session's turns go to one worker, so that no agent knows the session.
    async fn close_at_agent(
        &self,
        key: &SessionKey,
        worker: WorkerRef,
        is_placement_only: bool,
    ) -> Result<(), Error> {
        // After a move, other workers may still have the session. Close it there, too. Otherwise it
        // would seem to be open there.
        let view = self.directory.view();
        let other_workers = view.sessions.locate(key).iter().map(|located| located.worker);
        other_workers
            .filter(|other| other.agent != worker.agent && view.agent(*other).is_up())
            .for_each(|other| self.close_detached(key.clone(), other));
        let result = match self.close_once(key, worker).await {
            Ok(is_deferred) => Ok(is_deferred),
            // A placement is known only to the router, so the agent had nothing to close.
            Err(status) if status.code() == Code::NotFound && is_placement_only => Ok(false),
            Err(status) if status.code() == Code::NotFound => Err(Error::Unknown),
            Err(status) => Err(Error::from_agent(status)),
        };
        self.directory.step(|affinity, now| match &result {
            Ok(is_deferred) => affinity.record_close(key, *is_deferred, now),
            Err(Error::Unknown) => affinity.record_close(key, false, now),
            Err(_) => affinity.record_close_failure(key),
        });
        result.map(drop)
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

//! Opens, closes, demotes, prefetches and looks up sessions for clients.
//!
//! Opens and closes run in tasks of their own, so that they are completed even if the client leaves
//! before that. A session that a turn opens or closes isn't handled here: the turn's claim tells
//! the agent.

mod demotion;
mod prefetch;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use contract::{id::SessionKey, load::Session};
use service::{clock::now, tasks::Tasks};
use tokio::sync::{Semaphore, oneshot};
use tonic::{Code, Status};
use tracing::{debug, warn};

use super::{
    bindings::{KnownPlacementClaim, OpenAnswer},
    check,
    claims::{AgreedWorker, PlacementClaims, Proposal},
    directory::SessionDirectory,
    open::{self, OpenDecision},
    status::{self, SessionStatus},
};
use crate::{
    fleet::{
        control::{ControlClients, OpenRequest, OpenedAtAgent},
        snapshot::Snapshot,
        worker::WorkerRef,
    },
    metrics::Metrics,
};

/// The messages are for the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Decision(#[from] check::Error),
    #[error("no session is open under this id; open it with POST /v1/sessions")]
    Unknown,
    /// Carries the worker's name.
    #[error(
        "the agent of worker {0} is of an earlier version, which can't demote sessions; upgrade \
         the agent, or close the session to free its KV"
    )]
    NoDemotion(String),
    /// Carries the worker's name.
    #[error(
        "the agent of worker {0} is of an earlier version, which can't load KV ahead of a turn; \
         upgrade the agent, or send the turn"
    )]
    NoPrefetch(String),
    #[error("{}", .0.message())]
    Agent(Status),
    #[error("the router failed; see its log")]
    Internal,
}

impl Error {
    /// Logs the error if no client can act on it.
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

/// Holds also if the request names no limit. If there are more, the answer says so.
pub(crate) const SESSIONS_LISTED_MAX: usize = 1000;

/// The longest wait for an agent that gave an open no answer. Agents restart within seconds.
const HEARD_AGAIN_MAX: Duration = Duration::from_secs(60);
/// Sessions that wait to be closed at an agent as soon as it is heard.
const WAITING_CLOSES_MAX: usize = 256;

#[derive(Debug, Clone)]
pub(crate) struct SessionView {
    pub(crate) key: SessionKey,
    pub(crate) worker: WorkerRef,
    /// `None` if no agent has reported the session.
    pub(crate) session: Option<Arc<Session>>,
    pub(crate) is_lost: bool,
}

impl SessionView {
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

#[derive(Debug)]
pub(crate) struct OpenedSession {
    pub(crate) worker: WorkerRef,
    pub(crate) session: Arc<Session>,
    pub(crate) is_new: bool,
}

#[derive(Debug)]
pub(crate) struct Lifecycle {
    directory: Arc<SessionDirectory>,
    claims: Arc<PlacementClaims>,
    control_clients: Arc<ControlClients>,
    metrics: Arc<Metrics>,
    tasks: Tasks,
    /// For tasks that wait for an agent, to close a session there.
    places_to_wait: Arc<Semaphore>,
}

impl Lifecycle {
    pub(crate) fn new(
        directory: Arc<SessionDirectory>,
        claims: Arc<PlacementClaims>,
        control_clients: Arc<ControlClients>,
        metrics: Arc<Metrics>,
        tasks: Tasks,
    ) -> Self {
        let places_to_wait = Arc::new(Semaphore::new(WAITING_CLOSES_MAX));
        Self { directory, claims, control_clients, metrics, tasks, places_to_wait }
    }

    /// Returns the session that is already open, if one is.
    pub(crate) async fn open(
        self: &Arc<Self>,
        open_request: OpenRequest,
    ) -> Result<OpenedSession, Error> {
        let service = Arc::clone(self);
        self.run_detached(async move { Box::pin(service.open_at_agent(open_request)).await }).await
    }

    /// Returns the worker that has the session, and its name.
    async fn worker_of(&self, key: &SessionKey) -> Result<(WorkerRef, String), Error> {
        let status = self.directory.status_after_reconnect(key).await;
        let view = self.directory.view();
        match status {
            SessionStatus::Closing => Err(check::Error::Closing.into()),
            SessionStatus::Lost { worker, is_agent_up, .. } => {
                let worker = view.name(worker);
                Err(check::Error::SessionLost { worker, agent_up: is_agent_up }.into())
            }
            status => {
                let worker = status.owned_worker().ok_or(Error::Unknown)?;
                Ok((worker, view.name(worker)))
            }
        }
    }

    /// Returns once the agent has agreed. If a turn of the session is still running then, the agent
    /// closes the session after it.
    pub(crate) async fn close(self: &Arc<Self>, key: SessionKey) -> Result<(), Error> {
        self.directory.settled_view().await;
        let view = self.directory.view();
        // One step, so that the second of two closes finds the session closing.
        let (worker, is_placement_only) = self.directory.step(|bindings, now| {
            let binding = bindings.resolve(&key, &view, now);
            let status = status::determine_status(&key, &view, binding, now);
            let worker = status.owned_worker().ok_or(Error::Unknown)?;
            bindings.record_close_request(&key, worker, now).map_err(check::Error::from)?;
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

    /// Closes what an open without an answer has left on other agents than the session's own.
    pub(crate) fn close_strays(&self, key: &SessionKey) {
        let view = self.directory.view();
        if view.sessions.locate(key).len() < 2 {
            return;
        }
        if let SessionStatus::Open { worker, .. } = self.directory.status(key, &view) {
            for stray in status::strays(key, &view, worker) {
                self.close_detached(key.clone(), stray);
            }
        }
    }

    /// Closes what an open without an answer may have left. Nothing is lost without this: the agent
    /// does it after the session's idle limit, and [`Self::close_strays`] with the next turn.
    fn close_when_heard(self: &Arc<Self>, key: SessionKey, worker: WorkerRef) {
        let Ok(place) = Arc::clone(&self.places_to_wait).try_acquire_owned() else { return };
        let service = Arc::clone(self);
        self.tasks.spawn(async move {
            let _place = place;
            let is_left = |view: &Snapshot| status::is_unused_at(&key, view, worker);
            let view = service.directory.wait_for(now() + HEARD_AGAIN_MAX, is_left).await;
            let owner = service.directory.status(&key, &view).owned_worker();
            if is_left(&view) && owner.is_some_and(|owner| owner.agent != worker.agent) {
                service.close_detached(key, worker);
            }
        });
    }

    /// The close goes on even if the turn or client that wanted it is gone.
    pub(crate) fn close_detached(&self, key: SessionKey, worker: WorkerRef) {
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

    /// Closes one of several agents' copies of a session, unless a turn of it runs there.
    pub(crate) fn close_split(&self, key: SessionKey, worker: WorkerRef) {
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

    pub(crate) async fn find(&self, key: SessionKey) -> Result<SessionView, Error> {
        let view = self.directory.settled_view().await;
        let status = self.directory.status(&key, &view);
        SessionView::new(key, status).ok_or(Error::Unknown)
    }

    /// Lists sessions in the order of ids, after `after`, and says whether there are more.
    ///
    /// Reading the agents' tables takes milliseconds, so this is for a thread for blocking work.
    /// This router's own table is locked for the listed sessions only.
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

    /// Returns the keys with the smallest ids above `after`.
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
        self.directory.step(|bindings, now| {
            let own = bindings.keys_of_principal(principal, after_key.as_ref(), now);
            // An id that no session can have is no key to begin after.
            let later = own.filter(|key| after.is_none_or(|after| key.id() > after));
            later.take(count_max).for_each(&mut offer);
        });
        smallest
    }

    /// Makes room to open the session again. An agent that can't be reached doesn't matter.
    pub(crate) async fn close_lost(
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
        self.directory.step(|bindings, now| {
            let binding = bindings.get(key, now);
            if binding.is_some_and(|binding| binding.was_just_reopened(now)) {
                // Another request has found the session lost too, and was faster.
                return;
            }
            // Hides the session as long as the agent's last table still shows it.
            if bindings.record_close_request(key, worker, now).is_ok() {
                bindings.record_close(key, false, now);
            }
        });
        Ok(())
    }

    /// If the agent can't open the session, another one is tried once.
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
                return Err(check::Error::AgentRestarts { worker }.into());
            }
            self.close_lost(key, worker).await?;
        }
        let OpenDecision { worker, was_open, can_move, proposal, .. } =
            self.place(&open_request, None)?;
        let first_worker = self.agree(key, worker, proposal).await;
        let (worker, result) = match self.ask_to_open(&open_request, first_worker).await {
            // The agent is full or unreachable.
            Err(status)
                if can_move
                    && matches!(status.code(), Code::ResourceExhausted | Code::Unavailable) =>
            {
                match self.place(&open_request, Some(first_worker)) {
                    Ok(OpenDecision { worker, proposal, .. }) => {
                        let second_worker = self.agree(key, worker, proposal).await;
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
        self.directory.step(|bindings, now| {
            bindings.end_turn(key, now);
            if result.is_err() && !was_open {
                bindings.forget(key);
            }
            let OpenedAtAgent { session, was_open: agent_had_it } = result?;
            let session = Arc::new(session);
            let worker = WorkerRef { dp_rank: session.dp_rank, ..worker };
            let open_answer = OpenAnswer { session: Arc::clone(&session), epoch, answered_at: now };
            bindings.record_open(worker, open_answer, now).map_err(check::Error::from)?;
            Ok(OpenedSession {
                worker,
                is_new: !was_open && !agent_had_it && session.turns == 0,
                session,
            })
        })
    }

    /// Returns the worker that all routers know for the session.
    async fn agree(
        &self,
        key: &SessionKey,
        chosen: WorkerRef,
        proposal: Option<Proposal>,
    ) -> WorkerRef {
        let Some(proposal) = proposal else { return chosen };
        let agreed = self.claims.agree(proposal).await;
        let AgreedWorker { worker, generation, valid_until, .. } = agreed;
        self.directory.step(|bindings, _| {
            bindings.record_claim(key, worker, KnownPlacementClaim { generation, valid_until });
        });
        worker
    }

    async fn ask_to_open(
        &self,
        open_request: &OpenRequest,
        worker: WorkerRef,
    ) -> Result<OpenedAtAgent, Status> {
        self.control_clients.get(worker.agent)?.open(open_request, worker.dp_rank).await
    }

    /// Returns whether the agent closes the session later.
    async fn close_once(&self, key: &SessionKey, worker: WorkerRef) -> Result<bool, Status> {
        self.control_clients.get(worker.agent)?.close(key).await
    }

    /// See [`open::decide_open`].
    fn place(
        &self,
        open_request: &OpenRequest,
        failed_worker: Option<WorkerRef>,
    ) -> Result<OpenDecision, Error> {
        let view = self.directory.view();
        let decision = self.directory.step(|bindings, now| {
            open::decide_open(bindings, open_request, failed_worker, &view, now)
        })?;
        self.metrics.count_placement(decision.reason.as_str());
        Ok(decision)
    }

    /// After a move, other workers than `worker` may still have the session, and it would seem to
    /// be open there.
    pub(crate) fn close_elsewhere(&self, key: &SessionKey, worker: WorkerRef) {
        let view = self.directory.view();
        let workers = view.sessions.locate(key).iter().map(|located| located.worker);
        workers
            .filter(|other| other.agent != worker.agent && view.agent(*other).is_up())
            .for_each(|other| self.close_detached(key.clone(), other));
    }

    /// `is_placement_only`: no agent knows the session, as its client asked only for one worker.
    async fn close_at_agent(
        &self,
        key: &SessionKey,
        worker: WorkerRef,
        is_placement_only: bool,
    ) -> Result<(), Error> {
        self.close_elsewhere(key, worker);
        let result = match self.close_once(key, worker).await {
            Ok(is_deferred) => Ok(is_deferred),
            // A placement is known only to the router, so the agent had nothing to close.
            Err(status) if status.code() == Code::NotFound && is_placement_only => Ok(false),
            Err(status) if status.code() == Code::NotFound => Err(Error::Unknown),
            Err(status) => Err(Error::from_agent(status)),
        };
        self.directory.step(|bindings, now| match &result {
            Ok(is_deferred) => bindings.record_close(key, *is_deferred, now),
            Err(Error::Unknown) => bindings.record_close(key, false, now),
            Err(_) => bindings.record_close_failure(key),
        });
        result.map(drop)
    }

    /// Runs `work` to its end even if the caller goes away.
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

//! The state that all requests share, held together without rules of its own.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use parking_lot::Mutex;
use proto::id::SessionKey;
use service::{budget::BodyBudget, clock::now, tasks::Tasks};
use tokio::sync::{Semaphore, mpsc};

use crate::{
    config::Config,
    fleet::{control::Control, snapshot::Snapshot, state::Update, view::View, worker::WorkerRef},
    metrics::Metrics,
    placement::{
        affinity::Affinity,
        recent::RecentPlacements,
        session_status::{self, SessionStatus},
    },
    residency::{block_locator::BlockLocator, kv_index::KvIndex},
};

/// The HTTP client for turns, with one connection pool for all agents.
pub(crate) type TurnClient = Client<HttpConnector, Full<Bytes>>;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) view: Arc<View>,
    pub(crate) kv_index: Arc<KvIndex>,
    pub(crate) block_locator: BlockLocator,
    /// A leaf lock, as is the next field. Held for one decision, never across an await, never both
    /// at once.
    pub(crate) affinity: Mutex<Affinity>,
    /// The worker of each `prompt_cache_key`.
    pub(crate) cache_keys: Mutex<Affinity>,
    /// The reasons of the last placements. A leaf lock, too.
    pub(crate) recent_placements: Mutex<RecentPlacements>,
    pub(crate) client: TurnClient,
    /// Sends the view what turns find out about agents.
    pub(crate) updates: mpsc::Sender<(usize, Update, Instant)>,
    /// One control client per configured agent.
    pub(crate) controls: Vec<Control>,
    pub(crate) metrics: Metrics,
    pub(crate) tasks: Tasks,
    pub(crate) budget: BodyBudget,
    pub(crate) turn_permits: Arc<Semaphore>,
    /// Until this time, turns wait for the agents' first session tables.
    pub(crate) settled_by: Instant,
    /// The key that turn ids are hashed with.
    pub(crate) turn_id_hasher: RandomState,
    pub(crate) next_turn: AtomicU64,
}

impl Shared {
    /// Returns a new turn id, shown as 16 hex digits. It can't be guessed from other turns' ids,
    /// because the client that has it may ask why the turn went where it went.
    pub(crate) fn turn_id(&self) -> u64 {
        self.turn_id_hasher.hash_one(self.next_turn.fetch_add(1, Ordering::Relaxed))
    }

    /// Reports that a turn couldn't connect to a worker's data port.
    pub(crate) fn report_unreachable(&self, worker: WorkerRef, why: String) {
        // A full mailbox drops the report; the next turn that fails will repeat it.
        let _ = self.updates.try_send((worker.agent, Update::Unreachable(why), now()));
    }

    /// Returns the view once every agent was heard or failed. Waits only just after the start.
    pub(crate) async fn settled_view(&self) -> Arc<Snapshot> {
        let view = self.view.load();
        if view.is_settled() || now() >= self.settled_by {
            return view;
        }
        self.view.wait_for(self.settled_by, Snapshot::is_settled).await
    }

    /// Returns the status of a session.
    pub(crate) fn session_status(&self, key: &SessionKey, view: &Snapshot) -> SessionStatus {
        let now = now();
        let affinity = self.affinity.lock();
        session_status::determine_status(key, view, affinity.get(key, now), now)
    }

    /// Like [`Self::session_status`], but first waits for the agent of a pinned session if the
    /// connection was just lost. A short interruption must not cost the session its history.
    pub(crate) async fn session_status_after_reconnect(&self, key: &SessionKey) -> SessionStatus {
        let view = self.settled_view().await;
        let status = self.session_status(key, &view);
        let SessionStatus::Lost { worker, agent_up: false } = status else { return status };
        let crate::fleet::agent::Link::Lost { since, .. } = view.agent(worker).link else {
            return status;
        };
        let limit = since + self.config.connect_max();
        if now() >= limit {
            return status;
        }
        let view = self.view.wait_for(limit, |view| view.agent(worker).is_up()).await;
        self.session_status(key, &view)
    }

    /// Closes a session at an agent, in a task that doesn't depend on the caller: the turn or
    /// client that wanted the close may be gone.
    pub(crate) fn close_detached(self: &Arc<Self>, key: SessionKey, worker: WorkerRef) {
        let control = self.controls[worker.agent].clone();
        self.tasks.spawn(async move {
            if let Err(status) = control.close(&key).await
                && status.code() != tonic::Code::NotFound
            {
                // The agent closes the session in the end, after its idle limit.
                tracing::warn!(session = %key.digest(), code = ?status.code(), "close failed");
            }
        });
    }
}

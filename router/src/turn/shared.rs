//! Holds the state that all requests to the router share.
//!
//! The state has what the agents report, the worker of each session, the clients for the agents,
//! and the router's limits and metrics. `router::run` builds the state once, and every request
//! handler in `http` and `turn` gets it. The helpers here make turn ids, look up the status of a
//! session, and close a session in a task of its own. They place no turn: `decide` does.
//!
//! A *session* is a sequence of turns that share a growing prefix, and a *turn* is one request and
//! its answer. An *agent* runs beside each engine.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use parking_lot::Mutex;
use proto::id::SessionKey;
use service::{budget::BodyBudget, clock::now, tasks::Tasks};
use tokio::sync::Semaphore;

use super::upstream::UpstreamClient;
use crate::{
    config::Config,
    fleet::{control::ControlClient, snapshot::Snapshot, view::View, worker::WorkerRef},
    metrics::Metrics,
    placement::{
        affinity::Affinity,
        recent::RecentPlacements,
        session_status::{self, SessionStatus},
    },
    residency::{block_locator::BlockLocator, kv_index::KvIndex},
};

/// The state that all requests share.
///
/// Each of the three mutexes is locked for one decision, never across an await, and never together
/// with another of them. The locks inside `kv_index` may be taken while `affinity` is locked.
/// `affinity` must not be locked while one of those is held.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    /// What the agents report: their workers, loads and sessions.
    pub(crate) view: Arc<View>,
    /// The resident blocks of KV that the agents report.
    pub(crate) kv_index: Arc<KvIndex>,
    /// Counts how many blocks of a turn's prompt each worker has.
    pub(crate) block_locator: BlockLocator,
    /// The worker of each session.
    pub(crate) affinity: Mutex<Affinity>,
    /// The worker of each `prompt_cache_key`.
    pub(crate) cache_keys: Mutex<Affinity>,
    /// The last placements, for clients that ask for the reason.
    pub(crate) recent_placements: Mutex<RecentPlacements>,
    pub(crate) upstream: UpstreamClient,
    /// One control client per configured agent.
    pub(crate) control_clients: Vec<ControlClient>,
    pub(crate) metrics: Metrics,
    pub(crate) tasks: Tasks,
    /// Bounds the memory of all request bodies together.
    pub(crate) body_budget: BodyBudget,
    /// One permit per turn in flight.
    pub(crate) turn_permits: Arc<Semaphore>,
    /// Until this time, requests wait for the agents' first session tables.
    pub(crate) settle_deadline: Instant,
    /// Hashes turn numbers to turn ids, with a random key.
    pub(crate) turn_id_hasher: RandomState,
    /// The number of the next turn.
    pub(crate) next_turn_number: AtomicU64,
}

impl Shared {
    /// Returns a new turn id, which clients see as 16 hex digits. A client that knows a turn's id
    /// may ask why the turn went to its worker. So an id can't be guessed from other ids.
    pub(crate) fn new_turn_id(&self) -> u64 {
        self.turn_id_hasher.hash_one(self.next_turn_number.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns a snapshot of the fleet. Shortly after the router's start, waits for a snapshot in
    /// which every agent has reported or failed, at most until `settle_deadline`.
    pub(crate) async fn settled_view(&self) -> Arc<Snapshot> {
        let view = self.view.load();
        if view.is_settled() || now() >= self.settle_deadline {
            return view;
        }
        self.view.wait_for(self.settle_deadline, Snapshot::is_settled).await
    }

    /// Returns the status of a session.
    pub(crate) fn session_status(&self, key: &SessionKey, view: &Snapshot) -> SessionStatus {
        let now = now();
        let affinity = self.affinity.lock();
        session_status::determine_status(key, view, affinity.get(key, now), now)
    }

    /// Like [`Self::session_status`], but if the session is lost because its agent has just been
    /// disconnected, waits for the agent first. A short interruption must not cost a session its
    /// history.
    pub(crate) async fn session_status_after_reconnect(&self, key: &SessionKey) -> SessionStatus {
        let view = self.settled_view().await;
        let status = self.session_status(key, &view);
        let SessionStatus::Lost { worker, is_agent_up: false, .. } = status else { return status };
        let crate::fleet::agent::Link::Lost { since, .. } = view.agent(worker).link else {
            return status;
        };
        let reconnect_deadline = since + self.config.connect_max();
        if now() >= reconnect_deadline {
            return status;
        }
        let view = self.view.wait_for(reconnect_deadline, |view| view.agent(worker).is_up()).await;
        self.session_status(key, &view)
    }

    /// Starts a task that closes a session at an agent. The task goes on even if the turn or client
    /// that wanted the close is gone.
    pub(crate) fn close_detached(self: &Arc<Self>, key: SessionKey, worker: WorkerRef) {
        let control = self.control_clients[worker.agent].clone();
        self.tasks.spawn(async move {
            if let Err(status) = control.close(&key).await
                && status.code() != tonic::Code::NotFound
            {
                // The agent will close the session anyway, after its idle limit.
                tracing::warn!(session = %key.digest(), code = ?status.code(), "close failed");
            }
        });
    }
}

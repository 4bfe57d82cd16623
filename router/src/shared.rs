//! What all requests share. Every piece has its own rules; here they are only held together.

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
use proto::{
    id::SessionKey,
    process::{budget::BodyBudget, tasks::Tasks},
};
use tokio::sync::{Semaphore, mpsc};

use crate::{
    affinity::Affinity,
    blocks::Whereabouts,
    config::Config,
    control::Control,
    known::{self, Standing},
    kv::Residency,
    metrics::Metrics,
    recent::Recent,
    view::{ClusterView, Update, View, WorkerRef},
};

/// The HTTP client for turns: one pool of connections to all agents.
pub(crate) type Upstream = Client<HttpConnector, Full<Bytes>>;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) view: Arc<View>,
    pub(crate) residency: Arc<Residency>,
    pub(crate) whereabouts: Whereabouts,
    /// A leaf lock, as the next one: held for one decision, never across an await, never both.
    pub(crate) affinity: Mutex<Affinity>,
    /// `prompt_cache_key` -> worker.
    pub(crate) cache_keys: Mutex<Affinity>,
    /// Why the last turns went where they went; a leaf lock too.
    pub(crate) recent: Mutex<Recent>,
    pub(crate) client: Upstream,
    /// To the view: what turns find out about agents.
    pub(crate) updates: mpsc::Sender<(usize, Update, Instant)>,
    /// One per configured agent.
    pub(crate) controls: Vec<Control>,
    pub(crate) metrics: Metrics,
    pub(crate) tasks: Tasks,
    pub(crate) budget: BodyBudget,
    pub(crate) turns: Arc<Semaphore>,
    /// Until then, turns wait for the agents' first tables.
    pub(crate) settle_by: Instant,
    /// Makes turn ids of numbers.
    pub(crate) turn_key: RandomState,
    pub(crate) turn_next: AtomicU64,
}

impl Shared {
    /// 16 hex digits that nobody guesses from those of other turns: who has them may ask why the
    /// turn went where it went.
    pub(crate) fn turn_id(&self) -> u64 {
        self.turn_key.hash_one(self.turn_next.fetch_add(1, Ordering::Relaxed))
    }

    /// A turn found no way to a worker's data port.
    pub(crate) fn note_unreachable(&self, worker: WorkerRef, why: String) {
        // Where the view is behind it has no time for this; the next turn says it again.
        let _ = self.updates.try_send((worker.agent, Update::Unreachable(why), now()));
    }

    /// The view once every agent was heard or failed; at once, except just after the start.
    pub(crate) async fn settled_view(&self) -> Arc<ClusterView> {
        let view = self.view.load();
        if view.settled() || now() >= self.settle_by {
            return view;
        }
        self.view.wait_for(self.settle_by, ClusterView::settled).await
    }

    /// Where a session stands now.
    pub(crate) fn standing(&self, key: &SessionKey, view: &ClusterView) -> Standing {
        let now = now();
        let affinity = self.affinity.lock();
        known::standing(key, view, affinity.get(key, now), now)
    }

    /// As [`Self::standing`], but a pinned session whose agent was lost a moment ago gets as long
    /// as a connection may take to come back: a blip must not cost its history.
    pub(crate) async fn patient_standing(&self, key: &SessionKey) -> Standing {
        let view = self.settled_view().await;
        let standing = self.standing(key, &view);
        let Standing::Lost { worker, agent_up: false } = standing else { return standing };
        let crate::view::Link::Lost { since, .. } = view.agent(worker).link else {
            return standing;
        };
        let limit = since + self.config.connect_max();
        if now() >= limit {
            return standing;
        }
        let view = self.view.wait_for(limit, |view| view.agent(worker).is_up()).await;
        self.standing(key, &view)
    }

    /// Closes at an agent what a vanished turn or client was to close, whatever becomes of the
    /// caller. Spawned on purpose: the one who asked is gone.
    pub(crate) fn close_detached(self: &Arc<Self>, key: SessionKey, worker: WorkerRef) {
        let control = self.controls[worker.agent].clone();
        self.tasks.spawn(async move {
            if let Err(status) = control.close(&key).await
                && status.code() != tonic::Code::NotFound
            {
                // The agent's idle limit closes it in the end.
                tracing::warn!(session = %key.digest(), code = ?status.code(), "close failed");
            }
        });
    }
}

pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

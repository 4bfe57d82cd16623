//! Holds the parts of the router that requests use together.
//!
//! `router::run` builds the parts once, and every request handler in `http` and `turn` gets them.
//! Each part owns its state. All locks are leaves: no lock is taken while another one is held, and
//! none is held across an await.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use service::{running_turns::RunningTurns, tasks::Tasks, traces::Traces};
use tokio_util::sync::CancellationToken;

use super::{
    access_log::AccessLog, body::Bodies, directory::SessionDirectory, ended::RecentTurns,
    model_names::ModelNames, placer::Placer, session_names::SessionHeaders,
    sessions::SessionService, upstream::UpstreamClient,
};
use crate::{
    auth::Authenticator,
    config::{auth::CacheIsolation, tables::PreamblePolicy},
    discovery::announce::Announcements,
    metrics::Metrics,
    residency::{block_locator::BlockLocator, kv_index::KvIndex},
    shares::Shares,
};

/// What is known of a turn once its body was read, for who answers its client. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct TurnFlags(Arc<[AtomicBool; 2]>);

impl TurnFlags {
    pub(crate) fn set(&self, wants_stream: bool, is_idempotent: bool) {
        let [stream, idempotent] = &*self.0;
        stream.store(wants_stream, Ordering::Relaxed);
        idempotent.store(is_idempotent, Ordering::Relaxed);
    }

    /// Whether the turn's client asked for a stream.
    pub(crate) fn wants_stream(&self) -> bool {
        self.0[0].load(Ordering::Relaxed)
    }

    /// Whether running the turn twice changes no more than running it once.
    pub(crate) fn is_idempotent(&self) -> bool {
        self.0[1].load(Ordering::Relaxed)
    }
}

/// The parts that all requests share, and the limits of a request. Its many fields: each step of a
/// turn has its own part, and every request passes most steps.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Finds out who sends a request.
    pub(crate) auth: Authenticator,
    /// The resident blocks of KV that the agents report.
    pub(crate) kv_index: Arc<KvIndex>,
    /// Counts how many blocks of a turn's prompt each worker has.
    pub(crate) block_locator: Arc<BlockLocator>,
    pub(crate) directory: Arc<SessionDirectory>,
    pub(crate) placer: Placer,
    pub(crate) sessions: Arc<SessionService>,
    pub(crate) upstream: Arc<UpstreamClient>,
    pub(crate) metrics: Arc<Metrics>,
    /// The last turns that have ended. Locked for microseconds.
    pub(crate) recent_turns: Arc<Mutex<RecentTurns>>,
    /// A random number of this process. Places in the lists of recent turns and placements mean
    /// nothing in another process.
    pub(crate) process_id: u32,
    /// The turns that clients can abort here, because no agent has them yet.
    pub(crate) unsent_turns: RunningTurns<()>,
    /// What the clients share.
    pub(crate) shares: Arc<Shares>,
    /// Reads request bodies, within each client's share.
    pub(crate) bodies: Bodies,
    /// Time limit of a turn.
    pub(crate) turn_max: Duration,
    /// Time limit of a hand-off from a prefill to a decode engine.
    pub(crate) bootstrap_max: Duration,
    /// Runs what must finish after its turn.
    pub(crate) tasks: Tasks,
    /// How long a stream waits for its first event before it gets a comment; `None`: it gets none.
    pub(crate) waiting_comment: Option<Duration>,
    pub(crate) preamble: PreamblePolicy,
    /// The headers that hint at sessions.
    pub(crate) session_headers: SessionHeaders,
    /// What names of models stand for.
    pub(crate) model_names: ModelNames,
    /// Where agents announce themselves; `None`: they may not.
    pub(crate) announcements: Option<Arc<Announcements>>,
    /// Who may share KV in the engines' caches.
    pub(crate) cache_isolation: CacheIsolation,
    /// The log of all requests; `None`: there is none.
    pub(crate) access_log: Option<AccessLog>,
    /// Makes the traces of turns.
    pub(crate) traces: Traces,
    /// Cancelled when the router leaves, and soon stops.
    pub(crate) leaves: CancellationToken,
}

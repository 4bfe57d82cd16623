//! Holds the parts of the router that requests use together.
//!
//! Each part owns its state. All locks are leaves: no lock is taken while another one is held, and
//! none is held across an await.

use std::{sync::Arc, time::Duration};

use contract::id::TurnId;
use parking_lot::Mutex;
use service::{abortable_turns::AbortableTurns, tasks::Tasks, traces::Traces};
use tokio_util::sync::CancellationToken;

use super::{
    access_log::AccessLog, body::Bodies, ended::RecentTurns, model_names::ModelNames,
    placer::Placer, session_names::SessionHeaders, upstream::UpstreamClient,
};
use crate::{
    auth::Authenticator,
    config::{auth::CacheIsolation, tables::PreamblePolicy},
    discovery::announce::Announcements,
    metrics::Metrics,
    residency::{block_locator::BlockLocator, kv_index::KvIndex},
    sessions::{directory::SessionDirectory, lifecycle::Lifecycle},
    shares::Shares,
};

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) auth: Authenticator,
    pub(crate) kv_index: Arc<KvIndex>,
    pub(crate) block_locator: Arc<BlockLocator>,
    pub(crate) directory: Arc<SessionDirectory>,
    pub(crate) placer: Placer,
    pub(crate) sessions: Arc<Lifecycle>,
    pub(crate) upstream: Arc<UpstreamClient>,
    pub(crate) metrics: Arc<Metrics>,
    /// Locked for microseconds.
    pub(crate) recent_turns: Arc<Mutex<RecentTurns>>,
    /// Random. Places in lists of recent turns and placements mean nothing in another process.
    pub(crate) process_id: u32,
    /// Turns that no agent may have yet: an abort ends them here, or when they arrive there.
    pub(crate) unanswered_turns: AbortableTurns<TurnId>,
    pub(crate) shares: Arc<Shares>,
    pub(crate) bodies: Bodies,
    pub(crate) turn_max: Duration,
    /// Limits the time of a hand-off from a prefill to a decode engine.
    pub(crate) bootstrap_max: Duration,
    /// Runs what must finish after its turn.
    pub(crate) tasks: Tasks,
    /// How long a stream waits for its first event before it gets a comment; `None`: it gets none.
    pub(crate) waiting_comment: Option<Duration>,
    pub(crate) preamble: PreamblePolicy,
    pub(crate) session_headers: SessionHeaders,
    pub(crate) model_names: ModelNames,
    /// `None`: agents may not announce themselves.
    pub(crate) announcements: Option<Arc<Announcements>>,
    pub(crate) cache_isolation: CacheIsolation,
    pub(crate) access_log: Option<AccessLog>,
    pub(crate) traces: Traces,
    /// Cancelled when the router leaves, and soon stops.
    pub(crate) leaves: CancellationToken,
}

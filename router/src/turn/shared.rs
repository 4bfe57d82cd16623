//! Holds the parts of the router that requests use together.
//!
//! `router::run` builds the parts once, and every request handler in `http` and `turn` gets them.
//! Each part owns its state. All locks are leaves: no lock is taken while another one is held, and
//! none is held across an await.

use std::{sync::Arc, time::Duration};

use super::{
    body::Bodies, directory::SessionDirectory, placer::Placer, sessions::SessionService,
    upstream::UpstreamClient,
};
use crate::{
    auth::Authenticator,
    config::{auth::CacheIsolation, tables::PreamblePolicy},
    metrics::Metrics,
    residency::{block_locator::BlockLocator, kv_index::KvIndex},
    shares::Shares,
};

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
    /// What the clients share.
    pub(crate) shares: Arc<Shares>,
    /// Reads request bodies, within each client's share.
    pub(crate) bodies: Bodies,
    /// Time limit of a turn.
    pub(crate) turn_max: Duration,
    pub(crate) preamble: PreamblePolicy,
    /// Who may share KV in the engines' caches.
    pub(crate) cache_isolation: CacheIsolation,
}

//! Defines what a place that holds claims can do: the trait [`ClaimStore`].
//!
//! The agents hold claims by default (`agents`). A fleet that wants first placements to survive any
//! change of its agents has a store: `redis` or `etcd`. A fleet with one router needs neither, and
//! may keep its claims in the router (`memory`).

use std::{fmt, time::Duration};

use parking_lot::Mutex;
use proto::placement_claim::{self, ClaimRequest, ClaimTable, PlacementClaim};
use service::clock::now;
use tonic::async_trait;

/// Why a store gave no claim. Each text is for the operator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The store can't be reached, or failed.
    #[error("the claim store failed: {0}")]
    Failed(String),
    /// The store didn't answer within the deadline.
    #[error("the claim store did not answer within {} ms", .0.as_millis())]
    Late(Duration),
    /// The store holds as many claims as it may.
    #[error(transparent)]
    Full(#[from] placement_claim::Error),
    /// No agent can be asked.
    #[error("no agent that holds claims can be reached")]
    NoArbiter,
}

/// A place that holds claims. Several routers may ask it at once.
#[async_trait]
pub(crate) trait ClaimStore: fmt::Debug + Send + Sync {
    /// Makes, renews or replaces a claim, or returns the one that holds: one atomic step, with the
    /// meaning of [`ClaimTable::claim`].
    ///
    /// # Errors
    /// If the store gave no claim. It may have recorded the claim all the same.
    async fn claim(&self, request: ClaimRequest) -> Result<PlacementClaim, Error>;
}

/// Claims in this process, for a fleet with one router.
#[derive(Debug)]
pub(super) struct MemoryStore(pub(super) Mutex<ClaimTable>);

#[async_trait]
impl ClaimStore for MemoryStore {
    async fn claim(&self, request: ClaimRequest) -> Result<PlacementClaim, Error> {
        Ok(self.0.lock().claim(request, now())?)
    }
}

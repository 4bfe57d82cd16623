//! Defines what a place that holds claims can do: the trait [`ClaimStore`].
//!
//! By default agents hold claims. A fleet that wants first placements to survive any change of its
//! agents has a store. A fleet with one router needs neither, and may keep its claims in the
//! router.

use std::{
    fmt::{self, Write as _},
    time::Duration,
};

use contract::{
    id::WorkerId,
    placement_claim::{
        self, PlacementClaim, PlacementClaimKey, PlacementClaimRequest, PlacementClaimTable,
    },
};
use parking_lot::Mutex;
use service::clock::now;
use tonic::async_trait;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the claim store failed: {0}")]
    Failed(String),
    #[error("the claim store did not answer within {} ms", .0.as_millis())]
    Late(Duration),
    /// There has been no connection since the router started.
    #[error("there is no connection to the claim store yet")]
    NotConnected,
    #[error("the claim store's answer is no claim: {0}")]
    Unreadable(String),
    #[error(transparent)]
    Full(#[from] placement_claim::Error),
}

impl Error {
    /// Whether another connection could do better.
    pub(super) fn is_of_connection(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Late(_))
    }
}

/// Several routers may ask it at once.
#[async_trait]
pub(crate) trait ClaimStore: fmt::Debug + Send + Sync {
    /// Makes, renews or replaces a claim, or returns the one that holds: one atomic step, with the
    /// meaning of [`PlacementClaimTable::claim`]. Answers within `time_max`. At an error, the store
    /// may have recorded the claim all the same.
    async fn claim(
        &self,
        request: PlacementClaimRequest,
        time_max: Duration,
    ) -> Result<PlacementClaim, Error>;
}

#[derive(Debug)]
pub(super) struct MemoryStore(pub(super) Mutex<PlacementClaimTable>);

#[async_trait]
impl ClaimStore for MemoryStore {
    async fn claim(
        &self,
        request: PlacementClaimRequest,
        _: Duration,
    ) -> Result<PlacementClaim, Error> {
        Ok(self.0.lock().claim(request, now())?)
    }
}

pub(super) fn hex(key: PlacementClaimKey) -> String {
    key.0.iter().fold(String::with_capacity(32), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Stores keep the rank, a space, and the agent's id.
pub(super) fn read_worker(text: &str) -> Result<WorkerId, Error> {
    let unreadable = || Error::Unreadable(format!("the worker {text:?}"));
    let (rank, agent) = text.split_once(' ').ok_or_else(unreadable)?;
    let dp_rank = rank.parse().map_err(|_| unreadable())?;
    Ok(WorkerId { agent: agent.to_owned(), dp_rank })
}

#[cfg(test)]
mod tests;

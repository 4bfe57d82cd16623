//! Agrees with other routers on a session's worker: at the first two places that answer.
//!
//! All routers ask about one session in the same order of places. A router claims at the first that
//! answers, then claims what holds there at the second, and the second's answer is the result. So
//! two routers agree as long as their questions meet at one place:
//!
//! - If all places answer, both claim at the same two.
//! - If one router can't reach the first place, its two are the second and the third. It meets the
//!   other router at the second, whose claim holds for both.
//! - If a place is lost with its claims, the next one has them too.
//!
//! Only if two places fail at the same time may a session begin on two workers. Routers whose lists
//! of agents differ by one are in the same position as those that can't reach one place.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    id::WorkerId,
    placement_claim::{PlacementClaim, PlacementClaimKey, PlacementClaimRequest},
};
use service::clock::now;
use tonic::async_trait;

use super::Proposal;
use crate::fleet::{snapshot::Snapshot, worker::WorkerRef};

/// How often one place is asked at most, where each answer names a worker that the session leaves
/// or that can't take it. Each time, another router was faster.
const TRIES_MAX: usize = 3;

#[async_trait]
pub(super) trait ClaimPlace: fmt::Debug + Send + Sync {
    /// Makes, renews or replaces a claim, or returns the one that holds. `None` if the place gave
    /// none in time; it may have recorded the claim all the same.
    async fn ask(&self, request: PlacementClaimRequest) -> Option<PlacementClaim>;
}

#[derive(Debug)]
pub(super) struct Agreement<'a> {
    /// Every router asks them in this order.
    pub(super) places: &'a [Box<dyn ClaimPlace + 'a>],
    /// So many places have to answer.
    pub(super) needed: usize,
    pub(super) ttl: Duration,
}

#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) worker: WorkerRef,
    /// The claim's generation at the first place that answered.
    pub(super) generation: u64,
    pub(super) view: Arc<Snapshot>,
}

impl Agreement<'_> {
    /// `None` if no place gives a claim.
    pub(super) async fn reach(
        &self,
        proposal: &Proposal,
        view: impl Fn() -> Arc<Snapshot>,
    ) -> Option<Agreed> {
        let mut agreed: Option<Agreed> = None;
        let mut answers = 0;
        for place in self.places {
            // A later place is asked for what holds at the earlier one.
            let wanted = agreed.as_ref().map_or(proposal.wanted, |agreed| agreed.worker);
            let Some(next) = self.ask_at(&**place, proposal, wanted, &view).await else { continue };
            let first_generation = agreed.map(|agreed| agreed.generation);
            let generation = first_generation.unwrap_or(next.generation);
            agreed = Some(Agreed { generation, ..next });
            answers += 1;
            if answers == self.needed {
                break;
            }
        }
        agreed
    }

    async fn ask_at(
        &self,
        place: &dyn ClaimPlace,
        proposal: &Proposal,
        wanted: WorkerRef,
        view: impl Fn() -> Arc<Snapshot>,
    ) -> Option<Agreed> {
        let key = (&proposal.key).into();
        let mut expected = proposal.generation;
        for _ in 0..TRIES_MAX {
            let wanted_id = view().worker_id(wanted)?;
            let request = PlacementClaimRequest { key, wanted: wanted_id, expected, ttl: self.ttl };
            let claim = place.ask(request).await?;
            let view = view();
            match judge(&claim, wanted, proposal.leaves, &view, now()) {
                Verdict::Holds(worker) => {
                    return Some(Agreed { worker, generation: claim.generation, view });
                }
                Verdict::Replace => expected = Some(claim.generation),
            }
        }
        None
    }

    /// Returns the generation at the first place that answered. `None` if it names another worker,
    /// or if no place gives a claim.
    pub(super) async fn renew(
        &self,
        key: PlacementClaimKey,
        wanted: WorkerId,
        generation: u64,
    ) -> Option<u64> {
        let (mut first_generation, mut answers) = (None, 0);
        for place in self.places {
            let ask = async |generation| {
                let (wanted, expected) = (wanted.clone(), Some(generation));
                place.ask(PlacementClaimRequest { key, wanted, expected, ttl: self.ttl }).await
            };
            let Some(mut claim) = ask(generation).await else { continue };
            if !claim.is_granted && claim.worker == wanted {
                // The generations of the places differ.
                claim = ask(claim.generation).await?;
            }
            if !claim.is_granted && first_generation.is_none() {
                return None;
            }
            first_generation.get_or_insert(claim.generation);
            answers += 1;
            if answers == self.needed {
                break;
            }
        }
        first_generation
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Holds(WorkerRef),
    /// The claim names a worker that the session leaves or that can't take it.
    Replace,
}

fn judge(
    claim: &PlacementClaim,
    wanted: WorkerRef,
    leaves: Option<WorkerRef>,
    view: &Snapshot,
    now: Instant,
) -> Verdict {
    let Some(worker) = view.worker_named(&claim.worker) else { return Verdict::Replace };
    let is_left = leaves.is_some_and(|leaves| leaves.agent == worker.agent);
    if claim.is_granted || worker.agent == wanted.agent {
        // The router may have chosen another rank, and the agent keeps a session's rank.
        return Verdict::Holds(if claim.is_granted { wanted } else { worker });
    }
    if is_left || !view.state(worker, now).is_usable() {
        return Verdict::Replace;
    }
    Verdict::Holds(worker)
}

#[cfg(test)]
mod tests;

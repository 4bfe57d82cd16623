//! Decides which worker opens a session, and binds the session. Pure.
//!
//! A client opens a session without a turn, so there is no prompt to compare workers by.

use std::time::Instant;

use contract::load::Retention;

use super::{
    bindings::Bindings,
    check::{Error, proposal},
    claims::{PlacementClaims, Proposal},
    status::{self, SessionStatus},
};
use crate::{
    fleet::{control::OpenRequest, snapshot::Snapshot, worker::WorkerRef},
    placement::{self, PairUse, Placement, PlacementRequest, Reason, Sticky},
};

#[derive(Debug)]
pub(crate) struct OpenDecision {
    pub(crate) worker: WorkerRef,
    pub(crate) reason: Reason,
    pub(crate) was_open: bool,
    /// True only if no worker has the session.
    pub(crate) can_move: bool,
    /// What to ask other routers before the open. `None` if they know the session.
    pub(crate) proposal: Option<Proposal>,
}

/// The binding makes turns sent meanwhile go to the same worker. It counts a running turn, which
/// the caller must end. If `failed_worker` is set, the session is bound already, and the binding
/// moves.
pub(crate) fn decide_open(
    bindings: &mut Bindings,
    open_request: &OpenRequest,
    failed_worker: Option<WorkerRef>,
    view: &Snapshot,
    now: Instant,
) -> Result<OpenDecision, Error> {
    let key = &open_request.key;
    let binding = bindings.resolve(key, view, now);
    let status = status::determine_status(key, view, binding, now);
    let (bound_worker, was_open) = match status {
        SessionStatus::Closing => return Err(Error::Closing),
        SessionStatus::Unknown | SessionStatus::Lost { .. } => (None, false),
        SessionStatus::Bound { worker, .. } => (Some(worker), false),
        SessionStatus::Open { worker, .. } => (Some(worker), true),
    };
    let is_pinned = open_request.retention == Some(Retention::Pinned);
    let sticky = bound_worker
        .filter(|_| failed_worker.is_none())
        .map(|worker| Sticky { fixed: was_open && is_pinned, ..Sticky::new(worker) });
    let request = PlacementRequest {
        digest: key.digest(),
        expects_more_turns: true,
        sticky,
        conversations: None,
        prefer: None,
        // An open has no prompt.
        prompt: None,
        retention: if was_open { None } else { open_request.retention },
        model: None,
        weights: None,
        exclude: failed_worker,
        pairs: PairUse::May,
    };
    let Placement { worker, reason, .. } = placement::place(&request, view, now)?;
    let proposal = proposal(key, &status, binding, worker, view, now);
    let proposal = match failed_worker {
        None => proposal,
        Some(failed_worker) => {
            let generation = binding.and_then(|binding| binding.claimed?.generation);
            let leaves = Some(failed_worker);
            Some(Proposal { key: key.clone(), wanted: worker, leaves, generation })
                .filter(|_| PlacementClaims::are_needed(view))
        }
    };
    match failed_worker {
        None => {
            bindings.begin_turn(key, worker, false, now)?;
            // An unanswered turn can make the session busy, and an open must not.
            bindings.record_answer(key);
        }
        Some(_) => bindings.rebind(key, worker),
    }
    if bound_worker.is_none() {
        view.agent(worker).in_flight[worker.dp_rank as usize].count_open_request();
    }
    Ok(OpenDecision { worker, reason, was_open, can_move: bound_worker.is_none(), proposal })
}

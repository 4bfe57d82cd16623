//! Checks what a session's status allows its next turn or open. Pure.

use std::time::Instant;

use contract::{id::SessionKey, load::Retention};

use super::{
    bindings::{Binding, TableFull},
    claims::{PlacementClaims, Proposal},
    intent::SessionIntent,
    status::{SessionStatus, is_left_with_nothing},
};
use crate::{
    fleet::{snapshot::Snapshot, worker::WorkerRef},
    placement::{NoWorker, Sticky},
};

/// The messages are for the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    NoWorker(#[from] NoWorker),
    #[error(transparent)]
    SessionsFull(#[from] TableFull),
    /// The turn's body has only the new tokens.
    #[error(
        "this turn is a delta, but no session is open under its id; open the session first with \
         POST /v1/sessions, or send the full history not marked as a delta"
    )]
    DeltaWithoutHistory,
    #[error(
        "this session takes one turn at a time and a turn is running; send this turn when that one \
         has ended"
    )]
    SessionBusy,
    /// So many turns at once show that the hinted name isn't that of one conversation.
    #[error(
        "{TURNS_AT_ONCE_MAX} turns of this session run at once; open the session if it is one \
         conversation, or leave its name out"
    )]
    Crowded,
    #[error("this session is closing; wait until its last turn has ended, then open it again")]
    Closing,
    /// The agent's successor may take up the session.
    #[error("the agent of worker {worker} restarts and may keep this session; try again")]
    AgentRestarts {
        /// Name of the worker that has the session.
        worker: String,
    },
    #[error(
        "this session must stay on worker {session_worker}, but the previous response is at agent \
         {response_agent}; leave previous_response_id or the session out, and send the full history"
    )]
    ResponseElsewhere {
        session_worker: String,
        /// Name of the agent that has the response.
        response_agent: String,
    },
    #[error(
        "the session's KV and history were on worker {worker}, {}; open the session again and send \
         the full history",
        if *.agent_up { "whose engine or agent restarted" } else { "which can't be reached" }
    )]
    SessionLost {
        worker: String,
        /// Whether the agent is connected.
        agent_up: bool,
    },
}

/// Bounds sessions that were only hinted at. A coding agent asks for a title and suggests a next
/// message beside its main turn. Some clients send one constant name with all they do, and nothing
/// in common would keep their turns on one worker.
pub(crate) const TURNS_AT_ONCE_MAX: u32 = 4;

/// Returns the worker that has the session, and the retention with which the turn opens the session
/// if it goes to another worker; `None`: it doesn't open it there.
pub(crate) fn check_session(
    intent: &SessionIntent,
    status: &SessionStatus,
    view: &Snapshot,
    now: Instant,
) -> Result<(Option<Sticky>, Option<Retention>), Error> {
    let delta_needs_history = intent.is_delta && !intent.opens_session;
    match status {
        SessionStatus::Closing => Err(Error::Closing),
        SessionStatus::Lost { worker, is_agent_up: false, .. }
            if view.agent(*worker).may_hand_over(now) =>
        {
            Err(Error::AgentRestarts { worker: view.name(*worker) })
        }
        SessionStatus::Lost { worker, is_agent_up, .. } => {
            Err(Error::SessionLost { worker: view.name(*worker), agent_up: *is_agent_up })
        }
        _ if refuses_as_busy(status, view) => Err(Error::SessionBusy),
        SessionStatus::Unknown | SessionStatus::Bound { is_recent: false, .. }
            if delta_needs_history =>
        {
            Err(Error::DeltaWithoutHistory)
        }
        SessionStatus::Unknown => Ok((None, None)),
        SessionStatus::Bound { worker, is_busy, .. } => {
            // If the session is busy, its turn runs on the worker, and this turn must go there.
            Ok((Some(Sticky { fixed: *is_busy, ..Sticky::new(*worker) }), None))
        }
        SessionStatus::Open { worker, session, .. } => {
            let is_pinned = session.retention == Retention::Pinned;
            let fixed = session.exclusive || (is_pinned && !session.full_history);
            let reported_tokens = session.resident_tokens.map_or(0, |figure| figure.value);
            let private_tokens = if is_pinned { reported_tokens } else { 0 };
            let sticky = Sticky { fixed, reported_tokens, private_tokens, ..Sticky::new(*worker) };
            Ok((Some(sticky), session.exclusive.then_some(session.retention)))
        }
    }
}

/// Returns the worker whose engine has lost all that it had of the session: the next turn has no
/// reason to go there. `None` while a turn of this router may have begun the session anew there,
/// and its agent's report be under way.
pub(crate) fn worker_left_with_nothing(
    status: &SessionStatus,
    binding: Option<&Binding>,
    now: Instant,
) -> Option<WorkerRef> {
    let SessionStatus::Open { worker, session, .. } = status else { return None };
    let is_left = is_left_with_nothing(session);
    (is_left && !binding.is_some_and(|binding| binding.is_recent(now))).then_some(*worker)
}

/// A busy session refuses a turn only if its agent has no queue in which the turn could wait.
pub(crate) fn refuses_as_busy(status: &SessionStatus, view: &Snapshot) -> bool {
    let (SessionStatus::Open { is_busy: true, worker, .. }
    | SessionStatus::Bound { is_busy: true, worker, .. }) = status
    else {
        return false;
    };
    let facts = view.agent(*worker).facts.as_ref();
    facts.is_none_or(|facts| facts.description.turns_queued_per_session_max == 0)
}

/// `None` if other routers know that the session is on `chosen`.
pub(crate) fn proposal(
    key: &SessionKey,
    status: &SessionStatus,
    binding: Option<&Binding>,
    chosen: WorkerRef,
    view: &Snapshot,
    now: Instant,
) -> Option<Proposal> {
    let old_worker = match status {
        SessionStatus::Unknown | SessionStatus::Closing => None,
        SessionStatus::Bound { worker, .. }
        | SessionStatus::Open { worker, .. }
        | SessionStatus::Lost { worker, .. } => Some(*worker),
    };
    let leaves = old_worker.filter(|worker| worker.agent != chosen.agent);
    let is_known = match status {
        // All routers read it in the agent's table.
        SessionStatus::Open { .. } => true,
        SessionStatus::Bound { .. } => binding.is_some_and(|binding| binding.is_claimed(now)),
        SessionStatus::Unknown | SessionStatus::Closing | SessionStatus::Lost { .. } => false,
    };
    if (is_known && leaves.is_none()) || !PlacementClaims::are_needed(view) {
        return None;
    }
    let generation = binding.and_then(|binding| binding.claimed?.generation);
    Some(Proposal { key: key.clone(), wanted: chosen, leaves, generation })
}

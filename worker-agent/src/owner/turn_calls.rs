//! Handles the calls to the owner task that claim and admit turns.
//!
//! A turn of a session claims the session before its body is read, and asks for its admission
//! after. Any other turn asks for both at once.

use service::clock::now;
use tokio::sync::oneshot;

use super::{
    AdmittedTurn, Error, Owner, TurnLease,
    handle::{Admission, AdmissionRequest, new_turn_rid, too_many_turns},
    waiters::Waiter,
};
use crate::session::{self, ClaimRequest, Outcome, Session};

pub(super) fn claim(owner: &mut Owner, mut request: ClaimRequest) -> Result<TurnLease, Error> {
    owner.check_usable()?;
    // A session that a client opened takes its turns one after another, or refuses them.
    let session = request.claim.as_ref().and_then(|claim| owner.table.sessions().get(&claim.key));
    let is_exclusive = session.is_some_and(Session::is_exclusive);
    let is_beside = session.is_some_and(Session::has_turns);
    let may_leave_out = request.is_hint && request.claim.is_some() && !is_exclusive;
    // Reserve the place for the turn's end now, so that ending the turn never waits.
    let Ok(turn_end_permit) = owner.handle.turn_ends.clone().try_reserve_owned() else {
        return Err(too_many_turns());
    };
    let (rid, now) = (new_turn_rid(owner.reporter.agent_id(), &request.principal), now());
    let mut session_left_out = None;
    if let Err(error) = owner.table.claim(now, &rid, &request) {
        if !may_leave_out {
            return Err(error.into());
        }
        request.claim = None;
        owner.table.claim(now, &rid, &request)?;
        session_left_out = Some(error);
    }
    if let Some(claim) = &request.claim {
        owner.prefetches.begin_turn(now, &claim.key, request.returns_soon, is_beside);
    }
    Ok(TurnLease {
        rid,
        session_left_out,
        engine_process: owner.engine.process(),
        mailbox: owner.handle.mailbox.clone(),
        is_sent: false,
        turn_end_permit: Some(turn_end_permit),
    })
}

/// If the caller is gone when the answer comes, dropping the answer ends the turn.
pub(super) fn claim_and_admit(
    owner: &mut Owner,
    claim_request: ClaimRequest,
    request: AdmissionRequest,
) -> Result<(TurnLease, Admission), Error> {
    let lease = claim(owner, claim_request)?;
    let (reply, admission) = oneshot::channel();
    admit(owner, lease.rid.clone(), request, reply);
    Ok((lease, Admission(admission)))
}

pub(super) fn admit(
    owner: &mut Owner,
    rid: String,
    request: AdmissionRequest,
    reply: oneshot::Sender<Result<AdmittedTurn, Error>>,
) {
    let AdmissionRequest { need, prompt_start, facts } = request;
    let refusal = if owner.drain.has_begun() {
        // The turn was claimed before the drain, and its session may be closed by now.
        Some(Error::Stopping)
    } else if facts != *owner.engine.body_facts() {
        // Another engine process came while the body was read: it may crash on such a body.
        Some(session::Error::EngineLost.into())
    } else {
        None
    };
    if let Some(error) = refusal {
        owner.table.end_turn(now(), &rid, Outcome::Refused);
        return drop(reply.send(Err(error)));
    }
    owner.table.set_prompt_start(&rid, prompt_start);
    if owner.table.enqueue(now(), &rid, need) {
        // The effect that answers it is carried out after this message.
        owner.waiters.add(rid, Waiter::Turn(reply));
    }
}

#[cfg(test)]
mod tests;

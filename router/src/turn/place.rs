//! The fourth stage: decides where a turn runs, and binds its session there.

use std::sync::Arc;

use bytes::Bytes;
use contract::id::TurnId;
use service::abortable_turns::AbortableTurn;

use super::{
    admit::{Admitted, OutboundTurn},
    error::{Error, NoAnswer},
    holdings::{CloseGuard, Holdings},
    placer::{Chosen, assignment::Assignment},
    recorder::TurnRecorder,
    session_choice::{LeftOutReason, leave_out},
    shared::Shared,
};
use crate::sessions::{check, intent::SessionIntent, status::SessionStatus};

#[derive(Debug)]
pub(super) struct Placed {
    pub(super) outbound: OutboundTurn,
    /// Until the turn is sent, its client can abort it here: `send` looks.
    pub(super) unanswered: AbortableTurn<TurnId>,
    pub(super) assignment: Assignment,
    pub(super) holdings: Holdings,
}

pub(super) async fn run(shared: &Arc<Shared>, admitted: Admitted) -> Result<Placed, Error> {
    let Admitted { mut outbound, unanswered, share, mut tokens } = admitted;
    match &outbound.turn.session {
        Some(intent) => make_way(shared, intent).await?,
        // Right after the router's start, wait for the agents' first session tables.
        None => drop(shared.directory.settled_view().await),
    }
    let trace = outbound.arrival.observers.trace.clone();
    let chosen = trace.within("decide", place_or_leave_out(shared, &mut outbound)).await?;
    if let (Some(tokens), Some(blocks)) = (&mut tokens, &chosen.assignment.blocks) {
        tokens.set_prompt_tokens(blocks.prompt_overlap().tokens);
    }
    let recorder = TurnRecorder::new(shared, &outbound, &chosen.assignment, tokens);
    let close = CloseGuard::new(shared, &outbound.turn, chosen.assignment.to.worker);
    let (holdings, assignment) = Holdings::new(recorder, close, chosen, share);
    Ok(Placed { outbound, unanswered, assignment, holdings })
}

/// Closes what stands in the way of a session's turn: the lost session, if this turn opens it again
/// with its full history, and what an open without an answer left on other workers.
async fn make_way(shared: &Shared, intent: &SessionIntent) -> Result<(), Error> {
    let status = shared.directory.status_after_reconnect(&intent.key).await;
    if let SessionStatus::Lost { worker, .. } = status {
        let view = shared.directory.view();
        let may_return = view.agent(worker).may_hand_over(service::clock::now());
        if intent.opens_session && !intent.is_delta && !may_return {
            shared.sessions.close_lost(&intent.key, worker).await?;
        }
    }
    shared.sessions.close_strays(&intent.key);
    Ok(())
}

/// A turn refused for the sake of a session that was only hinted at is placed without the session.
async fn place_or_leave_out(shared: &Shared, outbound: &mut OutboundTurn) -> Result<Chosen, Error> {
    let bytes = outbound.body.bytes().expect("a body that isn't sent doesn't give way");
    check_length(shared, outbound, &bytes).await?;
    let OutboundTurn { arrival, turn, turn_id, .. } = outbound;
    let (path, sharer) = (arrival.path(), &arrival.sharer);
    let why = match shared.placer.place(turn, *turn_id, path, &bytes, sharer).await {
        Ok(chosen) => return Ok(chosen),
        Err(check::Error::SessionsFull(_)) if turn.hints.session => LeftOutReason::TableFull,
        Err(check::Error::Closing) if turn.hints.session => LeftOutReason::Closing,
        Err(check::Error::Crowded) if turn.hints.session => LeftOutReason::Crowded,
        Err(error) => return Err(error.into()),
    };
    leave_out(shared, turn, why);
    Ok(shared.placer.place(turn, *turn_id, path, &bytes, sharer).await?)
}

/// An engine would refuse such a prompt too, but only after tokenizing all of it, while its other
/// clients wait.
async fn check_length(shared: &Shared, outbound: &OutboundTurn, body: &Bytes) -> Result<(), Error> {
    let OutboundTurn { arrival, turn, .. } = outbound;
    let (model, view) = (turn.model.as_deref(), shared.directory.view());
    let (locator, path, sharer) = (&shared.block_locator, arrival.path(), &arrival.sharer);
    let checking = locator.context_if_over(&turn.prompt, model, path, body, &view, sharer);
    match tokio::time::timeout_at(arrival.deadline.into(), checking).await {
        Ok(None) => Ok(()),
        Ok(Some(context_tokens)) => Err(Error::PromptOverContext { context_tokens }),
        Err(_) => Err(NoAnswer::TimedOut.into()),
    }
}

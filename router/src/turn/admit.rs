//! The third stage: finds out whether a turn may run here and in which session, and counts it.

use std::sync::Arc;

use contract::{id::TurnId, route::Kind};
use service::abortable_turns::AbortableTurn;

use super::{
    arrival::Arrival,
    body::RetryBody,
    error::{Error, Limit},
    read::Read,
    request::Turn,
    responses, session_choice,
    shared::Shared,
    usage::{self, TurnTokens},
};
use crate::shares::{Share, Sharer};

/// A turn with its request, which can be sent more than once.
#[derive(Debug)]
pub(super) struct OutboundTurn {
    pub(super) arrival: Arrival,
    pub(super) turn: Turn,
    pub(super) turn_id: u64,
    pub(super) body: Arc<RetryBody>,
}

/// The capacity returns on drop.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) outbound: OutboundTurn,
    /// Until the turn is sent, its client can abort it here: `send` looks.
    pub(super) unanswered: AbortableTurn<TurnId>,
    /// One unit for each of the turn's sequences.
    pub(super) share: Share,
    /// `None` if the turn's key has no limit of tokens.
    pub(super) tokens: Option<TurnTokens>,
}

pub(super) async fn run(shared: &Arc<Shared>, read: Read) -> Result<Admitted, Error> {
    let Read { arrival, mut turn, body } = read;
    responses::find_previous(shared, &mut turn, &arrival.caller.principal).await?;
    let names = turn.names.clone().or_header(&arrival.head.headers);
    let turn_id = shared.placer.new_turn_id();
    let principal = &arrival.caller.principal;
    let unanswered = shared.unanswered_turns.add(principal, names, "", TurnId(turn_id));
    session_choice::choose_session(shared, &arrival.caller, &mut turn).await?;
    let share = take_places(shared, arrival.kind, &turn, &arrival.sharer)?;
    let tokens = shared
        .shares
        .take_tokens(&arrival.sharer, usage::estimate_tokens(body.bytes.len()))
        .map_err(Error::TokenRate)?
        .map(TurnTokens::new);
    let body = shared.bodies.keep(body);
    Ok(Admitted {
        outbound: OutboundTurn { arrival, turn, turn_id, body },
        unanswered,
        share,
        tokens,
    })
}

/// Takes as many of the turns in flight as the turn has sequences.
fn take_places(shared: &Shared, kind: Kind, turn: &Turn, sharer: &Sharer) -> Result<Share, Error> {
    let (pool, key_max) = (&shared.shares.turns, sharer.limits.turns_in_flight_max);
    // What generates nothing ends soon, and the agent bounds it.
    let sequences = if kind.is_generation() { turn.sequences.max(1) } else { 1 };
    let sequences_max = if sequences > 1 { pool.most_of_one(sharer, key_max) } else { 1 };
    if sequences > sequences_max {
        return Err(Error::BatchOverShare { sequences, sequences_max });
    }
    pool.take(sharer, sequences.into(), key_max)
        .map_err(|refused| Error::Limit { limit: Limit::Turns, refused })
}

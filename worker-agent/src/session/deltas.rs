//! Checks which turns a session takes: full histories, deltas, or both.
//!
//! A session is a conversation: ordered turns that share a growing prefix. A turn is one request
//! and its answer. A full history is a turn that holds the whole conversation. A delta is a turn
//! that holds only new tokens, which the engine appends to the history that it has. The shim,
//! Berth's part in the engine's process, may trim a full history: it removes the tokens that the
//! session already has.
//!
//! The session table calls [`check_turn`] when a turn claims its session, and again before the turn
//! is admitted. Whether there is room for the turn is not checked here, but in `table::admission`.

use proto::{claim::Claim, load::Retention};
use serde::{Deserialize, Serialize};

use super::{
    Error, RouteTurns, Session,
    lifecycle::{GoneReason, State},
};
use crate::guard::{Guard, Guards};

/// Whether a session takes deltas.
///
/// A delta is computed on the right context only if its client knows the engine's history. So there
/// are two kinds of sessions: a session that takes deltas keeps its history, and a session whose
/// history full histories may replace takes no deltas. A client that opens the session again may
/// change the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Deltas {
    /// The session takes no deltas, because no client has opened it or a full history has replaced
    /// its history. It takes none before a client opens it again.
    Refused,
    /// The session takes no deltas. Its history is gone, and the next full history starts an
    /// incarnation that replaces the earlier one.
    RefusedAnew,
    /// A client opened the session, and it has taken no delta yet.
    Allowed,
    /// The session has taken a delta. A full history must continue the session's history, unless
    /// its client opens the session again.
    Taken,
}

impl Session {
    /// Whether the session has no history, and no turn whose end could give it one.
    pub(super) fn is_fresh(&self) -> bool {
        self.turns.finished == 0 && self.history.tokens == 0 && self.turns.in_progress() == 0
    }

    /// Lets a session take deltas when a client opens it, if the session has no history yet. If it
    /// has one that full histories made, that history may differ from what this client believes.
    /// Then the session keeps refusing deltas.
    pub(super) fn open_for_deltas(&mut self) {
        if self.client.deltas == Deltas::Refused && self.is_fresh() {
            self.client.deltas = Deltas::Allowed;
        }
    }
}

/// Checks whether a session can take this turn now.
///
/// `claim` is what the router says about the turn, `route_turns` which turns the turn's route can
/// carry, and `shim_trims` whether the shim trims full histories.
pub(super) fn check_turn(
    session: &Session,
    claim: &Claim,
    route_turns: RouteTurns,
    shim_trims: bool,
    guards: Guards,
) -> Result<(), Error> {
    // A full history may start the session over if the engine's history is gone. But clients that
    // send deltas rely on the engine's history, so they must hear that it is gone, unless this turn
    // opens the session again.
    let clients_rely_on_history =
        session.client.deltas == Deltas::Taken && guards.is_on(Guard::FullHistoryContinues);
    let may_replace_history = claim.open || !clients_rely_on_history;
    let starts_over =
        !claim.delta && (shim_trims || session.has_auto_retention()) && may_replace_history;
    match &session.state {
        // This comes before the check for other turns (`Error::Busy`), because a closing session
        // exists only for its running turn.
        State::Closing(_) => return Err(Error::Closing),
        _ if starts_over => {}
        State::Gone { reason: GoneReason::EngineRestarted, tree }
            if tree.is_some() || !guards.is_on(Guard::LostRefused) => {}
        State::Gone { reason, .. } => return Err(reason.to_error()),
        _ if session.history.is_corrupt => return Err(Error::KvCorrupt),
        _ => {}
    }
    if session.has_auto_retention() || !session.is_pinned() {
        // If the agent pinned the session on its own, its clients send full histories. Then the
        // error calls it tagged, as if it had no pin.
        let retention_in_error = match session.retention() {
            Retention::Pinned => Retention::Tagged,
            other => other,
        };
        return if claim.delta { Err(Error::DeltaNeedsPinned(retention_in_error)) } else { Ok(()) };
    }
    let opens_fresh_session = claim.open && session.is_fresh();
    let refuses_deltas = matches!(session.client.deltas, Deltas::Refused | Deltas::RefusedAnew);
    let refuses_deltas = refuses_deltas && !opens_fresh_session;
    if claim.delta && refuses_deltas && guards.is_on(Guard::DeltaNeedsOpen) {
        return Err(Error::DeltaNeedsOpen);
    }
    if claim.delta && session.client.may_be_ahead && guards.is_on(Guard::ClientAheadRefused) {
        return Err(Error::HistoryUnknown);
    }
    let has_finished_turns = session.turns.finished > 0 && guards.is_on(Guard::DeltaOnly);
    // The engine may have committed a turn of which the agent saw no successful end.
    let has_history =
        has_finished_turns || (session.history.tokens > 0 && guards.is_on(Guard::DeltaOnly));
    check_route(claim.delta, has_history, route_turns, shim_trims)?;
    // The client of a delta that opens its session believes that the session has no history. A full
    // history holds the whole conversation, so it is right in both cases.
    if has_finished_turns && claim.open && claim.delta {
        return Err(Error::HasHistory);
    }
    Ok(())
}

/// Checks whether the turn's route can carry the turn to a pinned session. `route_turns`: what the
/// route can carry.
pub(super) fn check_route(
    is_delta: bool,
    has_history: bool,
    route_turns: RouteTurns,
    shim_trims: bool,
) -> Result<(), Error> {
    match route_turns {
        // If the session has no history, a full history and a delta are the same.
        RouteTurns::DeltasAndHistories if is_delta || !has_history || shim_trims => Ok(()),
        RouteTurns::FullHistories | RouteTurns::HistoriesTaggedByShim
            if !is_delta && shim_trims =>
        {
            Ok(())
        }
        _ => Err(Error::PinnedRouteRefused),
    }
}

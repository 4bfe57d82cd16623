//! Checks which turns a session takes: full histories, deltas, or both.

use contract::{claim::Claim, load::Retention};
use serde::{Deserialize, Serialize};

use super::{
    Error, RouteTurns, Session,
    lifecycle::{GoneReason, State},
};
use crate::guard::{Guard, Guards};

/// A delta is computed on the right context only if its client knows the engine's history. So no
/// full history may replace that of a session that takes deltas, and a session whose history may be
/// replaced refuses deltas. A client that opens the session again may change that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Deltas {
    /// No client has opened the session, or a full history has replaced its history.
    Refused,
    /// As [`Self::Refused`], also after a client has opened the session again: the engine has lost
    /// the history, and the next full history begins a new incarnation.
    RefusedAnew,
    /// A client opened the session, and it has taken no delta yet.
    Allowed,
    /// The session has taken a delta. A full history must continue its history, unless the turn
    /// opens the session again.
    Taken,
}

impl Session {
    /// Whether the session has no history, and no turn whose end could give it one.
    pub(super) fn is_fresh(&self) -> bool {
        self.turns.finished == 0 && self.history.tokens == 0 && self.turns.in_progress() == 0
    }

    /// Called when a client opens the session. It possibly doesn't know a history that full
    /// histories made, so a session with such a history goes on refusing deltas.
    pub(super) fn open_for_deltas(&mut self) {
        if self.client.deltas == Deltas::Refused && self.is_fresh() {
            self.client.deltas = Deltas::Allowed;
        }
    }
}

/// Asked when a turn claims its session, and again before its admission. Whether there is room is
/// not checked here, but in `table::queue`.
pub(super) fn check_turn(
    session: &Session,
    claim: &Claim,
    route_turns: RouteTurns,
    shim_trims: bool,
    guards: Guards,
) -> Result<(), Error> {
    // A full history may start the session over, also if the engine's history is gone or corrupt.
    // But clients that have sent deltas rely on that history, so they must be told that it is gone,
    // unless this turn opens the session.
    let clients_rely_on_history =
        session.client.deltas == Deltas::Taken && guards.is_on(Guard::FullHistoryContinues);
    let may_replace_history = claim.open || !clients_rely_on_history;
    let starts_over =
        !claim.delta && (shim_trims || session.has_auto_retention()) && may_replace_history;
    match &session.state {
        // Callers check for other turns later: a closing session always has a running one, and
        // `Closing` says more than `Busy`.
        State::Closing(_) => return Err(Error::Closing),
        _ if starts_over => {}
        State::Gone { reason: GoneReason::EngineRestarted, tree }
            if tree.is_some() || !guards.is_on(Guard::LostRefused) => {}
        State::Gone { reason, .. } => return Err(reason.to_error()),
        _ if session.history.is_corrupt => return Err(Error::KvCorrupt),
        _ => {}
    }
    if session.has_auto_retention() || !session.is_pinned() {
        // If the agent pinned the session and not its client, the client knows of no pin.
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
    // A delta that opens the session counts on an empty history. A full history counts on nothing.
    if has_finished_turns && claim.open && claim.delta {
        return Err(Error::HasHistory);
    }
    Ok(())
}

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

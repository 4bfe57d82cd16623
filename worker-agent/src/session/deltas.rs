//! Which turns a session takes: full histories, and deltas, which hold only new tokens.

use proto::{claim::Claim, load::Retention};

use super::{Appends, Error, Guard, Guards, Phase, Session, Why};

/// Whether a session takes delta turns: turns that hold only new tokens, which the engine appends
/// to the history it has.
///
/// A delta is computed on the right context only if its client knows the engine's history. So one
/// life of a session under its key either belongs to clients that send deltas, and then nothing
/// replaces its history, or its history may be replaced, and then it takes no delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Deltas {
    /// Takes none: no client opened this life of the session, or a full history replaced what it
    /// had. Only another life, which a client opens, takes deltas.
    Refused,
    /// A client opened the session, and it has taken no delta yet.
    Allowed,
    /// The session has taken a delta. A full history must continue the session's history.
    Taken,
}

impl Session {
    /// Nothing has become history of it, and no turn of it is on its way.
    pub(super) fn is_fresh(&self) -> bool {
        let on_its_way = self.running > 0 || self.waiting > 0;
        self.turns == 0 && self.history_tokens == 0 && !on_its_way
    }

    /// A client opens the session: one without a history takes deltas from now on. A history that
    /// full histories have made may not be what the client believes, so it stays closed to deltas.
    pub(super) fn open_for_deltas(&mut self) {
        if self.deltas == Deltas::Refused && self.is_fresh() {
            self.deltas = Deltas::Allowed;
        }
    }
}

/// May this session take this turn now? `trims`: the shim trims whole histories.
pub(super) fn check_turn(
    session: &Session,
    claim: &Claim,
    appends: Appends,
    trims: bool,
    guards: Guards,
) -> Result<(), Error> {
    // Who sends everything each time loses nothing with what the engine had. But clients that send
    // deltas rely on it, and must hear that it is gone, unless the session is opened again.
    let relied_on = session.deltas == Deltas::Taken && guards.hold(Guard::FullHistoryContinues);
    let replaceable = claim.open || !relied_on;
    let anew = !claim.delta && (trims || session.is_auto()) && replaceable;
    match session.phase {
        // Closing beats busy: the session is gone for everyone but its running turn.
        Phase::Closing => return Err(Error::Unknown),
        Phase::Gone(_) if anew => {}
        Phase::Gone(Why::EngineRestarted)
            if session.retention == Retention::Pinned && guards.hold(Guard::LostRefused) =>
        {
            return Err(Error::Lost);
        }
        Phase::Gone(Why::HistoryUnknown) => return Err(Error::HistoryUnknown),
        Phase::Gone(Why::Reclaimed) => return Err(Error::Reclaimed),
        Phase::Gone(Why::KvCorrupt) => return Err(Error::KvCorrupt),
        _ if session.corrupt && !anew => return Err(Error::KvCorrupt),
        _ => {}
    }
    if session.is_auto() || session.retention != Retention::Pinned {
        // One that is pinned unasked is nobody's to append to.
        let kept = match session.retention {
            Retention::Pinned => Retention::Tagged,
            other => other,
        };
        return if claim.delta { Err(Error::DeltaNeedsPinned(kept)) } else { Ok(()) };
    }
    let opens = claim.open && session.is_fresh();
    let refused = session.deltas == Deltas::Refused && !opens;
    if claim.delta && refused && guards.hold(Guard::DeltaNeedsOpen) {
        return Err(Error::DeltaNeedsOpen);
    }
    if claim.delta && session.whole.behind && guards.hold(Guard::BehindRefused) {
        return Err(Error::HistoryUnknown);
    }
    let told = session.turns > 0 && guards.hold(Guard::DeltaOnly);
    // The engine may have made history of a turn whose end was none for the agent.
    let history = told || (session.history_tokens > 0 && guards.hold(Guard::DeltaOnly));
    check_appends(claim.delta, history, appends, trims)?;
    // A full history is right on its own, whatever the session has.
    if told && claim.open && claim.delta {
        return Err(Error::HasHistory);
    }
    Ok(())
}

/// Can a pinned session take this by its route?
pub(super) fn check_appends(
    delta: bool,
    history: bool,
    appends: Appends,
    trims: bool,
) -> Result<(), Error> {
    match appends {
        // With an empty history the whole of it and what is new are the same.
        Appends::Possible if delta || !history || trims => Ok(()),
        Appends::Trimmed if !delta && trims => Ok(()),
        _ => Err(Error::WholeHistory),
    }
}

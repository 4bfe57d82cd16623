//! Leaves the session out of a turn whose client only hinted at it, where the session can't be had.
//!
//! Many clients send a session's name with every request, whichever server they talk to. Where such
//! a turn would be refused for its session's sake, it runs without the session, and is counted.
//! Only a session that a client has opened refuses such turns too, because its turns must come one
//! after another. A name that may be the request's own begins a session when it comes a second
//! time. So a gateway that names each request takes no session's place.

use std::sync::Arc;

use bytes::Bytes;
use contract::load::Retention;

use super::{
    check_key_sessions, decide,
    error::{Error, Limit},
    placer::PlacedTurn,
    request::{HintKind, Turn},
    shared::Shared,
};
use crate::{auth::Caller, placement::session_status::SessionStatus, shares::Sharer};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeftOut {
    Unusable,
    SeveralAnswers,
    Background,
    /// The name may be the request's own.
    SeenOnce,
    KeySessions,
    Closing,
    TableFull,
    Crowded,
}

impl LeftOut {
    fn as_str(self) -> &'static str {
        match self {
            Self::Unusable => "unusable",
            Self::SeveralAnswers => "several_answers",
            Self::Background => "background",
            Self::SeenOnce => "seen_once",
            Self::KeySessions => "key_sessions",
            Self::Closing => "closing",
            Self::TableFull => "table_full",
            Self::Crowded => "crowded",
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Unfit {
    pub(super) has_several_answers: bool,
    /// Whether the answer is made after the response has ended.
    pub(super) is_background: bool,
}

/// Fails if the session was named on purpose, and the caller's key has its limit of sessions.
pub(super) async fn settle(
    shared: &Shared,
    caller: &Caller,
    turn: &mut Turn,
    unfit: Unfit,
) -> Result<(), Error> {
    if turn.has_unusable_name {
        shared.metrics.count_session_left_out(LeftOut::Unusable.as_str());
    }
    let Some(intent) = &mut turn.session else { return Ok(()) };
    let view = shared.directory.settled_view().await;
    if intent.is_kept_required && intent.retention.is_none() && !intent.is_placement_only {
        // If no worker offers either, placement refuses the turn and says which flag is missing.
        let mut workers = view.workers();
        let is_tagged =
            workers.any(|(.., facts)| facts.description.retentions.contains(&Retention::Tagged));
        intent.retention = Some(if is_tagged { Retention::Tagged } else { Retention::Pinned });
    }
    let Some(hint) = intent.hint else {
        return check_key_sessions(shared, caller, &intent.key).await;
    };
    let status = shared.directory.status(&intent.key, &view);
    let was_opened = matches!(&status, SessionStatus::Open { session, .. } if session.exclusive);
    let is_unknown = matches!(status, SessionStatus::Unknown);
    let why = if was_opened {
        None
    } else if unfit.has_several_answers {
        Some(LeftOut::SeveralAnswers)
    } else if unfit.is_background {
        Some(LeftOut::Background)
    } else if matches!(status, SessionStatus::Closing) {
        Some(LeftOut::Closing)
    } else if hint == HintKind::SessionOrRequest
        && is_unknown
        && !shared.placer.has_seen_name(&intent.key)
    {
        Some(LeftOut::SeenOnce)
    } else {
        match check_key_sessions(shared, caller, &intent.key).await {
            Ok(()) => None,
            Err(Error::Limit { limit: Limit::Sessions, .. }) => Some(LeftOut::KeySessions),
            Err(error) => return Err(error),
        }
    };
    if let Some(why) = why {
        leave_out(shared, turn, why);
    }
    Ok(())
}

/// A turn refused for the sake of a session that was only hinted at is placed without the session.
pub(super) async fn place(
    shared: &Arc<Shared>,
    turn: &mut Turn,
    turn_id: u64,
    path: &str,
    body: &Bytes,
    sharer: &Sharer,
) -> Result<PlacedTurn, Error> {
    let why = match shared.placer.decide(turn, turn_id, path, body, sharer).await {
        Ok(placed) => return Ok(placed),
        Err(decide::Error::SessionsFull(_)) if turn.hints.session => LeftOut::TableFull,
        Err(decide::Error::Closing) if turn.hints.session => LeftOut::Closing,
        Err(decide::Error::Crowded) if turn.hints.session => LeftOut::Crowded,
        Err(error) => return Err(error.into()),
    };
    leave_out(shared, turn, why);
    Ok(shared.placer.decide(turn, turn_id, path, body, sharer).await?)
}

fn leave_out(shared: &Shared, turn: &mut Turn, why: LeftOut) {
    shared.metrics.count_session_left_out(why.as_str());
    let intent = turn.session.take();
    turn.hints.session = false;
    turn.name_seen_once = intent.filter(|_| why == LeftOut::SeenOnce).map(|intent| intent.key);
}

//! Chooses a turn's session: the one that the client named, or none where it only hinted at one.
//!
//! Many clients send a session's name with every request, whichever server they talk to. Where such
//! a turn would be refused for its session's sake, it runs without the session, and is counted.
//! Only a session that a client has opened refuses such turns too, because its turns must come one
//! after another. A name that may be the request's own begins a session when it comes a second
//! time. So a gateway that names each request takes no session's place.

use contract::{id::SessionKey, load::Retention};

use super::{
    error::{Error, Limit},
    request::Turn,
    shared::Shared,
};
use crate::{
    auth::Caller,
    sessions::{intent::HintKind, status::SessionStatus},
    shares::Refused,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeftOutReason {
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

impl LeftOutReason {
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

/// A session is left out where it was only hinted at and would have the turn refused. Fails if it
/// was named on purpose, and the caller's key has its limit of sessions.
pub(super) async fn choose_session(
    shared: &Shared,
    caller: &Caller,
    turn: &mut Turn,
) -> Result<(), Error> {
    if turn.has_unusable_name {
        shared.metrics.count_session_left_out(LeftOutReason::Unusable.as_str());
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
    let is_exclusive = matches!(&status, SessionStatus::Open { session, .. } if session.exclusive);
    let is_unknown = matches!(status, SessionStatus::Unknown);
    let why = if is_exclusive {
        None
    } else if turn.has_several_answers {
        Some(LeftOutReason::SeveralAnswers)
    } else if turn.is_background {
        Some(LeftOutReason::Background)
    } else if matches!(status, SessionStatus::Closing) {
        Some(LeftOutReason::Closing)
    } else if hint == HintKind::SessionOrRequest
        && is_unknown
        && !shared.placer.has_seen_name(&intent.key)
    {
        Some(LeftOutReason::SeenOnce)
    } else {
        match check_key_sessions(shared, caller, &intent.key).await {
            Ok(()) => None,
            Err(Error::Limit { limit: Limit::Sessions, .. }) => Some(LeftOutReason::KeySessions),
            Err(error) => return Err(error),
        }
    };
    if let Some(why) = why {
        leave_out(shared, turn, why);
    }
    Ok(())
}

pub(super) fn leave_out(shared: &Shared, turn: &mut Turn, why: LeftOutReason) {
    shared.metrics.count_session_left_out(why.as_str());
    let intent = turn.session.take();
    turn.hints.session = false;
    turn.name_seen_once =
        intent.filter(|_| why == LeftOutReason::SeenOnce).map(|intent| intent.key);
}

/// Refuses to begin a session if the caller's key has a limit of open sessions, and the agents
/// report that many. Sessions that begin at the same moment may pass together.
pub(crate) async fn check_key_sessions(
    shared: &Shared,
    caller: &Caller,
    key: &SessionKey,
) -> Result<(), Error> {
    let Some(sessions_max) = caller.limits.sessions_max else { return Ok(()) };
    let view = shared.directory.settled_view().await;
    if !matches!(shared.directory.status(key, &view), SessionStatus::Unknown) {
        return Ok(());
    }
    // With 100,000 sessions this takes about a millisecond, only for new sessions of such keys.
    let open =
        view.sessions.iter().filter(|entry| entry.session.key.principal() == key.principal());
    if open.count() < sessions_max.get() as usize {
        return Ok(());
    }
    Err(Error::Limit { limit: Limit::Sessions, refused: Refused::Key })
}

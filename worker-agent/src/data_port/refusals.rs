//! Maps the errors of a turn (one request and its answer) to HTTP refusals for its client.
//!
//! A refusal has a status, a code for programs, and a text for people. `turn` and `exchange` map
//! their errors here, and the control port uses the codes for its gRPC errors. The errors
//! themselves come from [`crate::owner`] and from the HTTP client; this module decides nothing.

use std::time::Duration;

use http::StatusCode;
use service::{descriptors, refusal::Refusal};
use tracing::warn;

use crate::{owner, session};

/// Maps an error of the owner task, which admits turns, to a refusal. The control port uses the
/// codes of this mapping too.
#[must_use]
pub fn refusal(error: &owner::Error) -> Refusal {
    use session::Error as E;
    let conflict = |code| Refusal::new(StatusCode::CONFLICT, code, error.to_string());
    let busy = |code, retry_after| {
        Refusal::new(StatusCode::TOO_MANY_REQUESTS, code, error.to_string())
            .retry_after(retry_after)
    };
    let down = |code| {
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, code, error.to_string())
            .retry_after(Duration::from_secs(2))
    };
    match error {
        owner::Error::Session(session_error) => match session_error {
            E::UnknownSession => Refusal::new(
                StatusCode::NOT_FOUND,
                "session_unknown",
                "there is no such session; open it first",
            ),
            E::Closing => conflict("session_closing").retry_after(Duration::from_secs(1)),
            E::Busy => conflict("session_busy"),
            E::RetentionUnavailable { .. } => conflict("retention_unavailable"),
            E::HasHistory => conflict("session_open"),
            E::PredecessorFailed => conflict("turn_before_failed"),
            E::OpenWithOtherRetention(_) => conflict("session_open_otherwise"),
            E::DeltaNeedsPinned(_) => conflict("delta_needs_pinned"),
            E::PinnedRouteRefused | E::NotContinued { .. } => conflict("whole_history"),
            E::DeltaNeedsOpen => conflict("delta_needs_open"),
            E::Lost | E::NotTakenOver => conflict("session_lost"),
            E::HistoryUnknown => conflict("history_unknown"),
            E::Reclaimed => conflict("session_reclaimed"),
            E::KvCorrupt => conflict("kv_corrupt"),
            E::TooLarge { .. } => {
                Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "turn_too_large", error.to_string())
            }
            E::OpenFailed(_) => down("open_failed"),
            E::JournalFailed(_) => down("journal_failed"),
            E::EngineSilent(_) => down("engine_silent"),
            E::EngineLost => down("engine_lost"),
            E::Stopping => down("stopping"),
            // The name of the missing resource is the code.
            E::OutOfRoom { resource, .. } => busy(resource, Duration::from_secs(1)),
            E::NoRank(_) => Refusal::bad_request("no_rank", error.to_string()),
        },
        owner::Error::EngineDown(_) => down("engine_down"),
        owner::Error::Stopping => down("stopping"),
    }
}

/// Logs that a turn's connection to the engine failed, and returns the turn's refusal. Either the
/// engine accepted no connection, or it closed the connection before its answer was complete.
pub(super) fn connection_refusal(error: &hyper_util::client::legacy::Error) -> Refusal {
    warn!(error = error as &dyn std::error::Error, "engine unreachable");
    let (status, code, text) = if error.is_connect() && descriptors::is_shortage(error) {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "agent_descriptors",
            "this agent has no file descriptor left for a connection to its engine; try again",
        )
    } else if error.is_connect() {
        (StatusCode::SERVICE_UNAVAILABLE, "engine_down", "the engine accepts no connections")
    } else {
        (
            StatusCode::BAD_GATEWAY,
            "engine_lost",
            "the engine closed the connection before its answer was complete",
        )
    };
    Refusal::new(status, code, text).retry_after(Duration::from_secs(2))
}

/// Returns the refusal of a turn that passed its time limit.
pub(super) fn timeout_refusal() -> Refusal {
    Refusal::new(
        StatusCode::GATEWAY_TIMEOUT,
        "turn_timeout",
        "the turn took longer than turn_ms_max and was aborted",
    )
}

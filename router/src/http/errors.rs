//! Maps the router's errors to refusals: HTTP status, code, message and retry delay.
//!
//! A refusal is an answer that the router itself gives instead of a worker's answer. The handlers
//! in `http` call this module with errors of `turn`, `placement` and the agents' control ports.
//! Each message is short and says what to do next. Details go to the log. This module writes no
//! log: `http` logs and counts the refusals.

use std::time::Duration;

use http::StatusCode;
use proto::claim;
use service::{auth::unauthorized_refusal, refusal::Refusal};
use tonic::{Code, Status};

use crate::{
    auth,
    placement::{NoWorker, affinity::TableFull},
    shares::Refused,
    turn::{
        self, decide,
        error::{Limit, NoAnswer},
        request, sessions,
    },
};

/// Retry delay for clients. A turn may end, or a worker may be back, in about this time.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Returns a refusal. An overloaded router or worker may take the request after [`RETRY_DELAY`].
fn refuse(status: StatusCode, code: &'static str, message: impl Into<String>) -> Refusal {
    let refusal = Refusal::new(status, code, message);
    if status == StatusCode::TOO_MANY_REQUESTS { refusal.retry_after(RETRY_DELAY) } else { refusal }
}

/// A request whose caller isn't known.
impl From<auth::Error> for Refusal {
    fn from(error: auth::Error) -> Self {
        match error {
            auth::Error::ScrapeKey => {
                refuse(StatusCode::FORBIDDEN, "scrape_key", error.to_string())
            }
            auth::Error::TokenKeysAbsent => {
                let (status, message) = (StatusCode::SERVICE_UNAVAILABLE, error.to_string());
                refuse(status, "auth_unavailable", message).retry_after(RETRY_DELAY)
            }
            _ => unauthorized_refusal(&error.to_string()),
        }
    }
}

/// A turn that is refused.
impl From<turn::error::Error> for Refusal {
    fn from(error: turn::error::Error) -> Self {
        use turn::error::Error;

        let message = error.to_string();
        let (status, code) = match error {
            Error::Body(refusal) => return refusal,
            Error::Request(error) => return error.into(),
            Error::Decision(error) => return error.into(),
            Error::Session(error) => return error.into(),
            Error::NoAnswer(error) => return error.into(),
            Error::Limit { limit, refused } => {
                (StatusCode::TOO_MANY_REQUESTS, limit_code(limit, refused))
            }
            Error::RequestRate(wait) => return rate_refusal("requests_per_minute", message, wait),
            Error::TokenRate(wait) => return rate_refusal("tokens_per_minute", message, wait),
            Error::BodyOverContext { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "body_over_context"),
            Error::BodyLate => (StatusCode::REQUEST_TIMEOUT, "body_late"),
        };
        refuse(status, code, message)
    }
}

/// Returns the code that names a limit.
fn limit_code(limit: Limit, refused: Refused) -> &'static str {
    match (limit, refused) {
        (Limit::Turns, Refused::Full) => "turns_in_flight",
        (Limit::Turns, Refused::Share) => "turns_in_flight_share",
        (Limit::Turns, Refused::Key) => "key_turns_in_flight",
        (Limit::Sessions, _) => "key_sessions",
        (Limit::BodyBytes, Refused::Full) => "body_bytes_in_flight",
        // No key has a limit of bytes.
        (Limit::BodyBytes, Refused::Share | Refused::Key) => "body_bytes_share",
        (_, Refused::Class) => "priority_shed",
    }
}

/// Returns the refusal of a key that has used up what it has per minute. After `wait` it has enough
/// again.
fn rate_refusal(code: &'static str, message: String, wait: Duration) -> Refusal {
    Refusal::new(StatusCode::TOO_MANY_REQUESTS, code, message).retry_after(wait)
}

/// A request that can't be read.
impl From<request::Error> for Refusal {
    fn from(error: request::Error) -> Self {
        let code = match error {
            request::Error::Body(_) => "invalid_json",
            request::Error::SessionId(_) => "invalid_session_id",
            request::Error::Field { .. } => "invalid_field",
            request::Error::NotIsolated => "not_isolated",
            request::Error::DeltaWithoutSession => "delta_without_session",
        };
        Self::bad_request(code, error.to_string())
    }
}

/// A turn, or the open of a session, that gets no worker.
impl From<decide::Error> for Refusal {
    fn from(error: decide::Error) -> Self {
        use decide::Error;

        let message = error.to_string();
        let (status, code) = match error {
            Error::NoWorker(error) => return error.into(),
            Error::SessionsFull(TableFull::All) => (StatusCode::TOO_MANY_REQUESTS, "sessions_full"),
            Error::SessionsFull(TableFull::Share) => {
                (StatusCode::TOO_MANY_REQUESTS, "sessions_share")
            }
            Error::DeltaWithoutHistory => (StatusCode::NOT_FOUND, "session_unknown"),
            Error::SessionBusy => (StatusCode::CONFLICT, "session_busy"),
            Error::TurnWhileClosing => (StatusCode::NOT_FOUND, "session_closing"),
            Error::OpenWhileClosing => (StatusCode::CONFLICT, "session_closing"),
            Error::SessionLost { .. } => (StatusCode::CONFLICT, "session_lost"),
            Error::AgentRestarts { .. } => {
                return refuse(StatusCode::SERVICE_UNAVAILABLE, "worker_unreachable", message)
                    .retry_after(RETRY_DELAY);
            }
        };
        refuse(status, code, message)
    }
}

/// A session that can't be opened or closed.
impl From<sessions::Error> for Refusal {
    fn from(error: sessions::Error) -> Self {
        use sessions::Error;

        let message = error.to_string();
        match error {
            Error::Decision(error) => error.into(),
            Error::Unknown => refuse(StatusCode::NOT_FOUND, "session_unknown", message),
            Error::Agent(status) => agent_refusal(&status),
            Error::Internal => refuse(StatusCode::INTERNAL_SERVER_ERROR, "internal", message),
        }
    }
}

/// A turn or session for which placement found no worker.
impl From<NoWorker> for Refusal {
    fn from(error: NoWorker) -> Self {
        let (status, code) = match error {
            NoWorker::Unusable | NoWorker::Disaggregated => {
                (StatusCode::SERVICE_UNAVAILABLE, "no_worker")
            }
            NoWorker::Model { .. } => (StatusCode::NOT_FOUND, "model_not_found"),
            NoWorker::Retention { .. } => (StatusCode::CONFLICT, "retention_unavailable"),
        };
        let refusal = refuse(status, code, error.to_string());
        if error == NoWorker::Unusable { refusal.retry_after(RETRY_DELAY) } else { refusal }
    }
}

/// A turn to which the worker gave no answer.
impl From<NoAnswer> for Refusal {
    fn from(error: NoAnswer) -> Self {
        match error {
            NoAnswer::Connect { .. } | NoAnswer::NotARouter { .. } => unreachable_refusal(),
            NoAnswer::BrokenOff { .. } => refuse(
                StatusCode::BAD_GATEWAY,
                "worker_broke_off",
                "the worker closed the connection before its answer began; the turn may have run, \
                 so check before you send it again",
            ),
            NoAnswer::NoDescriptors { .. } => refuse(
                StatusCode::SERVICE_UNAVAILABLE,
                "router_descriptors",
                "this router has no file descriptor left for a connection to the worker; try again",
            )
            .retry_after(RETRY_DELAY),
            NoAnswer::Silent { .. } => refuse(
                StatusCode::SERVICE_UNAVAILABLE,
                "worker_silent",
                "the worker has stopped answering, and the turn is given up; try again",
            )
            .retry_after(RETRY_DELAY),
            NoAnswer::TimedOut => refuse(
                StatusCode::GATEWAY_TIMEOUT,
                "turn_timeout",
                "the answer did not begin within turn_ms_max; send a shorter prompt or raise the \
                 limit",
            ),
        }
    }
}

/// Returns the refusal if the worker's data port or control port can't be reached.
fn unreachable_refusal() -> Refusal {
    let message = "the worker can't be reached; try again";
    refuse(StatusCode::SERVICE_UNAVAILABLE, "worker_unreachable", message).retry_after(RETRY_DELAY)
}

/// The refusal codes of agents that are passed on to the client. If an agent's control port sends
/// another code or none, the client gets a general code for the gRPC status.
const AGENT_REFUSAL_CODES: [&str; 20] = [
    "engine_down",
    "engine_lost",
    "history_unknown",
    "journal_failed",
    "kv_corrupt",
    "open_failed",
    "pin_tokens",
    "queue_places",
    "queue_time",
    "retention_unavailable",
    "rows",
    "session_busy",
    "session_closing",
    "session_lost",
    "session_open",
    "session_open_otherwise",
    "session_reclaimed",
    "sessions",
    "stopping",
    "turns",
];

/// Returns the refusal for a gRPC error of an agent's control port.
fn agent_refusal(status: &Status) -> Refusal {
    let message = status.message().to_owned();
    let header_code = status.metadata().as_ref().get(claim::REFUSAL);
    let agent_code = header_code
        .and_then(|header_code| AGENT_REFUSAL_CODES.into_iter().find(|code| header_code == code));
    match status.code() {
        Code::ResourceExhausted => {
            refuse(StatusCode::TOO_MANY_REQUESTS, agent_code.unwrap_or("worker_full"), message)
        }
        Code::FailedPrecondition => {
            let code = agent_code.unwrap_or("retention_unavailable");
            let refusal = refuse(StatusCode::CONFLICT, code, message);
            if code == "session_closing" { refusal.retry_after(RETRY_DELAY) } else { refusal }
        }
        Code::NotFound => sessions::Error::Unknown.into(),
        Code::InvalidArgument => Refusal::bad_request("invalid_field", message),
        Code::DeadlineExceeded => refuse(StatusCode::GATEWAY_TIMEOUT, "worker_timeout", message),
        // The agent doesn't recognize this router, which its operator has to mend.
        Code::Unauthenticated => unreachable_refusal(),
        Code::Unavailable => agent_code.map_or_else(unreachable_refusal, |code| {
            refuse(StatusCode::SERVICE_UNAVAILABLE, code, message).retry_after(RETRY_DELAY)
        }),
        _ => {
            let message = "the worker failed; see the router's log";
            refuse(StatusCode::BAD_GATEWAY, "worker_failed", message)
        }
    }
}

/// Returns the refusal of a path that the router doesn't serve.
pub(super) fn route_unknown_refusal() -> Refusal {
    let message = "no such route; see the API reference";
    refuse(StatusCode::NOT_FOUND, "route_unknown", message)
}

/// Returns the refusal of a method that the route doesn't have.
pub(super) fn method_refusal() -> Refusal {
    let message = "this route doesn't support this method; see the API reference";
    refuse(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// Returns the refusal to explain a turn's placement that this router doesn't know, or has
/// forgotten.
pub(super) fn placement_unknown_refusal() -> Refusal {
    refuse(
        StatusCode::NOT_FOUND,
        "placement_unknown",
        "this router keeps no placement of this turn; ask soon after the turn, with the id of its \
         answer's x-berth-turn header",
    )
}

/// Returns the refusal of a body that isn't the JSON expected by a session route.
pub(super) fn body_refusal(error: &serde_json::Error) -> Refusal {
    Refusal::bad_request("invalid_json", format!("the body is wrong: {error}"))
}

/// Returns the refusal of a query string that the route doesn't take.
pub(super) fn query_refusal(error: &axum::extract::rejection::QueryRejection) -> Refusal {
    Refusal::bad_request("invalid_field", format!("the query is wrong: {error}"))
}

//! Maps the router's errors to refusals: HTTP status, code, message and retry delay.
//!
//! A refusal is an answer that the router itself gives instead of a worker's answer. The handlers
//! in `http` call this module with errors of `turn`, `placement` and the agents' control ports.
//! Each message is short and says what to do next. Details go to the log. This module writes no
//! log: `http` logs and counts the refusals.

use std::time::Duration;

use http::StatusCode;
use proto::claim;
use service::refusal::Refusal;

use crate::{
    placement::NoWorker,
    turn::{
        error::{Error, NoAnswer},
        request,
    },
};

/// Retry delay for clients. A turn may end, or a worker may be back, in about this time.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Returns the refusal for the error of a turn, or of opening or closing a session.
pub(super) fn turn_refusal(error: Error) -> Refusal {
    let message = error.to_string();
    match error {
        Error::Body(refusal) => refusal,
        Error::Request(error) => request_refusal(&error),
        Error::NoWorker(error) => no_worker_refusal(&error),
        Error::Agent(status) => agent_refusal(&status),
        Error::NoAnswer(error) => no_answer_refusal(&error),
        Error::TurnsFull => Refusal::new(StatusCode::TOO_MANY_REQUESTS, "turns_in_flight", message)
            .retry_after(RETRY_DELAY),
        Error::SessionsFull(_) => {
            Refusal::new(StatusCode::TOO_MANY_REQUESTS, "sessions_full", message)
                .retry_after(RETRY_DELAY)
        }
        Error::BodyLate => Refusal::new(StatusCode::REQUEST_TIMEOUT, "body_late", message),
        Error::SessionUnknown | Error::DeltaWithoutHistory => {
            Refusal::new(StatusCode::NOT_FOUND, "session_unknown", message)
        }
        Error::SessionBusy => Refusal::new(StatusCode::CONFLICT, "session_busy", message),
        Error::TurnWhileClosing => Refusal::new(StatusCode::NOT_FOUND, "session_closing", message),
        Error::OpenWhileClosing => Refusal::new(StatusCode::CONFLICT, "session_closing", message),
        Error::SessionLost { .. } => Refusal::new(StatusCode::CONFLICT, "session_lost", message),
        Error::Internal => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message),
    }
}

/// Returns the refusal of a request that can't be read.
pub(super) fn request_refusal(error: &request::Error) -> Refusal {
    let code = match error {
        request::Error::Body(_) => "invalid_json",
        request::Error::SessionId(_) => "invalid_session_id",
        request::Error::Field { .. } => "invalid_field",
        request::Error::DeltaWithoutSession => "delta_without_session",
    };
    Refusal::bad_request(code, error.to_string())
}

/// Returns the refusal of a turn or session for which placement found no worker.
pub(super) fn no_worker_refusal(error: &NoWorker) -> Refusal {
    let message = error.to_string();
    match error {
        NoWorker::Unusable => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "no_worker", message)
            .retry_after(RETRY_DELAY),
        NoWorker::Disaggregated => {
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "no_worker", message)
        }
        NoWorker::Model { .. } => Refusal::new(StatusCode::NOT_FOUND, "model_not_found", message),
        NoWorker::Retention { .. } => {
            Refusal::new(StatusCode::CONFLICT, "retention_unavailable", message)
        }
    }
}

/// Returns the refusal of a turn to which the worker gave no answer.
fn no_answer_refusal(error: &NoAnswer) -> Refusal {
    match error {
        NoAnswer::Connect { .. } => {
            let message = "the worker can't be reached; try again";
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "worker_unreachable", message)
                .retry_after(RETRY_DELAY)
        }
        NoAnswer::BrokenOff { .. } => Refusal::new(
            StatusCode::BAD_GATEWAY,
            "worker_broke_off",
            "the worker closed the connection before its answer began; the turn may have run, so \
             check before you send it again",
        ),
        NoAnswer::TimedOut => Refusal::new(
            StatusCode::GATEWAY_TIMEOUT,
            "turn_timeout",
            "the answer did not begin within turn_ms_max; send a shorter prompt or raise the limit",
        ),
    }
}

/// The refusal codes of agents that are passed on to the client. If an agent's control port sends
/// another code or none, the client gets a general code for the gRPC status.
const AGENT_REFUSAL_CODES: [&str; 19] = [
    "engine_down",
    "engine_lost",
    "history_unknown",
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
fn agent_refusal(status: &tonic::Status) -> Refusal {
    let message = status.message().to_owned();
    let header_code = status.metadata().as_ref().get(claim::REFUSAL);
    let agent_code = header_code
        .and_then(|header_code| AGENT_REFUSAL_CODES.into_iter().find(|code| header_code == code));
    match status.code() {
        tonic::Code::ResourceExhausted => {
            let code = agent_code.unwrap_or("worker_full");
            Refusal::new(StatusCode::TOO_MANY_REQUESTS, code, message).retry_after(RETRY_DELAY)
        }
        tonic::Code::FailedPrecondition => {
            let code = agent_code.unwrap_or("retention_unavailable");
            let refusal = Refusal::new(StatusCode::CONFLICT, code, message);
            if code == "session_closing" { refusal.retry_after(RETRY_DELAY) } else { refusal }
        }
        tonic::Code::NotFound => turn_refusal(Error::SessionUnknown),
        tonic::Code::InvalidArgument => Refusal::bad_request("invalid_field", message),
        tonic::Code::DeadlineExceeded => {
            Refusal::new(StatusCode::GATEWAY_TIMEOUT, "worker_timeout", message)
        }
        tonic::Code::Unavailable => {
            let unreachable_message = "the worker can't be reached; try again".to_owned();
            let (code, message) = agent_code
                .map_or(("worker_unreachable", unreachable_message), |code| (code, message));
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, code, message).retry_after(RETRY_DELAY)
        }
        _ => {
            let message = "the worker failed; see the router's log";
            Refusal::new(StatusCode::BAD_GATEWAY, "worker_failed", message)
        }
    }
}

/// Returns the refusal of a path that the router doesn't serve.
pub(super) fn route_unknown_refusal() -> Refusal {
    let message = "no such route; see the API reference";
    Refusal::new(StatusCode::NOT_FOUND, "route_unknown", message)
}

/// Returns the refusal of a method that the route doesn't have.
pub(super) fn method_refusal() -> Refusal {
    let message = "this route doesn't support this method; see the API reference";
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// Returns the refusal to explain a turn's placement that this router doesn't know, or has
/// forgotten.
pub(super) fn placement_unknown_refusal() -> Refusal {
    Refusal::new(
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

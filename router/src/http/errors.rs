//! Maps errors to HTTP responses; the only place that does.
//!
//! Messages to clients are fixed and short and say what to do next. Details go to the log.

use std::time::Duration;

use http::StatusCode;
use proto::claim;
use service::refusal::Refusal;

use crate::{
    placement::{NoWorker, affinity::Full},
    turn::{proxy, request},
};

/// Retry delay for clients. A worker's restart or the end of a turn takes about that long.
const RETRY_AFTER: Duration = Duration::from_secs(1);

pub(crate) fn request(error: &request::Error) -> Refusal {
    let code = match error {
        request::Error::Body(_) => "invalid_json",
        request::Error::SessionId(_) => "invalid_session_id",
        request::Error::Field { .. } => "invalid_field",
        request::Error::DeltaWithoutSession => "delta_without_session",
    };
    Refusal::bad_request(code, error.to_string())
}

pub(crate) fn no_worker(error: &NoWorker) -> Refusal {
    let message = error.to_string();
    match error {
        NoWorker::Unusable => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "no_worker", message)
            .retry_after(RETRY_AFTER),
        NoWorker::Disaggregated => {
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "no_worker", message)
        }
        NoWorker::Model { .. } => Refusal::new(StatusCode::NOT_FOUND, "model_not_found", message),
        NoWorker::Retention { .. } => {
            Refusal::new(StatusCode::CONFLICT, "retention_unavailable", message)
        }
    }
}

pub(crate) fn full(error: Full) -> Refusal {
    Refusal::new(StatusCode::TOO_MANY_REQUESTS, "sessions_full", format!("{error}; try again"))
        .retry_after(RETRY_AFTER)
}

pub(crate) fn turns_full() -> Refusal {
    let message = "the router has turns_in_flight_max turns in flight; try again";
    Refusal::new(StatusCode::TOO_MANY_REQUESTS, "turns_in_flight", message).retry_after(RETRY_AFTER)
}

pub(crate) fn body_late() -> Refusal {
    let message = "the request body did not arrive within turn_ms_max; send it faster";
    Refusal::new(StatusCode::REQUEST_TIMEOUT, "body_late", message)
}

pub(crate) fn proxy(error: &proxy::Error) -> Refusal {
    match error {
        proxy::Error::Connect { .. } => {
            let message = "the worker can't be reached; try again";
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "worker_unreachable", message)
                .retry_after(RETRY_AFTER)
        }
        proxy::Error::BrokenOff { .. } => Refusal::new(
            StatusCode::BAD_GATEWAY,
            "worker_broke_off",
            "the worker closed the connection before its answer began; the turn may have run, so \
             check before you send it again",
        ),
        proxy::Error::TimedOut => Refusal::new(
            StatusCode::GATEWAY_TIMEOUT,
            "turn_timeout",
            "the answer did not begin within turn_ms_max; send a shorter prompt or raise the limit",
        ),
    }
}

/// Refusal codes that agents use on both ports. A code from the control port is passed on
/// unchanged.
const TOLD: [&str; 19] = [
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

/// Converts an agent's gRPC error.
pub(crate) fn status(status: &tonic::Status) -> Refusal {
    let message = status.message().to_owned();
    let told = status.metadata().as_ref().get(claim::REFUSAL);
    let told = told.and_then(|told| TOLD.into_iter().find(|code| told == code));
    match status.code() {
        tonic::Code::ResourceExhausted => {
            let code = told.unwrap_or("worker_full");
            Refusal::new(StatusCode::TOO_MANY_REQUESTS, code, message).retry_after(RETRY_AFTER)
        }
        tonic::Code::FailedPrecondition => {
            let code = told.unwrap_or("retention_unavailable");
            let refusal = Refusal::new(StatusCode::CONFLICT, code, message);
            if code == "session_closing" { refusal.retry_after(RETRY_AFTER) } else { refusal }
        }
        tonic::Code::NotFound => session_unknown(),
        tonic::Code::InvalidArgument => Refusal::bad_request("invalid_field", message),
        tonic::Code::DeadlineExceeded => {
            Refusal::new(StatusCode::GATEWAY_TIMEOUT, "worker_timeout", message)
        }
        tonic::Code::Unavailable => {
            let unreachable = "the worker can't be reached; try again".to_owned();
            let (code, message) =
                told.map_or(("worker_unreachable", unreachable), |code| (code, message));
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, code, message).retry_after(RETRY_AFTER)
        }
        _ => {
            tracing::warn!(code = ?status.code(), message, "agent failed");
            let message = "the worker failed; see the router's log";
            Refusal::new(StatusCode::BAD_GATEWAY, "worker_failed", message)
        }
    }
}

pub(crate) fn session_unknown() -> Refusal {
    let message = "no session is open under this id; open it with POST /v1/sessions";
    Refusal::new(StatusCode::NOT_FOUND, "session_unknown", message)
}

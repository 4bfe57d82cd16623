//! The format of every HTTP answer by which Berth refuses a request.
//!
//! A [`Refusal`] has a status, a stable code for programs, a message for people with the next step,
//! and the time after which to retry. Refusals are made by the router's `http`, by the agent's
//! `data_port` and `staged_prefill`, and by `budget` here. These modules decide which fault gets
//! which status. Axum sends a refusal as a JSON error in OpenAI's form, with the code also in the
//! header `x-berth-refusal`. The engine's own errors pass unchanged and are no refusals.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use proto::claim;

/// A refusal made by Berth itself, never by the engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Refusal {
    /// HTTP status.
    pub status: StatusCode,
    /// Stable code for programs, in `snake_case`.
    pub code: &'static str,
    /// What is wrong, and the next step for the client.
    pub message: String,
    /// Time after which to retry; `None` if a retry is useless. The header `Retry-After` has the
    /// time rounded up to whole seconds.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    /// Makes a refusal without a retry time: the same request would be refused again.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), retry_after: None }
    }

    /// Makes a refusal with status 400.
    pub fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// Sets the time after which the same request may succeed, for overload or a temporary fault.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

/// Whether an answer is a refusal for now (status 429 or 503) that Berth itself made, not the
/// engine. Then no part of the request has run, and it may be sent to another worker.
pub fn is_refusal_for_now<B>(answer: &http::Response<B>) -> bool {
    answer.headers().contains_key(claim::REFUSAL)
        && matches!(
            answer.status(),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        )
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let error_type = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "overloaded",
            500.. => "unavailable",
            _ => "invalid_request_error",
        };
        let body = serde_json::json!({
            "error": { "message": self.message, "type": error_type, "code": self.code }
        });
        let mut response = (self.status, axum::Json(body)).into_response();
        let headers = response.headers_mut();
        headers.insert(claim::REFUSAL, HeaderValue::from_static(self.code));
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_millis().div_ceil(1000).max(1);
            let value =
                HeaderValue::from_str(&seconds.to_string()).expect("digits are legal in a header");
            headers.insert(header::RETRY_AFTER, value);
        }
        response
    }
}

//! The format of every HTTP answer by which Berth refuses a request.
//!
//! The code decides the status, and is also in the header `x-berth-refusal`. `server` gives a
//! refusal the form of the client's API ([`Api`]). The engine's own errors pass unchanged.

mod aborted;
mod code;
mod form;
#[cfg(test)]
mod guide;

use std::time::Duration;

pub use aborted::AbortedTurn;
use axum::response::{IntoResponse, Response};
pub use code::{Code, GROUPS, Group, Origin, Repeat};
use contract::claim;
pub use form::Api;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

/// The header by which the libraries of OpenAI and Anthropic know whether to send a refused request
/// again. Without it, they repeat all requests with status 408, 409, 429 or 5xx.
pub const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// The header that these libraries read before `Retry-After`: milliseconds.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// For a request of which a part may have run.
const REPEAT_AFTER: Duration = Duration::from_secs(1);
/// The longest time that a client is told to wait in an outage. The libraries heed up to a minute.
const OUTAGE_WAIT_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Refusal {
    pub code: Code,
    /// What is wrong, and the next step for the client.
    pub message: String,
    /// `None` if a retry is useless. The header `Retry-After` rounds up to whole seconds.
    retry_after: Option<Duration>,
}

/// OpenAI's and Anthropic's libraries count here how often they have sent a request again.
const RETRY_COUNT: HeaderName = HeaderName::from_static("x-stainless-retry-count");

/// Whether a client sends a request for the first time, as far as it says so. A prompt that ends
/// its engine must not be sent to one after the other.
#[must_use]
pub fn is_first_try(headers: &HeaderMap) -> bool {
    headers.get(RETRY_COUNT).is_none_or(|count| count == "0")
}

impl Refusal {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry_after: code.retry_after() }
    }

    #[must_use]
    pub fn turn_timeout() -> Self {
        let message = "the turn took longer than turn_ms_max and was aborted; send a shorter \
                       prompt, or raise the limit";
        Self::new(Code::TurnTimeout, message)
    }

    /// Lets the client send a request again of which a part may have run. An idempotent one has its
    /// whole history: running twice changes no more than running once.
    #[must_use]
    pub fn allow_repeat(mut self, is_idempotent: bool) -> Self {
        // A turn that has used up its time would do so again.
        let may_help = self.code.repeat() == Repeat::AfterCheck && self.code != Code::TurnTimeout;
        if is_idempotent && may_help {
            self.retry_after = Some(REPEAT_AFTER);
        }
        self
    }

    /// Sets the time after which to retry during an outage that has lasted for `outage`: as long
    /// again. So a client that repeats a few times sees the end of a short outage soon, and doesn't
    /// give up in a longer one. Has no effect if the code says that a repetition is useless.
    #[must_use]
    pub fn retry_in_outage(self, outage: Duration) -> Self {
        let least = self.retry_after.unwrap_or_default();
        self.retry_after(outage.clamp(least, OUTAGE_WAIT_MAX.max(least)))
    }

    /// For a time that is known exactly. No effect if the code says that a repetition is useless.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = self.retry_after.map(|_| wait);
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
    /// Makes OpenAI's form. `server` makes another API's of the refusal in the extensions.
    fn into_response(self) -> Response {
        let body = Api::OpenAi.body(&self, "");
        let mut response = (self.code.status(), body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(claim::REFUSAL, HeaderValue::from_static(self.code.as_str()));
        if self.code.status() == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        let should_retry = if self.retry_after.is_some() { "true" } else { "false" };
        headers.insert(SHOULD_RETRY, HeaderValue::from_static(should_retry));
        if let Some(wait) = self.retry_after {
            let ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(1);
            headers.insert(RETRY_AFTER_MS, HeaderValue::from(ms));
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000)));
        }
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_its_code_in_a_header_and_when_to_come_again() {
        let response = Refusal::new(Code::Rows, "rows are short").into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[claim::REFUSAL], "rows");
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        let exact = Refusal::new(Code::Rows, "").retry_after(Duration::from_millis(4_100));
        let response = exact.into_response();
        assert_eq!(response.headers()[header::RETRY_AFTER], "5");
        assert_eq!(response.headers()[RETRY_AFTER_MS], "4100");
        let outage = |seconds| {
            let lasts = Duration::from_secs_f64(seconds);
            let refusal = Refusal::new(Code::NoWorker, "").retry_in_outage(lasts);
            refusal.into_response().headers()[RETRY_AFTER_MS].to_str().unwrap().to_owned()
        };
        let waits = [0.0, 1.0, 2.5, 20.0, 3_600.0].map(outage);
        assert_eq!(waits, ["1000", "1000", "2500", "20000", "30000"]);
        let useless = Refusal::new(Code::ModelNotFound, "").retry_after(Duration::from_secs(9));
        assert!(!useless.into_response().headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn what_may_have_run_is_repeated_if_that_does_no_harm() {
        let repeated = |code, is_idempotent| {
            let response = Refusal::new(code, "").allow_repeat(is_idempotent).into_response();
            response.headers()[SHOULD_RETRY] == "true"
        };
        assert!(repeated(Code::WorkerBrokeOff, true) && repeated(Code::HandOffLate, true));
        assert!(!repeated(Code::WorkerBrokeOff, false), "a delta would be appended twice");
        assert!(!repeated(Code::ModelNotFound, true), "it fails again");
    }
}

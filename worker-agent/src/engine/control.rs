//! Reads what a control call did to the engine's KV and weights, from its request and its answer.
//!
//! An answer may be lost, or say that a part was done. Whatever may have changed the weights counts
//! as a change: a needless one costs computation, a missed one wrong answers. Pure.

use bytes::Bytes;
use contract::control::Effect;
use http::{HeaderValue, StatusCode};
use serde::Deserialize;

#[derive(Debug, Clone)]
pub struct ControlAnswer {
    pub status: StatusCode,
    pub content_type: Option<HeaderValue>,
    pub body: Bytes,
}

/// The parts of a call's body on which its effect depends.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ControlRequest {
    pub flush_cache: bool,
    /// The kinds of memory to release or to resume; none means all.
    pub tags: Option<Vec<String>>,
    pub lora_name: Option<String>,
    /// Of a pause.
    pub mode: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlOutcome {
    Done {
        /// Whether the engine has freed all its KV.
        was_flushed: bool,
    },
    NotDone,
    /// The end of an update was refused, because none is open.
    NoUpdateOpen,
    /// The engine may have done the call, or a part of it.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightsLabel {
    pub version: String,
    pub model_path: String,
}

/// Beginnings of the engine's messages that nothing was changed.
const UNCHANGED: [&str; 4] = [
    "Failed to get ",
    "a weight-update session is already open",
    NONE_OPEN,
    "The engine initialized with",
];
const NONE_OPEN: &str = "no weight-update session is open";
/// The engine says this of an update outside begin and end.
const OUTSIDE_SESSION: &str = "must run between begin_weight_update() and end_weight_update()";
/// The engine says this of an update that was done without its flush.
const NOT_FLUSHED: &str = "Weights were updated, but the cache was not flushed";

impl Default for ControlRequest {
    fn default() -> Self {
        Self { flush_cache: true, tags: None, lora_name: None, mode: None }
    }
}

impl ControlRequest {
    /// A body that can't be read counts as no flush.
    #[must_use]
    pub fn read(body: &[u8]) -> Self {
        if body.is_empty() {
            return Self::default();
        }
        let unknown = Self { flush_cache: false, ..Self::default() };
        serde_json::from_slice(body).unwrap_or(unknown)
    }

    /// Whether a pause leaves running requests where they are. Others abort them or put them back
    /// into the queue.
    #[must_use]
    pub fn pauses_in_place(&self) -> bool {
        self.mode.as_deref() == Some("in_place")
    }

    #[must_use]
    pub fn has_tag(&self, tag: &str) -> bool {
        let tags = self.tags.as_deref().unwrap_or_default();
        tags.is_empty() || tags.iter().any(|own| own == tag)
    }
}

impl ControlOutcome {
    /// `answer` is `None` if none came.
    #[must_use]
    pub fn read(effect: Effect, request: &ControlRequest, answer: Option<&ControlAnswer>) -> Self {
        let Some(answer) = answer else { return Self::Unknown };
        if answer.status.is_success() {
            let flushes_by_wish = effect == Effect::Update && request.flush_cache;
            let was_flushed = effect == Effect::Flush || flushes_by_wish;
            return Self::Done { was_flushed };
        }
        #[derive(Deserialize)]
        struct Failure {
            success: bool,
            message: String,
        }
        match serde_json::from_slice::<Failure>(&answer.body) {
            _ if answer.status.is_server_error() => Self::Unknown,
            Ok(failure) if !failure.success && effect == Effect::Update => {
                let message = failure.message;
                let is_unchanged = UNCHANGED.iter().any(|text| message.starts_with(text));
                match message {
                    text if text.contains(NOT_FLUSHED) => Self::Done { was_flushed: false },
                    text if is_unchanged || text.contains(OUTSIDE_SESSION) => Self::NotDone,
                    _ => Self::Unknown,
                }
            }
            Ok(failure)
                if effect == Effect::EndUpdate && failure.message.starts_with(NONE_OPEN) =>
            {
                Self::NoUpdateOpen
            }
            Ok(_) | Err(_) => Self::NotDone,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(effect: Effect, request: &str, status: u16, body: &str) -> ControlOutcome {
        let answer = ControlAnswer {
            status: StatusCode::from_u16(status).unwrap(),
            content_type: None,
            body: Bytes::copy_from_slice(body.as_bytes()),
        };
        let request = ControlRequest::read(request.as_bytes());
        ControlOutcome::read(effect, &request, Some(&answer))
    }

    #[test]
    fn an_update_counts_unless_the_engine_says_that_nothing_changed() {
        let done = |was_flushed| ControlOutcome::Done { was_flushed };
        let failed = |text: &str| format!(r#"{{"success":false,"message":"{text}"}}"#);
        let outside = "update_weights_from_tensor must run between begin_weight_update() and \
                       end_weight_update()";
        let kept = "Weights were updated, but the cache was not flushed because requests are";
        let table = [
            ("{}", 200, String::new(), done(true)),
            (r#"{"flush_cache":false}"#, 200, String::new(), done(false)),
            ("no JSON", 200, String::new(), done(false)),
            ("{}", 400, failed(kept), done(false)),
            ("{}", 400, failed(outside), ControlOutcome::NotDone),
            ("{}", 400, failed("Failed to get model config: x"), ControlOutcome::NotDone),
            ("{}", 400, failed("Failed to update weights: x."), ControlOutcome::Unknown),
            ("{}", 400, r#"{"object":"error"}"#.to_owned(), ControlOutcome::NotDone),
            ("{}", 401, r#"{"error":"Unauthorized"}"#.to_owned(), ControlOutcome::NotDone),
            ("{}", 500, "Internal Server Error".to_owned(), ControlOutcome::Unknown),
        ];
        for (request, status, body, expected) in table {
            assert_eq!(outcome(Effect::Update, request, status, &body), expected, "{body}");
        }
        let request = ControlRequest::default();
        let lost = ControlOutcome::read(Effect::Update, &request, None);
        assert_eq!(lost, ControlOutcome::Unknown, "no answer came");
    }

    #[test]
    fn a_flush_that_the_engine_refuses_is_none() {
        let refused = outcome(Effect::Flush, "", 400, "Flush cache failed.\n");
        assert_eq!(refused, ControlOutcome::NotDone);
        let done = outcome(Effect::Flush, "", 200, "Cache flushed.\n");
        assert_eq!(done, ControlOutcome::Done { was_flushed: true });
    }

    #[test]
    fn memory_without_a_tag_is_all_memory() {
        let all = ControlRequest::read(b"{}");
        assert!(all.has_tag("weights") && all.has_tag("kv_cache"));
        let some = ControlRequest::read(br#"{"tags":["weights"]}"#);
        assert!(some.has_tag("weights") && !some.has_tag("kv_cache"));
    }
}

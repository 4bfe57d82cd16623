//! The header by which a router tells an agent what a turn's client hinted at.
//!
//! A hint may change where and when a turn runs, never what it answers. Only a router may send the
//! header ([`crate::claim::TRUSTED`]), and it bounds hints by the caller's key. An agent ignores
//! hints that it doesn't know, so that routers and agents of two versions work together.

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

/// The [`TurnHints`], as JSON.
pub const HINTS: HeaderName = HeaderName::from_static("x-berth-hints");

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TurnHints {
    /// The client only hinted at the turn's session, by a name that it sends with every request. If
    /// the session can't take the turn, the turn runs without it, unless a client opened the
    /// session.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub session: bool,
    /// A greater number is more urgent. A priority in the body counts before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
    /// The client expects so many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer_tokens: Option<u64>,
}

impl TurnHints {
    /// `None` if there are no hints.
    #[must_use]
    pub fn to_header(self) -> Option<HeaderValue> {
        if self == Self::default() {
            return None;
        }
        let text = serde_json::to_string(&self).expect("a struct of numbers serialises");
        Some(HeaderValue::from_str(&text).expect("JSON of numbers is ASCII"))
    }

    /// A header that can't be read has no hints.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Self {
        let value = headers.get(HINTS).map(HeaderValue::as_bytes);
        value.and_then(|text| serde_json::from_slice(text).ok()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_survive_the_header_and_no_hints_need_none() {
        assert_eq!(TurnHints::default().to_header(), None);
        for hints in [
            TurnHints { session: true, ..TurnHints::default() },
            TurnHints { priority: Some(i64::MIN), ..TurnHints::default() },
            TurnHints { session: true, priority: Some(7), answer_tokens: Some(9) },
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(HINTS, hints.to_header().unwrap());
            assert_eq!(TurnHints::from_headers(&headers), hints);
        }
    }

    #[test]
    fn hints_of_another_version_are_ignored() {
        let mut headers = HeaderMap::new();
        for (text, session) in [
            (r#"{"session":true,"later":{"a":1}}"#, true),
            (r#"{"session":1}"#, false),
            ("", false),
        ] {
            headers.insert(HINTS, HeaderValue::from_static(text));
            assert_eq!(TurnHints::from_headers(&headers).session, session, "{text}");
        }
    }
}

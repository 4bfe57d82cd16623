//! What a turn's client hinted at, as a router tells an agent in the turn's envelope.
//!
//! A hint may change where and when a turn runs, never what it answers. The router bounds hints by
//! the caller's key. An agent ignores hints that it doesn't know or can't read, so that routers and
//! agents of two versions work together.

use serde::{Deserialize, Serialize};

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
    /// The client expects to send the session's next turn soon after this one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub returns_soon: bool,
}

//! What a router tells an agent about a turn's session, and the headers of the answer.
//!
//! The claim is in the turn's [`envelope`](crate::envelope). The agent claims the session (reserves
//! it for this turn) before it reads the request's body.

use http::HeaderName;

use crate::{
    id::{Digest, SessionKey},
    load::Retention,
};

/// On an answer: the router's turn id.
pub const TURN: HeaderName = HeaderName::from_static("x-berth-turn");
/// On an answer: the code of the agent's own refusal. Absent when the engine answered.
pub const REFUSAL: HeaderName = HeaderName::from_static("x-berth-refusal");

/// Code of the refusal of a request that doesn't come from a router.
pub const NOT_A_ROUTER: &str = "not_a_router";

/// A turn's session, and what the client wants done with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The router has authenticated its principal, who is the turn's.
    pub key: SessionKey,
    /// How the engine should keep the session's KV, if this turn begins the session. `None`: tagged
    /// if the engine can tag KV.
    pub retention: Option<Retention>,
    /// The body holds only new messages or tokens, which the engine appends to the session's
    /// history.
    pub delta: bool,
    /// The client asked to open the session with this turn. The session then runs one turn at a
    /// time.
    pub open: bool,
    /// The session closes after this turn, however the turn ends.
    pub close: bool,
    /// Without a turn for so long, the session closes. `None`: the agent's default.
    pub idle_ms_max: Option<u64>,
    /// The session that started this one, as a sub-agent.
    pub parent: Option<Digest>,
}

impl Claim {
    /// A delta would be appended twice, and what opens or closes a session has changed it.
    #[must_use]
    pub fn is_idempotent(&self) -> bool {
        !(self.delta || self.open || self.close)
    }

    /// The turn has a full history, and no wish to open or close the session or to choose its
    /// retention.
    #[must_use]
    pub fn for_session(key: &SessionKey) -> Self {
        Self {
            key: key.clone(),
            retention: None,
            delta: false,
            open: false,
            close: false,
            idle_ms_max: None,
            parent: None,
        }
    }
}

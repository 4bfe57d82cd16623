//! What a turn's client wants of the turn's session.

use contract::{id::SessionKey, load::Retention};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HintKind {
    Session,
    /// The session, or only the request.
    SessionOrRequest,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionIntent {
    pub key: SessionKey,
    /// `None` if the client named the session on purpose.
    pub hint: Option<HintKind>,
    /// Whether the engine must keep the session's KV, by a pin or a tag.
    pub is_kept_required: bool,
    /// For the session's first turn. `None` lets the agent choose.
    pub retention: Option<Retention>,
    pub is_delta: bool,
    pub opens_session: bool,
    pub closes_session: bool,
    /// The router only sends the session's turns to the same worker. The agent knows no session.
    pub is_placement_only: bool,
    /// Time without a turn after which the session closes.
    pub idle_ms_max: Option<u64>,
}

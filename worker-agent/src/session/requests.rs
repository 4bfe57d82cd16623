//! What a turn's claim and an opening ask of the session table, made once where a request arrives.

use std::{sync::Arc, time::Duration};

use contract::{claim::Claim, id::SessionKey, load::Retention};

use super::RouteTurns;

/// Asks for a turn's place.
#[derive(Debug, Clone)]
pub struct ClaimRequest {
    /// The turn's client.
    pub principal: Arc<str>,
    /// `None` for a turn without a session; otherwise the session is the principal's.
    pub claim: Option<Claim>,
    /// The client only hinted at the session, so the owner task lets a turn that the session can't
    /// take run without it, unless a client opened the session.
    pub is_hint: bool,
    /// The client expects to send the session's next turn soon after this one.
    pub returns_soon: bool,
    /// The DP rank on which the turn must run, if any.
    pub requested_rank: Option<u32>,
    pub route_turns: RouteTurns,
}

/// Asks for an open session, without a turn.
#[derive(Debug, Clone)]
pub struct OpenRequest {
    pub key: SessionKey,
    /// `None`: the agent chooses.
    pub retention: Option<Retention>,
    /// Without a turn for so long, the session closes. `None`: the agent's default.
    pub idle_max: Option<Duration>,
    /// The DP rank on which the session must be, if any.
    pub requested_rank: Option<u32>,
}

//! The sessions of one caller, and those of all.

use serde::{Deserialize, Serialize};
use utoipa::{
    ToSchema,
    openapi::{Object, ObjectBuilder, Type},
};

use crate::load::{self, Retention, SessionState, Source, VolatilePrefix};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sessions {
    pub sessions: Vec<Session>,
    pub more: bool,
    /// The `after` of the next page
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub next: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Session {
    #[schema(required)]
    pub session_id: String,
    /// It holds the session's KV.
    #[schema(required)]
    pub worker: String,
    /// One of [`SessionState`]; or `bound`, while no agent has reported the session.
    #[schema(required, schema_with = states)]
    pub state: String,
    #[serde(flatten)]
    #[schema(value_type = SessionReport)]
    pub report: Option<SessionReport>,
}

/// KV that is on its way from the host's memory to the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Prefetch {
    /// Those that begin to be loaded
    pub tokens: u64,
}

/// Absent while no agent has reported the session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct SessionReport {
    #[schema(value_type = Retention)]
    pub retention: String,
    /// Finished turns.
    pub turns: u64,
    pub turns_running: u32,
    pub exclusive: bool,
    pub whole_history: bool,
    pub resident_tokens: Option<u64>,
    pub resident_tokens_source: Option<Source>,
    /// The time since the last turn, where the router knows.
    #[schema(value_type = u64)]
    pub idle_ms: Option<u64>,
    /// The time since the last turn, when the agent reported it.
    pub idle_ms_at_report: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Object)]
    pub volatile_prefix: Option<VolatilePrefix>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct FleetSessions {
    /// The first sessions by the order that was asked for.
    #[schema(required)]
    pub sessions: Vec<FleetSession>,
    /// Sessions not in the list that started some in it, directly or not.
    #[schema(required)]
    pub parents: Vec<FleetSession>,
    /// Those that the filter finds.
    #[schema(required)]
    pub total: u64,
}

/// A session of any client.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct FleetSession {
    /// Names the session among those of all clients.
    pub digest: String,
    pub session_id: String,
    pub principal: String,
    /// Digest of the session that started this one.
    pub parent: Option<String>,
    /// It holds the session's KV.
    pub worker: String,
    #[schema(value_type = Retention)]
    pub retention: String,
    #[schema(value_type = SessionState)]
    pub state: String,
    /// Finished turns.
    pub turns: u64,
    pub turns_running: u32,
    pub resident_tokens: Option<u64>,
    /// The time since the last turn, where the router knows.
    #[schema(value_type = u64)]
    pub idle_ms: Option<u64>,
    /// The time since the last turn, when the agent reported it.
    pub idle_ms_at_report: u64,
    /// By the agent's clock; 0 if it doesn't say.
    pub began_unix_ms: u64,
    /// The time since the session was demoted, if it is.
    pub demoted_age_ms: Option<u64>,
}

impl From<&load::Session> for SessionReport {
    /// Without the time since the last turn now, which the agent doesn't know.
    fn from(session: &load::Session) -> Self {
        Self {
            retention: session.retention.as_str().to_owned(),
            turns: session.turns,
            turns_running: session.turns_running,
            exclusive: session.exclusive,
            whole_history: session.full_history,
            resident_tokens: session.resident_tokens.map(|figure| figure.value),
            resident_tokens_source: session.resident_tokens.map(|figure| figure.source),
            idle_ms: None,
            idle_ms_at_report: u64::try_from(session.idle.as_millis()).unwrap_or(u64::MAX),
            volatile_prefix: session.volatile_prefix,
        }
    }
}

impl SessionReport {
    /// The time since the last turn: now, or at the last report if an agent listed the session.
    #[must_use]
    pub fn idle_ms(&self) -> u64 {
        self.idle_ms.unwrap_or(self.idle_ms_at_report)
    }
}

impl FleetSession {
    /// As [`SessionReport::idle_ms`].
    #[must_use]
    pub fn idle_ms(&self) -> u64 {
        self.idle_ms.unwrap_or(self.idle_ms_at_report)
    }
}

fn states() -> Object {
    let states = ["bound", "opening", "idle", "running", "closing", "lost", "demoted"];
    ObjectBuilder::new().schema_type(Type::String).enum_values(Some(states)).build()
}

//! The last placements and turns.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// The `next` of the last answer. Without it: the last entries
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(pattern = r"^[0-9a-f]{8}\.[0-9]{1,18}$")]
pub struct Cursor(pub String);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RecentPlacements {
    /// The oldest is first.
    pub placements: Vec<RecentPlacement>,
    /// Where the next page begins.
    pub next: Cursor,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RecentPlacement {
    pub turn: String,
    /// Digest.
    pub session: Option<String>,
    pub worker: String,
    /// The worker that computes the prompt, if it is another one.
    pub prefill_worker: Option<String>,
    pub reason: String,
    /// Prompt tokens that the worker must compute.
    pub uncached_tokens: Option<u64>,
    pub age_ms: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Placements {
    #[schema(required)]
    pub turn: String,
    /// One for each worker that the turn was sent to.
    #[schema(required)]
    pub placements: Vec<Placement>,
}

/// Why a turn went to its worker.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Placement {
    pub worker: String,
    pub reason: String,
    /// Digest.
    pub session: Option<String>,
    /// Prompt tokens that the worker must compute.
    pub uncached_tokens: Option<u64>,
    pub prefill: Option<PrefillPlacement>,
    pub age_ms: u64,
    /// The figures of each worker that was compared, with its name in `worker`.
    #[schema(value_type = Vec<Object>)]
    pub compared: Vec<Value>,
}

/// The worker that computes the prompt, if it is another one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PrefillPlacement {
    pub worker: String,
    pub uncached_tokens: Option<u64>,
    #[schema(value_type = Object)]
    pub figures: Value,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Turns {
    /// The oldest is first.
    pub turns: Vec<Turn>,
    /// Where the next page begins.
    pub next: Cursor,
}

/// A turn that has ended. Figures of tokens are the engine's own: null if the answer has none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Turn {
    pub turn: String,
    /// Digest.
    pub session: Option<String>,
    pub session_id: Option<String>,
    pub principal: Option<String>,
    /// Digest of the session that started this one.
    pub parent: Option<String>,
    pub worker: Option<String>,
    pub prefill_worker: Option<String>,
    pub reason: Option<String>,
    pub retried: bool,
    pub retention: Option<String>,
    pub status: Option<u16>,
    pub outcome: Option<String>,
    /// The time since the turn ended.
    pub age_ms: u64,
    pub ttft_ms: Option<u64>,
    pub duration_ms: Option<u64>,
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub output_tokens: Option<u64>,
    /// What placement expected the worker to compute.
    pub uncached_tokens_expected: Option<u64>,
}

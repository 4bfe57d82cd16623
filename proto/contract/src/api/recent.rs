//! The last placements and turns.

use serde::{Deserialize, Serialize};
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
    pub compared: Vec<WorkerFigures>,
}

/// The worker that computes the prompt, if it is another one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PrefillPlacement {
    pub worker: String,
    pub uncached_tokens: Option<u64>,
    pub figures: WorkerFigures,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct WorkerFigures {
    #[schema(required)]
    pub worker: String,
    #[serde(flatten)]
    pub figures: Figures,
}

/// What placement expects of a turn on one worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Figures {
    /// The sum of the costs below; for a decode worker, also that of its best prefill worker.
    pub cost_ms: u64,
    pub wait_ms: u64,
    /// Time to compute the part of the prompt that isn't resident; on a decode worker, time to
    /// transfer its KV. `None` if the prompt is unknown.
    pub prefill_ms: Option<u64>,
    /// Time to load the part of the prompt that only the host has, while the rest is computed.
    /// `None` if the prompt is unknown, or if no host tier is known.
    pub load_ms: Option<u64>,
    /// `None` if the prompt, or the pool's size or use, is unknown.
    pub displacement_ms: Option<u64>,
    pub crowding_ms: u64,
    /// `None` if the prompt is unknown.
    pub blocking_ms: Option<u64>,
    pub interference_ms: u64,
    pub impatience_ms: u64,
    /// On the device or the host. `None` if the prompt is unknown.
    pub resident_tokens: Option<u64>,
    /// The part of `resident_tokens` that only the host has. `None` as `load_ms`.
    pub host_tokens: Option<u64>,
    /// Prompt tokens of other turns that are computed before this turn's, those included that this
    /// router sent since the last load report.
    pub backlog_tokens: u64,
    /// As measured on this worker or on workers like it. `None`: the costs use an assumed rate.
    pub prefill_tokens_per_s: Option<u64>,
    /// Includes those that this router began since the last load report.
    pub turns: u32,
    /// 0 if not reported.
    pub turns_max: u32,
    pub waiting: Option<u64>,
    /// KV that other sessions are expected to use again, or KV that can't be evicted if that is
    /// more.
    pub wanted_tokens: u64,
    pub pool_tokens: Option<u64>,
    /// `None` unless workers of about the same cost were told apart by their room.
    pub free_tokens: Option<u64>,
    /// Of the conversation without a name whose KV the worker evicts first. `None` as
    /// `free_tokens`, and if there is none.
    pub oldest_idle_ms: Option<u64>,
    /// Includes those that this router opened since the last load report.
    pub sessions: u32,
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

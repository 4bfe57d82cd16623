//! What a worker says about itself, in domain types: description, sessions, load report. The wire
//! form is permissive by nature; conversion from it rejects what can't be true, so that the rest of
//! the router never checks again.

mod pages;
mod wire;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::pages::{NamedFinding, PageAudit, PageClasses, PageFinding};
use crate::id::{self, SessionKey};

/// How an engine keeps a session's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Retention {
    /// Ordinary radix cache.
    None,
    /// Evicted after untagged KV.
    Tagged,
    /// Private, not evictable, one request row held.
    Pinned,
}

/// Where a session is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionState {
    /// The engine was asked to open it.
    Opening,
    /// Open, no turn inside the engine.
    Idle,
    /// Open, at least one turn inside the engine.
    Running,
    /// It closes when its running turn has ended.
    Closing,
    /// The engine restarted under it.
    Lost,
    /// Pinned, its KV in the radix tree for now.
    Demoted,
}

/// Where a figure comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Usage fields of finished turns.
    Usage,
    /// The engine's `/v1/loads`.
    Loads,
    /// The engine's `/server_info`.
    ServerInfo,
    /// The agent's own account.
    Ledger,
    /// An upper bound of what may still be there.
    Estimate,
    /// The shim inside the engine.
    Shim,
    /// The GPU's driver.
    Nvml,
}

/// A number with its source and its age when it was sent. The unit is its field's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Figure {
    /// The number.
    pub value: u64,
    /// Where it comes from.
    pub source: Source,
    /// Milliseconds from sample to sending, by the agent's monotonic clock.
    pub age_ms: u32,
}

/// One device of a worker: a GPU or a MIG slice of one. What it doesn't tell is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Device {
    /// UUID, or the engine's word for its device where there is no NVML.
    pub uuid: String,
    /// Marketing name, may be empty.
    pub name: String,
    /// Index in the agent's NVML; a slice has its GPU's.
    pub index: Option<u32>,
    /// `00000000:1B:00.0`; a slice has its GPU's.
    pub pci_address: Option<String>,
    /// UUID of the GPU that this is a slice of.
    pub parent_uuid: Option<String>,
    /// Nearest node of the host's memory.
    pub numa_node: Option<u32>,
    /// Bytes.
    pub memory_total_bytes: Option<u64>,
    /// Bytes, by all processes.
    pub memory_used_bytes: Option<u64>,
    /// Bytes, by the driver, not among those used.
    pub memory_reserved_bytes: Option<u64>,
    /// 0..=100: a kernel ran.
    pub utilization_percent: Option<u32>,
    /// 0..=100: memory was read or written.
    pub memory_utilization_percent: Option<u32>,
    /// Of the chip.
    pub temperature_celsius: Option<u32>,
    /// Of the board.
    pub power_milliwatts: Option<u32>,
    /// Memory of the engine's processes, bytes.
    pub engine_bytes: Option<Figure>,
    /// The rank's KV pool on this device, bytes.
    pub kv_pool_bytes: Option<Figure>,
    /// Of the pool: not free, cached KV included. Bytes.
    pub kv_used_bytes: Option<Figure>,
    /// Of the pool: only closing frees it. Bytes.
    pub kv_pinned_bytes: Option<Figure>,
    /// Of the pool: cached, and eviction takes it. Bytes.
    pub kv_reclaimable_bytes: Option<Figure>,
    /// Why work on it fails or can't be trusted.
    pub unhealthy: Option<String>,
    /// Milliseconds from NVML's readings to sending.
    pub age_ms: Option<u32>,
}

/// Facts about the engine that hold until it restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineFacts {
    /// As the engine says it.
    pub version: String,
    /// Served names, never empty.
    pub models: Vec<String>,
    /// Tokens.
    pub page_tokens: u32,
    /// Tokens.
    pub context_tokens: u32,
    /// Largest token id plus one, if known.
    pub vocabulary: Option<u32>,
    /// Pinned sessions are possible.
    pub streaming_sessions: bool,
    /// Tagged sessions are possible.
    pub radix_sessions: bool,
    /// Differs after every restart of the engine.
    pub instance: String,
    /// `null`, `prefill` or `decode`.
    pub disaggregation: String,
}

/// One DP rank's fixed size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rank {
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// Tokens.
    pub pool_tokens: u64,
    /// Request rows.
    pub rows: u32,
    /// Devices the rank runs on.
    pub devices: Vec<Device>,
}

/// Who an agent and its engine are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Description {
    /// Unique in the fleet.
    pub agent_id: String,
    /// Number of the agent process.
    pub epoch: u64,
    /// Port for turns.
    pub data_port: u16,
    /// The engine beside the agent.
    pub engine: EngineFacts,
    /// In rank order, never empty.
    pub ranks: Vec<Rank>,
    /// What the engine's flags allow, best first.
    pub retentions: Vec<Retention>,
    /// Turns of one exclusive session that may wait behind the one that runs.
    pub turns_queued_per_session_max: u32,
    /// What makes tokens of text there, where the agent can read the model's folder.
    pub model_files: Option<ModelFiles>,
    /// SGLang's versions on which whole histories are trimmed for pinned sessions, the engine's own
    /// among them; empty: they aren't.
    pub trims: Vec<String>,
}

/// The files by which an engine makes tokens of text and of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct ModelFiles {
    /// SHA-256 over them; the same files have the same one on every agent.
    pub hash: [u8; 32],
    /// All of them, bytes.
    pub bytes: u64,
}

/// A session as its agent sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// Who it is.
    pub key: SessionKey,
    /// How its KV is kept.
    pub retention: Retention,
    /// Where it is in its life.
    pub state: SessionState,
    /// The rank that holds its KV.
    pub dp_rank: u32,
    /// Finished turns.
    pub turns: u64,
    /// Turns inside the engine.
    pub turns_running: u32,
    /// One turn at a time.
    pub exclusive: bool,
    /// Tokens of KV.
    pub resident_tokens: Option<Figure>,
    /// Since the end of its last turn.
    pub idle: Duration,
    /// Its client sends its whole history with each turn: it can go on anywhere.
    pub whole_history: bool,
    /// A text early in its prompts that differs from turn to turn; none was found where absent.
    pub volatile_prefix: Option<VolatilePrefix>,
}

/// A text early in a session's prompts that differed in three turns in a row. The engine computes
/// everything after that text again in each turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct VolatilePrefix {
    /// Tokens of the prompt before the text; absent where no shim compared the prompts.
    pub token_index: Option<u64>,
    /// The text's place in the request body; absent where the prompt is a single text.
    #[serde(flatten)]
    pub place: Option<PromptPlace>,
    /// Turns in which the text differed from that of the turn before.
    pub turns: u64,
}

/// A place in a request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct PromptPlace {
    /// Which part of the body.
    pub role: PromptRole,
    /// Index in the list of messages or input items; 0 for parts beside that list.
    pub message: u32,
    /// Index in the message's list of content blocks; 0 where the content is a string.
    pub block: u32,
}

/// The part of a request body that holds a text of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptRole {
    /// A system message, or a `system` beside the messages.
    System,
    /// A developer message.
    Developer,
    /// A user message.
    User,
    /// An assistant message.
    Assistant,
    /// A tool message.
    Tool,
    /// The member `instructions`.
    Instructions,
    /// The member `tools`.
    Tools,
    /// A message of any other role, or of none.
    Other,
}

/// What one rank holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankLoad {
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// Turns let in and not ended.
    pub turns_running: u32,
    /// Bound on `turns_running`.
    pub turns_running_max: u32,
    /// Requests in the engine's batch.
    pub requests_running: Option<Figure>,
    /// Requests in the engine's queue.
    pub requests_waiting: Option<Figure>,
    /// KV that eviction can't take, tokens.
    pub pool_used_tokens: Option<Figure>,
    /// The pool, tokens.
    pub pool_total_tokens: Option<Figure>,
    /// KV that only closing frees, tokens.
    pub pinned_tokens: Option<Figure>,
    /// Tagged sessions' KV at most, tokens.
    pub resident_tokens_estimate: Option<Figure>,
    /// Rows of pinned sessions.
    pub rows_held: Option<Figure>,
    /// All rows.
    pub rows_total: Option<Figure>,
    /// Sessions open on the rank.
    pub sessions: u32,
    /// With their readings.
    pub devices: Vec<Device>,
    /// Turns that wait in the agent.
    pub turns_queued: u32,
    /// Free KV, tokens.
    pub pool_available_tokens: Option<Figure>,
    /// Cached KV that eviction takes, tokens.
    pub pool_evictable_tokens: Option<Figure>,
    /// Of `pinned_tokens`: others' sessions in the engine.
    pub foreign_tokens: Option<Figure>,
    /// Who holds the pages, by identity.
    pub pages: Option<PageAudit>,
    /// Prompt tokens the engine computes in a second while it does nothing else, as measured.
    pub prefill_tokens_per_s: Option<Figure>,
    /// Prompt tokens let in and not computed yet, cached ones left out as far as they are known.
    pub prefill_backlog_tokens: Option<Figure>,
    /// Long prompts that the agent computes in pieces; none where it doesn't.
    pub lane: Option<Lane>,
}

/// Long prompts before their turns, computed in pieces between which shorter ones get their turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Lane {
    /// Of all of them, not computed and not in the engine.
    pub tokens: u64,
    /// How many they are.
    pub prompts: u32,
    /// Of a piece, as the engine is measured now.
    pub piece_tokens: u64,
}

/// One agent's report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// The next report comes within this time.
    #[serde(skip)]
    pub interval: Duration,
    /// In rank order, never empty.
    pub ranks: Vec<RankLoad>,
    /// Why the engine can't take turns, or a device of it doesn't work.
    pub unhealthy: Option<String>,
    /// Takes no new sessions.
    pub draining: bool,
    /// Why only a restart of the engine gives back what it holds.
    pub restart_required: Option<String>,
}

/// What was wrong with a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A message that must be there isn't.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A number no worker can have.
    #[error("{field} is {value}, which can't be")]
    Impossible {
        /// Which field.
        field: &'static str,
        /// What it said.
        value: u64,
    },
    /// An enum value this build doesn't know, or none.
    #[error("{field} has no known value: {value}")]
    Unknown {
        /// Which field.
        field: &'static str,
        /// What it said.
        value: i32,
    },
    /// A session's identifiers are out of bounds.
    #[error("a session has an invalid key")]
    Id(#[from] id::Error),
}

impl Retention {
    /// The name used in JSON, headers and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Tagged => "tagged",
            Self::Pinned => "pinned",
        }
    }
}

impl PromptRole {
    /// The name used in JSON and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
            Self::Instructions => "instructions",
            Self::Tools => "tools",
            Self::Other => "other",
        }
    }
}

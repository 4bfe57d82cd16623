//! The types in which an agent reports its engine, its sessions and its load to routers.
//!
//! A *request row* is a slot of the engine for one running request or one pinned session.
//! Conversion from the wire (`wire`) rejects impossible values, so the router doesn't check again.

mod bounds;
mod figure;
mod pages;
mod parts;
pub(crate) mod shown;
mod transfer;
mod weights;
mod wire;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use self::{
    bounds::RANKS_MAX,
    figure::{Figure, Ratio, Source},
    pages::{NamedFinding, PageAudit, PageClasses, PageFinding},
    parts::{FunctionOff, ModelFiles, RetentionOff},
    transfer::{EngineRole, KvTransfer},
    weights::{InvalidWeights, WEIGHTS, WantedWeights, Weights},
};
use crate::id::{self, Digest, SessionKey};

#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Retention {
    /// In the ordinary radix cache.
    None,
    /// In the radix cache, tagged with the session's id. The engine evicts untagged KV first.
    Tagged,
    /// Private to the session, and not evictable. The session occupies a request row of the engine
    /// until it closes.
    Pinned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SessionState {
    /// The agent has asked the engine to open the session.
    Opening,
    /// No turn is inside the engine.
    Idle,
    /// At least one turn is inside the engine.
    Running,
    /// The session closes when its running turn has ended.
    Closing,
    /// The engine restarted, so the session's KV and history are gone.
    Lost,
    /// A pinned session whose KV is in the radix tree for now, where the engine can evict it.
    Demoted,
}

/// A device of a worker: a GPU, or a MIG slice of a GPU. Unknown values are absent, never zero.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Device {
    /// The UUID that NVML reports. Without NVML, the engine's name of the device, such as `cpu`.
    #[schema(required)]
    pub uuid: String,
    /// Marketing name; may be empty.
    #[schema(required)]
    pub name: String,
    /// Index in the agent's NVML. A MIG slice has the index of its GPU.
    pub index: Option<u32>,
    /// Such as `00000000:1B:00.0`. A MIG slice has the address of its GPU.
    pub pci_address: Option<String>,
    /// The GPU to which this MIG slice belongs; absent for a whole GPU.
    pub parent_uuid: Option<String>,
    /// The node that is nearest to the device.
    pub numa_node: Option<u32>,
    pub memory_total_bytes: Option<u64>,
    /// Counts the memory of all processes.
    pub memory_used_bytes: Option<u64>,
    /// Memory that the driver reserves and NVML doesn't count as used.
    pub memory_reserved_bytes: Option<u64>,
    /// Share of the last sample period in which a kernel ran, 0..=100.
    pub utilization_percent: Option<u32>,
    /// Share of the last sample period in which device memory was read or written, 0..=100.
    pub memory_utilization_percent: Option<u32>,
    pub temperature_celsius: Option<u32>,
    pub power_milliwatts: Option<u32>,
    /// Memory of the engine's processes.
    pub engine_bytes: Option<Figure>,
    /// Size of the rank's pool on this device.
    pub kv_pool_bytes: Option<Figure>,
    /// The part of the pool that is not free, cached KV included.
    pub kv_used_bytes: Option<Figure>,
    /// KV of pinned sessions. Only closing or demoting them frees it.
    pub kv_pinned_bytes: Option<Figure>,
    /// KV that eviction can free.
    pub kv_reclaimable_bytes: Option<Figure>,
    /// Why work on the device fails or can't be trusted; absent if the device is healthy.
    pub unhealthy: Option<String>,
    /// The time between NVML's readings and the sending of this message.
    pub age_ms: Option<u32>,
}

/// Only the adapters change until the engine restarts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct EngineFacts {
    pub version: String,
    /// Never empty.
    pub models: Vec<String>,
    pub page_tokens: u32,
    /// Bounds prompt and answer together.
    pub context_tokens: u32,
    /// The largest token id plus one.
    pub vocabulary: Option<u32>,
    /// Pinned sessions need streaming sessions.
    pub streaming_sessions: bool,
    /// Tagged sessions need a session radix cache.
    pub radix_sessions: bool,
    /// Changes with every restart of the engine.
    pub instance: String,
    /// `null`, `prefill` or `decode`.
    pub disaggregation: String,
    /// The engine cuts prompts that are longer than its context, instead of refusing them.
    pub shortens_prompts: bool,
    /// The LoRA adapters that are loaded now, in order. `None` if the agent doesn't read them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Vec<String>>,
    /// `None` if the engine runs whole turns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer: Option<KvTransfer>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Rank {
    pub dp_rank: u32,
    pub pool_tokens: u64,
    /// The most turns and pinned sessions that can exist at once.
    pub rows: u32,
    #[serde(serialize_with = "shown::devices")]
    #[schema(value_type = Vec<shown::ShownDevice<'static>>)]
    pub devices: Vec<Device>,
}

/// What an agent and its engine are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Is unique in the fleet.
    pub agent_id: String,
    /// When the agent started, in unix nanoseconds; identifies the process.
    pub epoch: u64,
    pub data_port: u16,
    /// Host and port for routers. `None`: `data_port`, on the host of the control port.
    pub data_address: Option<String>,
    /// The URL for routers. `None`: as they dialled it.
    pub control_url: Option<String>,
    pub data_tls: bool,
    pub engine: EngineFacts,
    /// In order; never empty.
    pub ranks: Vec<Rank>,
    /// The engine can keep these safely. The best is first. They may change while it runs.
    pub retentions: Vec<Retention>,
    pub retentions_off: Vec<RetentionOff>,
    /// Turns of one exclusive session that may wait for its running turn ([`Session::exclusive`]).
    pub turns_queued_per_session_max: u32,
    /// Absent if the agent can't read the model's folder.
    pub model_files: Option<ModelFiles>,
    /// SGLang versions on which the agent trims full histories of pinned sessions, including the
    /// engine's own version. Trimming means that the engine gets only the part of a history that
    /// its session doesn't hold. Empty: the agent doesn't trim.
    pub trim_sglang_versions: Vec<String>,
    /// Functions that are off on the shim of some rank, or on the only trimmer.
    pub shim_functions_off: Vec<FunctionOff>,
}

/// A session, as its agent knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    pub key: SessionKey,
    pub retention: Retention,
    pub state: SessionState,
    pub dp_rank: u32,
    /// Counts finished turns.
    pub turns: u64,
    /// Counts turns inside the engine.
    pub turns_running: u32,
    /// The session runs at most one turn at a time.
    pub exclusive: bool,
    pub resident_tokens: Option<Figure>,
    /// Time since the end of the session's last turn.
    pub idle: Duration,
    /// The client sends the full history with each turn, so the session can continue on any worker.
    /// It is `whole_history` on the wire.
    pub full_history: bool,
    pub volatile_prefix: Option<VolatilePrefix>,
    /// In unix milliseconds by its agent's clock; 0 if the agent doesn't say. All routers read the
    /// same number, so they agree on which of two sessions is older.
    pub began_unix_ms: u64,
    /// The session that started this one, as a sub-agent. `None` if no turn has named one.
    pub parent: Option<Digest>,
}

/// A text early in a session's prompts that differed in three turns in a row. The engine computes
/// everything after that text again in each turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VolatilePrefix {
    /// Counts prompt tokens before the text; `None` if no shim compared the prompts.
    pub token_index: Option<u64>,
    /// `None` if the prompt is a single text.
    #[serde(flatten)]
    pub place: Option<PromptPlace>,
    /// Counts the turns in which the text differed from the previous turn's.
    pub turns: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PromptPlace {
    pub role: PromptRole,
    /// Index in the list of messages or input items; 0 for parts beside that list.
    pub message: u32,
    /// Index in the message's list of content blocks; 0 where the content is a string.
    pub block: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptRole {
    /// A system message, or a `system` beside the messages.
    System,
    Developer,
    User,
    Assistant,
    Tool,
    Instructions,
    Tools,
    /// A message of any other role, or of none.
    #[serde(other)]
    Other,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RankLoad {
    #[serde(skip)]
    pub dp_rank: u32,
    /// Turns that the agent has admitted and the engine has not ended.
    pub turns_running: u32,
    /// The most turns that may be inside the engine at once.
    pub turns_running_max: u32,
    pub requests_running: Option<Figure>,
    /// In the engine's queue.
    pub requests_waiting: Option<Figure>,
    /// KV that eviction can't free.
    pub pool_used_tokens: Option<Figure>,
    pub pool_total_tokens: Option<Figure>,
    /// KV of pinned sessions. Only closing or demoting them frees it.
    pub pinned_tokens: Option<Figure>,
    /// An upper bound for tagged sessions.
    pub resident_tokens_estimate: Option<Figure>,
    /// Request rows of pinned sessions.
    pub rows_held: Option<Figure>,
    pub rows_total: Option<Figure>,
    pub sessions: u32,
    #[serde(serialize_with = "shown::devices")]
    #[schema(value_type = Vec<shown::ShownDevice<'static>>)]
    pub devices: Vec<Device>,
    /// These turns wait in the agent until the engine has room.
    pub turns_queued: u32,
    /// Free KV, without what eviction can free.
    pub pool_available_tokens: Option<Figure>,
    /// Cached KV that eviction can free.
    pub pool_evictable_tokens: Option<Figure>,
    /// The part of `pinned_tokens` held by engine sessions that this agent didn't open.
    pub foreign_tokens: Option<Figure>,
    pub pages: Option<PageAudit>,
    /// Measured while the engine does nothing else.
    pub prefill_tokens_per_s: Option<Figure>,
    /// What is not computed yet of admitted turns' prompts, without tokens known to be cached.
    pub prefill_backlog_tokens: Option<Figure>,
    /// Absent if the agent doesn't stage prompts.
    pub staged_prefill: Option<StagedPrefill>,
    /// Absent without the shim, and on an engine without such a tier.
    pub host: Option<HostTier>,
}

/// The engine's copies of KV in the host's memory, from which it loads what the device has evicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct HostTier {
    pub total_tokens: Option<Figure>,
    /// Of KV that is on the device too, and of KV that isn't.
    pub used_tokens: Option<Figure>,
    /// The part of `used_tokens` that eviction can free: an estimate. With the write policy
    /// `write_back` also copies of what the device has.
    pub evictable_tokens: Option<Figure>,
    /// On their way to the device.
    pub loading_tokens: Option<Figure>,
    /// On their way from the device.
    pub writing_tokens: Option<Figure>,
    /// As measured; from the agent's settings until a load was measured. Never 0.
    pub load_tokens_per_s: Option<Figure>,
}

/// The queue of long prompts that the engine computes in stages before their turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct StagedPrefill {
    /// Tokens of all waiting prompts that are neither computed nor in the engine.
    pub tokens: u64,
    pub prompts: u32,
    /// Depends on the engine's measured rate.
    pub stage_tokens: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The next report arrives within this time.
    pub interval: Duration,
    /// In order; never empty.
    pub ranks: Vec<RankLoad>,
    /// Why the engine can't take turns, or which device fails.
    pub unhealthy: Option<String>,
    /// The agent takes no new sessions and finishes running turns.
    pub draining: bool,
    /// Why the engine holds resources that only its restart frees.
    pub restart_required: Option<String>,
    /// Why the engine runs no turns by its operator's wish, such as a pause. Turns wait in the
    /// agent.
    pub held: Option<String>,
    pub weights: Weights,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{field} is {value:?}, which is no address; set the agent's advertise.host to a host")]
    Address {
        field: &'static str,
        /// The field's value.
        value: String,
    },
    #[error("{field} is {value}, which is impossible")]
    Impossible {
        field: &'static str,
        /// The field's value.
        value: u64,
    },
    /// The value is unspecified, or unknown to this build.
    #[error("{field} has the unknown value {value}")]
    Unknown {
        field: &'static str,
        /// The field's value.
        value: i32,
    },
    #[error("a session has an invalid key")]
    Id(#[from] id::Error),
}

impl EngineFacts {
    /// Whether the engine serves `model`: one of its models, one of its adapters as it lists them,
    /// or `model:adapter`. With an empty `model` before the colon, any of its models will do.
    #[must_use]
    pub fn serves(&self, model: &str) -> bool {
        if self.models.iter().any(|served| served == model) {
            return true;
        }
        let adapter_of = |served: &str| model.strip_prefix(served)?.strip_prefix(':');
        let models = self.models.iter().map(String::as_str).chain([""]);
        let adapters = models.filter_map(adapter_of).chain([model]);
        match &self.adapters {
            Some(loaded) => adapters.into_iter().any(|name| loaded.iter().any(|it| it == name)),
            // The engine refuses an adapter that it doesn't have.
            None => adapters.into_iter().any(|name| name != model),
        }
    }

    /// The models are first, then the adapters.
    pub fn served_names(&self) -> impl Iterator<Item = &str> {
        let adapters = self.adapters.iter().flatten();
        self.models.iter().chain(adapters).map(String::as_str)
    }
}

impl Retention {
    /// Without this engine flag, no session can have the retention.
    #[must_use]
    pub fn engine_flag(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Tagged => Some("--enable-session-radix-cache"),
            Self::Pinned => Some("--enable-streaming-session"),
        }
    }

    /// JSON, headers and metrics have this name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Tagged => "tagged",
            Self::Pinned => "pinned",
        }
    }
}

impl SessionState {
    /// JSON and metrics have this name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Idle => "idle",
            Self::Running => "running",
            Self::Closing => "closing",
            Self::Lost => "lost",
            Self::Demoted => "demoted",
        }
    }
}

impl PromptRole {
    /// JSON and metrics have this name.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(models: &[&str], adapters: Option<&[&str]>) -> EngineFacts {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        EngineFacts {
            version: String::new(),
            models: names(models),
            page_tokens: 1,
            context_tokens: 1,
            vocabulary: None,
            streaming_sessions: false,
            radix_sessions: false,
            instance: String::new(),
            disaggregation: "null".to_owned(),
            shortens_prompts: false,
            adapters: adapters.map(names),
            transfer: None,
        }
    }

    #[test]
    fn an_engine_serves_its_models_and_the_adapters_that_it_has() {
        let with_sql = engine(&["qwen:7b"], Some(&["sql"]));
        for served in ["qwen:7b", "qwen:7b:sql", ":sql", "sql"] {
            assert!(with_sql.serves(served), "{served}");
        }
        for other in ["qwen", "7b", "qwen:7b:chess", "llama:sql", ":chess", "", "qwen:7bsql"] {
            assert!(!with_sql.serves(other), "{other}");
        }
        let names: Vec<&str> = with_sql.served_names().collect();
        assert_eq!(names, ["qwen:7b", "sql"]);
        let unknown = engine(&["m"], None);
        assert!(unknown.serves("m:any") && unknown.serves(":any"), "its engine knows");
        assert!(!unknown.serves("n") && !unknown.serves("n:any") && !unknown.serves("many"));
        assert!(!engine(&["m"], Some(&[])).serves("m:any"));
    }
}

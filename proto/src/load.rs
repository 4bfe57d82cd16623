//! The types in which an agent reports its engine, its sessions and its load to routers.
//!
//! A *worker* is one data-parallel (DP) rank of the agent's engine. A *session* is an ordered list
//! of turns that share a growing prefix; a *turn* is one request and its answer. A *request row* is
//! a slot of the engine for one running request or one pinned session.
//!
//! The agent's `owner` and `ledger` fill these types, and `control_port` sends them. The router's
//! `fleet` receives them for placement, and `http` shows them to operators as JSON. This module
//! measures nothing. The child `figure` has numbers with their
//! source and age, `bounds` says how much an agent may report, `pages` has the result
//! of a page audit, `weights` names an engine's weights, `parts` has parts of a description, and
//! `transfer` says how an engine hands over KV. The child `wire` converts from and to the wire
//! format and rejects impossible values, so the router doesn't check again.

mod bounds;
mod figure;
mod pages;
mod parts;
mod transfer;
mod weights;
mod wire;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::{
    bounds::RANKS_MAX,
    figure::{Figure, Ratio, Source},
    pages::{NamedFinding, PageAudit, PageClasses, PageFinding},
    parts::{FunctionOff, ModelFiles, RetentionOff},
    transfer::{EngineRole, KvTransfer},
    weights::{InvalidWeights, WEIGHTS, WantedWeights, Weights},
};
use crate::id::{self, Digest, SessionKey};

/// How an engine keeps a session's KV between turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
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

/// Lifecycle state of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionState {
    /// The agent has asked the engine to open the session.
    Opening,
    /// Open, no turn inside the engine.
    Idle,
    /// Open, at least one turn inside the engine.
    Running,
    /// The session closes when its running turn has ended.
    Closing,
    /// The engine restarted, so the session's KV and history are gone.
    Lost,
    /// A pinned session whose KV is in the radix tree for now, where the engine can evict it.
    Demoted,
}

/// A device of a worker: a GPU, or a MIG slice of a GPU. Unknown values are absent, never zero.
/// Its many fields: one for each field of the wire format.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Device {
    /// The UUID that NVML reports. Without NVML, the engine's name of the device, such as `cpu`.
    pub uuid: String,
    /// Marketing name; may be empty.
    pub name: String,
    /// Index in the agent's NVML. A MIG slice has the index of its GPU.
    pub index: Option<u32>,
    /// PCI address such as `00000000:1B:00.0`. A MIG slice has the address of its GPU.
    pub pci_address: Option<String>,
    /// UUID of the GPU to which this MIG slice belongs; absent for a whole GPU.
    pub parent_uuid: Option<String>,
    /// The NUMA node of host memory nearest to the device.
    pub numa_node: Option<u32>,
    /// Device memory, bytes.
    pub memory_total_bytes: Option<u64>,
    /// Device memory used by all processes, bytes.
    pub memory_used_bytes: Option<u64>,
    /// Device memory reserved by the driver and not counted as used, bytes.
    pub memory_reserved_bytes: Option<u64>,
    /// Share of the last sample period in which a kernel ran, 0..=100.
    pub utilization_percent: Option<u32>,
    /// Share of the last sample period in which device memory was read or written, 0..=100.
    pub memory_utilization_percent: Option<u32>,
    /// Temperature of the GPU chip.
    pub temperature_celsius: Option<u32>,
    /// Power draw of the GPU board.
    pub power_milliwatts: Option<u32>,
    /// Device memory of the engine's processes, bytes.
    pub engine_bytes: Option<Figure>,
    /// Size of the rank's KV pool on this device, bytes.
    pub kv_pool_bytes: Option<Figure>,
    /// The part of the pool that is not free, bytes. Includes cached KV.
    pub kv_used_bytes: Option<Figure>,
    /// The part of the pool held by pinned sessions, bytes. Only closing or demoting them frees it.
    pub kv_pinned_bytes: Option<Figure>,
    /// The part of the pool that eviction can free, bytes.
    pub kv_reclaimable_bytes: Option<Figure>,
    /// Why work on the device fails or can't be trusted; absent if the device is healthy.
    pub unhealthy: Option<String>,
    /// Milliseconds between NVML's readings and the sending of this message.
    pub age_ms: Option<u32>,
}

/// Facts about the engine that don't change until it restarts, except its adapters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineFacts {
    /// SGLang's version, as the engine reports it.
    pub version: String,
    /// Names under which the model is served; never empty.
    pub models: Vec<String>,
    /// Tokens per page of the KV pool.
    pub page_tokens: u32,
    /// Maximum of prompt plus answer, tokens.
    pub context_tokens: u32,
    /// Largest token id plus one, if known.
    pub vocabulary: Option<u32>,
    /// Whether the engine runs with streaming sessions, which pinned sessions need.
    pub streaming_sessions: bool,
    /// Whether the engine runs with a session radix cache, which tagged sessions need.
    pub radix_sessions: bool,
    /// Identity of the engine process. It changes with every restart.
    pub instance: String,
    /// Disaggregation mode: `null`, `prefill` or `decode`.
    pub disaggregation: String,
    /// Whether the engine cuts prompts that are longer than its context, instead of refusing them.
    pub shortens_prompts: bool,
    /// Names of the LoRA adapters that are loaded, in order. `None` if the agent doesn't read them.
    /// They may change while the engine runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Vec<String>>,
    /// How the engine hands over KV. `None` if it runs whole turns, or if the agent doesn't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer: Option<KvTransfer>,
}

/// The fixed sizes of one DP rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rank {
    /// The data-parallel rank.
    pub dp_rank: u32,
    /// Size of the rank's KV pool, tokens.
    pub pool_tokens: u64,
    /// Number of request rows: the most turns and pinned sessions that can exist at once.
    pub rows: u32,
    /// Devices that the rank runs on.
    pub devices: Vec<Device>,
}

/// What an agent and its engine are. Its many fields: one for each fact that routers ask for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Description {
    /// The agent's name, unique in the fleet.
    pub agent_id: String,
    /// Start time of the agent process, in unix nanoseconds; identifies the process.
    pub epoch: u64,
    /// TCP port that takes turns.
    pub data_port: u16,
    /// Host and port under which routers reach the data port. `None`: `data_port`, on the host of
    /// the control port.
    pub data_address: Option<String>,
    /// URL under which routers reach the control port. `None`: as they dialled it.
    pub control_url: Option<String>,
    /// Whether the data port speaks TLS.
    pub data_tls: bool,
    /// The engine next to the agent.
    pub engine: EngineFacts,
    /// The DP ranks in order; never empty.
    pub ranks: Vec<Rank>,
    /// Retentions that the engine can keep safely, best first. They may change while it runs.
    pub retentions: Vec<Retention>,
    /// The other retentions, and why each is not offered.
    pub retentions_off: Vec<RetentionOff>,
    /// How many turns of one exclusive session may wait for its running turn. See
    /// [`Session::exclusive`].
    pub turns_queued_per_session_max: u32,
    /// Hash and size of the model's tokenizer and chat template files; absent if the agent can't
    /// read the model's folder.
    pub model_files: Option<ModelFiles>,
    /// SGLang versions on which the agent trims full histories of pinned sessions, including the
    /// engine's own version. Trimming means that the engine gets only the part of a history that
    /// its session doesn't hold. Empty: the agent doesn't trim. It is `trims` on the wire.
    #[serde(rename = "trims")]
    pub trim_sglang_versions: Vec<String>,
    /// The functions that are off on the shim of some rank, or on the only trimmer.
    pub shim_functions_off: Vec<FunctionOff>,
}

/// A session, as its agent knows it. Its many fields: one for each fact of the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The session's identity.
    pub key: SessionKey,
    /// How the engine keeps the session's KV.
    pub retention: Retention,
    /// Lifecycle state.
    pub state: SessionState,
    /// The DP rank that holds the session's KV.
    pub dp_rank: u32,
    /// Number of finished turns.
    pub turns: u64,
    /// Number of turns inside the engine.
    pub turns_running: u32,
    /// Whether the session runs at most one turn at a time.
    pub exclusive: bool,
    /// Tokens of the session's KV on its worker.
    pub resident_tokens: Option<Figure>,
    /// Time since the end of the session's last turn.
    pub idle: Duration,
    /// Whether the client sends the full history with each turn. The session can then continue on
    /// any worker. It is `whole_history` on the wire.
    pub full_history: bool,
    /// A text early in the session's prompts that differs from turn to turn; `None` if there is no
    /// such text.
    pub volatile_prefix: Option<VolatilePrefix>,
    /// When the session began, in unix milliseconds by its agent's clock. 0 if the agent doesn't
    /// say. All routers read the same number, so they agree on which of two sessions is older.
    pub began_unix_ms: u64,
    /// The session that started this one, as a sub-agent. `None` if no turn has named one.
    pub parent: Option<Digest>,
}

/// A text early in a session's prompts that differed in three turns in a row. The engine computes
/// everything after that text again in each turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct VolatilePrefix {
    /// Number of prompt tokens before the text; `None` if no shim compared the prompts.
    pub token_index: Option<u64>,
    /// The text's place in the request body; `None` if the prompt is a single text.
    #[serde(flatten)]
    pub place: Option<PromptPlace>,
    /// The number of turns in which the text differed from the previous turn's.
    pub turns: u64,
}

/// A place in a request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct PromptPlace {
    /// The part of the body.
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

/// The load of one rank. Its many fields: one for each field of the wire format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankLoad {
    /// The data-parallel rank.
    pub dp_rank: u32,
    /// Turns that the agent has admitted and the engine has not ended.
    pub turns_running: u32,
    /// The most turns that may be inside the engine at once.
    pub turns_running_max: u32,
    /// Requests in the engine's running batch.
    pub requests_running: Option<Figure>,
    /// Requests in the engine's waiting queue.
    pub requests_waiting: Option<Figure>,
    /// KV that eviction can't free, tokens.
    pub pool_used_tokens: Option<Figure>,
    /// Size of the pool, tokens.
    pub pool_total_tokens: Option<Figure>,
    /// KV held by pinned sessions, tokens. Only closing or demoting the sessions frees it.
    pub pinned_tokens: Option<Figure>,
    /// Upper bound of the KV of tagged sessions, tokens.
    pub resident_tokens_estimate: Option<Figure>,
    /// Request rows held by pinned sessions.
    pub rows_held: Option<Figure>,
    /// Request rows in total.
    pub rows_total: Option<Figure>,
    /// Sessions open on the rank.
    pub sessions: u32,
    /// The rank's devices with their readings.
    pub devices: Vec<Device>,
    /// Turns that wait in the agent until the engine has room.
    pub turns_queued: u32,
    /// Free KV, tokens.
    pub pool_available_tokens: Option<Figure>,
    /// Cached KV that eviction can free, tokens.
    pub pool_evictable_tokens: Option<Figure>,
    /// The part of `pinned_tokens` held by engine sessions that this agent didn't open.
    pub foreign_tokens: Option<Figure>,
    /// The newest page audit: how many pages each kind of owner has, and the faults.
    pub pages: Option<PageAudit>,
    /// Prompt tokens per second that the engine computes while it does nothing else, as measured.
    pub prefill_tokens_per_s: Option<Figure>,
    /// Prompt tokens of admitted turns that are not computed yet, without tokens known to be
    /// cached.
    pub prefill_backlog_tokens: Option<Figure>,
    /// The queue of staged prefills; absent if the agent doesn't stage prompts.
    pub staged_prefill: Option<StagedPrefill>,
}

/// The prompts that wait in staged prefill: long prompts that the engine computes in stages before
/// their turns, with shorter prompts between the stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StagedPrefill {
    /// Tokens of all waiting prompts that are neither computed nor in the engine.
    pub tokens: u64,
    /// Number of waiting prompts.
    pub prompts: u32,
    /// Tokens per stage, at the engine's measured rate.
    pub stage_tokens: u64,
}

/// One load report of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// The next report arrives within this time.
    #[serde(skip)]
    pub interval: Duration,
    /// Load of each DP rank, in order; never empty.
    pub ranks: Vec<RankLoad>,
    /// Why the engine can't take turns, or which device fails; absent if the engine is healthy.
    pub unhealthy: Option<String>,
    /// Whether the agent drains: it takes no new sessions and finishes running turns.
    pub draining: bool,
    /// Why the engine holds resources that only its restart frees; absent if no restart is needed.
    pub restart_required: Option<String>,
    /// Why the engine runs no turns by its operator's wish, such as a pause; absent if it runs
    /// them. Turns wait in the agent.
    pub held: Option<String>,
    /// The engine's weights.
    pub weights: Weights,
}

/// Why a message from an agent was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A required field is absent.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// An address that isn't one.
    #[error("{field} is {value:?}, which is no address; set the agent's advertise.host to a host")]
    Address {
        /// The field's name.
        field: &'static str,
        /// The field's value.
        value: String,
    },
    /// A value that no worker can have.
    #[error("{field} is {value}, which is impossible")]
    Impossible {
        /// The field's name.
        field: &'static str,
        /// The field's value.
        value: u64,
    },
    /// An enum value that is unspecified or unknown to this build.
    #[error("{field} has the unknown value {value}")]
    Unknown {
        /// The field's name.
        field: &'static str,
        /// The field's value.
        value: i32,
    },
    /// The identifiers of a session are out of bounds.
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

    /// Returns the names of all that the engine serves: its models, then its adapters.
    pub fn served_names(&self) -> impl Iterator<Item = &str> {
        let adapters = self.adapters.iter().flatten();
        self.models.iter().chain(adapters).map(String::as_str)
    }
}

impl Retention {
    /// Returns the engine's flag without which no session can have this retention.
    #[must_use]
    pub fn engine_flag(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Tagged => Some("--enable-session-radix-cache"),
            Self::Pinned => Some("--enable-streaming-session"),
        }
    }

    /// Returns the name used in JSON, headers and metrics.
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
    /// Returns the name used in JSON and metrics.
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
    /// Returns the name used in JSON and metrics.
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

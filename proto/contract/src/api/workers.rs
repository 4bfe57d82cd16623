//! The state and figures of each worker, and the agents that have sent no description yet.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::load::{EngineFacts, FunctionOff, Rank, RankLoad, Retention, RetentionOff, shown};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Workers {
    #[schema(required)]
    pub workers: Vec<Worker>,
    #[schema(required)]
    pub unheard: Vec<UnheardAgent>,
}

/// One rank of an engine with its agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Worker {
    /// `agent/rank`.
    pub worker: String,
    pub agent: String,
    pub dp_rank: u32,
    /// URL of the agent's control port.
    pub control: String,
    /// Who lists the agent: `static`, `file`, `dns`, `kubernetes` or `announce`.
    pub sources: Vec<String>,
    /// No source lists the agent any more.
    pub leaving: bool,
    /// `host:port` of the agent's data port.
    pub data: String,
    /// `aggregated`, `prefill` or `decode`.
    pub role: String,
    pub advertised_control: Option<String>,
    /// `fresh`, `stale`, `lost`, `unhealthy`, `held`, `draining` or `disaggregated`.
    pub state: String,
    /// Why the state isn't `fresh`.
    pub reason: String,
    /// The time since the agent was last heard.
    pub heartbeat_age_ms: Option<u64>,
    pub report_age_ms: Option<u64>,
    /// Why only a restart of the engine frees what the engine holds.
    pub restart_required: Option<String>,
    pub weights: Option<String>,
    /// Turns that this router has sent there.
    pub turns_in_flight_here: u32,
    pub turns_estimate: Option<u32>,
    #[serde(serialize_with = "shown::load")]
    #[schema(value_type = Option<shown::ShownLoad<'static>>)]
    pub load: Option<RankLoad>,
    pub kv: Kv,
    pub engine: EngineFacts,
    /// The best is first.
    #[schema(value_type = Vec<Retention>)]
    pub retentions: Vec<String>,
    pub retentions_off: Vec<RetentionOff>,
    /// SGLang versions on which the agent trims full histories.
    pub trims: Vec<String>,
    pub shim_functions_off: Vec<FunctionOff>,
    pub rank: Option<Rank>,
}

/// Which blocks of a worker the router knows to be resident.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Kv {
    /// `live`, `snapshot` or `unknown`.
    pub state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_tokens: Option<u32>,
    /// Why they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// A block on both the device and the host counts twice.
    pub resident_blocks: u64,
}

/// An agent that the router knows by its address alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct UnheardAgent {
    pub control: String,
    pub state: String,
    pub reason: String,
    pub sources: Vec<String>,
    pub leaving: bool,
}

impl Worker {
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.state == "fresh"
    }
}

//! What `berth doctor` knows of a fleet: the input of the checks. Pure.
//!
//! Absent facts are unknown, never assumed.

use proto::load::FunctionOff;
use serde_json::Value;

use crate::api::{Fleet, Worker};

#[derive(Debug, Clone, Default)]
pub struct Facts {
    pub routers: Vec<RouterFacts>,
    pub agents: Vec<AgentFacts>,
    /// Routers and agents of Berth on this host, as far as this user may see them.
    pub processes: Vec<ProcessFacts>,
    /// Certificate files of this host that settings name.
    pub certificates: Vec<CertificateFacts>,
    /// How long the load balancer before the routers keeps idle connections, as the caller says.
    pub balancer_keep_alive_ms: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    /// The port that was meant.
    Port,
    /// Another port of Berth, or another server; the text says which.
    OtherPort(&'static str),
    /// Nothing, or nothing that could be understood; the text says why.
    Nothing(String),
    /// The port refuses the key, token or certificate of the caller.
    Refused(String),
}

#[derive(Debug, Clone)]
pub struct RouterFacts {
    /// The URL of the data port.
    pub url: String,
    pub reach: Reach,
    pub version: Option<String>,
    /// Negative: its clock is behind this host's.
    pub clock_ahead_ms: Option<i64>,
    pub fleet: Option<Fleet>,
    /// The effective settings, from the admin port.
    pub settings: Option<Value>,
}

#[derive(Debug, Clone)]
pub struct AgentFacts {
    /// The URL of the control port.
    pub url: String,
    pub reach: Reach,
    pub agent_id: Option<String>,
    /// Tells this process of the agent from every other.
    pub epoch: Option<u64>,
    /// Hash of the tokenizer's files; `Some(None)`: the agent has none.
    pub tokenizer: Option<Option<Vec<u8>>>,
    /// SGLang versions on which the agent trims full histories. Empty: it doesn't trim.
    pub trims: Option<Vec<String>>,
    pub shim_functions_off: Vec<FunctionOff>,
    /// Negative: its clock is behind this host's.
    pub clock_ahead_ms: Option<i64>,
    /// The effective settings, from the admin port.
    pub settings: Option<Value>,
    /// The engine's own `/server_info`, or why it can't be read.
    pub engine: Option<Result<Value, String>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessFacts {
    pub name: String,
    pub pid: u32,
    pub descriptors_max: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    pub path: String,
    /// Negative: the certificate has expired.
    pub days_left: i64,
}

impl Facts {
    /// As the first router says that gave its workers.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        let fleet = self.routers.iter().find_map(|router| router.fleet.as_ref());
        fleet.into_iter().flat_map(|fleet| &fleet.workers)
    }

    /// One worker of each agent, for what all ranks of an engine share.
    pub fn engines(&self) -> impl Iterator<Item = &Worker> {
        self.workers().filter(|worker| worker.dp_rank == 0)
    }
}

#[must_use]
pub fn setting<'a>(settings: &'a Value, name: &str) -> &'a Value {
    name.split('.').fold(settings, |value, key| &value[key])
}

//! What `berth doctor` knows of a fleet: the input of the checks. Pure.
//!
//! Absent facts are unknown, never assumed.

use proto::load::FunctionOff;
use serde_json::Value;

use crate::api::{Fleet, Worker};

/// All that is known.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The routers that were asked.
    pub routers: Vec<RouterFacts>,
    /// The agents that were asked.
    pub agents: Vec<AgentFacts>,
    /// Berth's processes on this host.
    pub processes: Vec<ProcessFacts>,
    /// The certificates on this host that settings name.
    pub certificates: Vec<CertificateFacts>,
    /// How long the load balancer before the routers keeps idle connections, as the caller says.
    pub balancer_keep_alive_ms: Option<u64>,
}

/// What answers at an address.
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

/// A router.
#[derive(Debug, Clone)]
pub struct RouterFacts {
    /// URL of its data port.
    pub url: String,
    /// What answers there.
    pub reach: Reach,
    /// Its version.
    pub version: Option<String>,
    /// How far its clock is ahead of this host's.
    pub clock_ahead_ms: Option<i64>,
    /// What it knows of the workers.
    pub fleet: Option<Fleet>,
    /// Its effective settings, from its admin port.
    pub settings: Option<Value>,
}

/// An agent.
#[derive(Debug, Clone)]
pub struct AgentFacts {
    /// URL of its control port.
    pub url: String,
    /// What answers there.
    pub reach: Reach,
    /// Its id.
    pub agent_id: Option<String>,
    /// Tells this process of the agent from every other.
    pub epoch: Option<u64>,
    /// Hash of the tokenizer's files; `Some(None)`: the agent has none.
    pub tokenizer: Option<Option<Vec<u8>>>,
    /// SGLang versions on which the agent trims full histories.
    pub trims: Option<Vec<String>>,
    /// The functions of its shim that are off.
    pub shim_functions_off: Vec<FunctionOff>,
    /// How far its clock is ahead of this host's.
    pub clock_ahead_ms: Option<i64>,
    /// Its effective settings, from its admin port.
    pub settings: Option<Value>,
    /// The engine's own `/server_info`, or why it can't be read.
    pub engine: Option<Result<Value, String>>,
}

/// A process of Berth on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessFacts {
    /// `berth-router` or `berth-agent`.
    pub name: String,
    /// Its process id.
    pub pid: u32,
    /// The most file descriptors that it may have.
    pub descriptors_max: u64,
}

/// A certificate in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// The file.
    pub path: String,
    /// Days until it expires; negative: it has expired.
    pub days_left: i64,
}

impl Facts {
    /// Returns the workers, as the first router that knows them says.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        let fleet = self.routers.iter().find_map(|router| router.fleet.as_ref());
        fleet.into_iter().flat_map(|fleet| &fleet.workers)
    }

    /// Returns one worker of each agent: what all ranks of an engine share.
    pub fn engines(&self) -> impl Iterator<Item = &Worker> {
        self.workers().filter(|worker| worker.dp_rank == 0)
    }
}

/// Returns a setting by its name, such as `listen.data_addr`.
#[must_use]
pub fn setting<'a>(settings: &'a Value, name: &str) -> &'a Value {
    name.split('.').fold(settings, |value, key| &value[key])
}

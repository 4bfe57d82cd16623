//! What `berth doctor` knows of a fleet: the input of the checks. Pure.
//!
//! Absent facts are unknown, never assumed.

use std::collections::BTreeMap;

use contract::{
    api::{Worker, Workers},
    load::{Description, Device},
};
use serde_json::Value;

#[derive(Debug, Clone, Default)]
pub struct Facts {
    pub routers: Vec<Asked>,
    pub agents: Vec<Asked>,
    /// The most file descriptors of each router and agent of this host, as far as this user may see
    /// them.
    pub descriptors_max: BTreeMap<String, u64>,
    /// The days that certificates have left, by their files on this host that settings name.
    /// Negative: the certificate has expired.
    pub certificate_days: BTreeMap<String, i64>,
    /// How long the load balancer before the routers keeps idle connections, as the caller says.
    pub balancer_keep_alive_ms: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Reach {
    /// The port that was meant.
    #[default]
    Port,
    /// Another port of Berth, or another server; the text says which.
    OtherPort(&'static str),
    /// Nothing, or nothing that could be understood; the text says why.
    Nothing(String),
    /// The port refuses the key, token or certificate of the caller.
    Refused(String),
}

/// A router or an agent that was asked.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// The URL of the router's data port, or of the agent's control port.
    pub url: String,
    pub reach: Reach,
    /// Negative: its clock is behind this host's.
    pub clock_ahead_ms: Option<i64>,
    /// The effective settings, from the admin port. Null: unknown.
    pub settings: Value,
    /// Of a router.
    pub version: Option<String>,
    /// What a router says of its workers.
    pub fleet: Option<Workers>,
    /// What an agent says of itself and its engine.
    pub description: Option<Description>,
    /// The own `/server_info` of an agent's engine, or why it can't be read.
    pub engine: Option<Result<Value, String>>,
}

impl Facts {
    /// As the first router says that gave its workers.
    pub fn fleet(&self) -> Option<&Workers> {
        self.routers.iter().find_map(|router| router.fleet.as_ref())
    }

    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.fleet().into_iter().flat_map(|fleet| &fleet.workers)
    }

    /// One worker of each agent, for what all ranks of an engine share.
    pub fn engines(&self) -> impl Iterator<Item = &Worker> {
        self.workers().filter(|worker| worker.dp_rank == 0)
    }

    pub fn devices(&self) -> impl Iterator<Item = (&Worker, &Device)> {
        let loads = self.workers().filter_map(|worker| Some((worker, worker.load.as_ref()?)));
        loads.flat_map(|(worker, load)| load.devices.iter().map(move |device| (worker, device)))
    }

    #[must_use]
    pub fn agent_of(&self, worker: &Worker) -> Option<&Asked> {
        self.agents.iter().find(|agent| agent.agent_id() == Some(&worker.agent))
    }
}

impl Asked {
    #[must_use]
    pub fn agent_id(&self) -> Option<&str> {
        self.description.as_ref().map(|it| it.agent_id.as_str())
    }

    #[must_use]
    pub fn server_info(&self) -> Option<&Value> {
        self.engine.as_ref()?.as_ref().ok()
    }

    /// Whether a text of the settings isn't empty.
    #[must_use]
    pub fn is_set(&self, name: &str) -> bool {
        setting(&self.settings, name).as_str().is_some_and(|text| !text.is_empty())
    }

    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        setting(&self.settings, name).as_u64()
    }
}

#[must_use]
pub fn setting<'a>(settings: &'a Value, name: &str) -> &'a Value {
    name.split('.').fold(settings, |value, key| &value[key])
}

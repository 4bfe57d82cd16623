//! Plans what `berth init` writes: from the engines of a host to settings and files. Pure.

pub mod engine;
mod files;
pub mod host;

use std::path::PathBuf;

use serde::Serialize;

use self::{
    engine::FoundEngine,
    files::Templates,
    host::{EngineProcess, Host},
};
use crate::{
    args::Supervisor,
    flags::{self, EngineFlag},
};

/// The first engine has these ports. The ports of each further one are 10 higher.
const AGENT_PORTS: [u16; 3] = [31_000, 31_001, 31_002];
const ROUTER_PORTS: [u16; 2] = [8080, 8081];
/// An engine has at least one GPU, and hosts have at most 16.
pub const ENGINES_MAX: usize = 16;
const WORKER_ID_BYTES_MAX: usize = 128;
pub const TOKEN_FILE: &str = "router-token";
/// The agent's default of `sessions.pin_budget_ratio`.
const PIN_BUDGET_PERCENT: u64 = 70;
/// The rest of the pool is for running turns.
const PIN_BUDGET_PERCENT_MAX: u64 = 90;
/// The user in the unit of the agent.
const UNIT_USER: &str = "sglang";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wishes {
    pub supervisor: Supervisor,
    /// The host at which routers of other hosts reach the agents. `None`: none do.
    pub address: Option<String>,
    /// Control ports of further agents, for the router.
    pub other_agents: Vec<String>,
    /// The file of the fleet's token.
    pub token_file: Option<PathBuf>,
    /// An absolute path.
    pub folder: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputFile {
    /// Its path in the folder.
    pub name: String,
    pub content: Content,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Text(String),
    /// The text of a program.
    Script(String),
    /// Random, or the token of the file that the user named; nobody else may read it.
    Token,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AgentPlan {
    pub engine: FoundEngine,
    /// `None` if it is unknown.
    pub process: Option<EngineProcess>,
    /// The engine's service of systemd, if its name is one that a path and a script can have.
    engine_unit: Option<String>,
    /// The engine's user, if the unit must name it.
    unit_user: Option<String>,
    pub worker_id: String,
    pub file: String,
    /// Of several agents, each is an instance of a template.
    unit: String,
    /// For data, for control, for admins.
    ports: [u16; 3],
    /// For the router.
    pub control_url: String,
    pub missing: Vec<MissingFlag>,
    /// Pinned sessions need this share of the pool so that one session of full length fits. `None`:
    /// the default does, or no share would.
    pin_budget_percent: Option<u64>,
    /// `None`: the agent's default.
    state_dir: Option<String>,
    /// `None`: where agent and shim look by default.
    shim_socket: Option<String>,
    /// The engine's GPUs, if they are known.
    pub devices: Option<Vec<String>>,
    pub devices_unknown: Option<String>,
}

/// As it is given, with what its lack costs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MissingFlag {
    pub flag: String,
    pub without: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Sorted by their engines' ports.
    pub agents: Vec<AgentPlan>,
    pub files: Vec<OutputFile>,
    pub notes: Vec<String>,
    pub next: Vec<String>,
}

impl Plan {
    /// Where the files are written.
    #[must_use]
    pub fn paths(&self, wishes: &Wishes) -> Vec<PathBuf> {
        self.files.iter().map(|file| wishes.folder.join(&file.name)).collect()
    }
}

impl Wishes {
    /// Where settings lie when the processes run.
    fn etc(&self) -> PathBuf {
        match self.supervisor {
            Supervisor::Systemd => PathBuf::from("/etc/berth"),
            Supervisor::None | Supervisor::Helm => self.folder.clone(),
        }
    }
}

/// The error says what to give.
pub fn plan(
    engines: Vec<(FoundEngine, Option<EngineProcess>)>,
    host: &Host,
    wishes: &Wishes,
) -> Result<Plan, String> {
    if wishes.supervisor == Supervisor::Helm && engines.len() > 1 {
        let ports: Vec<String> = engines.iter().map(|(it, _)| it.port.to_string()).collect();
        return Err(format!(
            "the chart has one agent for each node, and there are engines at the ports {}: name \
             one with --engine",
            ports.join(", ")
        ));
    }
    let agents = plan_agents(engines, host, wishes);
    let templates = Templates::new(&agents, host, wishes);
    let (notes, next) = (templates.lines("notes"), templates.lines("next"));
    let files = templates.files(&agents, wishes);
    Ok(Plan { agents, files, notes, next })
}

fn plan_agents(
    mut engines: Vec<(FoundEngine, Option<EngineProcess>)>,
    host: &Host,
    wishes: &Wishes,
) -> Vec<AgentPlan> {
    engines.sort_by_key(|(engine, _)| engine.port);
    let has_several = engines.len() > 1;
    let control_host = match wishes.address.as_deref() {
        None => "127.0.0.1".to_owned(),
        Some(address) if address.contains(':') => format!("[{address}]"),
        Some(address) => address.to_owned(),
    };
    let mut kv_events_port = flags::KV_EVENTS_PORT;
    let mut agents = vec![];
    for (number, (engine, process)) in (0..).zip(engines) {
        let port = engine.port;
        let instance = |prefix: &str| match has_several {
            true => format!("{prefix}{port}"),
            false => String::new(),
        };
        let unit_folder = format!("berth{}", instance("/"));
        let ports = AGENT_PORTS.map(|port| port + 10 * number);
        let missing = missing_flags(&engine, kv_events_port);
        // Each rank has a port for events and one to send them again.
        kv_events_port = kv_events_port.saturating_add(engine.ranks.saturating_mul(2));
        let user = process.as_ref().and_then(|it| it.user.as_deref());
        let engine_unit = process.as_ref().and_then(|it| it.unit.as_deref());
        let environment = process.as_ref().and_then(|it| it.environment.as_ref());
        let engine_socket = environment.and_then(|it| it.shim_socket.as_deref());
        let is_systemd = wishes.supervisor == Supervisor::Systemd;
        let devices = host::devices(&engine.gpus, environment, host);
        agents.push(AgentPlan {
            engine_unit: engine_unit.filter(|unit| is_name(unit)).map(str::to_owned),
            unit_user: user.filter(|it| *it != UNIT_USER && is_name(it)).map(str::to_owned),
            worker_id: worker_id(&host.name, port),
            file: format!("agent{}.toml", instance("-")),
            unit: format!("berth-agent{}.service", instance("@")),
            ports,
            control_url: format!("http://{control_host}:{}", ports[1]),
            missing,
            pin_budget_percent: pin_budget_percent(&engine),
            state_dir: is_systemd.then(|| format!("/var/lib/{unit_folder}")),
            shim_socket: match is_systemd {
                true => Some(format!("/run/{unit_folder}/engine.sock")),
                false => engine_socket.filter(|path| path.starts_with('/')).map(str::to_owned),
            },
            devices_unknown: devices.as_ref().err().cloned(),
            devices: devices.ok(),
            engine,
            process,
        });
    }
    agents
}

/// A name for the agent of the engine at `port`, unique in the fleet.
#[must_use]
pub fn worker_id(host: &str, port: u16) -> String {
    let is_legal = |it: &char| it.is_ascii_alphanumeric() || "._-".contains(*it);
    let name: String = host.chars().filter(is_legal).take(WORKER_ID_BYTES_MAX - 6).collect();
    format!("{}-{port}", if name.is_empty() { "node" } else { &name })
}

/// Whether a path and a script can have the name.
fn is_name(text: &str) -> bool {
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._@-".contains(&byte);
    !text.is_empty() && !text.starts_with(['.', '-']) && text.bytes().all(is_legal)
}

/// The flags that the engine lacks, with KV events from `kv_events_port` on.
#[must_use]
pub fn missing_flags(engine: &FoundEngine, kv_events_port: u16) -> Vec<MissingFlag> {
    let whole = |flag: EngineFlag| match flag {
        flags::KV_EVENTS | flags::KV_REPLAY => {
            flags::kv_events_flag(kv_events_port, kv_events_port.saturating_add(engine.ranks))
        }
        flag => flag.name.to_owned(),
    };
    let missing = engine.missing.iter();
    missing.map(|flag| MissingFlag { flag: whole(*flag), without: flag.why }).collect()
}

fn pin_budget_percent(engine: &FoundEngine) -> Option<u64> {
    let whole = engine.context_tokens.checked_mul(100)?;
    let percent = whole.div_ceil(engine.pool_tokens.max(1));
    (PIN_BUDGET_PERCENT + 1..=PIN_BUDGET_PERCENT_MAX).contains(&percent).then_some(percent)
}

#[cfg(test)]
mod tests;

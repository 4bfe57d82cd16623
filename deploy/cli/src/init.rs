//! Plans what `berth init` writes: from the engines of a host to settings and files. Pure.

pub mod agent;
pub mod engine;
pub mod helm;
pub mod host;
pub mod router;
pub mod systemd;

use std::path::PathBuf;

use self::{
    engine::{EngineRole, FoundEngine},
    host::{EngineProcess, Host},
};
use crate::{args::Supervisor, text::clean};

/// The first engine has these ports. The ports of each further one are 10 higher.
const AGENT_PORTS: [u16; 3] = [31_000, 31_001, 31_002];
const ROUTER_PORTS: [u16; 2] = [8080, 8081];
/// An engine has at least one GPU, and hosts have at most 16.
pub const ENGINES_MAX: usize = 16;
const WORKER_ID_BYTES_MAX: usize = 128;
pub const TOKEN_FILE: &str = "router-token";

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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentPlan {
    pub engine: FoundEngine,
    /// `None` if it is unknown.
    pub process: Option<EngineProcess>,
    pub worker_id: String,
    pub file: String,
    /// The instance of the agent's unit, if a host has several agents.
    pub instance: Option<String>,
    /// For data, for control, for admins.
    pub ports: [u16; 3],
    /// The first port that the engine may take for KV events.
    pub kv_events_port: u16,
    /// The engine's GPUs, or why they aren't known.
    pub devices: Result<Vec<String>, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Sorted by their engines' ports.
    pub agents: Vec<AgentPlan>,
    pub files: Vec<OutputFile>,
    pub notes: Vec<String>,
    pub next: Vec<String>,
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
    let agents = plan_agents(engines, host);
    let paths = Paths::new(wishes);
    let mut files = vec![];
    for agent in &agents {
        files.push(text_file(&agent.file, agent::settings(agent, &paths, wishes)));
    }
    files.push(text_file("router.toml", router::settings(&agents, &paths, wishes)));
    if wishes.address.is_some() {
        files.push(OutputFile { name: TOKEN_FILE.into(), content: Content::Token });
    }
    match wishes.supervisor {
        Supervisor::None => {}
        Supervisor::Systemd => files.extend(systemd::files(&agents, wishes)),
        Supervisor::Helm => {
            files.extend(agents.iter().map(|it| text_file("values.yaml", helm::values(it, host))));
        }
    }
    let notes = notes(&agents, host, wishes);
    let next = next_steps(&agents, wishes);
    Ok(Plan { agents, files, notes, next })
}

fn plan_agents(
    mut engines: Vec<(FoundEngine, Option<EngineProcess>)>,
    host: &Host,
) -> Vec<AgentPlan> {
    engines.sort_by_key(|(engine, _)| engine.port);
    let has_several = engines.len() > 1;
    let mut kv_events_port = crate::flags::KV_EVENTS_PORT;
    let mut agents = vec![];
    for (number, (engine, process)) in (0..).zip(engines) {
        let own_kv_events_port = kv_events_port;
        // Each rank has a port for events and one to send them again.
        kv_events_port = kv_events_port.saturating_add(engine.ranks.saturating_mul(2));
        let port = engine.port;
        agents.push(AgentPlan {
            worker_id: worker_id(&host.name, port),
            file: if has_several { format!("agent-{port}.toml") } else { "agent.toml".into() },
            instance: has_several.then(|| port.to_string()),
            ports: AGENT_PORTS.map(|port| port + 10 * number),
            kv_events_port: own_kv_events_port,
            devices: host::devices(&engine.gpus, process.as_ref(), host),
            engine,
            process,
        });
    }
    agents
}

fn worker_id(host: &str, port: u16) -> String {
    let is_legal = |it: &char| it.is_ascii_alphanumeric() || "._-".contains(*it);
    let name: String = host.chars().filter(is_legal).take(WORKER_ID_BYTES_MAX - 6).collect();
    format!("{}-{port}", if name.is_empty() { "node" } else { &name })
}

/// Where files lie when the processes run.
#[derive(Debug)]
pub struct Paths {
    supervisor: Supervisor,
    /// `None`: agents need no token.
    pub token_file: Option<String>,
}

impl Paths {
    fn new(wishes: &Wishes) -> Self {
        let folder = match wishes.supervisor {
            Supervisor::Systemd => PathBuf::from("/etc/berth"),
            Supervisor::None | Supervisor::Helm => wishes.folder.clone(),
        };
        let token_file =
            wishes.address.is_some().then(|| folder.join(TOKEN_FILE).display().to_string());
        Self { supervisor: wishes.supervisor, token_file }
    }

    /// `None`: the agent's default.
    #[must_use]
    pub fn state_dir(&self, agent: &AgentPlan) -> Option<String> {
        let is_set = self.supervisor == Supervisor::Systemd;
        is_set.then(|| format!("/var/lib/{}", unit_folder(agent)))
    }

    /// `None`: where agent and shim look by default.
    #[must_use]
    pub fn shim_socket(&self, agent: &AgentPlan) -> Option<String> {
        if self.supervisor == Supervisor::Systemd {
            return Some(format!("/run/{}/engine.sock", unit_folder(agent)));
        }
        let environment = agent.process.as_ref()?.environment.as_ref()?;
        environment.shim_socket.clone().filter(|path| path.starts_with('/'))
    }
}

/// systemd makes this folder for a unit, below those for state and for sockets.
#[must_use]
pub fn unit_folder(agent: &AgentPlan) -> String {
    match &agent.instance {
        None => "berth".into(),
        Some(instance) => format!("berth/{instance}"),
    }
}

fn text_file(name: &str, text: String) -> OutputFile {
    OutputFile { name: name.to_owned(), content: Content::Text(text) }
}

fn notes(agents: &[AgentPlan], host: &Host, wishes: &Wishes) -> Vec<String> {
    let mut notes = vec![];
    let own_ports = agents.iter().flat_map(|agent| agent.ports).chain(ROUTER_PORTS);
    let taken: Vec<String> =
        own_ports.filter(|it| host.ports_taken.contains(it)).map(|it| it.to_string()).collect();
    if !taken.is_empty() && wishes.supervisor != Supervisor::Helm {
        notes.push(format!(
            "something listens at {} now: Berth itself, or change the addresses in [listen]",
            taken.join(", ")
        ));
    }
    for agent in agents.iter().filter(|it| it.engine.role != EngineRole::Aggregated) {
        let url = &agent.engine.url;
        notes.push(format!(
            "the engine at {url} is half of a pair: the router needs the agent of the other half \
             too, see --other-agent"
        ));
    }
    if let (Some(_), None) = (&wishes.address, &wishes.token_file) {
        notes.push(format!(
            "{TOKEN_FILE} is new: give it to berth init on the fleet's other hosts, with \
             --token-file"
        ));
    }
    notes
}

fn next_steps(agents: &[AgentPlan], wishes: &Wishes) -> Vec<String> {
    let folder = clean(&wishes.folder.display().to_string());
    let mut steps = vec![];
    match wishes.supervisor {
        Supervisor::None => {
            for agent in agents {
                let file = &agent.file;
                let user = agent.process.as_ref().and_then(|it| it.user.as_deref());
                let user = user.map(|user| format!(", as the engine's user {user}"));
                let user = user.unwrap_or_default();
                steps.push(format!("berth-agent --config {folder}/{file}{user}"));
            }
            steps.push(format!("berth-router --config {folder}/router.toml"));
        }
        Supervisor::Systemd => steps.push(format!("as root: {folder}/install.sh")),
        Supervisor::Helm => {
            steps.push(format!(
                "helm install berth deploy/helm/berth --values {folder}/values.yaml"
            ));
        }
    }
    steps.push("berth doctor".into());
    steps
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(clean(text)).to_string()
}

#[cfg(test)]
mod tests;

//! Makes of the arguments what each engine and its agent get: ports, GPUs, names and settings.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use service::{server, settings::Problems};
use worker_agent::config::{Args as AgentArgs, Config as AgentConfig, tables::ListenTable};

use crate::{
    args::Args,
    engine_command::{DEFAULT_PORT, EngineCommand, GivenCommand, Place},
};

/// Engines take ports near their own.
const PORT_STEP: u16 = 10;
/// What `berth init` gives to the first agent of a host is the default of its settings; the ports
/// of each further one are so much higher.
const AGENT_PORT_STEP: u16 = 10;

/// Why nothing is started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text says what to give.
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Settings(#[from] Problems),
    #[error("port {port} of the engine is taken; stop what listens there, or give another --port")]
    PortTaken {
        /// On loopback.
        port: u16,
    },
}

#[derive(Debug)]
pub struct EnginePlan {
    pub name: String,
    pub url: String,
    /// `None` if it runs already.
    pub command: Option<EngineCommand>,
    pub agent: AgentConfig,
}

/// One for each engine.
///
/// # Errors
/// Wrong arguments or settings, or a port that is taken.
pub fn plan(args: &Args) -> Result<Vec<EnginePlan>, Error> {
    let count = args.engines().map_err(Error::Usage)?;
    let given = GivenCommand(&args.command);
    let given_port = given.port().map_err(Error::Usage)?;
    if count > 1 && !args.command.is_empty() && (given_port.is_some() || args.no_flags) {
        let text = "several engines can't have one port: leave out --port of the engine and \
                    --no-flags";
        return Err(Error::Usage(text.into()));
    }
    if given.has_key() && std::env::var_os("BERTH_ENGINE_API_KEY").is_none() {
        let text = "the engine has an --api-key: set BERTH_ENGINE_API_KEY to it, so that the \
                    agent may use the engine";
        return Err(Error::Usage(text.into()));
    }
    let mut ports = FreePorts::default();
    let mut plans = vec![];
    for number in 0..count {
        let name = if count > 1 { format!("engine {number}") } else { "engine".to_owned() };
        let (url, command) = match args.engine.get(number) {
            Some(url) => (url.trim_end_matches('/').to_owned(), None),
            None => {
                let command = engine_command(args, number, &mut ports)?;
                (format!("http://{}:{}", command.host, command.port), Some(command))
            }
        };
        let agent = agent_config(args, &url, number)?;
        plans.push(EnginePlan { name, url, command, agent });
    }
    let engine_ports = BTreeSet::from_iter(plans.iter().map(|plan| plan.agent.engine_port()));
    if engine_ports.len() < count {
        let text = "two engines have one port, by which agents name their files".to_owned();
        return Err(Error::Usage(text));
    }
    if count > 1 && plans.iter().any(|it| !it.agent.files.shim_socket.as_os_str().is_empty()) {
        let text = "files.shim_socket of --agent-config is one engine's, and there are several";
        return Err(Error::Usage(text.into()));
    }
    Ok(plans)
}

fn engine_command(
    args: &Args,
    number: usize,
    ports: &mut FreePorts,
) -> Result<EngineCommand, Error> {
    let given = GivenCommand(&args.command);
    let ranks = given.dp_ranks();
    let kv_events = ports.take(cli::flags::KV_EVENTS_PORT, 1, ranks.saturating_mul(2));
    let place = Place {
        free_port: ports.take(DEFAULT_PORT, PORT_STEP, 1),
        kv_events_ports: (kv_events, kv_events.saturating_add(ranks)),
        gpus: args.gpus.chunks(args.tp.into()).nth(number).unwrap_or_default().to_vec(),
    };
    let command = given.complete(&place, !args.no_flags).map_err(Error::Usage)?;
    let is_free = match command.host.trim_matches(['[', ']']).parse() {
        Ok(host) => is_free_at(host, command.port),
        Err(_) => true,
    };
    if !is_free {
        return Err(Error::PortTaken { port: command.port });
    }
    Ok(command)
}

fn agent_config(args: &Args, url: &str, number: usize) -> Result<AgentConfig, Problems> {
    let load = |listen: Option<&ListenTable>, worker_id| {
        AgentConfig::load(AgentArgs {
            config: args.agent_config.clone(),
            engine: Some(url.to_owned()),
            worker_id,
            handover: false,
            data_addr: listen.map(|it| it.data_addr),
            control_addr: listen.map(|it| it.control_addr),
            admin_addr: listen.map(|it| it.admin_addr),
            join: args.join.iter().cloned().collect(),
            address: args.address.clone(),
            check_config: false,
        })
    };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    // Any name will do until the engine's port is known.
    let first = load(None, None).or_else(|_| load(None, Some("engine".to_owned())))?;
    let worker_id = match first.worker_id.as_str() {
        "" | "engine" => cli::init::worker_id(host.trim(), first.engine_port()),
        given if number == 0 => given.to_owned(),
        given => format!("{given}-{number}"),
    };
    let mut listen = first.listen;
    for address in [&mut listen.data_addr, &mut listen.control_addr, &mut listen.admin_addr] {
        if args.join.is_some() && args.agent_config.is_none() {
            address.set_ip(Ipv4Addr::UNSPECIFIED.into());
        }
        let further = AGENT_PORT_STEP.saturating_mul(u16::try_from(number).unwrap_or(u16::MAX));
        if address.port() != 0 {
            address.set_port(address.port().saturating_add(further));
        }
    }
    let mut config = load(Some(&listen), Some(worker_id))?;
    let own_gpus = args.gpus.chunks(args.tp.into()).nth(number).unwrap_or_default();
    if config.gpu.devices.is_empty() {
        config.gpu.devices = own_gpus.iter().map(u16::to_string).collect();
    }
    Ok(config)
}

/// Ports of loopback that nothing has, and that were not taken for an engine before this one.
#[derive(Debug, Default)]
struct FreePorts(BTreeSet<u16>);

impl FreePorts {
    /// The first of `count` ports in a row, from `from` on in steps of `step`. If there are none,
    /// `from`: the engine says what it thinks of it.
    fn take(&mut self, from: u16, step: u16, count: u16) -> u16 {
        let row = |first: u16| first..=first.saturating_add(count - 1);
        let is_free = |port: u16| !self.0.contains(&port) && is_free(port);
        let mut firsts = (from..u16::MAX - count).step_by(step.into());
        let first = firsts.find(|first| row(*first).all(is_free)).unwrap_or(from);
        self.0.extend(row(first));
        first
    }
}

fn is_free(port: u16) -> bool {
    is_free_at(Ipv4Addr::LOCALHOST.into(), port)
}

fn is_free_at(host: IpAddr, port: u16) -> bool {
    server::bind(SocketAddr::new(host, port)).is_ok()
}

/// How long an engine may take to end.
#[must_use]
pub fn stop_max(args: &Args) -> Duration {
    Duration::from_secs(args.stop_seconds_max.into())
}

//! Makes the settings and the command of each engine, agent and router of a fleet.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use super::{FleetPlan, Process, program};
use crate::certificates::{self, Files};

pub(super) fn engine(folder: &Path, number: usize, host: &str, plan: &FleetPlan) -> Process {
    let mut command = vec![program("engine-sim"), format!("--host={host}")];
    let usual = [
        "--port=30000",
        "--enable-streaming-session",
        "--enable-session-radix-cache",
        "--enable-cache-report",
        "--enable-metrics",
        "--health-ms=0",
        "--decode-log-interval=1",
        "--context-length=32768",
        "--chunked-prefill-size=2048",
        "--prefill-tokens-per-s=40000",
    ];
    command.extend(usual.map(str::to_owned));
    command.push(format!("--seed={number}"));
    command.extend_from_slice(&plan.engine_flags);
    command.extend(plan.flags_by_engine.get(number).into_iter().flatten().cloned());
    if plan.has_handover {
        let socket = state_folder(folder, number).join("engine-30000.sock");
        command.push(format!("--shim-socket={}", socket.display()));
    }
    Process::new(
        folder,
        &format!("engine-{number}"),
        command,
        format!("http://{host}:30000/health"),
    )
}

/// Returns the folder of an agent's journal and of its socket for the shim.
fn state_folder(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("state-{number}"))
}

pub(super) fn agent(
    folder: &Path,
    number: usize,
    host: &str,
    plan: &FleetPlan,
    certificates: Option<&Files>,
) -> anyhow::Result<Process> {
    let state = state_folder(folder, number);
    let mut settings = format!("worker_id = \"w{number}\"\n");
    let port = plan.engine_port;
    writeln!(settings, "engine.url = \"http://{host}:{port}\"\nfiles.state_dir = {state:?}")?;
    writeln!(settings, "engine.vocabulary = 320\ngpu.nvml_library = \"no-nvml\"")?;
    writeln!(settings, "shutdown.handover = {}", plan.has_handover)?;
    for (key, port) in [("data", 31000), ("control", 31001), ("admin", 31002)] {
        writeln!(settings, "listen.{key}_addr = \"{host}:{port}\"")?;
    }
    if let Some(files) = certificates {
        let path = |name| files.path(name);
        let (cert, key) = (path("agent.pem"), path("agent.key"));
        writeln!(settings, "tls.cert = {cert:?}\ntls.key = {key:?}")?;
        writeln!(settings, "tls.client_ca = {:?}", path("ca.pem"))?;
        writeln!(settings, "tls.client_names = [{:?}]", certificates::ROUTER)?;
        writeln!(settings, "auth.token_file = {:?}", path("tokens"))?;
    }
    settings.push_str(&plan.agent_settings);
    let file = folder.join(format!("agent-{number}.toml"));
    std::fs::write(&file, settings)?;
    let command = vec![program("berth-agent"), "--config".into(), file.display().to_string()];
    let ready_url = format!("http://{host}:31002/readyz");
    let mut agent = Process::new(folder, &format!("agent-{number}"), command, ready_url);
    agent.descriptors = plan.descriptors;
    Ok(agent)
}

pub(super) fn router_settings(
    host: &str,
    agents: &[String],
    keys: &Path,
    certificates: Option<&Files>,
) -> anyhow::Result<String> {
    let scheme = if certificates.is_some() { "https" } else { "http" };
    let workers: Vec<_> = agents.iter().map(|host| format!("{scheme}://{host}:31001")).collect();
    let mut settings = format!("workers = {workers:?}\n");
    writeln!(settings, "listen.data_addr = \"{host}:8080\"\nlisten.admin_addr = \"{host}:8081\"")?;
    writeln!(settings, "auth.keys_file = {keys:?}\nauth.metrics_auth = \"none\"")?;
    if let Some(files) = certificates {
        let path = |name| files.path(name);
        let (cert, key) = (path("front.pem"), path("front.key"));
        writeln!(settings, "tls.cert = {cert:?}\ntls.key = {key:?}")?;
        let (cert, key) = (path("router.pem"), path("router.key"));
        writeln!(settings, "agents.cert = {cert:?}\nagents.key = {key:?}")?;
        writeln!(settings, "agents.ca = {:?}", path("ca.pem"))?;
        writeln!(settings, "agents.server_name = {:?}", certificates::AGENT)?;
        writeln!(settings, "agents.token_file = {:?}", path("tokens"))?;
    }
    Ok(settings)
}

pub(super) fn router(
    folder: &Path,
    number: usize,
    host: &str,
    settings: &str,
    plan: &FleetPlan,
) -> anyhow::Result<Process> {
    let file = folder.join(format!("router-{number}.toml"));
    std::fs::write(&file, settings)?;
    let command = vec![program("berth-router"), "--config".into(), file.display().to_string()];
    let ready_url = format!("http://{host}:8081/readyz");
    let mut router = Process::new(folder, &format!("router-{number}"), command, ready_url);
    router.descriptors = plan.descriptors;
    Ok(router)
}

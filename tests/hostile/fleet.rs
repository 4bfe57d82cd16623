//! Starts engines, agents and routers as processes, and signals and limits them.
//!
//! Each process listens on a loopback address of its own with its default ports, so nothing must be
//! read from logs. Dropping a [`Fleet`] kills its processes.

use std::{
    fmt::Write as _,
    fs::File,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicU8, Ordering},
    time::Duration,
};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use service::clock::now;
use tests::{keys::key_text, web::Web};
use tokio::{
    process::{Child, Command},
    runtime::Handle,
};

/// The longest wait for a process to be ready or to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// The keys that the routers know. `ops` is an admin.
pub(crate) const KEYS: [&str; 4] = ["alice", "bob", "mallory", "ops"];

/// Where a scenario's files are.
#[derive(Debug)]
pub(crate) struct Place {
    folder: PathBuf,
    /// The runtime of the attacks.
    pub(crate) attackers: Handle,
    /// Removed at the end, unless the logs are kept.
    _temporary: Option<tempfile::TempDir>,
}

impl Place {
    pub(crate) fn new(kept: Option<PathBuf>, attackers: Handle) -> anyhow::Result<Self> {
        if let Some(folder) = kept {
            std::fs::create_dir_all(&folder)?;
            return Ok(Self { folder, attackers, _temporary: None });
        }
        let temporary = tempfile::tempdir()?;
        Ok(Self { folder: temporary.path().to_owned(), attackers, _temporary: Some(temporary) })
    }
}

/// How a fleet is started.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) engines: usize,
    pub(crate) routers: usize,
    /// Flags of the engines, beside those that all scenarios need.
    pub(crate) engine_flags: Vec<String>,
    /// Settings of the agents and of the routers, as dotted TOML keys.
    pub(crate) agent_settings: String,
    pub(crate) router_settings: String,
    /// The limit on open descriptors of agents and routers.
    pub(crate) descriptors: Option<u32>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            engines: 1,
            routers: 1,
            engine_flags: vec![],
            agent_settings: String::new(),
            router_settings: String::new(),
            descriptors: None,
        }
    }
}

/// One process.
#[derive(Debug)]
pub(crate) struct Process {
    command: Vec<String>,
    log: PathBuf,
    descriptors: Option<u32>,
    child: Option<Child>,
    /// A URL that answers 200 while the process is ready.
    ready_url: String,
}

impl Process {
    fn start(&mut self) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = match self.descriptors {
            None => Command::new(&self.command[0]),
            Some(limit) => {
                let mut shell = Command::new("sh");
                let script = format!("ulimit -n {limit} && exec \"$0\" \"$@\"");
                shell.args(["-c", &script, &self.command[0]]);
                shell
            }
        };
        command.args(&self.command[1..]).kill_on_drop(true).stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let started =
            command.spawn().with_context(|| format!("{} can't start", self.command[0]))?;
        self.child = Some(started);
        Ok(())
    }

    fn pid(&self) -> anyhow::Result<Pid> {
        let id = self.child.as_ref().and_then(Child::id).context("the process has ended")?;
        Pid::from_raw(i32::try_from(id)?).context("no process id")
    }

    pub(crate) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill_process(self.pid()?, signal)?)
    }

    /// Ends the process by a signal, and waits for its end.
    pub(crate) async fn end(&mut self, signal: Signal) -> anyhow::Result<()> {
        self.signal(signal)?;
        let mut child = self.child.take().context("the process has ended")?;
        tokio::time::timeout(PATIENCE, child.wait()).await.context("it did not end")??;
        Ok(())
    }

    /// Starts the process again with the same flags.
    pub(crate) fn restart(&mut self) -> anyhow::Result<()> {
        self.start()
    }

    /// Waits until the process is ready.
    pub(crate) async fn ready(&mut self, web: &Web) -> anyhow::Result<()> {
        let began = now();
        loop {
            let answer = tokio::time::timeout(PATIENCE, web.get(&self.ready_url)).await?;
            if answer.is_ok_and(|answer| answer.status == 200) {
                return Ok(());
            }
            if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().ok()?) {
                let log = std::fs::read_to_string(&self.log).unwrap_or_default();
                bail!("{} ended with {status}: {log}", self.command[0]);
            }
            if began.elapsed() > PATIENCE {
                bail!("{} is not ready: {}", self.command[0], self.ready_url);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the memory of the process that is resident, in bytes.
    pub(crate) fn resident_bytes(&self) -> anyhow::Result<u64> {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.pid()?.as_raw_nonzero()))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
        let kib = line.split_whitespace().nth(1).context("no figure")?;
        Ok(kib.parse::<u64>()? * 1024)
    }
}

/// The processes of one scenario.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) engines: Vec<Process>,
    pub(crate) agents: Vec<Process>,
    pub(crate) routers: Vec<Process>,
    /// The hosts of the agents and of the routers.
    pub(crate) agent_hosts: Vec<String>,
    pub(crate) router_hosts: Vec<String>,
    pub(crate) web: Web,
    pub(crate) place: Place,
}

impl Fleet {
    /// Starts all processes, and waits until all are ready.
    pub(crate) async fn start(place: Place, plan: &Plan) -> anyhow::Result<Self> {
        let web = Web::default();
        let folder = place.folder.clone();
        let keys = write_keys(&folder)?;
        let mut fleet = Self {
            engines: vec![],
            agents: vec![],
            routers: vec![],
            agent_hosts: vec![],
            router_hosts: vec![],
            web,
            place,
        };
        for number in 0..plan.engines {
            let host = own_host();
            fleet.engines.push(engine(&folder, number, &host, &plan.engine_flags));
            fleet.agents.push(agent(&folder, number, &host, plan)?);
            fleet.agent_hosts.push(host);
        }
        for number in 0..plan.routers {
            let host = own_host();
            fleet.routers.push(router(&folder, number, &host, &fleet.agent_hosts, &keys, plan)?);
            fleet.router_hosts.push(host);
        }
        let web = fleet.web.clone();
        let (engines, agents, routers) =
            (fleet.engines.iter_mut(), fleet.agents.iter_mut(), fleet.routers.iter_mut());
        for process in engines.chain(agents).chain(routers) {
            process.start()?;
            process.ready(&web).await?;
        }
        Ok(fleet)
    }

    /// Returns the URL of a route of a router's data port.
    pub(crate) fn url(&self, router: usize, path: &str) -> String {
        format!("http://{}:8080{path}", self.router_hosts[router])
    }
}

/// Returns a loopback address that nothing else of this process uses.
fn own_host() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = std::process::id();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{}.{number}", 1 + process % 250, 1 + process / 250 % 250)
}

/// Returns the path of a binary, which is beside this one.
fn program(name: &str) -> String {
    let this = std::env::current_exe().unwrap_or_default();
    this.with_file_name(name).display().to_string()
}

fn process(folder: &Path, name: &str, command: Vec<String>, ready_url: String) -> Process {
    let log = folder.join(format!("{name}.log"));
    Process { command, log, descriptors: None, child: None, ready_url }
}

fn engine(folder: &Path, number: usize, host: &str, flags: &[String]) -> Process {
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
    command.extend_from_slice(flags);
    process(folder, &format!("engine-{number}"), command, format!("http://{host}:30000/health"))
}

fn agent(folder: &Path, number: usize, host: &str, plan: &Plan) -> anyhow::Result<Process> {
    let state = folder.join(format!("state-{number}"));
    let mut settings = format!("worker_id = \"w{number}\"\n");
    writeln!(settings, "engine.url = \"http://{host}:30000\"\nfiles.state_dir = {state:?}")?;
    writeln!(settings, "engine.vocabulary = 320\ngpu.nvml_library = \"no-nvml\"")?;
    for (key, port) in [("data", 31000), ("control", 31001), ("admin", 31002)] {
        writeln!(settings, "listen.{key}_addr = \"{host}:{port}\"")?;
    }
    settings.push_str(&plan.agent_settings);
    let file = folder.join(format!("agent-{number}.toml"));
    std::fs::write(&file, settings)?;
    let command = vec![program("berth-agent"), "--config".into(), file.display().to_string()];
    let ready_url = format!("http://{host}:31002/readyz");
    let mut agent = process(folder, &format!("agent-{number}"), command, ready_url);
    agent.descriptors = plan.descriptors;
    Ok(agent)
}

fn router(
    folder: &Path,
    number: usize,
    host: &str,
    agents: &[String],
    keys: &Path,
    plan: &Plan,
) -> anyhow::Result<Process> {
    let workers: Vec<String> = agents.iter().map(|host| format!("http://{host}:31001")).collect();
    let mut settings = format!("workers = {workers:?}\n");
    writeln!(settings, "listen.data_addr = \"{host}:8080\"\nlisten.admin_addr = \"{host}:8081\"")?;
    writeln!(settings, "auth.keys_file = {keys:?}\nauth.metrics_auth = \"none\"")?;
    settings.push_str(&plan.router_settings);
    let file = folder.join(format!("router-{number}.toml"));
    std::fs::write(&file, settings)?;
    let command = vec![program("berth-router"), "--config".into(), file.display().to_string()];
    let ready_url = format!("http://{host}:8081/readyz");
    let mut router = process(folder, &format!("router-{number}"), command, ready_url);
    router.descriptors = plan.descriptors;
    Ok(router)
}

/// Writes the file of keys. A key's secret is its name with `-secret`.
fn write_keys(folder: &Path) -> anyhow::Result<PathBuf> {
    let secrets = KEYS.map(|name| (name, format!("{name}-secret")));
    let keys = secrets.each_ref().map(|(name, secret)| {
        (*name, secret.as_str(), if *name == "ops" { "admin = true" } else { "" })
    });
    let file = folder.join("keys.toml");
    std::fs::write(&file, key_text(&keys))?;
    Ok(file)
}

/// Returns the value of the header that carries a key.
pub(crate) fn credential(name: &str) -> String {
    format!("Bearer {name}-secret")
}

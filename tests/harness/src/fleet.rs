//! Starts engines, agents and routers as processes, and signals and limits them.
//!
//! Each process listens on a loopback address of its own with its default ports, so nothing must be
//! read from logs. Dropping [`Processes`] kills them. The programs are those beside the one that
//! runs.

mod programs;

use std::{
    fmt::Write as _,
    fs::File,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicU8, Ordering},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use axum::body::Body;
use http::Method;
use rustix::process::{Pid, Signal, kill_process};
use service::{clock::now, tls::client::ClientTls};
use tokio::process::{Child, Command};

use self::programs::{agent, engine, router, router_settings};
use crate::{
    certificates::{Authority, Files},
    keys::key_text,
    web::Web,
};

/// The longest wait for a process to be ready or to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// The keys that the routers know. `ops` is an admin.
pub const KEYS: [&str; 4] = ["alice", "bob", "mallory", "ops"];

/// Where a case's files are, and how it is run.
#[derive(Debug)]
pub struct Place {
    folder: PathBuf,
    /// What random choices begin from.
    pub seed: u64,
    /// Whether the case should be short, with fewer rounds.
    pub is_quick: bool,
    /// Removed at the end, unless the logs are kept.
    _temporary: Option<tempfile::TempDir>,
}

impl Place {
    /// Returns a place with the files in the folder `kept`, or in a temporary one.
    ///
    /// # Errors
    /// Fails if no folder can be made.
    pub fn new(kept: Option<PathBuf>, seed: u64, is_quick: bool) -> anyhow::Result<Self> {
        if let Some(folder) = kept {
            std::fs::create_dir_all(&folder)?;
            return Ok(Self { folder, seed, is_quick, _temporary: None });
        }
        let temporary = tempfile::tempdir()?;
        let folder = temporary.path().to_owned();
        Ok(Self { folder, seed, is_quick, _temporary: Some(temporary) })
    }

    /// Returns the folder of settings and logs.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a file beside the logs.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub fn write(&self, name: &str, text: &str) -> std::io::Result<()> {
        std::fs::write(self.folder.join(name), text)
    }
}

/// How a fleet is started.
#[derive(Debug, Clone)]
pub struct FleetPlan {
    /// The number of engines, each with an agent.
    pub engines: usize,
    /// The number of routers.
    pub routers: usize,
    /// The port at which agents reach their engines. The engines listen at 30000.
    pub engine_port: u16,
    /// Flags of the engines, beside those that all cases need.
    pub engine_flags: Vec<String>,
    /// More flags of single engines, by their number.
    pub flags_by_engine: Vec<Vec<String>>,
    /// More settings of all agents: lines of TOML with dotted keys.
    pub agent_settings: String,
    /// More settings of all routers: lines of TOML with dotted keys.
    pub router_settings: String,
    /// Further lines of the settings of single routers, by their number.
    pub own_router_settings: Vec<String>,
    /// How long routers serve on after SIGTERM.
    pub lame_duck_ms: u64,
    /// Whether the routers' settings name the agents.
    pub names_workers: bool,
    /// The limit on open descriptors of agents and routers.
    pub descriptors: Option<u32>,
    /// Whether clients speak TLS to routers, and routers and agents show each other certificates.
    pub has_tls: bool,
    /// Whether an agent that ends by SIGTERM leaves its sessions to the next one. The engines then
    /// have shims, from which the next agent learns what is still there.
    pub has_handover: bool,
}

impl Default for FleetPlan {
    fn default() -> Self {
        Self {
            engines: 1,
            routers: 1,
            engine_port: 30000,
            engine_flags: vec![],
            flags_by_engine: vec![],
            agent_settings: String::new(),
            router_settings: String::new(),
            own_router_settings: vec![],
            lame_duck_ms: 0,
            names_workers: true,
            descriptors: None,
            has_tls: false,
            has_handover: false,
        }
    }
}

/// One process.
#[derive(Debug)]
pub struct Process {
    command: Vec<String>,
    log: PathBuf,
    descriptors: Option<u32>,
    child: Option<Child>,
    /// A URL that answers 200 while the process is ready.
    ready_url: String,
}

impl Process {
    /// Waits for the process's end, without a signal.
    ///
    /// # Errors
    /// Fails if the process has ended before, does not end in time, or fails.
    pub async fn ended(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().context("the process has ended")?;
        let status = tokio::time::timeout(PATIENCE, child.wait()).await;
        let status = status.context("it did not end")??;
        if !status.success() {
            bail!("{} ended with {status}", self.command[0]);
        }
        Ok(())
    }

    /// Describes a process that isn't started yet. `ready_url` answers 200 while it is ready. Its
    /// log is `name.log` in the folder.
    #[must_use]
    pub fn new(folder: &Path, name: &str, command: Vec<String>, ready_url: String) -> Self {
        let log = folder.join(format!("{name}.log"));
        Self { command, log, descriptors: None, child: None, ready_url }
    }

    /// Starts the process, also again with the same flags.
    ///
    /// # Errors
    /// Fails if the program can't be run.
    pub fn start(&mut self) -> anyhow::Result<()> {
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

    /// Sends the process a signal.
    ///
    /// # Errors
    /// Fails if the process has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill_process(self.pid()?, signal)?)
    }

    /// Ends the process by a signal, and waits for its end.
    ///
    /// # Errors
    /// Fails if the process has ended, or does not end in time.
    pub async fn end(&mut self, signal: Signal) -> anyhow::Result<()> {
        self.signal(signal)?;
        let mut child = self.child.take().context("the process has ended")?;
        tokio::time::timeout(PATIENCE, child.wait()).await.context("it did not end")??;
        Ok(())
    }

    /// Waits until the process is ready.
    ///
    /// # Errors
    /// Fails if the process ends, with its log, or isn't ready in time.
    pub async fn ready(&mut self, web: &Web) -> anyhow::Result<()> {
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
    ///
    /// # Errors
    /// Fails if the process has ended.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.pid()?.as_raw_nonzero()))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
        let kib = line.split_whitespace().nth(1).context("no figure")?;
        Ok(kib.parse::<u64>()? * 1024)
    }
}

/// Where users and operators are: at an address that no attacker has.
#[derive(Debug, Clone)]
pub struct Origin {
    address: IpAddr,
    tls: Option<ClientTls>,
}

impl Origin {
    /// Returns a client with connections of its own.
    #[must_use]
    pub fn web(&self) -> Web {
        Web::from_address(self.address, self.tls.clone())
    }
}

/// The processes of one case.
#[derive(Debug)]
pub struct Processes {
    /// The engines, each beside the agent with its number.
    pub engines: Vec<Process>,
    /// The agents.
    pub agents: Vec<Process>,
    /// The routers.
    pub routers: Vec<Process>,
    /// The host of each agent.
    pub agent_hosts: Vec<String>,
    /// The host of each router.
    pub router_hosts: Vec<String>,
    /// Where clients are.
    pub origin: Origin,
    /// A client at [`Processes::origin`].
    pub web: Web,
    /// Where the files are.
    pub place: Place,
    /// Whether a [`FleetPlan`] limits the descriptors.
    pub has_few_descriptors: bool,
    certificates: Option<Files>,
}

impl Processes {
    /// Starts all processes, and waits until all are ready.
    ///
    /// # Errors
    /// Fails if a process can't be started, or isn't ready in time.
    pub async fn start(place: Place, plan: &FleetPlan) -> anyhow::Result<Self> {
        let folder = place.folder.clone();
        let keys = write_keys(&folder)?;
        let certificates = plan.has_tls.then(|| Files::of_fleet(&Authority::new("fleet")));
        // The name in the certificate that the routers show to clients.
        let tls = certificates.as_ref().map(|files| files.client_tls(None, Some("127.0.0.1")));
        let origin = Origin { address: own_host().parse()?, tls };
        let web = origin.web();
        let mut fleet = Self {
            engines: vec![],
            agents: vec![],
            routers: vec![],
            agent_hosts: vec![],
            router_hosts: vec![],
            origin,
            web,
            place,
            has_few_descriptors: plan.descriptors.is_some(),
            certificates,
        };
        let files = fleet.certificates.as_ref();
        for number in 0..plan.engines {
            let host = own_host();
            fleet.engines.push(engine(&folder, number, &host, plan));
            fleet.agents.push(agent(&folder, number, &host, plan, files)?);
            fleet.agent_hosts.push(host);
        }
        for number in 0..plan.routers {
            let host = own_host();
            let named = if plan.names_workers { &fleet.agent_hosts[..] } else { &[] };
            let mut settings = router_settings(&host, named, &keys, files)?;
            writeln!(settings, "timeouts.lame_duck_ms = {}", plan.lame_duck_ms)?;
            settings.push_str(&plan.router_settings);
            settings.push_str(plan.own_router_settings.get(number).map_or("", String::as_str));
            fleet.routers.push(router(&folder, number, &host, &settings, plan)?);
            fleet.router_hosts.push(host);
        }
        let web = fleet.web.clone();
        let (engines, agents, routers) =
            (fleet.engines.iter_mut(), fleet.agents.iter_mut(), fleet.routers.iter_mut());
        let mut all: Vec<&mut Process> = engines.chain(agents).chain(routers).collect();
        for process in &mut all {
            process.start()?;
        }
        for process in all {
            process.ready(&web).await?;
        }
        if plan.names_workers {
            for router in 0..plan.routers {
                fleet.wait_for_workers(router, plan.engines).await?;
            }
        }
        Ok(fleet)
    }

    /// Waits until a router knows the workers of all agents. It is ready as soon as it knows one.
    async fn wait_for_workers(&self, router: usize, count: usize) -> anyhow::Result<()> {
        let (key, url) = (credential("ops"), self.url(router, "/v1/workers"));
        let headers = [("authorization", key.as_str())];
        let began = now();
        loop {
            let answer = self.web.request(Method::GET, &url, &headers, Body::empty()).await?;
            let list = answer.json();
            if list["workers"].as_array().is_some_and(|workers| workers.len() >= count) {
                return Ok(());
            }
            ensure!(began.elapsed() < PATIENCE, "router {router} knows only {list}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns the URL of a route of a router's data port.
    #[must_use]
    pub fn url(&self, router: usize, path: &str) -> String {
        let scheme = if self.certificates.is_some() { "https" } else { "http" };
        format!("{scheme}://{}:8080{path}", self.router_hosts[router])
    }

    /// Returns the URLs of the routers' data ports.
    #[must_use]
    pub fn router_urls(&self) -> Vec<String> {
        (0..self.routers.len()).map(|router| self.url(router, "")).collect()
    }

    /// Returns the URL of a router's admin port.
    #[must_use]
    pub fn router_admin(&self, router: usize) -> String {
        format!("http://{}:8081", self.router_hosts[router])
    }

    /// Returns the URL of an agent's admin port.
    #[must_use]
    pub fn agent_admin(&self, agent: usize) -> String {
        format!("http://{}:31002", self.agent_hosts[agent])
    }
}

/// Returns a loopback address that nothing else of this process uses.
#[must_use]
pub fn own_host() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = std::process::id();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{}.{number}", 1 + process % 250, 1 + process / 250 % 250)
}

/// Returns the path of a binary, which is beside this one.
#[must_use]
pub fn program(name: &str) -> String {
    let this = std::env::current_exe().unwrap_or_default();
    this.with_file_name(name).display().to_string()
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
#[must_use]
pub fn credential(name: &str) -> String {
    format!("Bearer {name}-secret")
}

//! Starts an engine, an agent and a router as processes, with certificates and keys or without.

use std::{
    fs::{self, File},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::Context as _;
use engine_sim::loopback::own_addr;
use harness::{cluster::ready, keys::key_text, web::Web};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use service::{reload, tasks::Tasks, tls::client::ClientFiles};

/// The ports of every fleet; each has an address of its own.
const ENGINE_PORT: u16 = 30000;
const DATA_PORT: u16 = 31000;
const CONTROL_PORT: u16 = 31001;
const ADMIN_PORT: u16 = 31002;
const ROUTER_PORT: u16 = 8080;
const ROUTER_ADMIN_PORT: u16 = 8081;

/// The secret of the client's key.
const SECRET: &str = "sk-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// What protects the connections of a fleet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Security {
    /// Clients reach the router by TLS.
    pub(crate) client_tls: bool,
    /// Router and agent reach each other by TLS, and show each other certificates.
    pub(crate) agent_tls: bool,
    /// Clients have API keys, and routers a token.
    pub(crate) keys: bool,
}

/// How a fleet is started.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) security: Security,
    /// The folder with the programs of agent and router.
    pub(crate) programs: PathBuf,
    /// The time of the engine for a token, in milliseconds.
    pub(crate) step_ms: u32,
    /// A running engine. Not given: the worker has a simulated one of its own.
    pub(crate) engine: Option<SocketAddr>,
    /// The core on which agent and router run. Not given: on all.
    pub(crate) core: Option<u32>,
}

impl Plan {
    /// Returns a fleet of this build without certificates and keys, whose engine takes no time: a
    /// wait for a timer would hide everything else.
    pub(crate) fn own() -> anyhow::Result<Self> {
        let (security, step_ms) = (Security::default(), 0);
        Ok(Self { security, programs: own_programs()?, step_ms, engine: None, core: None })
    }
}

/// Returns the folder of this program, where the others of its build are too.
pub(crate) fn own_programs() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe()?;
    Ok(path.parent().context("a program without a folder")?.to_owned())
}

/// Returns what starts the program, on one core if it is given.
pub(crate) fn command(program: &Path, core: Option<u32>) -> Command {
    let Some(core) = core else { return Command::new(program) };
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string()]).arg(program);
    command
}

/// A process that is killed when dropped.
#[derive(Debug)]
pub(crate) struct Process(Child);

impl Process {
    /// Starts the command. Its log is a file of this name in the folder.
    pub(crate) fn start(folder: &Path, name: &str, mut command: Command) -> anyhow::Result<Self> {
        let log = File::create(folder.join(format!("{name}.log")))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Self(command.spawn().with_context(|| format!("{name} can't start"))?))
    }

    /// Returns the bytes of memory that are resident now, and the most that ever were.
    pub(crate) fn resident_bytes(&self) -> anyhow::Result<(u64, u64)> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let bytes = |name: &str| -> anyhow::Result<u64> {
            let line =
                status.lines().find_map(|line| line.strip_prefix(name)).context("no line")?;
            Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
        };
        Ok((bytes("VmRSS:")?, bytes("VmHWM:")?))
    }

    /// Returns the processor time of all threads so far, in seconds.
    pub(crate) fn processor_seconds(&self) -> anyhow::Result<f64> {
        let mut nanoseconds = 0.0;
        for thread in fs::read_dir(format!("/proc/{}/task", self.0.id()))? {
            // A thread may end meanwhile.
            let Ok(text) = fs::read_to_string(thread?.path().join("schedstat")) else { continue };
            nanoseconds += text.split(' ').next().context("no figure")?.parse::<f64>()?;
        }
        Ok(nanoseconds / 1e9)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An engine and its agent.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) agent: Process,
    host: IpAddr,
    folder: tempfile::TempDir,
    _engine: Option<Process>,
}

impl Worker {
    /// Starts an engine and its agent, and waits until both are ready.
    pub(crate) async fn start(plan: &Plan) -> anyhow::Result<Self> {
        let (host, folder) = (own_addr().ip(), tempfile::tempdir()?);
        write_secrets(folder.path(), host)?;
        let own_engine = SocketAddr::new(host, ENGINE_PORT);
        let engine = match plan.engine {
            None => Some(start_engine(folder.path(), own_engine, plan.step_ms)?),
            Some(_) => None,
        };
        let engine_addr = plan.engine.unwrap_or(own_engine);
        let settings = agent_settings(folder.path(), host, engine_addr, plan.security);
        let config = folder.path().join("agent.toml");
        fs::write(&config, settings)?;
        let mut command = command(&plan.programs.join("berth-agent"), plan.core);
        command.arg("--config").arg(config);
        let agent = Process::start(folder.path(), "berth-agent", command)?;
        ready(&Web::default(), SocketAddr::new(host, ADMIN_PORT)).await;
        Ok(Self { agent, host, folder, _engine: engine })
    }

    /// Returns the address of the agent's port for turns.
    pub(crate) fn data_addr(&self) -> SocketAddr {
        SocketAddr::new(self.host, DATA_PORT)
    }

    /// Returns the address of the agent's control port.
    pub(crate) fn control_addr(&self) -> SocketAddr {
        SocketAddr::new(self.host, CONTROL_PORT)
    }
}

fn start_engine(folder: &Path, addr: SocketAddr, step_ms: u32) -> anyhow::Result<Process> {
    let mut command = Command::new(own_programs()?.join("engine-sim"));
    command.args([
        &format!("--host={}", addr.ip()),
        &format!("--port={}", addr.port()),
        "--enable-streaming-session",
        "--enable-session-radix-cache",
        "--enable-metrics",
        "--health-ms=0",
        "--prefill-tokens-per-s=1e12",
        &format!("--decode-ms-per-step={step_ms}"),
        // Room for a session of some hundred turns.
        "--max-total-tokens=65536",
        "--context-length=32768",
    ]);
    Process::start(folder, "engine-sim", command)
}

/// A worker with a router before it, and a client of the router.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) url: String,
    pub(crate) web: Web,
    /// The header with the client's key.
    pub(crate) authorization: Option<String>,
    pub(crate) router: Process,
    worker: Worker,
}

impl Fleet {
    /// Starts all processes, and waits until they are ready.
    pub(crate) async fn start(plan: &Plan) -> anyhow::Result<Self> {
        let worker = Worker::start(plan).await?;
        let (folder, host, security) = (worker.folder.path(), worker.host, plan.security);
        let config = folder.join("router.toml");
        fs::write(&config, router_settings(folder, host, security))?;
        let mut command = command(&plan.programs.join("berth-router"), plan.core);
        command.arg("--config").arg(config);
        let router = Process::start(folder, "berth-router", command)?;
        ready(&Web::default(), SocketAddr::new(host, ROUTER_ADMIN_PORT)).await;
        let scheme = if security.client_tls { "https" } else { "http" };
        Ok(Self {
            url: format!("{scheme}://{host}:{ROUTER_PORT}/generate"),
            web: client(folder, security)?,
            authorization: security.keys.then(|| format!("Bearer {SECRET}")),
            router,
            worker,
        })
    }

    /// Returns the address of the router's port for turns.
    pub(crate) fn addr(&self) -> SocketAddr {
        SocketAddr::new(self.worker.host, ROUTER_PORT)
    }

    /// Returns the process of the agent.
    pub(crate) fn agent(&self) -> &Process {
        &self.worker.agent
    }

    /// Returns the processor time of router and agent so far, in seconds.
    pub(crate) fn processor_seconds(&self) -> anyhow::Result<f64> {
        Ok(self.router.processor_seconds()? + self.worker.agent.processor_seconds()?)
    }
}

/// Router and agent in one process.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) process: Process,
    pub(crate) addr: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Served {
    /// Serves the plan's engine, and waits until it is ready.
    pub(crate) async fn start(plan: &Plan) -> anyhow::Result<Self> {
        let engine = plan.engine.context("it serves an engine that runs")?;
        let (host, folder) = (own_addr().ip(), tempfile::tempdir()?);
        let config = folder.path().join("agent.toml");
        fs::write(&config, agent_settings(folder.path(), host, engine, plan.security))?;
        let (addr, admin) =
            (SocketAddr::new(host, ROUTER_PORT), SocketAddr::new(host, ROUTER_ADMIN_PORT));
        let mut command = command(&plan.programs.join("berth-serve"), plan.core);
        command.arg("--engine").arg(format!("http://{engine}")).arg("--agent-config").arg(config);
        command.args(["--data-addr", &addr.to_string(), "--admin-addr", &admin.to_string()]);
        let process = Process::start(folder.path(), "berth-serve", command)?;
        ready(&Web::default(), admin).await;
        Ok(Self { process, addr, _folder: folder })
    }
}

/// Returns a client that trusts the fleet's authority if the fleet has TLS.
fn client(folder: &Path, security: Security) -> anyhow::Result<Web> {
    if !security.client_tls {
        return Ok(Web::default());
    }
    let files = ClientFiles { ca: folder.join("ca.pem"), identity: None, server_name: None };
    let metrics = reload::Metrics::default();
    Ok(Web::with_tls(files.start(&metrics, &Tasks::default())?))
}

fn agent_settings(folder: &Path, host: IpAddr, engine: SocketAddr, security: Security) -> String {
    let mut settings = format!(
        "worker_id = \"w0\"\nengine.url = \"http://{engine}\"\n\
         engine.vocabulary = 320\ngpu.nvml_library = \"no-nvml\"\n\
         files.state_dir = {:?}\nlisten.data_addr = \"{host}:{DATA_PORT}\"\n\
         listen.control_addr = \"{host}:{CONTROL_PORT}\"\n\
         listen.admin_addr = \"{host}:{ADMIN_PORT}\"\n",
        folder.join("state")
    );
    if security.agent_tls {
        settings += &identity("tls", folder, "agent");
        settings += &format!("tls.client_ca = {:?}\n", folder.join("ca.pem"));
    }
    if security.keys {
        settings += &format!("auth.token_file = {:?}\n", folder.join("token"));
    }
    settings
}

fn router_settings(folder: &Path, host: IpAddr, security: Security) -> String {
    let scheme = if security.agent_tls { "https" } else { "http" };
    let mut settings = format!(
        "workers = [\"{scheme}://{host}:{CONTROL_PORT}\"]\n\
         listen.data_addr = \"{host}:{ROUTER_PORT}\"\n\
         listen.admin_addr = \"{host}:{ROUTER_ADMIN_PORT}\"\n"
    );
    if security.client_tls {
        settings += &identity("tls", folder, "front");
    }
    if security.agent_tls {
        settings += &identity("agents", folder, "router");
        settings += &format!("agents.ca = {:?}\n", folder.join("ca.pem"));
    }
    if security.keys {
        settings += &format!("auth.keys_file = {:?}\n", folder.join("keys.toml"));
        settings += &format!("agents.token_file = {:?}\n", folder.join("token"));
    }
    settings
}

/// Returns the settings that name a certificate and its key.
fn identity(table: &str, folder: &Path, name: &str) -> String {
    let path = |ending| folder.join(format!("{name}.{ending}"));
    format!("{table}.cert = {:?}\n{table}.key = {:?}\n", path("pem"), path("key"))
}

/// Writes an authority, a certificate for each port of the host, a token, and a file of keys.
fn write_secrets(folder: &Path, host: IpAddr) -> anyhow::Result<()> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    fs::write(folder.join("ca.pem"), authority.pem())?;
    for name in ["agent", "router", "front"] {
        let key = KeyPair::generate()?;
        let certificate =
            CertificateParams::new(vec![host.to_string()])?.signed_by(&key, &authority)?;
        fs::write(folder.join(format!("{name}.pem")), certificate.pem())?;
        fs::write(folder.join(format!("{name}.key")), key.serialize_pem())?;
    }
    fs::write(folder.join("token"), "0123456789abcdef".repeat(4))?;
    Ok(fs::write(folder.join("keys.toml"), key_text(&[("client", SECRET, "")]))?)
}

//! What is compared, and how each is started: on one core, with one engine behind it.

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use engine_sim::loopback::own_addr;
use harness::web::Web;

use crate::fleet::{Fleet, Plan, Process, Served, Worker, command};

/// In the order of the tables.
pub(crate) const NAMES: [&str; 10] = [
    "direct",
    "nginx",
    "sglang-router",
    "smg",
    "vllm-router",
    "agent before",
    "agent",
    "serve",
    "router + agent before",
    "router + agent",
];
/// How the names of an earlier build's contenders end.
pub(crate) const BEFORE: &str = " before";
const PORT: u16 = 8080;
const METRICS_PORT: u16 = 8081;
/// Routers in Python packages take seconds to load.
const START_MAX: Duration = Duration::from_secs(60);

/// What the contenders' starts have in common.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) engine: SocketAddr,
    pub(crate) python: Option<PathBuf>,
    pub(crate) core: u32,
    /// The folder with the programs of an earlier build.
    pub(crate) before: Option<PathBuf>,
}

/// The processes of a contender.
#[derive(Debug)]
enum Running {
    None,
    Peer { process: Process, folder: tempfile::TempDir },
    Agent(Worker),
    Served(Served),
    Both(Box<Fleet>),
}

/// A contender, and where clients reach it.
#[derive(Debug)]
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    pub(crate) addr: SocketAddr,
    running: Running,
}

impl Contender {
    fn processes(&self) -> Vec<&Process> {
        match &self.running {
            Running::None => vec![],
            Running::Peer { process, .. } => vec![process],
            Running::Agent(worker) => vec![&worker.agent],
            Running::Served(served) => vec![&served.process],
            Running::Both(fleet) => vec![&fleet.router, fleet.agent()],
        }
    }

    pub(crate) fn has_processes(&self) -> bool {
        !matches!(self.running, Running::None)
    }

    /// Returns the processor time of all its processes so far, in seconds.
    pub(crate) fn processor_seconds(&self) -> anyhow::Result<f64> {
        self.processes().iter().map(|process| process.processor_seconds()).sum()
    }

    /// Returns the memory of all its processes.
    pub(crate) fn resident_bytes(&self) -> anyhow::Result<u64> {
        self.processes().iter().map(|process| Ok(process.resident_bytes()?.0)).sum()
    }
}

/// Starts a contender. The inner error is why it can't be had here.
pub(crate) async fn start(
    name: &'static str,
    setup: &Setup,
) -> anyhow::Result<Result<Contender, String>> {
    let mut plan = Plan { engine: Some(setup.engine), core: Some(setup.core), ..Plan::own()? };
    if name.ends_with(BEFORE) {
        let Some(before) = &setup.before else { return Ok(Err("no --before".to_owned())) };
        plan.programs.clone_from(before);
    }
    let (addr, running) = match name.trim_end_matches(BEFORE) {
        "direct" => (setup.engine, Running::None),
        "agent" => {
            let worker = Worker::start(&plan).await?;
            (worker.data_addr(), Running::Agent(worker))
        }
        "serve" => {
            let served = Served::start(&plan).await?;
            (served.addr, Running::Served(served))
        }
        "router + agent" => {
            let fleet = Fleet::start(&plan).await?;
            (fleet.addr(), Running::Both(Box::new(fleet)))
        }
        name => {
            let (host, folder) = (own_addr().ip(), tempfile::tempdir()?);
            let command = match peer_command(name, setup, host, &folder)? {
                Ok(command) => command,
                Err(why) => return Ok(Err(why)),
            };
            let process = Process::start(folder.path(), name, command)?;
            (SocketAddr::new(host, PORT), Running::Peer { process, folder })
        }
    };
    let contender = Contender { name, addr, running };
    wait_until_it_answers(&contender).await?;
    Ok(Ok(contender))
}

fn peer_command(
    name: &str,
    setup: &Setup,
    host: IpAddr,
    folder: &tempfile::TempDir,
) -> anyhow::Result<Result<Command, String>> {
    let Setup { engine, python, core, .. } = setup;
    if name == "nginx" {
        let path = PathBuf::from("/usr/sbin/nginx");
        if !path.exists() {
            return Ok(Err("the Debian package nginx is not installed".to_owned()));
        }
        let config = folder.path().join("nginx.conf");
        fs::write(&config, nginx_config(*engine, SocketAddr::new(host, PORT), folder)?)?;
        let mut command = command(&path, Some(*core));
        command.arg("-p").arg(folder.path()).arg("-c").arg(config);
        return Ok(Ok(command));
    }
    let Some(python) = python else {
        return Ok(Err("no --python with its package".to_owned()));
    };
    let module = name.replace('-', "_");
    let mut command = command(python, Some(*core));
    command.args(["-m", &format!("{module}.launch_router")]);
    for (flag, value) in [
        ("--host", host.to_string()),
        ("--port", PORT.to_string()),
        ("--prometheus-host", host.to_string()),
        ("--prometheus-port", METRICS_PORT.to_string()),
        ("--log-level", if name == "vllm-router" { "warning" } else { "warn" }.to_owned()),
        ("--policy", "round_robin".to_owned()),
        ("--worker-urls", format!("http://{engine}")),
    ] {
        command.args([flag, &value]);
    }
    Ok(Ok(command))
}

/// One process with one thread, which keeps its connections to clients and engine.
fn nginx_config(
    engine: SocketAddr,
    addr: SocketAddr,
    folder: &tempfile::TempDir,
) -> anyhow::Result<String> {
    let path = |name: &str| folder.path().join(name).display().to_string();
    let mut config = format!(
        "daemon off; master_process off; worker_processes 1; pid {};\n\
         error_log {} error;\nevents {{ worker_connections 4096; }}\nhttp {{\n\
         access_log off; keepalive_requests 1000000000; client_max_body_size 8m;\n\
         client_body_buffer_size 2m;\n",
        path("nginx.pid"),
        path("error.log"),
    );
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        writeln!(config, "{kind}_temp_path {};", path(kind))?;
    }
    writeln!(
        config,
        "upstream engine {{ server {engine}; keepalive 256; keepalive_requests 1000000000; }}\n\
         server {{ listen {addr}; location / {{ proxy_pass http://engine; proxy_http_version 1.1; \
         proxy_set_header Connection \"\"; proxy_buffering off; proxy_read_timeout 1h; }} }} }}"
    )?;
    Ok(config)
}

async fn wait_until_it_answers(contender: &Contender) -> anyhow::Result<()> {
    let (web, url) = (Web::default(), format!("http://{}/generate", contender.addr));
    let body = serde_json::json!({ "text": "small", "sampling_params": { "max_new_tokens": 1 } });
    let answers = async {
        loop {
            if web.post(&url, &[], &body).await.is_ok_and(|answer| answer.status == 200) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let in_time = tokio::time::timeout(START_MAX, answers).await;
    let why =
        || format!("{} answers no turn after {START_MAX:?}: {}", contender.name, log(contender));
    ensure!(in_time.is_ok(), why());
    Ok(())
}

/// Returns the end of a peer's log.
fn log(contender: &Contender) -> String {
    let Running::Peer { folder, .. } = &contender.running else { return String::new() };
    let path = folder.path().join(format!("{}.log", contender.name));
    let text = fs::read_to_string(path).context("no log").unwrap_or_default();
    let lines: Vec<&str> = text.lines().rev().take(10).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

//! Settings: a TOML file, then environment, then flags. Every default is here with its reason.

use std::{net::SocketAddr, os::unix::fs::MetadataExt as _, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};
use http::{HeaderValue, Uri};
use proto::process::settings::{self, Problems};
use serde::{Deserialize, Serialize};

use crate::{
    gpu::select::Selector,
    show::{AuditArgs, kv::KvArgs},
};

/// How long the agent waits for the end of an aborted turn. The engine acknowledges an abort after
/// the step that runs, which takes seconds at most.
pub const ABORT_MAX: Duration = Duration::from_secs(15);

/// Longest name of an agent; it is a part of what the engine knows sessions by.
pub const WORKER_ID_BYTES_MAX: usize = 128;

/// Command line and environment.
#[derive(Debug, Parser)]
#[command(
    name = "berth-agent",
    version,
    about = "Owns the KV sessions of one SGLang engine",
    args_conflicts_with_subcommands = true
)]
pub struct Args {
    /// Something else than to run an agent.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Settings file (TOML).
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// The engine beside this agent, e.g. http://127.0.0.1:30000
    #[arg(long)]
    pub engine: Option<String>,
    /// Name of this agent, unique in the fleet. Default: the control address.
    #[arg(long, env = "WORKER_ID")]
    pub worker_id: Option<String>,
    /// Where turns come in.
    #[arg(long)]
    pub data_addr: Option<SocketAddr>,
    /// Where routers connect (gRPC).
    #[arg(long)]
    pub control_addr: Option<SocketAddr>,
    /// Metrics, health and readiness.
    #[arg(long)]
    pub admin_addr: Option<SocketAddr>,
    /// Checks the settings, prints them and exits.
    #[arg(long)]
    pub check_config: bool,
}

/// What can be asked of a running agent.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Says who holds each page of the engine's KV pool; exit status 1 if anything is wrong
    Audit(AuditArgs),
    /// Says which blocks are resident on the engine, as routers are told
    Kv(KvArgs),
}

/// Effective settings.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The engine's base URL.
    pub engine: String,
    /// Name of this agent, unique in the fleet; empty: the control address.
    pub worker_id: String,
    /// Turns (HTTP).
    pub data_addr: SocketAddr,
    /// Routers (gRPC).
    pub control_addr: SocketAddr,
    /// Metrics and health (HTTP).
    pub admin_addr: SocketAddr,
    /// A report goes out at least this often; it is the heartbeat routers judge the agent by.
    pub report_interval_ms: u64,
    /// The engine's `/v1/loads` is read this often.
    pub load_interval_ms: u64,
    /// Time for an engine's answer to a control call.
    pub engine_call_ms_max: u64,
    /// A turn that takes longer is aborted.
    pub turn_ms_max: u64,
    /// How long running turns may go on at shutdown.
    pub drain_ms_max: u64,
    /// A session without a turn for so long is closed.
    pub session_idle_ms_max: u64,
    /// Rows of each rank that pinned sessions never take.
    pub rows_reserve: u32,
    /// Share of each rank's pool that pinned sessions may hold.
    pub pin_budget_ratio: f64,
    /// A pinned session idle for so long gives up its KV when someone needs the room.
    pub demote_idle_ms: u64,
    /// Sessions that come back soon are pinned without being asked, where the shim can trim the
    /// whole histories that their clients send. Idle for `demote_idle_ms`, they give their KV up.
    pub auto_pin: bool,
    /// Long prompts are computed before their turns in pieces that take the engine so long, so that
    /// short ones wait for one at most; 0: every prompt goes to the engine whole.
    pub piece_ms: u64,
    /// Turns inside the engine at once, per rank; beyond it they wait.
    pub turns_in_flight_max: u32,
    /// Turns that wait for room in the engine; beyond it 429.
    pub turns_queued_max: usize,
    /// Turns of one session that may wait behind the one that runs; 0: they get 409.
    pub turns_queued_per_session_max: u32,
    /// A turn that waited so long gets 429.
    pub queue_wait_ms_max: u64,
    /// An engine that runs nothing for so long while turns wait in it is stuck.
    pub stall_ms_max: u64,
    /// The engine's shim looks at every page of the pool this often; 0: only on demand.
    pub audit_interval_s: u64,
    /// The shortest time between two requests, after lost KV events, for the engine's radix tree.
    pub republish_interval_ms: u64,
    /// Where the engine publishes its row table (BERTH_KV_TABLE in its environment), for audits
    /// from this process by CUDA IPC; empty: they are made inside the engine.
    pub audit_table: PathBuf,
    /// Where the journal of open sessions and the shim's socket are; the same for every agent of an
    /// engine. Empty: `/tmp/berth-<uid>`.
    pub state_dir: PathBuf,
    /// Where the engine's shim finds this agent. Empty: `engine-<port>.sock` in `state_dir`, which
    /// is where the shim looks by itself as long as `state_dir` is empty too.
    pub shim_socket: PathBuf,
    /// Longest request body.
    pub body_bytes_max: usize,
    /// Request bodies in memory at once, together.
    pub body_bytes_in_flight_max: usize,
    /// Size of the model's vocabulary; 0: read from the model's config.json.
    pub vocabulary: u32,
    /// The engine's GPUs or MIG slices, by UUID, NVML's index or PCI address; empty: those that its
    /// processes run on, where the shim tells them.
    pub devices: Vec<String>,
    /// NVML's library, where the loader doesn't find the driver's by itself.
    pub nvml_library: PathBuf,
    /// Reads the GPUs' performance counters too.
    pub gpm: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            engine: "http://127.0.0.1:30000".into(),
            worker_id: String::new(),
            data_addr: SocketAddr::from(([127, 0, 0, 1], 31000)),
            control_addr: SocketAddr::from(([127, 0, 0, 1], 31001)),
            admin_addr: SocketAddr::from(([127, 0, 0, 1], 31002)),
            // Routers call a worker stale after 3 s: six reports.
            report_interval_ms: 500,
            // The engine answers from a snapshot in under a millisecond.
            load_interval_ms: 200,
            // `/server_info` asks the scheduler, which may be inside a long prefill step.
            engine_call_ms_max: 10_000,
            // Agents' longest generations take tens of minutes.
            turn_ms_max: 3_600_000,
            drain_ms_max: 30_000,
            // 99.5 % of a coding agent's turns resume within the hour.
            session_idle_ms_max: 3_600_000,
            // With no free row the engine stops for good; one is the least that can't.
            rows_reserve: 1,
            // The rest is room for what runs.
            pin_budget_ratio: 0.7,
            // 87 % of a coding agent's turns resume within it.
            demote_idle_ms: 120_000,
            // It guarantees what the radix tree only makes likely, and takes no one's room for it.
            auto_pin: true,
            // Attention isn't lost in it. In `berth-sim`, where a piece costs its prompt 10 ms for
            // another request, 0.4 s loses more by those, and 0.8 s more by waiting.
            piece_ms: 600,
            // Above any engine's useful batch, below its row count.
            turns_in_flight_max: 512,
            // Ten seconds' worth for an engine that ends 100 turns a second.
            turns_queued_max: 1024,
            turns_queued_per_session_max: 0,
            // Clients of agents give up after a minute or two.
            queue_wait_ms_max: 60_000,
            // Longer than any prefill step.
            stall_ms_max: 10_000,
            // A look costs the scheduler's thread well under a millisecond.
            audit_interval_s: 10,
            // With pages of one token, a tree of a million tokens takes 1.4 s of the engine's
            // scheduler, which is 5 % of this. With pages of 16 tokens it takes 0.1 s.
            republish_interval_ms: 30_000,
            // A CUDA context costs some 0.5 GiB of the GPU.
            audit_table: PathBuf::new(),
            state_dir: PathBuf::new(),
            shim_socket: PathBuf::new(),
            body_bytes_max: 64 << 20,
            body_bytes_in_flight_max: 512 << 20,
            vocabulary: 0,
            devices: vec![],
            nvml_library: PathBuf::new(),
            // A second reader can disturb DCGM's, which most fleets run.
            gpm: false,
        }
    }
}

impl Config {
    /// Puts file, environment and flags together and checks the whole.
    ///
    /// # Errors
    /// All problems at once.
    pub fn load(args: Args) -> Result<Self, Problems> {
        let (mut config, mut problems) = settings::load::<Self>(args.config.as_deref());
        config.engine = args.engine.unwrap_or(config.engine);
        config.worker_id = args.worker_id.unwrap_or(config.worker_id);
        config.data_addr = args.data_addr.unwrap_or(config.data_addr);
        config.control_addr = args.control_addr.unwrap_or(config.control_addr);
        config.admin_addr = args.admin_addr.unwrap_or(config.admin_addr);
        config.check(&mut problems);
        problems.extend(engine_api_key().err().map(str::to_owned));
        if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
    }

    /// `state_dir`, or what stands for it.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        if !self.state_dir.as_os_str().is_empty() {
            return self.state_dir.clone();
        }
        let uid = std::fs::metadata("/proc/self").map_or(0, |own| own.uid());
        PathBuf::from(format!("/tmp/berth-{uid}"))
    }

    /// `shim_socket`, or what stands for it.
    #[must_use]
    pub fn shim_socket(&self) -> PathBuf {
        if !self.shim_socket.as_os_str().is_empty() {
            return self.shim_socket.clone();
        }
        self.state_dir().join(format!("engine-{}.sock", self.engine_port()))
    }

    /// The engine's port: what the shim inside it knows of its address, and what names its files.
    #[must_use]
    pub fn engine_port(&self) -> u16 {
        self.engine_uri().port_u16().unwrap_or(80)
    }

    fn check(&self, problems: &mut Vec<String>) {
        let mut need = |good: bool, problem: &str| {
            if !good {
                problems.push(problem.to_owned());
            }
        };
        let base = self.engine.parse::<Uri>().ok();
        let base = base.filter(|uri| {
            uri.scheme_str() == Some("http") && uri.authority().is_some() && uri.path() == "/"
        });
        need(base.is_some(), "engine must be a URL like http://127.0.0.1:30000");
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        let id = self.worker_id.len() <= WORKER_ID_BYTES_MAX && self.worker_id.bytes().all(plain);
        need(id, "worker_id must have at most 128 letters, digits and . _ : -");
        let named = !self.worker_id.is_empty() || !self.control_addr.ip().is_unspecified();
        need(named, "worker_id is needed where control_addr names no host: it must be unique");
        for (key, value) in [
            ("report_interval_ms", self.report_interval_ms),
            ("load_interval_ms", self.load_interval_ms),
            ("engine_call_ms_max", self.engine_call_ms_max),
            ("turn_ms_max", self.turn_ms_max),
            ("session_idle_ms_max", self.session_idle_ms_max),
            ("queue_wait_ms_max", self.queue_wait_ms_max),
            ("stall_ms_max", self.stall_ms_max),
        ] {
            need((1..=7 * 86_400_000).contains(&value), &format!("{key} must be 1 to 7 days"));
        }
        let republish = (100..=7 * 86_400_000).contains(&self.republish_interval_ms);
        need(republish, "republish_interval_ms must be 100 to 7 days");
        need(self.piece_ms <= 60_000, "piece_ms must be 0 to 60000");
        let can = self.audit_table.as_os_str().is_empty() || cfg!(feature = "cuda");
        need(can, "audit_table needs an agent with CUDA: cargo build --features cuda");
        need(self.audit_interval_s <= 86_400, "audit_interval_s must be 0 to 86400");
        need(
            self.rows_reserve >= 1,
            "rows_reserve must be at least 1: a full engine never recovers",
        );
        let ratio = (0.0..=1.0).contains(&self.pin_budget_ratio);
        need(ratio, "pin_budget_ratio must be between 0 and 1");
        need((1..=65_536).contains(&self.turns_queued_max), "turns_queued_max must be 1 to 65536");
        let turns = (1..=65_536).contains(&self.turns_in_flight_max);
        need(turns, "turns_in_flight_max must be 1 to 65536");
        need(self.body_bytes_max >= 1024, "body_bytes_max must be at least 1024");
        let room = self.body_bytes_in_flight_max >= self.body_bytes_max;
        need(room, "body_bytes_in_flight_max must be at least body_bytes_max");
        for device in &self.devices {
            if let Err(error) = device.parse::<Selector>() {
                need(false, &format!("devices: {error}"));
            }
        }
    }

    /// The engine's base URL.
    #[must_use]
    pub fn engine_uri(&self) -> Uri {
        self.engine.parse().expect("checked when the settings were loaded")
    }
}

/// Milliseconds of a setting as a duration.
#[must_use]
pub fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

/// The engine's API key: a secret, so from the environment alone. Files and secret stores like to
/// end it with a line's end, which isn't part of it; an empty one is none.
///
/// # Errors
/// Where a header can't carry it. Going on without it would be answered 401 for ever.
pub fn engine_api_key() -> Result<Option<HeaderValue>, &'static str> {
    let unusable = "BERTH_ENGINE_API_KEY has characters that a header can't carry: set it to what \
                    the engine's --api-key is";
    let Some(key) = std::env::var_os("BERTH_ENGINE_API_KEY") else { return Ok(None) };
    let key = key.to_str().ok_or(unusable)?.trim();
    if key.is_empty() {
        return Ok(None);
    }
    HeaderValue::from_str(&format!("Bearer {key}")).map(Some).map_err(|_| unusable)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert!(Config::load(Args::parse_from(["berth-agent"])).is_ok());
    }

    #[test]
    fn flags_win_over_the_file_and_all_problems_come_together() {
        let path = std::env::temp_dir().join(format!("berth-agent-{}.toml", std::process::id()));
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(b"engine = \"ftp://x\"\nrows_reserve = 0\nbogus = 1\nworker_id = \"f\"\n")
            .unwrap();
        let args = |rest: &[&str]| {
            let config = path.to_str().unwrap();
            Args::parse_from(["berth-agent", "--config", config].iter().chain(rest))
        };
        let problems = Config::load(args(&[])).unwrap_err();
        assert_eq!(problems.0.len(), 3, "{problems}");
        std::fs::write(&path, "worker_id = \"f\"\nload_interval_ms = 50\n").unwrap();
        let config = Config::load(args(&["--worker-id", "w"])).unwrap();
        assert_eq!((config.worker_id.as_str(), config.load_interval_ms), ("w", 50));
        std::fs::remove_file(&path).unwrap();
    }
}

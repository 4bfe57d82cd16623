//! Defines the agent's settings, their defaults, and the reasons for the defaults.
//!
//! Settings come from a TOML file, the environment and flags. A flag takes precedence over the
//! environment, and the environment over the file. `main` loads and checks them once, as
//! [`Config`]; they don't change while the agent runs. [`selector`] parses the setting `devices`.
//!
//! The settings use these words. A *session* is a chain of *turns* (one request and its answer
//! each) that share a growing prefix. A *pinned* session keeps its KV and a request row in the
//! engine between turns. The *shim* is Berth's part inside the engine. It can *trim* a full
//! history: the engine then gets only the part that the session doesn't hold.

pub mod selector;

use std::{
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Parser, Subcommand};
use http::{HeaderValue, Uri};
use serde::{Deserialize, Serialize};
use service::settings::{self, Problems};

use self::selector::Selector;

/// How long the agent waits for the engine to end an aborted turn. The engine ends the turn after
/// its current step, which takes seconds at most.
pub const ABORT_WAIT_MAX: Duration = Duration::from_secs(15);

/// The longest name of an agent, in bytes. The name is part of session ids inside the engine.
pub const WORKER_ID_BYTES_MAX: usize = 128;
/// Renamed settings: the old name and the new name. The old name is refused.
const RENAMED_SETTINGS: [(&str, &str); 1] = [("piece_ms", "prefill_stage_ms")];

/// Command-line flags, and the environment variables read with them.
#[derive(Debug, Parser)]
#[command(
    name = "berth-agent",
    version,
    about = "Owns the KV sessions of one SGLang engine",
    args_conflicts_with_subcommands = true
)]
pub struct Args {
    /// What to do instead of running an agent.
    #[command(subcommand)]
    pub command: Option<CliCommand>,
    /// Settings file (TOML).
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// URL of the engine beside this agent, e.g. http://127.0.0.1:30000
    #[arg(long)]
    pub engine: Option<String>,
    /// Name of this agent, unique in the fleet. Default: the control address.
    #[arg(long, env = "WORKER_ID")]
    pub worker_id: Option<String>,
    /// Address to serve turns on.
    #[arg(long)]
    pub data_addr: Option<SocketAddr>,
    /// Address that routers connect to (gRPC).
    #[arg(long)]
    pub control_addr: Option<SocketAddr>,
    /// Address for metrics, health and readiness.
    #[arg(long)]
    pub admin_addr: Option<SocketAddr>,
    /// Checks the settings, prints them and exits.
    #[arg(long)]
    pub check_config: bool,
}

/// Commands that query a running agent.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Shows which session holds each page of the engine's KV pool; exit status 1 if anything is
    /// wrong
    Audit(AuditArgs),
    /// Shows which blocks are resident on the engine, as routers are told
    Kv(KvArgs),
}

/// The arguments of `berth-agent audit`.
#[derive(Debug, clap::Args)]
pub struct AuditArgs {
    /// The control address of the agent.
    #[arg(long, default_value = "127.0.0.1:31001")]
    pub control_addr: SocketAddr,
    /// DP rank; all ranks if not given.
    #[arg(long)]
    pub rank: Option<u32>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `berth-agent kv`.
#[derive(Debug, clap::Args)]
pub struct KvArgs {
    /// The control address of the agent.
    #[arg(long, default_value = "127.0.0.1:31001")]
    pub control_addr: SocketAddr,
    /// Prints JSON, with the hash of every block.
    #[arg(long)]
    pub json: bool,
}

/// The settings in effect. Its many fields: one for each setting of the file, a flat table.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The engine's base URL.
    pub engine: String,
    /// The name of this agent, unique in the fleet. Empty: the control address.
    pub worker_id: String,
    /// The address for turns (HTTP).
    pub data_addr: SocketAddr,
    /// The address for routers (gRPC).
    pub control_addr: SocketAddr,
    /// The address for metrics and health (HTTP).
    pub admin_addr: SocketAddr,
    /// The longest time between two load reports. Routers use the reports as heartbeats.
    pub report_interval_ms: u64,
    /// The interval at which the engine's `/v1/loads` is read.
    pub load_interval_ms: u64,
    /// The time limit for the engine's answer to a control call.
    pub engine_call_ms_max: u64,
    /// The time limit of a turn, after which it is aborted.
    pub turn_ms_max: u64,
    /// How long running turns may continue at shutdown.
    pub drain_ms_max: u64,
    /// A session without a turn for this long is closed.
    pub session_idle_ms_max: u64,
    /// The number of request rows of each rank that pinned sessions never take.
    pub rows_reserve: u32,
    /// The share of each rank's pool that pinned sessions may hold, from 0 to 1.
    pub pin_budget_ratio: f64,
    /// After this idle time, a pinned session's KV is freed if other sessions need the room.
    pub demote_idle_ms: u64,
    /// Whether to pin sessions automatically. A session is pinned if its next turns usually come
    /// soon, and if the shim can trim the full histories that its client sends. The session's KV
    /// may be freed after `demote_idle_ms` of idle time.
    pub auto_pin: bool,
    /// The time the engine takes for one stage of staged prefill. A long prompt is computed in
    /// stages before its turn, so that a short prompt waits for at most one stage. With 0, there
    /// are no stages, and every prompt is sent to the engine at once.
    pub prefill_stage_ms: u64,
    /// The maximum number of turns inside the engine, per rank. Further turns wait.
    pub turns_in_flight_max: u32,
    /// The maximum number of turns that wait for room in the engine. Further turns get status 429.
    pub turns_queued_max: usize,
    /// The maximum number of turns of one session that wait behind its running turn. Further turns
    /// get status 409.
    pub turns_queued_per_session_max: u32,
    /// The longest time that a turn waits for room. Then the turn gets status 429.
    pub queue_wait_ms_max: u64,
    /// The engine counts as stuck if turns wait in it and it runs nothing for this long.
    pub stall_ms_max: u64,
    /// The interval at which every page of the KV pool is audited. 0: only on demand.
    pub audit_interval_s: u64,
    /// The shortest time between two requests to the shim to publish the engine's radix tree again.
    /// The agent requests that after it has missed KV events.
    pub republish_interval_ms: u64,
    /// The path at which the engine publishes its row table, which is BERTH_KV_TABLE in the
    /// engine's environment. With it, the agent's process makes the periodic audits, and reads the
    /// engine's GPU memory by CUDA IPC. Empty: all audits are made inside the engine.
    pub audit_table: PathBuf,
    /// The folder for the journal (the file that lists the open sessions) and for the shim's
    /// socket. It must be the same for every agent of an engine. Empty: `/tmp/berth-<uid>`.
    pub state_dir: PathBuf,
    /// The path of the socket on which the agent listens for the engine's shim. Empty:
    /// `engine-<port>.sock` in `state_dir`. The shim finds that path without configuration if
    /// `state_dir` is empty too.
    pub shim_socket: PathBuf,
    /// The longest request body, in bytes.
    pub body_bytes_max: usize,
    /// The maximum bytes of all request bodies in memory together.
    pub body_bytes_in_flight_max: usize,
    /// The size of the model's vocabulary. 0: the agent reads it from the model's config.json.
    pub vocabulary: u32,
    /// The engine's GPUs or MIG slices, by UUID, NVML index or PCI address. Empty: the devices that
    /// the engine's processes run on, if the shim reports those processes.
    pub devices: Vec<String>,
    /// The path of the NVML library. Empty: the loader finds the driver's own library.
    pub nvml_library: PathBuf,
    /// Whether to read the GPUs' performance counters too.
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
            // Routers consider a worker stale after 3 s, which is six missed reports.
            report_interval_ms: 500,
            // The engine answers from a snapshot in under a millisecond.
            load_interval_ms: 200,
            // `/server_info` asks the scheduler, which may be in a long prefill step.
            engine_call_ms_max: 10_000,
            // The longest generations of coding agents take tens of minutes.
            turn_ms_max: 3_600_000,
            drain_ms_max: 30_000,
            // 99.5 % of a coding agent's turns follow within an hour of the previous turn.
            session_idle_ms_max: 3_600_000,
            // If pinned sessions hold all rows, the engine can never run a request again. One free
            // row is enough to prevent that.
            rows_reserve: 1,
            // The rest of the pool is for running turns.
            pin_budget_ratio: 0.7,
            // 87 % of a coding agent's turns follow the previous turn within this time.
            demote_idle_ms: 120_000,
            // A session's KV in the radix tree may be evicted before its next turn, and pinned KV
            // isn't. The cost is low, because a pinned session yields its room after idle time.
            auto_pin: true,
            // A user hardly notices a wait of this length. In the simulation `berth-sim`, each
            // stage costs 10 ms more than its tokens. There, stages of 0.4 s are worse because of
            // that cost, and stages of 0.8 s are worse because short prompts wait longer.
            prefill_stage_ms: 600,
            // This is more than any engine's useful batch size, and less than its number of rows.
            turns_in_flight_max: 512,
            // This is ten seconds of work for an engine that ends 100 turns per second.
            turns_queued_max: 1024,
            turns_queued_per_session_max: 0,
            // Clients of coding agents give up after a minute or two.
            queue_wait_ms_max: 60_000,
            // This is longer than any prefill step.
            stall_ms_max: 10_000,
            // An audit takes well under a millisecond of the scheduler's thread.
            audit_interval_s: 10,
            // With one token per page, publishing a tree of a million tokens takes 1.4 s of the
            // engine's scheduler, which is 5 % of this interval. With 16 tokens per page it takes
            // 0.1 s.
            republish_interval_ms: 30_000,
            // It is off by default, because it needs a CUDA context in the agent's process. The
            // context takes about 0.5 GiB of GPU memory.
            audit_table: PathBuf::new(),
            state_dir: PathBuf::new(),
            shim_socket: PathBuf::new(),
            body_bytes_max: 64 << 20,
            body_bytes_in_flight_max: 512 << 20,
            vocabulary: 0,
            devices: vec![],
            nvml_library: PathBuf::new(),
            // Most fleets run DCGM, which reads these counters too. A second reader can disturb the
            // readings of the first.
            gpm: false,
        }
    }
}

impl Config {
    /// Combines the settings file, the environment and the flags, and checks the result.
    ///
    /// # Errors
    /// All problems at once.
    pub fn load(args: Args) -> Result<Self, Problems> {
        let (mut config, mut problems) =
            settings::load::<Self>(args.config.as_deref(), &RENAMED_SETTINGS);
        config.engine = args.engine.unwrap_or(config.engine);
        config.worker_id = args.worker_id.unwrap_or(config.worker_id);
        config.data_addr = args.data_addr.unwrap_or(config.data_addr);
        config.control_addr = args.control_addr.unwrap_or(config.control_addr);
        config.admin_addr = args.admin_addr.unwrap_or(config.admin_addr);
        config.check(&mut problems);
        problems.extend(engine_api_key().err().map(str::to_owned));
        if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
    }

    /// Returns the state folder: `state_dir`, or its default.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        path_if_set(&self.state_dir).unwrap_or_else(|| {
            let uid = std::fs::metadata("/proc/self").map_or(0, |process| process.uid());
            PathBuf::from(format!("/tmp/berth-{uid}"))
        })
    }

    /// Returns the path of the shim's socket: `shim_socket`, or its default.
    #[must_use]
    pub fn shim_socket(&self) -> PathBuf {
        let default_path = || self.state_dir().join(format!("engine-{}.sock", self.engine_port()));
        path_if_set(&self.shim_socket).unwrap_or_else(default_path)
    }

    /// Returns the engine's port. The names of the agent's files for the engine contain the port,
    /// because it is the only part of the engine's address that the shim knows too.
    #[must_use]
    pub fn engine_port(&self) -> u16 {
        self.engine_uri().port_u16().unwrap_or(80)
    }

    fn check(&self, problems: &mut Vec<String>) {
        let mut require = |is_valid: bool, problem: &str| {
            if !is_valid {
                problems.push(problem.to_owned());
            }
        };
        let engine_uri = self.engine.parse::<Uri>().ok();
        let engine_uri = engine_uri.filter(|uri| {
            uri.scheme_str() == Some("http") && uri.authority().is_some() && uri.path() == "/"
        });
        require(engine_uri.is_some(), "engine must be a URL like http://127.0.0.1:30000");
        let is_id_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        let is_valid_id =
            self.worker_id.len() <= WORKER_ID_BYTES_MAX && self.worker_id.bytes().all(is_id_byte);
        require(is_valid_id, "worker_id must have at most 128 letters, digits and . _ : -");
        let has_unique_name =
            !self.worker_id.is_empty() || !self.control_addr.ip().is_unspecified();
        require(
            has_unique_name,
            "worker_id is needed where control_addr names no host: it must be unique",
        );
        for (key, value) in [
            ("report_interval_ms", self.report_interval_ms),
            ("load_interval_ms", self.load_interval_ms),
            ("engine_call_ms_max", self.engine_call_ms_max),
            ("turn_ms_max", self.turn_ms_max),
            ("session_idle_ms_max", self.session_idle_ms_max),
            ("queue_wait_ms_max", self.queue_wait_ms_max),
            ("stall_ms_max", self.stall_ms_max),
        ] {
            require((1..=7 * 86_400_000).contains(&value), &format!("{key} must be 1 to 7 days"));
        }
        let is_valid_interval = (100..=7 * 86_400_000).contains(&self.republish_interval_ms);
        require(is_valid_interval, "republish_interval_ms must be 100 to 7 days");
        require(self.prefill_stage_ms <= 60_000, "prefill_stage_ms must be 0 to 60000");
        let is_audit_table_usable =
            path_if_set(&self.audit_table).is_none() || cfg!(feature = "cuda");
        require(
            is_audit_table_usable,
            "audit_table needs an agent with CUDA: cargo build --features cuda",
        );
        require(self.audit_interval_s <= 86_400, "audit_interval_s must be 0 to 86400");
        require(
            self.rows_reserve >= 1,
            "rows_reserve must be at least 1: a full engine never recovers",
        );
        let is_ratio = (0.0..=1.0).contains(&self.pin_budget_ratio);
        require(is_ratio, "pin_budget_ratio must be between 0 and 1");
        require(
            (1..=65_536).contains(&self.turns_queued_max),
            "turns_queued_max must be 1 to 65536",
        );
        let is_valid_count = (1..=65_536).contains(&self.turns_in_flight_max);
        require(is_valid_count, "turns_in_flight_max must be 1 to 65536");
        require(self.body_bytes_max >= 1024, "body_bytes_max must be at least 1024");
        let has_room_for_one_body = self.body_bytes_in_flight_max >= self.body_bytes_max;
        require(has_room_for_one_body, "body_bytes_in_flight_max must be at least body_bytes_max");
        for device in &self.devices {
            if let Err(error) = device.parse::<Selector>() {
                require(false, &format!("devices: {error}"));
            }
        }
    }

    /// Returns the engine's base URL.
    #[must_use]
    pub fn engine_uri(&self) -> Uri {
        self.engine.parse().expect("checked when the settings were loaded")
    }
}

/// Returns the path in a setting, or `None` if the setting is empty.
#[must_use]
pub fn path_if_set(setting: &Path) -> Option<PathBuf> {
    (!setting.as_os_str().is_empty()).then(|| setting.to_owned())
}

/// Converts a setting in milliseconds to a duration.
#[must_use]
pub fn ms(setting_ms: u64) -> Duration {
    Duration::from_millis(setting_ms)
}

/// Returns the engine's API key as a header value, or `None` if the key is unset or empty.
///
/// The key is a secret, so it is read only from the environment. White space around the key is
/// removed, because files and secret stores often add a line feed.
///
/// # Errors
/// If a header can't carry the key. Without the key, the engine would answer 401 to every request.
pub fn engine_api_key() -> Result<Option<HeaderValue>, &'static str> {
    let error_text = "BERTH_ENGINE_API_KEY has characters that a header can't carry: set it to \
                      what the engine's --api-key is";
    let Some(key) = std::env::var_os("BERTH_ENGINE_API_KEY") else { return Ok(None) };
    let key = key.to_str().ok_or(error_text)?.trim();
    if key.is_empty() {
        return Ok(None);
    }
    HeaderValue::from_str(&format!("Bearer {key}")).map(Some).map_err(|_| error_text)
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

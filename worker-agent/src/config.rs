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

pub mod access;
pub mod announce;
pub mod auth;
pub mod selector;
mod state_folder;
pub mod tables;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Parser;
use http::{HeaderValue, Uri};
use service::{
    server::ConnectionSettings,
    settings::{self, Problems},
    traces::settings::TracesTable,
};

use self::{
    access::TlsTable,
    announce::{AdvertiseTable, AnnounceTable},
    auth::AuthTable,
    selector::Selector,
    state_folder::default_state_folder,
    tables::{
        AuditTable, EngineTable, FilesTable, GpuTable, LimitsTable, ListenTable, ReportsTable,
        SessionsTable, ShutdownTable,
    },
};

/// How long the agent waits for the engine to end an aborted turn. The engine ends the turn after
/// its current step, which takes seconds at most.
pub const ABORT_WAIT_MAX: Duration = Duration::from_secs(15);

/// The longest name of an agent, in bytes. The name is part of session ids inside the engine.
pub const WORKER_ID_BYTES_MAX: usize = 128;

/// Command-line flags, and the environment variables read with them.
#[derive(Debug, Parser)]
#[command(name = "berth-agent", version, about = "Owns the KV sessions of one SGLang engine")]
pub struct Args {
    /// Settings file (TOML).
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// URL of the engine beside this agent, e.g. http://127.0.0.1:30000
    #[arg(long)]
    pub engine: Option<String>,
    /// Name of this agent, unique in the fleet. Default: the control address.
    #[arg(long, env = "WORKER_ID")]
    pub worker_id: Option<String>,
    /// At SIGTERM, leave the sessions open at the engine for the next agent to take up.
    #[arg(long)]
    pub handover: bool,
    /// Address to serve turns on.
    #[arg(long)]
    pub data_addr: Option<SocketAddr>,
    /// Address that routers connect to (gRPC).
    #[arg(long)]
    pub control_addr: Option<SocketAddr>,
    /// Address for metrics, health and readiness.
    #[arg(long)]
    pub admin_addr: Option<SocketAddr>,
    /// URL of a router's data port to announce this agent to; once for each router
    #[arg(long, value_name = "URL")]
    pub join: Vec<String>,
    /// Host at which routers on other hosts reach this agent
    #[arg(long, value_name = "HOST")]
    pub address: Option<String>,
    /// Checks the settings, prints them and exits.
    #[arg(long)]
    pub check_config: bool,
}

service::settings! {
    /// The settings in effect.
    pub struct Config {
        /// The name of this agent, unique in the fleet. Empty: the control address.
        worker_id: String;
        engine: EngineTable;
        listen: ListenTable;
        advertise: AdvertiseTable;
        announce: AnnounceTable;
        sessions: SessionsTable;
        limits: LimitsTable;
        connections: ConnectionSettings;
        reports: ReportsTable;
        shutdown: ShutdownTable;
        audit: AuditTable;
        files: FilesTable;
        gpu: GpuTable;
        tls: TlsTable;
        auth: AuthTable;
        traces: TracesTable;
    }
}

impl Config {
    /// Combines the settings file, the environment and the flags, and checks the result.
    ///
    /// # Errors
    /// All problems at once.
    pub fn load(args: Args) -> Result<Self, Problems> {
        let (mut config, mut problems) = settings::load::<Self>(args.config.as_deref());
        config.engine.url = args.engine.unwrap_or(config.engine.url);
        config.shutdown.handover |= args.handover;
        config.worker_id = args.worker_id.unwrap_or(config.worker_id);
        config.listen.data_addr = args.data_addr.unwrap_or(config.listen.data_addr);
        config.listen.control_addr = args.control_addr.unwrap_or(config.listen.control_addr);
        config.listen.admin_addr = args.admin_addr.unwrap_or(config.listen.admin_addr);
        if !args.join.is_empty() {
            config.announce.routers = args.join;
        }
        config.advertise.host = args.address.unwrap_or(config.advertise.host);
        config.check(&mut problems);
        config.check_access(&mut problems);
        problems.extend(config.connections.problems());
        problems.extend(config.traces.problems());
        problems.extend(engine_api_key().err().map(str::to_owned));
        problems.extend(engine_admin_key().err().map(str::to_owned));
        problems.extend(config.auth.file_problem());
        if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
    }

    /// Returns the agent's name: the setting, or the address of the control port.
    #[must_use]
    pub fn agent_id(&self, control: SocketAddr) -> String {
        match self.worker_id.as_str() {
            "" => control.to_string(),
            worker_id => worker_id.to_owned(),
        }
    }

    /// Returns the state folder: `state_dir`, or its default.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        path_if_set(&self.files.state_dir).unwrap_or_else(default_state_folder)
    }

    /// Returns the path of the shim's socket: `shim_socket`, or its default.
    #[must_use]
    pub fn shim_socket(&self) -> PathBuf {
        let default_path = || self.state_dir().join(format!("engine-{}.sock", self.engine_port()));
        path_if_set(&self.files.shim_socket).unwrap_or_else(default_path)
    }

    /// Returns the engine's port. The names of the agent's files for the engine contain the port,
    /// because it is the only part of the engine's address that the shim knows too.
    #[must_use]
    pub fn engine_port(&self) -> u16 {
        self.engine_uri().port_u16().unwrap_or(80)
    }

    /// Reads the certificates and tokens once. Returns what is wrong with them.
    #[must_use]
    pub fn file_problems(&self) -> Vec<String> {
        let mut problems = access::file_problems(&self.tls, &self.auth);
        problems.extend(self.announce.file_problems());
        problems.extend(self.traces.file_problem());
        problems
    }

    /// Adds the problems of ports that other hosts reach.
    fn check_access(&self, problems: &mut Vec<String>) {
        let ListenTable { data_addr, control_addr, admin_addr } = self.listen;
        let addresses = [("listen.data_addr", data_addr), ("listen.control_addr", control_addr)];
        access::check(&self.tls, &self.auth, addresses, problems);
        problems.extend(self.auth.problem(admin_addr));
        announce::check(&self.advertise, &self.announce, control_addr, problems);
    }

    fn check(&self, problems: &mut Vec<String>) {
        let mut require = |is_valid: bool, problem: &str| {
            if !is_valid {
                problems.push(problem.to_owned());
            }
        };
        if let Some(fault) = self.engine.url_fault() {
            let url = &self.engine.url;
            let example = "http://127.0.0.1:30000";
            require(false, &format!("engine.url is {url:?}: {fault}; an example: {example}"));
        }
        let is_id_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        let is_valid_id =
            self.worker_id.len() <= WORKER_ID_BYTES_MAX && self.worker_id.bytes().all(is_id_byte);
        require(is_valid_id, "worker_id must have at most 128 letters, digits and . _ : -");
        let has_unique_name =
            !self.worker_id.is_empty() || !self.listen.control_addr.ip().is_unspecified();
        require(
            has_unique_name,
            "worker_id is needed where control_addr names no host: it must be unique",
        );
        for (key, value) in [
            ("reports.interval_ms", self.reports.interval_ms),
            ("engine.load_interval_ms", self.engine.load_interval_ms),
            ("engine.call_ms_max", self.engine.call_ms_max),
            ("limits.turn_ms_max", self.limits.turn_ms_max),
            ("sessions.idle_ms_max", self.sessions.idle_ms_max),
            ("sessions.idle_ms_cap", self.sessions.idle_ms_cap),
            ("limits.queue_wait_ms_max", self.limits.queue_wait_ms_max),
            ("engine.stall_ms_max", self.engine.stall_ms_max),
            ("engine.silent_ms_max", self.engine.silent_ms_max),
        ] {
            require(
                (1..=7 * 86_400_000).contains(&value),
                &format!("{key} must be 1 ms to 7 days"),
            );
        }
        self.check_engine_times(&mut require);
        require(self.audit.interval_s <= 86_400, "audit.interval_s must be 0 to 86400");
        require(
            self.sessions.rows_reserve >= 1,
            "sessions.rows_reserve must be at least 1: a full engine never recovers",
        );
        require(
            (1..=65_536).contains(&self.limits.turns_queued_max),
            "limits.turns_queued_max must be 1 to 65536",
        );
        let is_valid_count = (1..=65_536).contains(&self.limits.turns_in_flight_max);
        require(is_valid_count, "limits.turns_in_flight_max must be 1 to 65536");
        require(self.limits.body_bytes_max >= 1024, "limits.body_bytes_max must be at least 1024");
        let has_room_for_one_body =
            self.limits.body_bytes_in_flight_max >= self.limits.body_bytes_max;
        require(
            has_room_for_one_body,
            "limits.body_bytes_in_flight_max must be at least body_bytes_max",
        );
        self.check_shares(&mut require);
        for device in &self.gpu.devices {
            if let Err(error) = device.parse::<Selector>() {
                require(false, &format!("gpu.devices: {error}"));
            }
        }
    }

    fn check_engine_times(&self, require: &mut impl FnMut(bool, &str)) {
        require(
            self.engine.silent_ms_max >= 2000,
            "engine.silent_ms_max must be at least 2000: an idle engine speaks once a second",
        );
        let is_valid_interval = (100..=7 * 86_400_000).contains(&self.engine.republish_interval_ms);
        require(is_valid_interval, "engine.republish_interval_ms must be 100 ms to 7 days");
        require(
            self.engine.prefill_stage_ms <= 60_000,
            "engine.prefill_stage_ms must be 0 to 60000",
        );
        let is_valid_rate =
            (1_000_000..=10_u64.pow(13)).contains(&self.engine.host_load_bytes_per_s);
        require(is_valid_rate, "engine.host_load_bytes_per_s must be 1 MB/s to 10 TB/s");
    }

    /// Checks what clients may have of the engine and of the agent.
    fn check_shares(&self, require: &mut impl FnMut(bool, &str)) {
        require(
            self.sessions.idle_ms_cap >= self.sessions.idle_ms_max,
            "sessions.idle_ms_cap must be at least idle_ms_max",
        );
        for (key, ratio) in [
            ("sessions.pin_budget_ratio", self.sessions.pin_budget_ratio),
            ("sessions.pin_rows_ratio", self.sessions.pin_rows_ratio),
            ("limits.principal_turns_ratio", self.limits.principal_turns_ratio),
        ] {
            require((0.0..=1.0).contains(&ratio), &format!("{key} must be between 0 and 1"));
        }
        require(
            (1..=1 << 20).contains(&self.limits.sessions_max),
            "limits.sessions_max must be 1 to 1048576",
        );
        require(
            (1..=self.limits.sessions_max).contains(&self.limits.principal_sessions_max),
            "limits.principal_sessions_max must be 1 to sessions_max",
        );
    }

    /// Returns the engine's base URL.
    #[must_use]
    pub fn engine_uri(&self) -> Uri {
        self.engine.url.parse().expect("checked when the settings were loaded")
    }
}

/// Returns the path in a setting, or `None` if the setting is empty.
#[must_use]
pub fn path_if_set(setting: &Path) -> Option<PathBuf> {
    (!setting.as_os_str().is_empty()).then(|| setting.to_owned())
}

/// Converts a checked ratio to thousandths.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a ratio is between 0 and 1"
)]
pub fn to_milli(ratio: f64) -> u32 {
    (ratio * 1000.0).round() as u32
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
    bearer("BERTH_ENGINE_API_KEY").ok_or(error_text)
}

/// Returns the engine's admin key as a header value, or `None` if the key is unset or empty. An
/// engine that has one takes no other key on its admin routes.
///
/// # Errors
/// If a header can't carry the key.
pub fn engine_admin_key() -> Result<Option<HeaderValue>, &'static str> {
    let error_text = "BERTH_ENGINE_ADMIN_API_KEY has characters that a header can't carry: set it \
                      to what the engine's --admin-api-key is";
    bearer("BERTH_ENGINE_ADMIN_API_KEY").ok_or(error_text)
}

/// Returns the key in an environment variable as a header value; the inner `None` if it is unset or
/// empty, the outer if a header can't carry it.
fn bearer(variable: &str) -> Option<Option<HeaderValue>> {
    let Some(key) = std::env::var_os(variable) else { return Some(None) };
    let key = key.to_str()?.trim();
    if key.is_empty() {
        return Some(None);
    }
    HeaderValue::from_str(&format!("Bearer {key}")).ok().map(Some)
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
        file.write_all(b"worker_id = \"f\"\nbogus = 1\n[engine]\nurl = \"ftp://x\"\n[sessions]\nrows_reserve = 0\n")
            .unwrap();
        let args = |rest: &[&str]| {
            let config = path.to_str().unwrap();
            Args::parse_from(["berth-agent", "--config", config].iter().chain(rest))
        };
        let problems = Config::load(args(&[])).unwrap_err();
        assert_eq!(problems.0.len(), 3, "{problems}");
        for (url, fault) in [
            ("https://127.0.0.1:30000", "--ssl-certfile"),
            ("http://127.0.0.1:30000/v1", "has a path"),
            ("127.0.0.1:30000", "http://"),
        ] {
            let problems = Config::load(args(&["--engine", url])).unwrap_err().to_string();
            assert!(problems.contains(url) && problems.contains(fault), "{problems}");
        }
        std::fs::write(&path, "worker_id = \"f\"\n[engine]\nload_interval_ms = 50\n").unwrap();
        let config = Config::load(args(&["--worker-id", "w"])).unwrap();
        assert_eq!((config.worker_id.as_str(), config.engine.load_interval_ms), ("w", 50));
        std::fs::remove_file(&path).unwrap();
    }
}

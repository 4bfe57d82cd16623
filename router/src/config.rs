//! Reads and checks the router's settings: one flat TOML file, environment variables and flags.
//!
//! `main` calls [`Config::load`] with the command line. The router's other modules read the fields
//! of the [`Config`]. Environment variables and flags are for settings that differ from host to
//! host. They take precedence over the file. Every default is a documented constant.
//!
//! This module opens no socket. It reads the file and lists problems with the help of
//! `service::settings`, which the agent uses, too.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::Parser;
use http::Uri;
use serde::{Deserialize, Serialize};
use service::settings::{self, Problems};

/// The most agents that one router follows. Each agent costs a connection and a few tasks, so a
/// larger fleet needs several routers.
pub const AGENTS_MAX: usize = 1024;

/// The default address for clients. It is loopback, so that nothing is exposed by accident.
pub const DATA_ADDR: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// The default address for operators (metrics and health).
pub const ADMIN_ADDR: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8081);
/// The default largest request body, in bytes. A transcript of 1M tokens is about 5 MiB of JSON,
/// and ten times as much with images.
pub const BODY_BYTES_MAX: usize = 64 << 20;
/// The default bound on the bytes of all request bodies in memory. It is enough for eight of the
/// largest bodies, or for a thousand usual ones.
pub const BODY_BYTES_IN_FLIGHT_MAX: usize = 512 << 20;
/// The default age of a worker's last load report at which the worker is stale. Agents report every
/// 500 ms by default, so a stale worker has missed six reports. With a shorter time, the workers of
/// a busy agent would be stale. With a longer time, the router would trust a dead agent.
pub const LOAD_REPORT_AGE_MS_MAX: u64 = 3_000;
/// The default time limit of a turn. Some reasoning turns take half an hour. Longer turns are
/// stuck.
pub const TURN_MS_MAX: u64 = 30 * 60 * 1000;
/// The default time limit of connecting to an agent. Inside one data centre a connection takes less
/// than 1 ms. If the first SYN is lost, TCP would need a second to send another.
pub const CONNECT_MS_MAX: u64 = 1_000;
/// The default time limit of draining. Most turns end within 30 s. Longer turns are cut off when
/// the process ends.
pub const DRAIN_MS_MAX: u64 = 30_000;
/// The default time for which the router remembers an idle session. It is an agent's default, too.
pub const AFFINITY_IDLE_MS_MAX: u64 = 60 * 60 * 1000;
/// The default least gain for which a session moves to another worker. Users don't notice less. A
/// move also has a cost: the KV that it leaves behind occupies the old worker for minutes.
pub const REBIND_GAIN_MS_MIN: u64 = 500;
/// The default bound on remembered sessions. A session takes about 600 bytes, so this many take 60
/// MiB.
pub const SESSIONS_MAX: usize = 100_000;
/// The default memory of the index of resident blocks. A block on a worker takes about 8 bytes, so
/// the index holds 60 million blocks. They fill 480 KV pools of 8 million tokens.
pub const OVERLAP_BYTES_MAX: usize = 512 << 20;
/// The default bound on turns in flight. Each turn has a client's connection, which takes about 40
/// KiB, and a connection to an agent. The clients' connections of this many turns take 160 MiB.
pub const TURNS_IN_FLIGHT_MAX: usize = 4_096;

/// What the router does with a volatile preamble: text at the beginning of a prompt that the client
/// changes with each request (see [`crate::turn::preamble`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreamblePolicy {
    /// Removes the preamble from the body, because an engine's cache misses everything after it.
    #[default]
    Strip,
    /// Leaves the body as it is, for engines or models that need the preamble.
    Keep,
}

/// All settings as they take effect. [`Config::problems`] checks them. Its many fields: the file of
/// settings is one flat table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Control ports of the worker agents, as `http://host:port`.
    pub workers: Vec<String>,
    /// Address for clients.
    pub data_addr: SocketAddr,
    /// Address for `/metrics`, `/healthz`, `/readyz`, `/config`.
    pub admin_addr: SocketAddr,
    /// Largest request body in bytes; a larger body is answered with 413.
    pub body_bytes_max: usize,
    /// Most bytes of all request bodies in memory; a body beyond that is answered with 503.
    pub body_bytes_in_flight_max: usize,
    /// A worker whose last load report is older than this gets no new sessions, unless every
    /// worker's report is older.
    pub load_report_age_ms_max: u64,
    /// Time limit of a turn, from its arrival to the end of its answer, retry included.
    pub turn_ms_max: u64,
    /// Time limit of connecting to an agent, and of waiting at the start for the agents' first
    /// session tables.
    pub connect_ms_max: u64,
    /// Time for running turns to end after the process was told to stop.
    pub drain_ms_max: u64,
    /// A session without a turn for longer than this is placed again, unless its agent remembers
    /// it.
    pub affinity_idle_ms_max: u64,
    /// A session moves to another worker if its turn is faster there by at least this time.
    pub rebind_gain_ms_min: u64,
    /// Most sessions that the router binds to workers. Also the most sessions that it takes over
    /// from each agent's session table.
    pub sessions_max: usize,
    /// Most bytes of the index of resident blocks; beyond that the oldest blocks are forgotten.
    pub overlap_bytes_max: usize,
    /// Most turns at once; a turn beyond that is answered with 429.
    pub turns_in_flight_max: usize,
    /// Whether the router removes a preamble that a coding agent changes with each request.
    pub preamble: PreamblePolicy,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            workers: vec![],
            data_addr: DATA_ADDR,
            admin_addr: ADMIN_ADDR,
            body_bytes_max: BODY_BYTES_MAX,
            body_bytes_in_flight_max: BODY_BYTES_IN_FLIGHT_MAX,
            load_report_age_ms_max: LOAD_REPORT_AGE_MS_MAX,
            turn_ms_max: TURN_MS_MAX,
            connect_ms_max: CONNECT_MS_MAX,
            drain_ms_max: DRAIN_MS_MAX,
            affinity_idle_ms_max: AFFINITY_IDLE_MS_MAX,
            rebind_gain_ms_min: REBIND_GAIN_MS_MIN,
            sessions_max: SESSIONS_MAX,
            overlap_bytes_max: OVERLAP_BYTES_MAX,
            turns_in_flight_max: TURNS_IN_FLIGHT_MAX,
            preamble: PreamblePolicy::default(),
        }
    }
}

/// The command line. Settings that it leaves out come from the file, then from the defaults.
#[derive(Debug, Default, Parser)]
#[command(name = "berth-router", version, about = "Places turns on workers, sticky to their KV.")]
pub struct Args {
    /// Path of the settings file (TOML).
    #[arg(long, env = "BERTH_ROUTER_CONFIG")]
    pub config: Option<PathBuf>,
    /// Control port of a worker agent, `http://host:port`; give the flag once per agent.
    #[arg(long = "worker", env = "BERTH_ROUTER_WORKERS", value_delimiter = ',')]
    pub workers: Vec<String>,
    /// Address for clients.
    #[arg(long, env = "BERTH_ROUTER_DATA_ADDR")]
    pub data_addr: Option<String>,
    /// Address for metrics and health.
    #[arg(long, env = "BERTH_ROUTER_ADMIN_ADDR")]
    pub admin_addr: Option<String>,
    /// Check the settings, print the effective settings and exit.
    #[arg(long)]
    pub check_config: bool,
}

impl Config {
    /// Reads the settings from the file and the command line, and checks them.
    ///
    /// # Errors
    /// All problems of the settings at once.
    pub fn load(args: &Args) -> Result<Self, Problems> {
        let (mut config, mut problems) = settings::load::<Self>(args.config.as_deref(), &[]);
        if !args.workers.is_empty() {
            config.workers.clone_from(&args.workers);
        }
        override_addr("data-addr", args.data_addr.as_ref(), &mut config.data_addr, &mut problems);
        override_addr(
            "admin-addr",
            args.admin_addr.as_ref(),
            &mut config.admin_addr,
            &mut problems,
        );
        problems.extend(config.problems());
        if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
    }

    /// Returns the problems of these settings, a sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = vec![];
        if self.workers.is_empty() {
            problems.push("workers: none is named; give --worker http://host:port".to_owned());
        }
        if self.workers.len() > AGENTS_MAX {
            problems.push(format!("workers: more than {AGENTS_MAX} are named"));
        }
        let mut named_workers = BTreeSet::new();
        for worker in &self.workers {
            if let Err(problem) = control_authority(worker) {
                problems.push(format!("workers: {worker:?} {problem}; write http://host:port"));
            } else if !named_workers.insert(worker.trim_end_matches('/')) {
                problems.push(format!("workers: {worker:?} is named twice"));
            }
        }
        let times_ms = [
            ("load_report_age_ms_max", self.load_report_age_ms_max),
            ("turn_ms_max", self.turn_ms_max),
            ("connect_ms_max", self.connect_ms_max),
            ("affinity_idle_ms_max", self.affinity_idle_ms_max),
            ("rebind_gain_ms_min", self.rebind_gain_ms_min),
        ];
        // A time of more than a year is a mistake of unit, and its deadline might not fit the
        // clock.
        let year_ms = 366 * 24 * 3600 * 1000;
        for (key, value) in times_ms.into_iter().chain([("drain_ms_max", self.drain_ms_max + 1)]) {
            if value == 0 || value > year_ms {
                problems.push(format!("{key}: must be 1 to {year_ms} ms"));
            }
        }
        let sizes = [("body_bytes_max", self.body_bytes_max), ("sessions_max", self.sessions_max)];
        for (key, value) in sizes {
            // A semaphore counts to 2^61, and no router needs more than 2^40.
            if value == 0 || value > 1 << 40 {
                problems.push(format!("{key}: must be 1 to 2^40"));
            }
        }
        // A process usually has fewer file descriptors than 65,536.
        if !(1..=1 << 16).contains(&self.turns_in_flight_max) {
            problems.push("turns_in_flight_max: must be 1 to 65536".to_owned());
        }
        if self.body_bytes_in_flight_max < self.body_bytes_max {
            problems.push("body_bytes_in_flight_max: is below body_bytes_max".to_owned());
        }
        problems
    }

    pub(crate) fn load_report_age_max(&self) -> Duration {
        Duration::from_millis(self.load_report_age_ms_max)
    }

    pub(crate) fn turn_max(&self) -> Duration {
        Duration::from_millis(self.turn_ms_max)
    }

    pub(crate) fn connect_max(&self) -> Duration {
        Duration::from_millis(self.connect_ms_max)
    }

    pub(crate) fn drain_max(&self) -> Duration {
        Duration::from_millis(self.drain_ms_max)
    }

    pub(crate) fn rebind_gain_min(&self) -> Duration {
        Duration::from_millis(self.rebind_gain_ms_min)
    }

    pub(crate) fn affinity_idle_max(&self) -> Duration {
        Duration::from_millis(self.affinity_idle_ms_max)
    }
}

/// Returns host and port of an agent's control address.
///
/// # Errors
/// When the address isn't `http://host:port`. The error text completes a sentence that begins with
/// the address.
pub(crate) fn control_authority(worker: &str) -> Result<http::uri::Authority, &'static str> {
    let uri: Uri = worker.parse().map_err(|_| "is no address")?;
    if uri.scheme_str() != Some("http") {
        return Err("is not http");
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err("has a path");
    }
    let authority = uri.authority().ok_or("has no host")?;
    if authority.port_u16().is_none_or(|port| port == 0) {
        return Err("has no port");
    }
    Ok(authority.clone())
}

/// Sets `addr` to the address in `text`, the value of a flag, if the flag is set.
fn override_addr(
    flag: &str,
    text: Option<&String>,
    addr: &mut SocketAddr,
    problems: &mut Vec<String>,
) {
    let Some(text) = text else { return };
    match text.parse() {
        Ok(parsed) => *addr = parsed,
        Err(_) => problems.push(format!("--{flag}: {text:?} is not address:port")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_is_told_at_once() {
        let args = Args {
            workers: vec!["http://a:1".into(), "http://a:1/".into(), "https://b:2".into()],
            data_addr: Some("nowhere".into()),
            ..Args::default()
        };
        let problems = Config::load(&args).unwrap_err().0;
        assert_eq!(problems.len(), 3, "{problems:?}");
    }

    #[test]
    fn a_flag_beats_the_file_and_defaults_are_legal_but_for_workers() {
        assert_eq!(Config::default().problems().len(), 1);
        let args = Args { workers: vec!["http://a:1".into()], ..Args::default() };
        let config = Config::load(&args).unwrap();
        assert_eq!(config.workers, ["http://a:1"]);
        let (shown, problems) = settings::parse::<Config>(&settings::to_toml(&config), &[]);
        assert_eq!((shown, problems), (config, vec![]));
    }

    #[test]
    fn preambles_are_stripped_or_kept_and_nothing_else() {
        let of = |text: &str| settings::parse::<Config>(text, &[]);
        assert_eq!(of("").0.preamble, PreamblePolicy::Strip);
        assert_eq!(of("preamble = \"keep\"").0.preamble, PreamblePolicy::Keep);
        let (_, problems) = of("preamble = \"leave\"");
        assert!(problems[0].contains("`strip` or `keep`"), "{problems:?}");
    }

    #[test]
    fn a_control_address_is_http_host_and_port() {
        for bad in ["", "a", "http://a", "http://a:0", "http://a:1/x", "ftp://a:1"] {
            assert!(control_authority(bad).is_err(), "{bad:?} was taken");
        }
        assert_eq!(control_authority("http://[::1]:7/").unwrap().as_str(), "[::1]:7");
    }
}

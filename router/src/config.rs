//! Reads and checks the router's settings: a TOML file, environment variables and flags.
//!
//! `main` calls [`Config::load`] with the command line. The router's other modules read the fields
//! of the [`Config`], one for each table of the file. [`tables`] has the keys and their defaults.
//! Environment variables and flags are for settings that differ from host to host. They take
//! precedence over the file.
//!
//! This module opens no socket. It reads the file and lists problems with the help of
//! `service::settings`, which the agent uses, too.

pub mod access;
pub mod auth;
pub mod claims;
pub mod discovery;
pub mod jwt;
pub mod tables;

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use http::Uri;
use service::{
    server::ConnectionSettings,
    settings::{self, Problems},
    traces::settings::TracesTable,
};

use self::{
    access::{AgentsTable, TlsTable},
    auth::{AuthMode, AuthTable},
    claims::ClaimsTable,
    discovery::DiscoveryTable,
    tables::{LimitsTable, ListenTable, LogTable, ModelsTable, PlacementTable, TimeoutsTable},
};

/// The most agents that one router follows. Each agent costs a connection and a few tasks, so a
/// larger fleet needs several routers.
pub const AGENTS_MAX: usize = 1024;

service::settings! {
    /// All settings as they take effect: the tables of the settings file. [`Config::problems`]
    /// checks them.
    pub struct Config {
        /// Control ports of the worker agents, as `http://host:port` or `https://host:port`.
        workers: Vec<String>;
        discovery: DiscoveryTable;
        listen: ListenTable;
        limits: LimitsTable;
        timeouts: TimeoutsTable;
        connections: ConnectionSettings;
        placement: PlacementTable;
        models: ModelsTable;
        auth: AuthTable;
        tls: TlsTable;
        agents: AgentsTable;
        claims: ClaimsTable;
        log: LogTable;
        traces: TracesTable;
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
    /// Path of the file of API keys (TOML).
    #[arg(long, env = "BERTH_ROUTER_KEYS_FILE")]
    pub keys_file: Option<PathBuf>,
    /// Serve everybody who reaches the router, without keys.
    #[arg(long, env = "BERTH_ROUTER_NO_AUTH")]
    pub no_auth: bool,
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
        let (mut config, mut problems) = settings::load::<Self>(args.config.as_deref());
        if !args.workers.is_empty() {
            config.workers.clone_from(&args.workers);
        }
        override_addr(
            "data-addr",
            args.data_addr.as_ref(),
            &mut config.listen.data_addr,
            &mut problems,
        );
        override_addr(
            "admin-addr",
            args.admin_addr.as_ref(),
            &mut config.listen.admin_addr,
            &mut problems,
        );
        if let Some(path) = &args.keys_file {
            config.auth.keys_file.clone_from(path);
        }
        if args.no_auth {
            config.auth.mode = AuthMode::None;
        }
        problems.extend(config.problems());
        problems.extend(config.auth.file_problems());
        if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
    }

    /// Returns the problems of these settings, a sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = vec![];
        self.discovery.check(self.auth.keys_path().is_some(), &mut problems);
        if self.workers.is_empty() && !self.discovery.is_on() {
            problems.push(
                "workers: none is named; give --worker http://host:port, or set a source of \
                 [discovery]"
                    .to_owned(),
            );
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
        access::check(&self.tls, &self.agents, &self.workers, &mut problems);
        for origin in self.listen.cors_origins.iter().filter(|origin| !is_origin(origin)) {
            problems.push(format!(
                "listen.cors_origins: {origin:?} is no origin; write https://host, with the port \
                 if it isn't the usual one, or *"
            ));
        }
        let is_host = |host: &&String| {
            host.parse::<http::uri::Authority>().is_ok_and(|parsed| parsed.host() == host.as_str())
        };
        for host in self.listen.allowed_hosts.iter().filter(|host| !is_host(host)) {
            problems.push(format!("listen.allowed_hosts: {host:?} is no name of a host"));
        }
        problems.extend(self.time_problems());
        problems.extend(self.connections.problems());
        problems.extend(self.claims.problems());
        problems.extend(self.traces.problems());
        let sizes = [
            ("limits.body_bytes_max", self.limits.body_bytes_max),
            ("limits.sessions_max", self.limits.sessions_max),
            ("limits.tokenizer_bytes_max", self.limits.tokenizer_bytes_max),
        ];
        for (key, value) in sizes {
            // A semaphore counts to 2^61, and no router needs more than 2^40.
            if value == 0 || value > 1 << 40 {
                problems.push(format!("{key}: must be 1 to 2^40"));
            }
        }
        // A process usually has fewer file descriptors than 65,536.
        if !(1..=1 << 16).contains(&self.limits.turns_in_flight_max) {
            problems.push("limits.turns_in_flight_max: must be 1 to 65536".to_owned());
        }
        // One client gets 88 % of the memory, and the largest body must fit into that.
        let body_bytes_max = self.limits.body_bytes_max;
        if self.limits.body_bytes_in_flight_max < body_bytes_max.saturating_add(body_bytes_max / 4)
        {
            problems.push(
                "limits.body_bytes_in_flight_max: is below 5/4 of limits.body_bytes_max".to_owned(),
            );
        }
        self.placement.check(&mut problems);
        self.models.check(&mut problems);
        problems.extend(self.auth.problems(self.listen.data_addr, self.listen.admin_addr));
        problems
    }

    /// Returns the problems of the times.
    fn time_problems(&self) -> Vec<String> {
        let times_ms = [
            ("timeouts.load_report_age_ms_max", self.timeouts.load_report_age_ms_max),
            ("timeouts.turn_ms_max", self.timeouts.turn_ms_max),
            ("timeouts.connect_ms_max", self.timeouts.connect_ms_max),
            ("timeouts.bootstrap_ms_max", self.timeouts.bootstrap_ms_max),
            ("placement.affinity_idle_ms_max", self.placement.affinity_idle_ms_max),
            ("placement.rebind_gain_ms_min", self.placement.rebind_gain_ms_min),
        ];
        // A time of more than a year is a mistake of unit, and its deadline might not fit the
        // clock.
        let year_ms = 366 * 24 * 3600 * 1000;
        let times_from_0_ms = [
            ("timeouts.lame_duck_ms", self.timeouts.lame_duck_ms),
            ("timeouts.drain_ms_max", self.timeouts.drain_ms_max),
            ("timeouts.waiting_comment_ms", self.timeouts.waiting_comment_ms),
        ];
        let times_ms = times_ms.map(|(key, value)| (key, value, 1));
        let times_from_0_ms = times_from_0_ms.map(|(key, value)| (key, value, 0));
        let times_ms = times_ms.into_iter().chain(times_from_0_ms);
        let wrong = times_ms.filter(|(_, value, least)| !(*least..=year_ms).contains(value));
        wrong.map(|(key, _, least)| format!("{key}: must be {least} to {year_ms} ms")).collect()
    }

    /// Reads the certificates and tokens once. Returns what is wrong with them.
    #[must_use]
    pub fn file_problems(&self) -> Vec<String> {
        let mut problems = access::file_problems(&self.tls, &self.agents);
        problems.extend(self.discovery.file_problems());
        problems.extend(self.traces.file_problem());
        problems
    }

    pub(crate) fn load_report_age_max(&self) -> Duration {
        Duration::from_millis(self.timeouts.load_report_age_ms_max)
    }

    pub(crate) fn turn_max(&self) -> Duration {
        Duration::from_millis(self.timeouts.turn_ms_max)
    }

    pub(crate) fn connect_max(&self) -> Duration {
        Duration::from_millis(self.timeouts.connect_ms_max)
    }

    pub(crate) fn lame_duck(&self) -> Duration {
        Duration::from_millis(self.timeouts.lame_duck_ms)
    }

    pub(crate) fn drain_max(&self) -> Duration {
        Duration::from_millis(self.timeouts.drain_ms_max)
    }

    /// Returns how long a stream waits before it gets a comment. `None`: it gets none.
    pub(crate) fn waiting_comment(&self) -> Option<Duration> {
        let ms = self.timeouts.waiting_comment_ms;
        (ms > 0).then(|| Duration::from_millis(ms))
    }

    pub(crate) fn bootstrap_max(&self) -> Duration {
        Duration::from_millis(self.timeouts.bootstrap_ms_max)
    }

    pub(crate) fn rebind_gain_min(&self) -> Duration {
        Duration::from_millis(self.placement.rebind_gain_ms_min)
    }

    pub(crate) fn affinity_idle_max(&self) -> Duration {
        Duration::from_millis(self.placement.affinity_idle_ms_max)
    }
}

/// Whether a text is `*`, or an origin as browsers write it: scheme, host and an unusual port.
fn is_origin(text: &str) -> bool {
    let is_url = |uri: Uri| uri.scheme_str().is_some() && uri.authority().is_some();
    let has_path = text.splitn(4, '/').count() > 3;
    text == "*" || (!has_path && text.parse().is_ok_and(is_url))
}

/// Returns host and port of an agent's control address.
///
/// # Errors
/// When the address is neither `http://host:port` nor `https://host:port`. The error text completes
/// a sentence that begins with the address.
pub(crate) fn control_authority(worker: &str) -> Result<http::uri::Authority, &'static str> {
    let uri: Uri = worker.parse().map_err(|_| "is no address")?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err("is neither http nor https");
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
    use super::{tables::PreamblePolicy, *};

    #[test]
    fn every_problem_is_told_at_once() {
        let args = Args {
            workers: vec!["http://a:1".into(), "http://a:1/".into(), "ftp://b:2".into()],
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
        let (shown, problems) = settings::parse::<Config>(&settings::to_toml(&config));
        assert_eq!((shown, problems), (config, vec![]));
    }

    #[test]
    fn preambles_are_stripped_or_kept_and_nothing_else() {
        let of = |text: &str| settings::parse::<Config>(text);
        assert_eq!(of("").0.placement.preamble, PreamblePolicy::Strip);
        assert_eq!(of("placement.preamble = \"keep\"").0.placement.preamble, PreamblePolicy::Keep);
        let (_, problems) = of("placement.preamble = \"leave\"");
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

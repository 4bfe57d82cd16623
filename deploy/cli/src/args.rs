//! Defines the command line of `berth`.
//!
//! A secret is never a flag: every user of the host can read the flags of a process.

use std::{ffi::OsString, path::PathBuf};

use clap::{Parser, Subcommand, ValueEnum};

pub const ROUTER_URL: &str = "http://127.0.0.1:8080";
pub const AGENT_URL: &str = "http://127.0.0.1:31001";

const EXIT_STATUS_HELP: &str = "\
Exit status: 0 well, 1 not well, 64 wrong arguments, 66 a file can't be used,
69 nothing answers, 70 the answer isn't understood, 74 no output, 77 refused.
The key comes from --key-file, or from BERTH_KEY in the environment.";

/// Shows a Berth fleet and operates it
#[derive(Debug, Parser)]
#[command(name = "berth", version, after_help = EXIT_STATUS_HELP)]
pub struct Args {
    /// How to reach routers and agents.
    #[command(flatten)]
    pub target: TargetArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// How to reach routers and agents.
#[derive(Debug, Clone, clap::Args)]
pub struct TargetArgs {
    /// URL of the router's data port
    #[arg(long, global = true, env = "BERTH_ROUTER", value_name = "URL",
          default_value = ROUTER_URL)]
    pub router: String,
    /// URL of an agent's control port, for the commands that ask an agent
    #[arg(long, global = true, env = "BERTH_AGENT", value_name = "URL", default_value = AGENT_URL)]
    pub agent: String,
    /// File with the key for the router
    #[arg(long, global = true, env = "BERTH_KEY_FILE", value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// CAs of the certificates of routers and agents (PEM); default: the system's
    #[arg(long, global = true, env = "BERTH_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Certificate to show to an agent, as a router does (PEM)
    #[arg(long, global = true, value_name = "FILE")]
    pub cert: Option<PathBuf>,
    /// Private key of that certificate (PEM)
    #[arg(long, global = true, value_name = "FILE")]
    pub cert_key: Option<PathBuf>,
    /// Name in the certificates, if it isn't the host of the URL
    #[arg(long, global = true, value_name = "NAME")]
    pub server_name: Option<String>,
    /// File with a token of the fleet, by which routers and agents prove themselves
    #[arg(long, global = true, env = "BERTH_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

impl Default for TargetArgs {
    fn default() -> Self {
        Self {
            router: ROUTER_URL.to_owned(),
            agent: AGENT_URL.to_owned(),
            key_file: None,
            ca: None,
            cert: None,
            cert_key: None,
            server_name: None,
            token_file: None,
        }
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serves the SGLang engines of this host, by the program berth-serve; see --help behind it
    #[command(disable_help_flag = true)]
    Serve(ServeArgs),
    /// Shows workers, sessions and placements as they change, until q
    Top(TopArgs),
    /// Lists the workers: state, turns, request rows, KV pool
    Workers(ListArgs),
    /// Lists the GPUs of the workers: memory, KV, load, health
    Devices(ListArgs),
    /// Lists the sessions of the key's owner, or of everybody at one agent
    Sessions(SessionsArgs),
    /// Lists the last placements, or explains those of one turn
    Placements(PlacementsArgs),
    /// Lists the last turns
    Turns(TurnsArgs),
    /// Shows or ends one session
    Session {
        /// What to do with the session.
        #[command(subcommand)]
        command: SessionCommand,
    },
    /// Makes routers place no new sessions at an agent; status 1 if turns are left after the wait
    Drain(DrainArgs),
    /// Writes settings for the engines on this host, and the systemd units or Helm values with them
    Init(InitArgs),
    /// Finds what is set wrong in a fleet, and names the line to change; status 1 if anything is
    Doctor(DoctorArgs),
    /// Shows which session holds each page of an engine's KV pool; status 1 if anything is wrong
    Audit(AuditArgs),
    /// Shows which blocks are resident on an engine, as routers are told
    Kv(KvArgs),
}

/// The arguments of `berth serve`.
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Arguments of berth-serve
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<OsString>,
}

/// The arguments of `berth top`.
#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// Seconds between two questions to the router
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    pub interval: f64,
}

/// The arguments of a list.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ListArgs {
    /// Prints JSON; with --watch, one document a line
    #[arg(long)]
    pub json: bool,
    /// Prints again every so many seconds, until it is stopped
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true,
          default_missing_value = "2", value_parser = parse_seconds)]
    pub watch: Option<f64>,
}

/// The arguments of `berth sessions`.
#[derive(Debug, clap::Args)]
pub struct SessionsArgs {
    /// How to print.
    #[command(flatten)]
    pub list: ListArgs,
    /// Asks the agent of --agent instead of the router: sessions of all owners
    #[arg(long)]
    pub at_agent: bool,
    /// Most sessions to list
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub limit: usize,
}

/// The arguments of `berth placements`.
#[derive(Debug, clap::Args)]
pub struct PlacementsArgs {
    /// Id of one turn, from the header x-berth-turn of its answer
    pub turn: Option<String>,
    /// How to print.
    #[command(flatten)]
    pub list: ListArgs,
    /// Most placements to list; the newest
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,
}

/// The arguments of `berth turns`.
#[derive(Debug, clap::Args)]
pub struct TurnsArgs {
    /// How to print.
    #[command(flatten)]
    pub list: ListArgs,
    /// Only the turns of this session, as `berth turns` names it
    #[arg(long, value_name = "SESSION")]
    pub session: Option<String>,
    /// Most turns to list; the newest
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,
}

/// The commands of one session.
#[derive(Debug, Subcommand)]
pub enum SessionCommand {
    /// Shows the session
    Show(SessionArgs),
    /// Closes the session; a running turn ends first
    Close(SessionArgs),
    /// Demotes the pinned session: gives its KV to the engine's cache and keeps its history
    Demote(SessionArgs),
    /// Begins to load the session's KV from the host's memory to the device, for its next turn
    Prefetch(SessionArgs),
}

/// The arguments of a command for one session.
#[derive(Debug, clap::Args)]
pub struct SessionArgs {
    /// The session's id
    pub id: String,
    /// Prints JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `berth drain`.
#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    /// Ends the drain instead
    #[arg(long, conflicts_with = "wait_ms")]
    pub undo: bool,
    /// Waits so long for the turns there to end (milliseconds)
    #[arg(long, default_value_t = 0)]
    pub wait_ms: u64,
    /// Prints JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `berth init`.
#[derive(Debug, clap::Args)]
pub struct InitArgs {
    /// URL of an engine on this host; if not given, the engines are looked for
    #[arg(long, value_name = "URL")]
    pub engine: Vec<String>,
    /// This host's name or address for routers of other hosts; if not given, none reach the agents
    #[arg(long, value_name = "HOST")]
    pub address: Option<String>,
    /// Control port of an agent on another host, for the router's settings
    #[arg(long, value_name = "URL")]
    pub other_agent: Vec<String>,
    /// What starts agent and router
    #[arg(long = "for", value_enum, value_name = "WHAT", default_value = "none")]
    pub supervisor: Supervisor,
    /// Folder to write to
    #[arg(long, value_name = "DIR", default_value = "berth")]
    pub out: PathBuf,
    /// Replaces files that exist
    #[arg(long)]
    pub force: bool,
    /// Prints the files instead of writing them
    #[arg(long)]
    pub print: bool,
    /// Prints what was found and written as JSON
    #[arg(long, conflicts_with = "print")]
    pub json: bool,
}

/// What starts agent and router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Supervisor {
    /// The user, or something that `berth init` has no files for
    None,
    /// Units of systemd on this host
    Systemd,
    /// The Helm chart, with an agent on each node
    Helm,
}

/// The arguments of `berth doctor`.
#[derive(Debug, Default, clap::Args)]
pub struct DoctorArgs {
    /// Prints JSON
    #[arg(long)]
    pub json: bool,
    /// Lists the checks
    #[arg(long)]
    pub list: bool,
    /// A further router of the fleet
    #[arg(long, value_name = "URL")]
    pub other_router: Vec<String>,
    /// A further agent; those that the router knows are asked anyway
    #[arg(long, value_name = "URL")]
    pub other_agent: Vec<String>,
    /// Admin port of a router, in the routers' order; default: port 8081 of each
    #[arg(long, value_name = "URL")]
    pub router_admin: Vec<String>,
    /// Admin port of an agent; default: port 31002 of each
    #[arg(long, value_name = "URL")]
    pub agent_admin: Vec<String>,
    /// How long the load balancer before the routers keeps idle connections (milliseconds)
    #[arg(long, value_name = "MS")]
    pub balancer_keep_alive_ms: Option<u64>,
}

/// The arguments of `berth audit`.
#[derive(Debug, clap::Args)]
pub struct AuditArgs {
    /// DP rank; all ranks if not given
    #[arg(long)]
    pub rank: Option<u32>,
    /// Prints JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `berth kv`.
#[derive(Debug, clap::Args)]
pub struct KvArgs {
    /// Prints JSON, with the hash of every block
    #[arg(long)]
    pub json: bool,
}

/// Takes a tenth of a second to a day.
fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number of seconds".to_owned())?;
    let is_valid = (0.1..=86_400.0).contains(&seconds);
    is_valid.then_some(seconds).ok_or_else(|| "give 0.1 to 86400 seconds".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn help_fits_80_columns_and_names_every_exit_status() {
        for status in ["0", "1", "64", "66", "69", "70", "74", "77"] {
            assert!(EXIT_STATUS_HELP.contains(status), "{status}");
        }
        assert!(EXIT_STATUS_HELP.lines().all(|line| line.len() <= 80));
    }

    #[test]
    fn a_watch_has_an_interval_of_its_own() {
        let watch = |args: &[&str]| {
            let args = Args::try_parse_from([&["berth", "workers"], args].concat());
            args.map(|args| match args.command {
                Command::Workers(list) => list.watch,
                _ => None,
            })
        };
        assert_eq!(watch(&[]).unwrap(), None);
        assert_eq!(watch(&["--watch"]).unwrap(), Some(2.0));
        assert_eq!(watch(&["--watch=0.5", "--json"]).unwrap(), Some(0.5));
        for wrong in ["--watch=0", "--watch=x", "--watch=-1", "--watch=NaN"] {
            assert!(watch(&[wrong]).is_err(), "{wrong}");
        }
    }
}

//! Defines the command line of `berth serve`.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

const HELP_AFTER: &str = "\
Examples:
  berth serve -- python3 -m sglang.launch_server --model-path Qwen/Qwen2.5-0.5B-Instruct
  berth serve --engine http://127.0.0.1:30000
  berth serve --gpus 0,1,2,3 --tp 2 -- python3 -m sglang.launch_server --model-path MODEL

Exit status: that of an engine which ended by itself; 0 after Ctrl-C or SIGTERM, 1 if something
can't start or failed, 64 wrong arguments or settings.";

/// When an engine that ended is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Restart {
    /// Its end is the end of everything
    Never,
    /// After an exit status other than 0 or a signal, if it had been ready before
    OnFailure,
}

/// Serves the SGLang engines of this host: starts them, or joins those that run
#[derive(Debug, Clone, Parser)]
#[command(name = "berth-serve", version, after_help = HELP_AFTER)]
pub struct Args {
    /// URL of an engine that runs on this host; once for each
    #[arg(long, value_name = "URL", conflicts_with = "command")]
    pub engine: Vec<String>,
    /// GPUs for the engines that COMMAND starts, such as 0,1,2,3: one engine for every --tp of them
    #[arg(long, value_name = "GPUS", value_delimiter = ',')]
    pub gpus: Vec<u16>,
    /// GPUs of each engine, which run its layers together (tensor parallelism)
    #[arg(long, value_name = "N", default_value_t = 1, requires = "gpus")]
    pub tp: u16,
    /// Add no flags to COMMAND; its --port is 30000 if it names none
    #[arg(long)]
    pub no_flags: bool,
    /// When an engine that ended is started again
    #[arg(long, value_enum, default_value = "never")]
    pub restart: Restart,
    /// Most seconds that an engine may take to end before it is killed
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub stop_seconds_max: u32,
    /// Address for clients [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "join")]
    pub data_addr: Option<String>,
    /// Address for operators: metrics, health, dashboard [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "join")]
    pub admin_addr: Option<String>,
    /// File of API keys for clients (TOML)
    #[arg(long, value_name = "FILE", conflicts_with = "join")]
    pub keys_file: Option<PathBuf>,
    /// Serve everybody who reaches the router, without keys
    #[arg(long, conflicts_with = "join")]
    pub no_auth: bool,
    /// Settings file of the router (TOML)
    #[arg(long, value_name = "FILE", conflicts_with = "join")]
    pub router_config: Option<PathBuf>,
    /// Settings file of the agents (TOML); each gets its own engine, name and addresses
    #[arg(long, value_name = "FILE")]
    pub agent_config: Option<PathBuf>,
    /// URL of a router of a fleet that this host's engines join, instead of a router here
    #[arg(long, value_name = "URL", requires = "address")]
    pub join: Option<String>,
    /// Host at which the fleet's routers reach this host
    #[arg(long, value_name = "HOST", requires = "join")]
    pub address: Option<String>,
    /// Command that starts an engine
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl Args {
    /// The number of engines, or what is wrong with the arguments.
    ///
    /// # Errors
    /// The text says what to give.
    pub fn engines(&self) -> Result<usize, String> {
        if self.command.is_empty() {
            // The parser waives what an argument requires if another one excludes that.
            let is_of_command =
                !self.gpus.is_empty() || self.no_flags || self.restart != Restart::Never;
            if is_of_command {
                return Err("--gpus, --no-flags and --restart are for engines that a command \
                            starts: give it after --"
                    .to_owned());
            }
            return match self.engine.len() {
                0 => Err("name an engine that runs with --engine URL, or give the command that \
                          starts one after --"
                    .to_owned()),
                count => Ok(count),
            };
        }
        if self.tp == 0 {
            return Err("--tp must be at least 1".to_owned());
        }
        let (gpus, tp) = (self.gpus.len(), usize::from(self.tp));
        if gpus % tp != 0 {
            return Err(format!("--gpus names {gpus} GPUs, which isn't a multiple of --tp {tp}"));
        }
        let mut sorted = self.gpus.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() < gpus {
            return Err("--gpus names a GPU twice".to_owned());
        }
        Ok((gpus / tp).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from(["berth-serve"].iter().chain(words))
    }

    #[test]
    fn engines_are_counted_and_wrong_arguments_say_what_to_give() {
        let count = |words: &[&str]| parse(words).unwrap().engines();
        assert_eq!(count(&["--engine", "http://a", "--engine", "http://b"]), Ok(2));
        assert_eq!(count(&["--", "python3", "--gpus", "7"]), Ok(1), "the engine's own flag");
        assert_eq!(count(&["--gpus", "0,1,2,3", "--tp", "2", "--", "e"]), Ok(2));
        assert!(count(&[]).unwrap_err().contains("--engine"));
        assert!(count(&["--gpus", "0,1,2", "--tp", "2", "--", "e"]).unwrap_err().contains("--tp"));
        assert!(count(&["--gpus", "0,0", "--", "e"]).unwrap_err().contains("twice"));
        assert!(count(&["--gpus", "0", "--tp", "0", "--", "e"]).is_err());
    }

    #[test]
    fn arguments_that_exclude_each_other_are_refused() {
        assert!(parse(&["--engine", "http://a", "--", "python3"]).is_err());
        let of_command = parse(&["--gpus", "0", "--engine", "http://a"]).unwrap();
        assert!(of_command.engines().unwrap_err().contains("after --"));
        assert!(parse(&["--join", "http://a", "--", "python3"]).is_err(), "without --address");
    }
}

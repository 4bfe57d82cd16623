//! The process `berth-agent`: reads the settings, sets up logs and signals, and runs the agent.

use std::process::ExitCode;

use service::{
    command_line::{print_error, read_settings},
    log, memory,
    signal::{StopSignal, StopSignals},
};

use crate::{
    Listeners,
    config::{Args, Config},
    owner::Ending,
};

/// Runs the process from its command line to its exit status.
#[must_use]
pub fn main() -> ExitCode {
    // With 16,384 sessions and 100 watchers the process takes 49 MiB, and 66 with huge pages.
    memory::use_small_pages();
    let only_checks = |args: &Args| args.check_config;
    let config = match read_settings(only_checks, Config::load, Config::file_problems) {
        Ok(config) => config,
        Err(status) => return status,
    };
    log::init();
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&format_args!("berth-agent: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(config: Config) -> anyhow::Result<()> {
    let listeners = Listeners::bind(&config)?;
    let mut signals = StopSignals::new()?;
    // A person who stops the agent wants its sessions closed. A supervisor may start the next one.
    let leaves_sessions = config.shutdown.handover;
    let stop = async move {
        match signals.next().await {
            StopSignal::Terminate if leaves_sessions => Ending::HandOver,
            StopSignal::Terminate | StopSignal::Interrupt => Ending::Close,
        }
    };
    let epoch = service::clock::unix_ns();
    Ok(crate::run(config, listeners, epoch, stop).await?)
}

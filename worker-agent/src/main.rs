//! Starts `berth-agent`: reads settings, sets up logs and signals, and runs the agent.

use std::process::ExitCode;

use clap::Parser;
use service::{
    log, memory, settings,
    signal::{StopSignal, StopSignals},
};
use worker_agent::{
    Listeners,
    config::{Args, Config},
    owner::Ending,
};

/// Gives freed memory back to the system. The system's allocator keeps what many short bursts of
/// turns and watchers leave behind.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // With 16,384 sessions and 100 watchers the process takes 49 MiB, and 66 with huge pages.
    memory::use_small_pages();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // The parser reports help and version as errors, but they are not usage errors.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { settings::EXIT_USAGE } else { 0 });
        }
    };
    let only_checks_settings = args.check_config;
    let config = match Config::load(args) {
        Ok(config) => config,
        Err(problems) => {
            print_error(&problems);
            return ExitCode::from(settings::EXIT_USAGE);
        }
    };
    if only_checks_settings {
        let problems = config.file_problems();
        if !problems.is_empty() {
            print_error(&settings::Problems(problems));
            return ExitCode::from(settings::EXIT_USAGE);
        }
        let config_text = settings::to_toml(&config);
        return if print(&config_text) { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    log::init();
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&format_args!("{error:#}"));
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
    Ok(worker_agent::run(config, listeners, epoch, stop).await?)
}

/// Prints to standard output. Returns whether that succeeded.
fn print(text: &str) -> bool {
    std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes()).is_ok()
}

fn print_error(error: &dyn std::fmt::Display) {
    // If standard error is gone too, nothing can be reported.
    let _ =
        std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("berth-agent: {error}\n"));
}

//! The process `berth-router`: reads the settings, starts logging, and runs the router.
//!
//! At SIGTERM the router leaves: it serves on for a while, and says that it isn't ready. Then it
//! drains: it takes no new turns, and ends after its running turns. Ctrl-C, or a second signal,
//! makes it drain at once.

use std::{io::Write as _, process::ExitCode};

use anyhow::Context as _;
use clap::Parser as _;
use router::{
    Listeners,
    config::{Args, Config},
};
use service::{
    log, server, settings,
    signal::{StopSignal, StopSignals},
    tasks::Tasks,
};

/// Gives freed memory back to the system. The system's allocator keeps what a burst of turns or a
/// large prompt leaves behind.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are not errors; everything else is an invalid setting.
            let is_error = error.use_stderr();
            drop(error.print());
            return if is_error { ExitCode::from(settings::EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let config = match Config::load(&args) {
        Ok(config) => config,
        Err(problems) => {
            drop(writeln!(std::io::stderr(), "{problems}"));
            return ExitCode::from(settings::EXIT_USAGE);
        }
    };
    if args.check_config {
        let problems = config.file_problems();
        if !problems.is_empty() {
            drop(writeln!(std::io::stderr(), "{}", settings::Problems(problems)));
            return ExitCode::from(settings::EXIT_USAGE);
        }
        drop(write!(std::io::stdout(), "{}", settings::to_toml(&config)));
        return ExitCode::SUCCESS;
    }
    log::init();
    match serve(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "router ended");
            ExitCode::FAILURE
        }
    }
}

fn serve(config: Config) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let data = server::bind(config.listen.data_addr).and_then(|listener| {
            listener.set_nonblocking(true)?;
            tokio::net::TcpListener::from_std(listener)
        });
        let data =
            data.with_context(|| format!("data_addr {} can't be bound", config.listen.data_addr))?;
        let admin = server::bind(config.listen.admin_addr)
            .with_context(|| format!("admin_addr {} can't be bound", config.listen.admin_addr))?;
        let tasks = Tasks::default();
        stop_on_signal(&tasks)?;
        Ok(router::run(config, Listeners { data, admin }, tasks).await?)
    });
    // Abandons the tasks that did not end within the drain time.
    runtime.shutdown_background();
    result
}

fn stop_on_signal(tasks: &Tasks) -> std::io::Result<()> {
    let mut signals = StopSignals::new()?;
    let stopping = tasks.clone();
    tasks.spawn(async move {
        let signals = async {
            // A person who stops the router waits for no balancer.
            if signals.next().await == StopSignal::Terminate {
                stopping.leave();
                signals.next().await;
            }
            stopping.cancel();
        };
        tokio::select! {
            biased;
            () = stopping.cancelled() => {}
            () = signals => {}
        }
    });
    Ok(())
}

//! The process `berth-router`: reads the settings, starts logging, and runs the router.
//!
//! At SIGTERM the router leaves: it serves on for a while, and says that it isn't ready. Then it
//! drains: it takes no new turns, and ends after its running turns. Ctrl-C, or a second signal,
//! makes it drain at once.

use std::process::ExitCode;

use anyhow::Context as _;
use router::{
    Listeners,
    config::{Args, Config},
};
use service::{
    command_line::read_settings,
    log, memory, server,
    signal::{StopSignal, StopSignals},
    tasks::Tasks,
};

/// Gives freed memory back to the system. The system's allocator keeps what a burst of turns or a
/// large prompt leaves behind.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // An open stream takes 35 KiB, and 58 with huge pages: of a buffer of 8 KiB, half is used.
    memory::use_small_pages();
    let only_checks = |args: &Args| args.check_config;
    let load = |args: Args| Config::load(&args);
    let config = match read_settings(only_checks, load, Config::file_problems) {
        Ok(config) => config,
        Err(status) => return status,
    };
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
        Ok(router::run(
            config,
            Listeners { data, admin, agents: server::LocalPorts::default() },
            tasks,
        )
        .await?)
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

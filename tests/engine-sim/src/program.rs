//! `engine-sim`: the engine simulator as a process, with SGLang's own flag names.

use crate::shim::SimShim;
use crate::{Config, EngineSim};
use clap::Parser;
use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
};
use tokio::net::TcpListener;

/// Behaves as SGLang 0.5.23 does to an outside caller, without weights.
#[derive(Debug, Parser)]
#[command(name = "engine-sim", version)]
struct Args {
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 takes a free port. The address is printed.
    #[arg(long, default_value_t = 30000)]
    port: u16,
    /// The socket on which an agent listens for the engine's shim. The first rank's shim reports
    /// there; without the flag, the engine has no shim.
    #[arg(long, env = "BERTH_SHIM_SOCKET")]
    shim_socket: Option<PathBuf>,
    #[command(flatten)]
    config: Config,
}

impl Args {
    fn problems(&self) -> Vec<&'static str> {
        let core = &self.config.core;
        let checks = [
            (core.page_size.is_power_of_two(), "--page-size must be a power of two"),
            (core.chunked_prefill_size >= core.page_size, "--chunked-prefill-size is below a page"),
            (core.max_total_tokens >= core.page_size.max(2), "--max-total-tokens is below a page"),
            (core.context_len >= 16, "--context-length must be at least 16"),
            (core.max_running_requests >= 1, "--max-running-requests must be at least 1"),
            (self.config.dp_size >= 1, "--dp-size must be at least 1"),
        ];
        checks.into_iter().filter(|(good, _)| !good).map(|(_, message)| message).collect()
    }
}

/// Runs the process from its command line to its exit status.
#[must_use]
pub fn main() -> ExitCode {
    let mut args = Args::parse();
    args.config.core.test_retract =
        std::env::var("SGLANG_TEST_RETRACT").is_ok_and(|set| set == "true");
    let problems = args.problems();
    if !problems.is_empty() {
        let _ = writeln!(io::stderr(), "{}", problems.join("\n"));
        return ExitCode::from(service::settings::EXIT_USAGE);
    }
    tracing_subscriber::fmt().with_writer(io::stderr).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(run(args))) {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(io::stderr(), "engine-sim: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> io::Result<ExitCode> {
    let listener = TcpListener::bind((args.host.as_str(), args.port)).await?;
    let sim = Arc::new(EngineSim::start(args.config, listener)?);
    let _shim = args.shim_socket.map(|socket| SimShim::start(Arc::clone(&sim), socket));
    writeln!(io::stdout(), "listening on {}", sim.url())?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let crashed = tokio::select! {
        () = sim.gone() => true,
        _ = tokio::signal::ctrl_c() => false,
        _ = terminate.recv() => false,
    };
    sim.kill();
    sim.gone().await;
    Ok(if crashed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

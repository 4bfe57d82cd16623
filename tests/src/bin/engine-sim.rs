//! `engine-sim`: the engine simulator as a process, with SGLang's own flag names.

use clap::Parser;
use std::{
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
    time::Duration,
};
use tests::engine_sim::{Config, EngineSim, core::CoreConfig, kv::KvEventsConfig};
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
    #[arg(long, default_value = "tiny")]
    model_path: String,
    /// Default: the last part of the model path.
    #[arg(long)]
    served_model_name: Option<String>,
    /// The tokens of a page; a power of two.
    #[arg(long, default_value_t = 16)]
    page_size: usize,
    #[arg(long, default_value_t = 2048)]
    max_total_tokens: usize,
    #[arg(long, default_value_t = 1024)]
    context_length: usize,
    #[arg(long, default_value_t = 8)]
    max_running_requests: usize,
    #[arg(long, default_value_t = 512)]
    chunked_prefill_size: usize,
    #[arg(long, default_value_t = 1)]
    dp_size: usize,
    /// With 1, admission reserves 70 % of an unfinished answer; with less, less.
    #[arg(long, default_value = "1", value_parser = new_token_per_mille)]
    schedule_conservativeness: usize,
    #[arg(long)]
    enable_streaming_session: bool,
    #[arg(long)]
    enable_session_radix_cache: bool,
    #[arg(long)]
    enable_metrics: bool,
    #[arg(long)]
    enable_cache_report: bool,
    #[arg(long, default_value_t = 40)]
    decode_log_interval: u32,
    /// The seed of sampled answers and generated ids.
    #[arg(long, alias = "random-seed", default_value_t = 0)]
    seed: u64,
    #[arg(long, default_value_t = 100_000.0)]
    prefill_tokens_per_s: f64,
    #[arg(long, default_value_t = 1.0)]
    decode_ms_per_step: f64,
    /// The publisher of KV events, as JSON: publisher, endpoint, replay_endpoint, buffer_steps,
    /// topic, bind; and `arrays` for the encoding of older releases.
    #[arg(long, value_parser = kv_events)]
    kv_events_config: Option<KvEventsConfig>,
    /// The chance, in thousandths, that a token ends the answer.
    #[arg(long, default_value_t = 0)]
    eos_per_mille: u32,
    /// The duration of `/health`, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    health_ms: u64,
    /// The interval at which the engine looks for vanished non-streaming clients, in milliseconds.
    #[arg(long, default_value_t = 4000)]
    disconnect_poll_ms: u64,
    /// How long the port stays open after a crash, in milliseconds.
    #[arg(long, default_value_t = 5000)]
    crash_linger_ms: u64,
}

/// Converts SGLang's factor to the share, in thousandths, that admission reserves: 70 % of the
/// factor.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped before")]
fn new_token_per_mille(factor: &str) -> Result<usize, std::num::ParseFloatError> {
    let factor: f64 = factor.parse()?;
    Ok((700.0 * factor).round().clamp(0.0, 1000.0) as usize)
}

fn kv_events(json: &str) -> Result<KvEventsConfig, String> {
    let config: KvEventsConfig = serde_json::from_str(json).map_err(|error| error.to_string())?;
    config.problem().map_or(Ok(config), Err)
}

impl Args {
    fn problems(&self) -> Vec<&'static str> {
        let checks = [
            (self.page_size.is_power_of_two(), "--page-size must be a power of two"),
            (self.chunked_prefill_size >= self.page_size, "--chunked-prefill-size is below a page"),
            (self.max_total_tokens >= self.page_size.max(2), "--max-total-tokens is below a page"),
            (self.context_length >= 16, "--context-length must be at least 16"),
            (self.max_running_requests >= 1, "--max-running-requests must be at least 1"),
            (self.dp_size >= 1, "--dp-size must be at least 1"),
        ];
        checks.into_iter().filter(|(good, _)| !good).map(|(_, message)| message).collect()
    }

    fn config(&self) -> Config {
        let name = self.served_model_name.clone().unwrap_or_else(|| {
            let last = Path::new(&self.model_path).file_name();
            last.map_or(self.model_path.clone(), |name| name.to_string_lossy().into_owned())
        });
        Config {
            core: CoreConfig {
                page_size: self.page_size,
                max_total_tokens: self.max_total_tokens,
                context_len: self.context_length,
                max_running_requests: self.max_running_requests,
                chunked_prefill_size: self.chunked_prefill_size,
                streaming_sessions: self.enable_streaming_session,
                session_radix_cache: self.enable_session_radix_cache,
                new_token_per_mille: self.schedule_conservativeness,
                test_retract: std::env::var("SGLANG_TEST_RETRACT").is_ok_and(|set| set == "true"),
                decode_log_interval: self.decode_log_interval.max(1),
                prefill_tokens_per_s: self.prefill_tokens_per_s,
                decode_ms_per_step: self.decode_ms_per_step,
                eos_per_mille: self.eos_per_mille,
                seed: self.seed,
                kv_events: false,
            },
            dp_size: self.dp_size,
            served_model_name: name,
            model_path: self.model_path.clone(),
            enable_metrics: self.enable_metrics,
            enable_cache_report: self.enable_cache_report,
            disconnect_poll: Duration::from_millis(self.disconnect_poll_ms),
            crash_linger: Duration::from_millis(self.crash_linger_ms),
            health_wait: Duration::from_millis(self.health_ms),
            requests_seen_max: 0,
            kv_events: self.kv_events_config.clone(),
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let problems = args.problems();
    if !problems.is_empty() {
        let _ = writeln!(io::stderr(), "{}", problems.join("\n"));
        return ExitCode::from(64);
    }
    tracing_subscriber::fmt().with_writer(io::stderr).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(run(&args))) {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(io::stderr(), "engine-sim: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> io::Result<ExitCode> {
    let listener = TcpListener::bind((args.host.as_str(), args.port)).await?;
    let sim = EngineSim::start(args.config(), listener)?;
    writeln!(io::stdout(), "listening on {}", sim.url())?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let crashed = tokio::select! {
        () = sim.gone() => true,
        _ = tokio::signal::ctrl_c() => false,
        _ = terminate.recv() => false,
    };
    sim.shutdown().await;
    Ok(if crashed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

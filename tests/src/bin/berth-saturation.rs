//! `berth-saturation`: goodput of a saturated engine, bare and with an agent in front of it.

use std::{io::Write as _, process::ExitCode, time::Duration};

use clap::Parser;
use tests::saturation::{self, Comparison, Stretch};

#[derive(Debug, Parser)]
#[command(
    name = "berth-saturation",
    version,
    about = "Goodput of a full engine, with and without Berth"
)]
struct Args {
    /// The number of rounds; a round is bare, guarded, guarded, bare
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The seconds of each of a round's four periods
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Print one JSON object on the last line of standard output
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(comparison) => {
            if print_comparison(&args, &comparison).is_ok() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "berth-saturation: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(args: &Args) -> anyhow::Result<Comparison> {
    let show = |stretch: &Stretch| {
        let _ = writeln!(
            std::io::stderr(),
            "{:>8}  {:6.1} turns/s  {:7.1} tokens/s  first token {:6.0} ms p50 {:6.0} ms p99  \
             {} errors",
            if stretch.guarded { "agent" } else { "bare" },
            stretch.turns_per_s,
            stretch.tokens_per_s,
            stretch.ttft_ms_p50,
            stretch.ttft_ms_p99,
            stretch.errors,
        );
    };
    saturation::compare(args.rounds, Duration::from_secs(args.seconds), show).await
}

fn print_comparison(args: &Args, comparison: &Comparison) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "goodput with the agent: {:.3} of the bare engine's", comparison.goodput_ratio)?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(comparison)?)?;
    }
    Ok(())
}

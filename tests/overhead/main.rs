//! Measures what the release binaries cost beside an engine; see `tests/overhead/run`.
//!
//! - `fleet`: an engine, an agent and a router as processes, with certificates and keys or without.
//! - `hops`: what a turn costs in this build and in another one.
//! - `latency`: the time that certificates and keys add to a turn.
//! - `memory`: the memory of an agent with many sessions and watchers.
//! - `peers`: what a request costs, beside the routers that people use instead.

#![expect(clippy::print_stdout, reason = "the results are its output")]

mod fleet;
mod hops;
mod latency;
mod memory;
mod peers;

use clap::{Parser, Subcommand};
use service::signal::StopSignals;

#[derive(Debug, Parser)]
#[command(name = "berth-overhead", version)]
struct Options {
    #[command(subcommand)]
    what: What,
    /// Print one JSON object.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Compares what turns cost in this build and in another one.
    Hops(hops::Options),
    /// Compares turns with and without certificates, keys and tokens.
    Tls(latency::Options),
    /// Prints the memory of an agent with many sessions and watchers.
    Memory(memory::Options),
    /// Compares what a request costs with other routers and with nginx.
    Peers(peers::Options),
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    // A client on several threads would measure how these wake each other.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = StopSignals::new()?;
        tokio::select! {
            biased;
            // The processes that were started end with the futures that hold them.
            _ = signals.next() => anyhow::bail!("stopped by a signal"),
            done = measure(&options) => done,
        }
    })
}

async fn measure(options: &Options) -> anyhow::Result<()> {
    match &options.what {
        What::Hops(hops) => show(&hops::measure(hops).await?, options.json),
        What::Tls(tls) => show(&latency::measure(tls).await?, options.json),
        What::Memory(memory) => show(&memory::measure(memory).await?, options.json),
        What::Peers(peers) => show(&peers::measure(peers).await?, options.json),
    }
}

/// Prints figures for people, or as JSON.
fn show(
    figures: &(impl std::fmt::Display + serde::Serialize),
    as_json: bool,
) -> anyhow::Result<()> {
    if as_json {
        println!("{}", serde_json::to_string(figures)?);
    } else {
        print!("{figures}");
    }
    Ok(())
}

//! `berth-sim`: placement policies side by side over a model of engines, in virtual time.
//!
//! Exit status: 0 when all ran, 1 when the trace can't be read, 64 when the flags make no sense.

use std::{io::Write as _, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use clap::{Parser, ValueEnum as _};
use serde::Serialize;
use tests::{
    replay::{load, trace::Trace},
    sim::{
        azure, compare,
        corpus::{Choice, Corpus, Half},
        made::Made,
        options::{Churn, Close, Hearing, Mode, Options},
        plot,
        policy::Kind,
        report::{self, Summary},
    },
};

/// BSD's code for a command line that makes no sense.
const EX_USAGE: u8 = 64;

/// Plays a workload under each placement policy and compares times to the first token.
#[derive(Debug, Parser)]
#[command(name = "berth-sim", version)]
struct Flags {
    /// A trace: kv-cache-tester's or Mooncake's form, or Azure's packed CSV
    #[arg(long, required_unless_present = "made")]
    trace: Option<PathBuf>,
    /// A made workload instead
    #[arg(long, value_enum, conflicts_with = "trace")]
    made: Option<Made>,
    /// Only these policies [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    policies: Vec<Kind>,
    /// Users side by side, where the trace has no arrival times
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    users: u32,
    /// Engines
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// Tokens of each engine's pool
    #[arg(long, default_value_t = 1_000_000)]
    pool_tokens: u64,
    /// Runs of each policy, with seeds from 0
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Tokens of a block: 512 or 64
    #[arg(long, default_value_t = 512, value_parser = block_tokens)]
    block_tokens: u64,
    /// Leave out conversations with a longer prompt; a second table keeps them. 0: keep all
    #[arg(long, default_value_t = 200_000)]
    max_context: u64,
    /// One half of the conversations
    #[arg(long, value_enum)]
    half: Option<Half>,
    /// How the end of a session reaches its engine, under every policy
    #[arg(long, value_enum, default_value = "none")]
    close: Close,
    /// How engines keep the KV of open sessions, under every policy
    #[arg(long, value_enum, default_value = "none")]
    mode: Mode,
    /// Share of a pool that pinned sessions may hold; 1: all of it
    #[arg(long, default_value_t = 0.5)]
    pin_budget_ratio: f64,
    /// Factor on the arrival rate of a trace with times
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// Seconds of virtual time, where users go on for ever
    #[arg(long, default_value_t = 7_200)]
    horizon_s: u64,
    /// Longest pause between two turns, seconds
    #[arg(long, default_value_t = 600)]
    think_s_max: u64,
    /// Prefill in pieces of so many tokens, waiting prompts in turns
    #[arg(long)]
    chunk_tokens: Option<u64>,
    /// The router hears of blocks this much later
    #[arg(long, default_value_t = 0)]
    event_lag_ms: u64,
    /// Share of changes of blocks that the router never hears of
    #[arg(long, default_value_t = 0.0)]
    event_loss_ratio: f64,
    /// Share of closes that are never heard
    #[arg(long, default_value_t = 0.0)]
    close_loss_ratio: f64,
    /// Share of closes that are told twice
    #[arg(long, default_value_t = 0.0)]
    close_twice_ratio: f64,
    /// What happens to workers
    #[arg(long, value_enum, default_value = "none")]
    churn: Churn,
    /// Write the first table as a picture
    #[arg(long)]
    plot: Option<PathBuf>,
    /// One JSON object on the last line of standard output
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Output {
    policies: Vec<Summary>,
    /// What no placement reaches, and `ideal` is not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    bounds: Vec<Summary>,
    /// The same with conversations of any length, where some were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    policies_all_contexts: Option<Vec<Summary>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bounds_all_contexts: Option<Vec<Summary>>,
}

/// Bounds beside policies.
fn parted(summaries: Vec<Summary>) -> (Vec<Summary>, Vec<Summary>) {
    let is_bound = |one: &Summary| Kind::BOUNDS.iter().any(|kind| kind.as_str() == one.name);
    let (bounds, policies) = summaries.into_iter().partition(is_bound);
    (policies, bounds)
}

fn main() -> ExitCode {
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EX_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        // Who reads it has seen enough.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "berth-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}

fn run(flags: &Flags) -> anyhow::Result<()> {
    let options = options(flags);
    let trace = trace(flags)?;
    let kinds = if flags.policies.is_empty() { Kind::value_variants() } else { &flags.policies };
    let table = |context_tokens_max: Option<u64>| -> anyhow::Result<(usize, Vec<Summary>)> {
        let choice = Choice { context_tokens_max, half: flags.half };
        let corpus = Arc::new(Corpus::new(&trace, flags.block_tokens, choice));
        anyhow::ensure!(!corpus.roots.is_empty(), "no conversation is left to play");
        let summaries = compare::compare(&corpus, &options, kinds, flags.seeds);
        let within =
            context_tokens_max.map_or_else(String::new, |max| format!(" within {max} tokens"));
        let title = format!("{} conversations{within}", corpus.roots.len());
        let mut out = std::io::stdout().lock();
        writeln!(out, "{title}\n{}", report::table(&summaries))?;
        Ok((corpus.roots.len(), summaries))
    };
    let bound = Some(flags.max_context).filter(|&max| max > 0);
    let (played, policies) = table(bound)?;
    if let Some(path) = &flags.plot {
        let title = format!("mean time to first token, {} users", flags.users);
        std::fs::write(path, plot::svg(&title, &policies)).context("the plot can't be written")?;
    }
    let all = Corpus::roots_of(&trace, flags.half);
    let all_contexts = if played < all { Some(table(None)?.1) } else { None };
    if flags.json {
        let (policies, bounds) = parted(policies);
        let (policies_all_contexts, bounds_all_contexts) = all_contexts.map(parted).unzip();
        let output = Output { policies, bounds, policies_all_contexts, bounds_all_contexts };
        writeln!(std::io::stdout(), "{}", serde_json::to_string(&output)?)?;
    }
    Ok(())
}

fn trace(flags: &Flags) -> anyhow::Result<Trace> {
    let Some(path) = &flags.trace else {
        let made = flags.made.expect("the parser wants one of both");
        return Ok(made.trace(flags.workers as usize));
    };
    let name = path.to_string_lossy();
    if name.ends_with(".csv.gz") {
        azure::trace(path).with_context(|| path.display().to_string())
    } else {
        Ok(load::trace(path)?)
    }
}

fn options(flags: &Flags) -> Options {
    let options = Options {
        workers: flags.workers as usize,
        pool_tokens: Some(flags.pool_tokens),
        users: flags.users as usize,
        rate: flags.rate,
        horizon: Duration::from_secs(flags.horizon_s),
        think_max: Duration::from_secs(flags.think_s_max),
        close: flags.close,
        mode: flags.mode,
        pin_budget_ratio: flags.pin_budget_ratio,
        chunk_tokens: flags.chunk_tokens,
        hearing: Hearing {
            lag: Duration::from_millis(flags.event_lag_ms),
            loss_ratio: flags.event_loss_ratio,
            close_loss_ratio: flags.close_loss_ratio,
            close_twice_ratio: flags.close_twice_ratio,
        },
        churn: flags.churn,
        ..Options::default()
    };
    flags.made.map_or(options, |made| made.load(options))
}

/// Blocks of a trace are made of, or cut into, these.
fn block_tokens(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(tokens @ (64 | 128 | 256 | 512)) => Ok(tokens),
        _ => Err("64, 128, 256 or 512".to_owned()),
    }
}

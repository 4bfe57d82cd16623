//! `berth-sim`: compares placement policies over modelled engines, in virtual time.
//!
//! Exit status: 0 if all runs ended, 1 if the trace can't be read, 64 if the flags are invalid.

use std::{io::Write as _, path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use clap::{Parser, ValueEnum as _};
use placement_sim::{
    azure, compare,
    corpus::{ConversationFilter, Corpus, Half},
    options::SimOptions,
    policy::PolicyKind,
    report::{self, PolicySummary},
    synthetic::SyntheticWorkload,
};
use replay::{load, trace::Trace};
use serde::Serialize;

/// Plays a workload under each placement policy and compares the times to the first token.
#[derive(Debug, Parser)]
#[command(name = "berth-sim", version)]
struct Flags {
    /// A trace in the form of kv-cache-tester or Mooncake, or Azure's gzip CSV
    #[arg(long, required_unless_present = "synthetic")]
    trace: Option<PathBuf>,
    /// A synthetic workload instead of a trace
    #[arg(long, value_enum, conflicts_with = "trace")]
    synthetic: Option<SyntheticWorkload>,
    /// The policies to compare [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    policies: Vec<PolicyKind>,
    /// The number of runs of each policy, with seeds from 0
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// The tokens of a block: 64, 128, 256 or 512
    #[arg(long, default_value_t = 512, value_parser = block_tokens)]
    block_tokens: u64,
    /// Leave out conversations with a longer prompt; a second table includes them. 0 keeps all
    #[arg(long, default_value_t = 200_000)]
    max_context: u64,
    /// Use only one half of the conversations
    #[arg(long, value_enum)]
    half: Option<Half>,
    #[command(flatten)]
    options: SimOptions,
    /// Print one JSON object on the last line of standard output
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Output {
    policies: Vec<PolicySummary>,
    /// The bounds, except `ideal`, which is listed with the policies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    bounds: Vec<PolicySummary>,
    /// The results with conversations of any length, if some were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    policies_all_contexts: Option<Vec<PolicySummary>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bounds_all_contexts: Option<Vec<PolicySummary>>,
}

/// Separates bounds from policies.
fn split_bounds(summaries: Vec<PolicySummary>) -> (Vec<PolicySummary>, Vec<PolicySummary>) {
    let is_bound = |one: &PolicySummary| PolicyKind::BOUNDS.contains(&one.name);
    let (bounds, policies) = summaries.into_iter().partition(is_bound);
    (policies, bounds)
}

fn main() -> ExitCode {
    let flags: Flags = match service::command_line::parse() {
        Ok(flags) => flags,
        Err(status) => return status,
    };
    match run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        // A closed pipe is no error: the reader has stopped reading.
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
    let options = flags.synthetic.map_or(flags.options, |workload| workload.options(flags.options));
    let trace = trace(flags)?;
    let kinds =
        if flags.policies.is_empty() { PolicyKind::value_variants() } else { &flags.policies };
    let table = |context_tokens_max: Option<u64>| -> anyhow::Result<(usize, Vec<PolicySummary>)> {
        let choice = ConversationFilter { context_tokens_max, half: flags.half };
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
    let all = Corpus::root_count(&trace, flags.half);
    let all_contexts = if played < all { Some(table(None)?.1) } else { None };
    if flags.json {
        let (policies, bounds) = split_bounds(policies);
        let (policies_all_contexts, bounds_all_contexts) = all_contexts.map(split_bounds).unzip();
        let output = Output { policies, bounds, policies_all_contexts, bounds_all_contexts };
        writeln!(std::io::stdout(), "{}", serde_json::to_string(&output)?)?;
    }
    Ok(())
}

fn trace(flags: &Flags) -> anyhow::Result<Trace> {
    let Some(path) = &flags.trace else {
        let workload = flags.synthetic.expect("the parser wants one of both");
        return Ok(workload.trace(flags.options.workers));
    };
    let name = path.to_string_lossy();
    if name.ends_with(".csv.gz") {
        azure::read_trace(path).with_context(|| path.display().to_string())
    } else {
        Ok(load::read_trace(path)?)
    }
}

/// Parses a block size; blocks of a trace are joined or split to this size.
fn block_tokens(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(tokens @ (64 | 128 | 256 | 512)) => Ok(tokens),
        _ => Err("64, 128, 256 or 512".to_owned()),
    }
}

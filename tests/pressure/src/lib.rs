//! `berth-pressure`: a main agent beside growing background load, by ways of keeping KV.
//!
//! The same agents run in each arm: without sessions, in SGLang's own, in Berth's. Pure modules:
//! `arms`, `workload` (what agents do), `outcome` (what was seen), `report`. Shell: `stage` starts
//! a simulated engine with Berth, `run` plays a plan there or at a running engine, `watch` looks at
//! the pool meanwhile.

pub mod arms;
pub mod outcome;
pub mod report;
pub mod run;
pub mod stage;
pub mod watch;
pub mod workload;

use std::{
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use replay::trace::Conversation;
use serde_json::json;

use self::{
    arms::{ARMS, Arm, ENGINE_FLAGS},
    outcome::Outcome,
    run::Target,
    stage::Stage,
    workload::{Plan, Scenario},
};

/// How the sizes of subagents are varied if nobody says another way.
const RATIOS: [f64; 4] = [0.5, 1.0, 2.0, 4.0];

#[derive(Debug, Parser)]
#[command(
    name = "berth-pressure",
    version,
    about = "A main agent beside growing background load, by ways of keeping KV"
)]
struct Args {
    /// The arms [default: all]
    #[arg(long, value_delimiter = ',', value_parser = arm)]
    arms: Vec<Arm>,
    /// KVP-1: tokens of all subagents, as multiples of the pool
    #[arg(long, value_delimiter = ',', value_parser = ratio, default_values_t = RATIOS)]
    ratios: Vec<f64>,
    /// KVP-1: main agents at once, at twice the pool
    #[arg(long, value_delimiter = ',', default_values_t = [4],
        value_parser = clap::value_parser!(u64).range(1..=64))]
    trees: Vec<u64>,
    /// KVP-2: a trace of conversations, at twice the pool [default: without KVP-2]
    #[arg(long)]
    trace: Option<PathBuf>,
    /// KVP-2: conversations at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16],
        value_parser = clap::value_parser!(u64).range(1..=1024))]
    conversations: Vec<u64>,
    /// What to play [default: all, KVP-2 with a trace]
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Part>,
    /// The first of their plans
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..1_000_000))]
    first_seed: u64,
    /// Runs of each, each with another plan
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Play at a running engine and the router before it, with one of --arms
    #[arg(long, num_args = 2, value_names = ["ENGINE", "ROUTER"], requires = "pool_tokens")]
    at: Option<Vec<String>>,
    /// The tokens of that engine's pool
    #[arg(long)]
    pool_tokens: Option<u64>,
    /// The tokens of a page of that pool
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    page_tokens: u64,
    /// The seconds without an answer to any turn after which that engine is probed
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    stall_s_max: u64,
    /// Play nothing, and show what these files of results hold
    #[arg(long, num_args = 1.., value_name = "FILE")]
    show: Vec<PathBuf>,
    /// Write the results to this file
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write tables and pictures into the guide in this folder
    #[arg(long, value_name = "FOLDER")]
    guide: Option<PathBuf>,
    /// The part of the guide
    #[arg(long, default_value = "simulator")]
    stage: String,
    /// Print the arms with the engine's flags as JSON, and play nothing
    #[arg(long)]
    list: bool,
    /// Print the results as JSON instead of tables
    #[arg(long)]
    json: bool,
}

/// A group of scenarios.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// KVP-1 with one main agent.
    Trees,
    /// KVP-1 with several.
    MoreTrees,
    /// KVP-2.
    Conversations,
    /// KVP-3.
    NeverClosed,
}

fn arm(name: &str) -> Result<Arm, String> {
    let names = || ARMS.map(|arm| arm.name).join(", ");
    arms::find(name).ok_or_else(|| format!("no arm of this name; the arms are {}", names()))
}

fn ratio(text: &str) -> Result<f64, String> {
    let ratio: f64 = text.parse().map_err(|_| "no number".to_owned())?;
    // A subagent of more than four fifths of the pool leaves no room for the main agent.
    if (0.1..=4.0).contains(&ratio) { Ok(ratio) } else { Err("must be 0.1 to 4".to_owned()) }
}

/// Runs the program from its command line to its exit status.
#[must_use]
pub fn main() -> ExitCode {
    let args: Args = match service::command_line::parse() {
        Ok(args) => args,
        Err(status) => return status,
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "berth-pressure: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(args: &Args) -> anyhow::Result<()> {
    let mut out = io::stdout();
    if args.list {
        writeln!(out, "{}", json!({"engine_flags": ENGINE_FLAGS, "arms": ARMS}))?;
        return Ok(());
    }
    let (outcomes, problem) = match &args.show[..] {
        [] => play_all(args).await?,
        files => (read(files)?, None),
    };
    if let Some(file) = &args.out {
        std::fs::write(file, json!(outcomes).to_string())
            .with_context(|| format!("{} can't be written", file.display()))?;
    }
    if args.json {
        writeln!(out, "{}", json!(outcomes))?;
    } else {
        writeln!(out, "{}", report::tables(&outcomes))?;
    }
    if let Some(folder) = &args.guide {
        report::write_guide(folder, &args.stage, &outcomes)?;
    }
    problem.map_or(Ok(()), Err)
}

fn read(files: &[PathBuf]) -> anyhow::Result<Vec<Outcome>> {
    let mut outcomes = vec![];
    for file in files {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("{} can't be read", file.display()))?;
        let more: Vec<Outcome> = serde_json::from_str(&text)
            .with_context(|| format!("{} has no results", file.display()))?;
        outcomes.extend(more);
    }
    Ok(outcomes)
}

fn scenarios(args: &Args) -> Vec<Scenario> {
    let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let is_played = |part| args.only.is_empty() || args.only.contains(&part);
    let mut scenarios = vec![];
    if is_played(Part::Trees) {
        scenarios.extend(args.ratios.iter().map(|&ratio| Scenario::Trees { ratio, trees: 1 }));
    }
    if is_played(Part::MoreTrees) {
        let several = args.trees.iter().filter(|trees| **trees > 1);
        scenarios.extend(several.map(|&n| Scenario::Trees { ratio: 2.0, trees: size(n) }));
    }
    if is_played(Part::Conversations) && args.trace.is_some() {
        let counts = args.conversations.iter();
        scenarios.extend(counts.map(|&n| Scenario::Conversations { at_once: size(n) }));
    }
    if is_played(Part::NeverClosed) {
        scenarios.push(Scenario::NeverClosed);
    }
    scenarios
}

/// Returns the outcomes, and the error that ended it early.
async fn play_all(args: &Args) -> anyhow::Result<(Vec<Outcome>, Option<anyhow::Error>)> {
    let arms = if args.arms.is_empty() { ARMS.to_vec() } else { args.arms.clone() };
    let conversations = match &args.trace {
        Some(path) => replay::load::read_trace(path)?.conversations,
        None => vec![],
    };
    let mut runs = vec![];
    for scenario in scenarios(args) {
        for arm in &arms {
            let seeds = args.first_seed..args.first_seed + args.seeds;
            runs.extend(seeds.map(|seed| (scenario, *arm, seed)));
        }
    }
    // A second one would find what the first left in the cache.
    let is_one = runs.len() == 1;
    anyhow::ensure!(
        args.at.is_none() || is_one,
        "--at plays one run: choose it by --arms, --only, --ratios and --seeds 1"
    );
    let bar = progress(runs.len());
    let is_shown = io::stderr().is_terminal();
    let mut outcomes = vec![];
    for (scenario, arm, seed) in runs {
        bar.set_message(format!("{}, {scenario}", arm.name));
        let outcome = match play_one(args, &conversations, scenario, arm, seed, &bar).await {
            Ok(outcome) => outcome,
            Err(error) => return Ok((outcomes, Some(error))),
        };
        bar.inc(1);
        if !is_shown {
            let (at, all) = (bar.position(), bar.length().unwrap_or_default());
            writeln!(
                io::stderr(),
                "{at}/{all}: {} in {:.0} s, {scenario}",
                arm.name,
                outcome.seconds
            )?;
        }
        outcomes.push(outcome);
    }
    bar.finish_and_clear();
    Ok((outcomes, None))
}

async fn play_one(
    args: &Args,
    conversations: &[Conversation],
    scenario: Scenario,
    arm: Arm,
    seed: u64,
    bar: &ProgressBar,
) -> anyhow::Result<Outcome> {
    let stage = match args.at {
        None => Some(Stage::start(arm).await?),
        Some(_) => None,
    };
    let target = match (&stage, args.at.as_deref()) {
        (Some(stage), _) => stage.target(),
        (None, Some([engine, router])) => Target {
            engine: engine.clone(),
            router: router.clone(),
            pool_tokens: args.pool_tokens.unwrap_or_default(),
            page_tokens: args.page_tokens,
            stall_max: Duration::from_secs(args.stall_s_max),
        },
        (None, _) => anyhow::bail!("--at needs two addresses"),
    };
    let plan = Plan::new(scenario, target.pool_tokens, conversations, seed);
    let bar = bar.clone();
    let outcome = run::play(arm, (scenario, seed), plan, target, move || bar.tick()).await;
    if let Some(stage) = stage {
        stage.stop().await?;
    }
    Ok(outcome)
}

/// Returns a bar on standard error that shows how many runs have ended.
fn progress(runs: usize) -> ProgressBar {
    let bar = ProgressBar::new(runs as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:20} {pos}/{len} {msg}");
    bar.set_style(style.expect("the template is valid"));
    bar
}

#[cfg(test)]
mod tests {
    use super::{outcome::Ending, *};

    /// Four times the pool: three subagents at once don't fit.
    const SCENARIO: Scenario = Scenario::Trees { ratio: 4.0, trees: 1 };

    async fn play(name: &str) -> Outcome {
        let arm = arms::find(name).expect("an arm");
        let stage = Stage::start(arm).await.expect("a stage");
        let target = stage.target();
        let plan = Plan::new(SCENARIO, target.pool_tokens, &[], 1);
        let outcome = run::play(arm, (SCENARIO, 1), plan, target, || {}).await;
        stage.stop().await.expect("all ends in order");
        outcome
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn sessions_of_sglang_alone_wedge_it_and_berth_s_do_not() {
        let (bare, pinned) = tokio::join!(play("bare-streaming"), play("pinned"));
        assert_eq!(bare.ending, Ending::Wedged, "{bare:?}");
        assert!(bare.turns_lost > 0, "{bare:?}");
        assert_eq!((pinned.ending, pinned.turns_lost), (Ending::Complete, 0), "{pinned:?}");
        let physical = pinned.physical.expect("the shim says it");
        assert!(physical.floor < physical.peak, "{pinned:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_host_tier_keeps_what_the_pool_has_no_room_for() {
        let (without, with) = tokio::join!(play("auto"), play("auto-host-4"));
        for run in [&without, &with] {
            assert_eq!((run.ending, run.turns_lost), (Ending::Complete, 0), "{run:?}");
        }
        let (most, few) = (without.recomputed_tokens(), with.recomputed_tokens());
        assert!(most > 10_000, "{most} of {} tokens again", without.known_tokens());
        assert!(few * 10 <= most, "{few} and {most} tokens again");
    }

    #[test]
    fn the_tables_and_the_guide_show_each_arm() {
        let outcome = |arm: &str, ratio: f64| Outcome {
            scenario: Scenario::Trees { ratio, trees: 1 },
            arm: arm.to_owned(),
            seed: 0,
            pool_tokens: 100,
            turns: vec![outcome::TurnOutcome {
                is_subagent: false,
                index: 2,
                prompt_tokens: 50,
                known_tokens: 40,
                cached_tokens: 30,
                ttft_ms: 12.0,
            }],
            turns_lost: 3,
            physical: Some(outcome::PhysicalUsage { peak: 0.8, floor: 0.2 }),
            freed_ms: vec![],
            not_freed: 1,
            opens_refused: 2,
            given_up: 1,
            failures: [].into(),
            ending: Ending::Complete,
            seconds: 1.0,
            measured: "2026-01-01, on a machine".to_owned(),
        };
        let wedged = Outcome { ending: Ending::Wedged, ..outcome("bare-streaming", 2.0) };
        let outcomes = [outcome("none", 1.0), outcome("none", 2.0), outcome("pinned", 2.0), wedged];
        let tables = report::tables(&outcomes);
        let row = "| `pinned` | – / 60 % | – / 12 | 25 % | 80 %, 20 % | 75 % | 1 × stays cached | \
                   2, 1 | 3 | 0 of 1 | 0 of 1 |";
        assert!(tables.contains(row), "{tables}");
        let cut_short = "| `bare-streaming` | – / – | – / – | – | 80 %, 20 % |";
        assert!(tables.contains(cut_short), "{tables}");
        assert!(tables.contains("| `none` |") && !tables.contains("| `tagged` |"), "{tables}");

        let folder = tempfile::tempdir().expect("a folder");
        let guide = folder.path().join("pressure.md");
        let old = "a\n<!-- figures of engine -->\nold\n<!-- end of the figures -->\nz\n";
        std::fs::write(&guide, old).expect("written");
        report::write_guide(folder.path(), "engine", &outcomes).expect("written");
        let text = std::fs::read_to_string(&guide).expect("a guide");
        let picture = std::fs::read_to_string(folder.path().join("pressure-engine-1.svg"));
        assert!(text.starts_with("a\n") && text.ends_with("\nz\n") && !text.contains("old"));
        assert!(text.contains(row) && text.contains("pressure-engine-2.svg"), "{text}");
        assert!(text.contains("Measured on 2026-01-01, on a machine."), "{text}");
        assert!(picture.expect("a picture").contains("none"));
    }
}

//! Attacks the release binaries as hostile clients and failing hosts do; see `tests/hostile/run`.
//!
//! - `fleet`: the processes of one scenario, with real signals and limits.
//! - `users`: the turns of other people, and how long they take.
//! - `attacks`: what a hostile client does. `figures`: from which metric one sees that it does.
//! - `scenarios`: which attack must not be noticed by whom.
//! - `chaos`: processes that are killed, stopped and restarted at random under load.
//! - `stopped`: an engine that is stopped.

#![expect(clippy::print_stdout, reason = "the results are its output")]

mod attacks;
mod chaos;
mod figures;
mod fleet;
mod scenarios;
mod stopped;
mod users;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Parser;
use service::clock::now;

use crate::scenarios::SCENARIOS;

#[derive(Debug, Parser)]
struct Options {
    /// Runs the scenarios that are short.
    #[arg(long)]
    quick: bool,
    /// Runs the scenarios whose name contains this.
    #[arg(short = 'k')]
    keyword: Option<String>,
    /// Lists the scenarios.
    #[arg(long)]
    list: bool,
    /// What random choices begin from. A scenario that makes any prints its seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Folder for the processes' logs.
    #[arg(long)]
    keep_logs: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let matches =
        |name: &str| options.keyword.as_ref().is_none_or(|keyword| name.contains(keyword));
    let chosen: Vec<_> = SCENARIOS
        .iter()
        .filter(|scenario| matches(scenario.name) && (scenario.is_quick || !options.quick))
        .collect();
    if options.list {
        for scenario in chosen {
            println!("{}", scenario.name);
        }
        return ExitCode::SUCCESS;
    }
    let (mut passed, mut failed) = (0, 0);
    for scenario in chosen {
        let began = now();
        let result = run(scenario, &options);
        let seconds = began.elapsed().as_secs();
        match result {
            Ok(figures) => {
                passed += 1;
                println!("ok     {} ({seconds} s): {figures}", scenario.name);
            }
            Err(error) => {
                failed += 1;
                println!("FAILED {} ({seconds} s): {error:#}", scenario.name);
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one scenario on a runtime of its own, so that nothing of it is left for the next.
/// Attacks run on another one, whose threads have the lowest priority: attackers have processors of
/// their own, and here they would take those of the processes under test.
fn run(scenario: &scenarios::Scenario, options: &Options) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("no runtime")?;
    let attackers = attacks::runtime().context("no runtime for attacks")?;
    let folder = options.keep_logs.as_ref().map(|logs| logs.join(scenario.name.replace(' ', "-")));
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let place = fleet::Place::new(folder, attackers.handle().clone(), seed)?;
    let result = runtime.block_on((scenario.run)(place));
    runtime.shutdown_background();
    attackers.shutdown_background();
    result
}

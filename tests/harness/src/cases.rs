//! Runs the cases of a program that starts real processes, and counts what passed and what failed.

use std::{future::Future, path::PathBuf, pin::Pin, process::ExitCode};

use anyhow::Context as _;
use clap::Parser;
use service::clock::now;

use crate::fleet::Place;

/// One case.
#[derive(Debug)]
pub struct Case {
    /// Its name, which is unique in its program.
    pub name: &'static str,
    /// Whether CI runs it.
    pub is_quick: bool,
    /// Runs it. Returns the figures that were seen.
    pub run: fn(Place) -> Running,
}

/// A case that runs.
pub type Running = Pin<Box<dyn Future<Output = anyhow::Result<String>> + Send>>;

/// Makes a [`Case`] of a name, whether it is quick, and an async function of a [`Place`].
#[macro_export]
macro_rules! case {
    ($name:literal, $quick:literal, $run:expr) => {
        $crate::cases::Case { name: $name, is_quick: $quick, run: |place| Box::pin($run(place)) }
    };
}

#[derive(Debug, Parser)]
struct Options {
    /// Runs the cases that are short.
    #[arg(long)]
    quick: bool,
    /// Runs the cases whose name contains this.
    #[arg(short = 'k')]
    keyword: Option<String>,
    /// Lists the cases.
    #[arg(long)]
    list: bool,
    /// What random choices begin from. A case that makes any prints its seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Folder for the processes' logs.
    #[arg(long)]
    keep_logs: Option<PathBuf>,
}

/// Runs the cases that the command line chooses, one after the other. The last line is
/// `N passed, N failed`.
#[expect(clippy::print_stdout, reason = "the results are its output")]
pub fn run_chosen<'a>(cases: impl IntoIterator<Item = &'a Case>) -> ExitCode {
    let options: Options = match service::command_line::parse() {
        Ok(options) => options,
        Err(status) => return status,
    };
    let matches =
        |name: &str| options.keyword.as_ref().is_none_or(|keyword| name.contains(keyword));
    let chosen: Vec<_> = cases
        .into_iter()
        .filter(|case| matches(case.name) && (case.is_quick || !options.quick))
        .collect();
    if options.list {
        chosen.iter().for_each(|case| println!("{}", case.name));
        return ExitCode::SUCCESS;
    }
    let (mut passed, mut failed) = (0, 0);
    for case in chosen {
        let began = now();
        let result = run(case, &options);
        let seconds = began.elapsed().as_secs();
        match result {
            Ok(figures) => {
                passed += 1;
                println!("ok     {} ({seconds} s): {figures}", case.name);
            }
            Err(error) => {
                failed += 1;
                println!("FAILED {} ({seconds} s): {error:#}", case.name);
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one case on a runtime of its own, so that nothing of it is left for the next.
fn run(case: &Case, options: &Options) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("no runtime")?;
    let folder = options.keep_logs.as_ref().map(|logs| logs.join(case.name.replace(' ', "-")));
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let place = Place::new(folder, seed, options.quick)?;
    let result = runtime.block_on((case.run)(place));
    runtime.shutdown_background();
    result
}

//! `berth-gpu`: on a machine with a GPU, holds the kernels to the reference, measures them and what
//! an audit costs, and answers what no machine without one can. `tests/gpu/run` builds and calls
//! it.
//!
//! Exit status: 0 all well, 1 something is not, 77 no CUDA here.

mod answers;
mod child;
mod device;
mod equality;
mod load;
mod nvml;
mod questions;
mod synthetic;
mod times;

use answers::Answers;
use clap::Parser;
use kernels::cuda;
use std::{io::Write, path::PathBuf, process::ExitCode, time::Duration};

const NO_CUDA: u8 = 77;

/// What to do, and with what.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// The kernels, as kernels/cuda/build makes them.
    #[arg(long)]
    fatbin: PathBuf,
    /// The driver is one without a GPU: small pools, and times that mean nothing.
    #[arg(long)]
    fake: bool,
    /// One JSON object on the last line.
    #[arg(long)]
    json: bool,
    /// Only hold the kernels to the reference: for compute-sanitizer.
    #[arg(long)]
    only_equality: bool,
    /// Random pools to hold the kernels to.
    #[arg(long, default_value_t = 300)]
    pools: u64,
    /// Of each load that audits are measured against.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// A Python that has torch with CUDA, for how it shares its tensors.
    #[arg(long)]
    python: Option<PathBuf>,
    /// Where the lines for kernels/README.md go.
    #[arg(long)]
    lines: Option<PathBuf>,
    /// This process is the other one of a question.
    #[arg(long, hide = true)]
    role: Option<child::Role>,
    /// Of the row table, for a role.
    #[arg(long, hide = true)]
    table: Option<PathBuf>,
    /// Audits a second, for a role.
    #[arg(long, hide = true, default_value_t = 1.0)]
    rate: f64,
}

impl Options {
    fn load_time(&self) -> Duration {
        Duration::from_secs_f64(if self.fake { 0.2 } else { self.seconds })
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let options = Options::parse();
    if let Some(missing) = cuda::missing() {
        say(&format!("no GPU, nothing was measured: {missing}"))?;
        return Ok(ExitCode::from(NO_CUDA));
    }
    if let Some(role) = options.role {
        return child::play(role, &options).map(|()| ExitCode::SUCCESS);
    }
    let mut answers = Answers::default();
    equality::hold(&options, &mut answers)?;
    if !options.only_equality {
        times::measure(&options, &mut answers)?;
        load::measure(&options, &mut answers)?;
        questions::ask(&options, &mut answers)?;
        nvml::compare(&mut answers);
    }
    say(&answers.table(options.fake))?;
    if let Some(path) = &options.lines {
        std::fs::write(path, answers.markdown(options.fake))?;
        say(&format!("the lines for kernels/README.md are in {}", path.display()))?;
    }
    if options.json {
        say(&answers.json(options.fake).to_string())?;
    }
    Ok(ExitCode::from(u8::from(!answers.all_well())))
}

fn say(text: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout().lock(), "{text}")
}

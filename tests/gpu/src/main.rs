//! `berth-gpu`: checks and measures page accounting on a machine with a GPU.
//!
//! It compares the kernels with the reference, measures the kernels and the cost of an audit, and
//! answers questions that need a GPU. `tests/gpu/run` builds and runs it. Exit status: 0 all checks
//! passed, 1 a check failed, 77 no CUDA here.

mod answers;
mod child;
mod device;
mod equality;
mod load;
mod nvml;
mod questions;
mod synthetic;
mod times;
mod torch;

use answers::Answers;
use clap::Parser;
use kernels::cuda;
use std::{io::Write, path::PathBuf, process::ExitCode, time::Duration};

const NO_CUDA: u8 = 77;

/// One part of the program, which adds its results.
type Part = fn(&Options, &mut Answers) -> anyhow::Result<()>;

/// All parts; the first is the one for compute-sanitizer.
const PARTS: [Part; 6] = [
    equality::hold,
    nvml::compare,
    questions::ask,
    torch::audit_pool,
    times::measure,
    load::measure,
];

/// The command line.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// The kernels, as built by kernels/cuda/build
    #[arg(long)]
    fatbin: PathBuf,
    /// The driver is the fake one: use small pools; times are meaningless
    #[arg(long)]
    fake: bool,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
    /// Only compare the kernels with the reference, for compute-sanitizer
    #[arg(long)]
    only_equality: bool,
    /// Number of random pools on which the kernels are compared with the reference
    #[arg(long, default_value_t = 300)]
    pools: u64,
    /// Seconds per measurement of the decoding loop
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// A Python that has torch with CUDA and msgspec, to audit a pool of torch. Needs --library
    #[arg(long)]
    python: Option<PathBuf>,
    /// libberth_kv.so, to audit a pool of torch as the shim does. Needs --python
    #[arg(long, requires = "python")]
    library: Option<PathBuf>,
    /// File for the lines for kernels/README.md
    #[arg(long)]
    lines: Option<PathBuf>,
    /// Run as the second process of a question
    #[arg(long, hide = true)]
    hold_context: bool,
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
    if options.hold_context {
        return child::hold_context(&options).map(|()| ExitCode::SUCCESS);
    }
    let mut answers = Answers::default();
    let parts: &[Part] = if options.only_equality { &PARTS[..1] } else { &PARTS };
    for part in parts {
        // An error ends only its own part: the others' results are worth having.
        if let Err(error) = part(&options, &mut answers) {
            answers.check("errors", "a part ended early", format!("{error:#}"), false);
        }
    }
    say(&answers.table(options.fake))?;
    if let Some(path) = &options.lines {
        std::fs::write(path, answers.markdown(options.fake))?;
        say(&format!("the lines for kernels/README.md are in {}", path.display()))?;
    }
    if options.json {
        say(&answers.json(options.fake).to_string())?;
    }
    Ok(ExitCode::from(u8::from(!answers.all_passed())))
}

fn say(text: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout().lock(), "{text}")
}

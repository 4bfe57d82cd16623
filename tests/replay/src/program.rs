//! `berth-replay`: replays conversations against an OpenAI- or SGLang-compatible URL.
//!
//! The conversations come from a trace or are synthetic agent conversations. At the end the program
//! reports the results.
//!
//! Exit status: 0 if all turns were answered, 1 if some were not or the trace can't be read, 64 if
//! the flags are invalid.

use crate::options::Pace;
use crate::trace::Form;
use crate::{ReplayControl, ReplayOptions, Report, Workload, drive, load};
use anyhow::Context as _;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Whether each of a round's periods is at the URL of `--beside`.
const IS_BESIDE: [bool; 4] = [true, false, false, true];
/// The seconds between status lines on an output without a progress bar.
const STATUS_EVERY_S: f64 = 10.0;

/// Replays a trace of conversations against a model server and measures the server.
#[derive(Debug, Parser)]
#[command(name = "berth-replay", version, allow_negative_numbers = true)]
struct Flags {
    #[command(flatten)]
    options: ReplayOptions,
    /// A trace: a .json, .jsonl or .jsonl.gz file, or a folder of such files; without a trace,
    /// conversations are made from published statistics
    #[arg(long)]
    trace: Option<PathBuf>,
    /// The number of conversations without a trace [default: the number of users, or unlimited with
    /// a limit on time or turns]
    #[arg(long, conflicts_with = "trace")]
    conversations: Option<u64>,
    /// Replay in turns at this URL and at `--url`, and compare the tokens per second
    #[arg(long, requires = "seconds")]
    beside: Option<String>,
    /// The number of rounds with --beside; a round is one period at it, two at --url, one at it
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Print the report as one JSON object, on the last line of stdout
    #[arg(long)]
    json: bool,
    /// Exit with 0 even if turns failed
    #[arg(long)]
    allow_errors: bool,
}

/// Runs the process from its command line to its exit status.
#[must_use]
pub fn main() -> ExitCode {
    let flags: Flags = match service::command_line::parse() {
        Ok(flags) => flags,
        Err(status) => return status,
    };
    let beside = flags.beside.iter().map(|url| with_url(&flags.options, url));
    let problems: Vec<String> =
        flags.options.problems().into_iter().chain(beside.flat_map(|one| one.problems())).collect();
    if !problems.is_empty() {
        for problem in problems {
            print_status(&format!("berth-replay: {problem}"));
        }
        return ExitCode::from(service::settings::EXIT_USAGE);
    }
    match replay(&flags) {
        Ok(good) if good || flags.allow_errors => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            print_status(&format!("berth-replay: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn with_url(options: &ReplayOptions, url: &str) -> ReplayOptions {
    ReplayOptions { url: url.to_owned(), ..options.clone() }
}

fn workload(flags: &Flags) -> anyhow::Result<Workload> {
    let options = &flags.options;
    let Some(path) = &flags.trace else {
        let bounded = options.seconds.is_some() || options.turns_max.is_some();
        let few = match options.pace() {
            Pace::Closed { users, .. } => users as u64,
            Pace::Open { .. } => 8,
        };
        let conversations = flags.conversations.unwrap_or(if bounded { u64::MAX } else { few });
        return Ok(Workload::Synthetic { conversations });
    };
    let trace = load::read_trace(path).context("the trace can't be replayed")?;
    print_status(&format!(
        "{}: {} conversations, {} turns, {} duplicates left out",
        path.display(),
        trace.conversations.len(),
        trace.turns(),
        trace.duplicates,
    ));
    if trace.form == Form::Prompts {
        let edits = trace.edits();
        print_status(&format!("{edits} of the turns edit their history and send all of it again"));
    }
    Ok(Workload::Trace(trace))
}

/// Runs the replay; returns true if nothing failed.
fn replay(flags: &Flags) -> anyhow::Result<bool> {
    let workload = workload(flags)?;
    let progress = Progress::new(flags);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the runtime can't start")?;
    if let Some(beside) = &flags.beside {
        let compared = runtime.block_on(compare(flags, beside, &workload, &progress))?;
        print_report(flags, &compared, || compared.table())?;
        return Ok(compared.reports.iter().all(|report| report.errors == 0));
    }
    let report = runtime.block_on(run(flags.options.clone(), workload, &progress))?;
    progress.bar.finish_and_clear();
    print_report(flags, &report, || report.table())?;
    if report.turns == 0 {
        print_status("berth-replay: no turn was answered");
    }
    Ok(report.errors == 0 && report.turns > 0)
}

fn print_report(
    flags: &Flags,
    report: &impl Serialize,
    table: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if flags.json {
        writeln!(out, "{}", serde_json::to_string(report)?)?;
    } else {
        write!(out, "{}", table())?;
    }
    Ok(out.flush()?)
}

/// The reports of `--beside`.
#[derive(Debug, Serialize)]
struct Comparison {
    /// In each round: at the other server, at `--url` twice, and at the other server again.
    reports: Vec<Report>,
    /// The median of the tokens per second at `--url`, divided by that of the other server.
    goodput_ratio: f64,
}

/// Replays at two servers in turns, so that disturbances of the machine affect both.
async fn compare(
    flags: &Flags,
    beside: &str,
    workload: &Workload,
    progress: &Progress,
) -> anyhow::Result<Comparison> {
    let mut reports = vec![];
    for period in 0..u64::from(flags.rounds) * 4 {
        let url = if IS_BESIDE[(period % 4) as usize] { beside } else { &flags.options.url };
        let options = ReplayOptions {
            run_id: format!("{}-{period}", flags.options.run_id),
            // Each pair of periods has the same conversations.
            seed: flags.options.seed + period / 2,
            ..with_url(&flags.options, url)
        };
        let report = run(options, workload.clone(), progress).await?;
        print_status(&format!("{url}: {}", report.line()));
        reports.push(report);
    }
    let median = |is_beside: bool| {
        let periods = reports.iter().zip(IS_BESIDE.into_iter().cycle());
        let chosen = periods.filter(|(_, beside)| *beside == is_beside);
        let mut rates: Vec<f64> = chosen.map(|(report, _)| report.output_tokens_per_s).collect();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let goodput_ratio = median(false) / median(true);
    Ok(Comparison { reports, goodput_ratio })
}

impl Comparison {
    fn table(&self) -> String {
        format!("goodput: {:.3} of the other server's\n", self.goodput_ratio)
    }
}

async fn run(
    options: ReplayOptions,
    workload: Workload,
    progress: &Progress,
) -> anyhow::Result<Report> {
    let control = ReplayControl::default();
    let stop = control.stop.clone();
    let driven = drive(options, workload, control, |report| progress.show(report));
    let mut driven = std::pin::pin!(driven);
    let interrupted = async {
        // If the signal can't be caught, the replay continues without it.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        report = &mut driven => return Ok(report?),
        () = interrupted => stop.cancel(),
    }
    Ok(driven.await?)
}

/// The progress bar, or status lines on an output without one.
struct Progress {
    bar: ProgressBar,
    by_time: bool,
    lines: bool,
}

impl Progress {
    fn new(flags: &Flags) -> Self {
        let options = &flags.options;
        let lines = flags.json || !std::io::stderr().is_terminal();
        let template = |text: &str| {
            ProgressStyle::with_template(text).unwrap_or_else(|_| ProgressStyle::default_bar())
        };
        let (bar, by_time) = match (options.seconds, options.turns_max) {
            _ if lines => (ProgressBar::hidden(), false),
            (_, Some(turns)) => (ProgressBar::new(turns), false),
            (Some(time), None) => {
                (ProgressBar::new(Duration::from_secs_f64(time).as_secs().max(1)), true)
            }
            (None, None) => (ProgressBar::new_spinner(), false),
        };
        bar.set_style(match bar.length() {
            Some(_) => template("{elapsed} [{bar:24}] {msg}"),
            None => template("{elapsed} {spinner} {msg}"),
        });
        Self { bar, by_time, lines }
    }

    fn show(&self, report: &Report) {
        if !self.lines {
            let done = Duration::try_from_secs_f64(report.seconds).unwrap_or_default().as_secs();
            self.bar.set_position(if self.by_time { done } else { report.turns });
            self.bar.set_message(report.line());
        } else if report.seconds % STATUS_EVERY_S < 1.0 {
            print_status(&report.line());
        }
    }
}

/// Prints a line on stderr and ignores a failure.
fn print_status(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

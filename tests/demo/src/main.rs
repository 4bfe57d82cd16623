//! `berth-demo`: simulated engines, agents and a router in one process, with a live table.
//!
//! Agent conversations run through the engines, and the table shows their KV usage. The exit
//! status is not zero if a turn failed or a session leaked.

use std::{
    io::{IsTerminal as _, Write as _},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use demo::{Demo, DemoSummary, WorkerLine};
use indicatif::{MultiProgress, ProgressBar, ProgressFinish, ProgressStyle};
use replay::Report;
use service::signal::StopSignals;
use tokio_util::sync::CancellationToken;

/// The width of a pool's bar, in columns.
const BAR: usize = 30;
/// The seconds between two tables on an output that can't be redrawn.
const PLAIN_EVERY_S: f64 = 5.0;

#[derive(Debug, Parser)]
#[command(name = "berth-demo", version, about = "Berth on simulated engines, in one process")]
struct Args {
    /// Seconds of traffic
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Engines, each with an agent; a large fleet has no more traffic than one of 16, and reports
    /// less often
    #[arg(long, default_value_t = demo::WORKERS)]
    workers: usize,
    /// Print one JSON object on the last line of standard output
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args: Args = match service::command_line::parse() {
        Ok(args) => args,
        Err(status) => return status,
    };
    match run(&args) {
        Ok(summary) => {
            let printed = print_summary(&args, &summary);
            if printed.is_ok() && summary.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "berth-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(args: &Args) -> anyhow::Result<DemoSummary> {
    let stop = CancellationToken::new();
    let mut signals = StopSignals::new()?;
    let mut screen = Screen::new();
    let show = |workers: &[WorkerLine], report: &Report| screen.show(workers, report);
    let begun = |demo: &Demo| {
        let _ = writeln!(std::io::stderr(), "dashboard: {}", demo.dashboard_url());
        let _ = writeln!(std::io::stderr(), "agents: {}", demo.control_urls().join(" "));
    };
    let time = Duration::from_secs(args.seconds);
    let running = demo::run(args.workers, time, stop.clone(), begun, show);
    let mut running = std::pin::pin!(running);
    tokio::select! {
        ended = &mut running => return ended,
        _ = signals.next() => stop.cancel(),
    }
    running.await
}

fn print_summary(args: &Args, summary: &DemoSummary) -> std::io::Result<()> {
    for (kind, count) in &summary.errors_by_kind {
        writeln!(std::io::stderr(), "failed {count} times: {kind}")?;
    }
    let mut out = std::io::stdout();
    if args.json {
        return writeln!(out, "{}", serde_json::to_string(summary)?);
    }
    let DemoSummary { turns, errors, ttft_ms_p50, ttft_ms_p99, cached_ratio, .. } = summary;
    writeln!(out)?;
    writeln!(out, "turns            {turns}, {errors} failed")?;
    writeln!(out, "first token      {ttft_ms_p50:.1} ms median, {ttft_ms_p99:.1} ms p99")?;
    writeln!(out, "prompt tokens    {:.1} % resident already", cached_ratio * 100.0)?;
    writeln!(
        out,
        "sessions         {} opened, {} closed, {} leaked",
        summary.sessions_opened, summary.sessions_closed, summary.sessions_leaked
    )?;
    writeln!(out, "held at the end  {} tokens", summary.held_tokens_end)?;
    let verdict = if summary.is_good() { "all as promised" } else { "NOT as promised" };
    writeln!(out, "{verdict}")
}

/// The live table: redrawn on a terminal, printed at intervals elsewhere.
struct Screen {
    lines: Option<(ProgressBar, Vec<ProgressBar>)>,
    group: MultiProgress,
    printed_s: f64,
}

impl Screen {
    fn new() -> Self {
        let group = MultiProgress::new();
        Self { lines: None, group, printed_s: f64::NEG_INFINITY }
    }

    fn show(&mut self, workers: &[WorkerLine], report: &Report) {
        let head = head(report);
        let rows: Vec<String> = workers.iter().map(row).collect();
        if !std::io::stderr().is_terminal() {
            if report.seconds - self.printed_s >= PLAIN_EVERY_S {
                self.printed_s = report.seconds;
                let _ = writeln!(std::io::stderr(), "{head}\n{}", rows.join("\n"));
            }
            return;
        }
        let group = &self.group;
        let (top, bars) = self.lines.get_or_insert_with(|| {
            let plain = ProgressStyle::with_template("{msg}").expect("the template is a constant");
            // The last table stays on the screen.
            let bar = || ProgressBar::no_length().with_finish(ProgressFinish::Abandon);
            let line = || group.add(bar().with_style(plain.clone()));
            (line(), rows.iter().map(|_| line()).collect())
        });
        top.set_message(head);
        for (bar, row) in bars.iter().zip(rows) {
            bar.set_message(row);
        }
    }
}

fn head(report: &Report) -> String {
    format!(
        "{:>4.0} s  {} turns ({:.0}/s)  first token {:.0} ms  resident {:.0} %  \
         █ held or running ▒ evictable",
        report.seconds,
        report.turns,
        report.turns_per_s,
        report.ttft_ms_p50,
        report.cached_ratio.unwrap_or(0.0) * 100.0,
    )
}

/// Formats one worker: its pool by the engine's account, and the figures of Berth's ledger.
fn row(worker: &WorkerLine) -> String {
    let pool = &worker.pool;
    let columns = |tokens: usize| (tokens * BAR).div_ceil(pool.total.max(1));
    let held = columns(pool.used()).min(BAR);
    let evictable = columns(pool.evictable).min(BAR - held);
    let bar = "█".repeat(held) + &"▒".repeat(evictable) + &"·".repeat(BAR - held - evictable);
    let figure = |key: &str| worker.ledger["load"][key]["value"].as_u64();
    let shown = |key: &str| figure(key).map_or("–".to_owned(), |value| value.to_string());
    format!(
        "{}  {bar}  {:>3.0} % full  {:>2} running  ledger: {:>6} pinned {:>6} tagged",
        worker.name,
        100.0 - percent(pool.available, pool.total),
        pool.running,
        shown("pinned_tokens"),
        shown("resident_tokens_estimate"),
    )
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a pool are far below 2^52")]
fn percent(part: usize, whole: usize) -> f64 {
    part as f64 * 100.0 / whole.max(1) as f64
}

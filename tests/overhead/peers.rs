//! Measures what a request costs through Berth, beside the routers that people use instead.
//!
//! They share one core and take turns there; the engine and the clients, which are this process,
//! are on another. A noisy machine disturbs all of them alike.

use std::{fmt, path::PathBuf, time::Duration};

use anyhow::ensure;
use harness::guide;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use self::{
    contenders::{BEFORE, Contender, NAMES, Setup},
    load::{Request, Seen},
    mock::Mock,
};
use crate::latency::median;

mod contenders;
mod load;
mod mock;

/// The streams that are open at once where memory is measured. By default, an agent lets hardly
/// more turns into its engine.
const HELD_STREAMS: usize = 500;
/// The routers that people use; nginx only passes on. Berth is compared with the best of them.
const PEERS: [&str; 3] = ["sglang-router", "smg", "vllm-router"];
const BERTH: &str = "router + agent";
/// The name of the table's place in the guide.
const GUIDE_FIGURES: &str = "peers";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// A Python that has the packages of tests/peers/overhead/requirements.txt. Not given: the
    /// routers in them are left out
    #[arg(long)]
    python: Option<PathBuf>,
    /// The folder with an earlier build's `berth-agent` and `berth-router`. Not given: it is left
    /// out
    #[arg(long, value_name = "FOLDER")]
    before: Option<PathBuf>,
    /// The contenders, with commas [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The rows whose names contain this
    #[arg(long, default_value = "")]
    rows: String,
    /// The number of rounds. In each, every contender gets each row's requests
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The seconds of a row in a round
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// The core of the contender; this process should be on another one
    #[arg(long, default_value_t = 1)]
    core: u32,
    /// Write the table into this guide
    #[arg(long, requires = "measured", conflicts_with_all = ["only", "rows"])]
    guide: Option<PathBuf>,
    /// When and where it is measured, for the guide
    #[arg(long)]
    measured: Option<String>,
}

/// A kind of load.
#[derive(Debug, Clone, Copy)]
struct Row {
    name: &'static str,
    connections: usize,
    request: Request,
}

const fn row(name: &'static str, connections: usize, request: Request) -> Row {
    Row { name, connections, request }
}

const SMALL: Request = Request { prompt_bytes: 24, chunks: 0, is_paced: false, has_session: false };
const STREAM: Request = Request { chunks: 50, ..SMALL };

const ROWS: [Row; 9] = [
    row("small POST, 1 connection", 1, SMALL),
    row("small POST, 32 connections", 32, SMALL),
    row("8 KiB, 32 connections", 32, Request { prompt_bytes: 8 << 10, ..SMALL }),
    row("100 KiB, 8 connections", 8, Request { prompt_bytes: 100 << 10, ..SMALL }),
    row("1.3 MiB, 4 connections", 4, Request { prompt_bytes: 1_363_149, ..SMALL }),
    row("stream of 50 chunks, 1 connection", 1, STREAM),
    row("stream of 50 chunks, 32 connections", 32, STREAM),
    row(
        "64 chunks, one in 5 ms, 64 connections",
        64,
        Request { chunks: 64, is_paced: true, ..STREAM },
    ),
    // The engine that keeps sessions is slower than the mock, and only Berth's turns reach it.
    row("tagged sessions, 32 connections", 32, Request { has_session: true, ..SMALL }),
];

/// What a contender showed of one row. Times are in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Costs {
    p50: f64,
    p99: f64,
    first_byte_p50: f64,
    first_byte_p99: f64,
    /// The processor time of all its processes for a request.
    processor: f64,
    per_second: f64,
}

impl Costs {
    fn figures(&self) -> [f64; 6] {
        let Self { p50, p99, first_byte_p50, first_byte_p99, processor, per_second } = *self;
        [p50, p99, first_byte_p50, first_byte_p99, processor, per_second]
    }

    fn medians(rounds: &[Self]) -> Self {
        let of = |index: usize| median(rounds.iter().map(|costs| costs.figures()[index]));
        let [p50, p99, first_byte_p50, first_byte_p99, processor, per_second] =
            std::array::from_fn(of);
        Self { p50, p99, first_byte_p50, first_byte_p99, processor, per_second }
    }
}

/// One row: a contender's name and what it showed.
#[derive(Debug, Serialize)]
struct RowFigures {
    row: &'static str,
    is_stream: bool,
    /// Whether all contenders have the same engine behind them.
    is_comparable: bool,
    contenders: Vec<(&'static str, Costs)>,
    /// How far a contender's processor time lies from its median in a round, at most.
    noise: f64,
}

/// All that was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    rounds: u32,
    seconds: f64,
    rows: Vec<RowFigures>,
    /// The memory for an open stream, in bytes.
    stream_bytes: Vec<(&'static str, u64)>,
    left_out: Vec<String>,
}

/// Measures all rows.
pub(crate) async fn measure(options: &Options) -> anyhow::Result<Figures> {
    for name in &options.only {
        ensure!(NAMES.contains(&name.as_str()), "no contender {name}; there are {NAMES:?}");
    }
    if let Some(guide) = &options.guide {
        // Now, and not after all was measured.
        guide::check(guide, GUIDE_FIGURES)?;
    }
    service::descriptors::raise_limit();
    let mock = Mock::start().await?;
    let Options { python, before, core, .. } = options;
    let (python, before) = (python.clone(), before.clone());
    let setup = Setup { engine: mock.addr, python, core: *core, before };
    let (mut contenders, mut left_out) = (vec![], vec![]);
    let is_asked = |name: &&str| {
        let is_there = options.before.is_some() || !name.ends_with(BEFORE);
        is_there && (options.only.is_empty() || options.only.iter().any(|it| it == name))
    };
    for name in NAMES.into_iter().filter(is_asked) {
        match contenders::start(name, &setup).await? {
            Ok(contender) => contenders.push(contender),
            Err(why) => left_out.push(format!("{name}: {why}")),
        }
    }
    ensure!(!contenders.is_empty(), "nothing to measure. Left out: {}", left_out.join("; "));
    let asked: Vec<&Row> = ROWS.iter().filter(|row| row.name.contains(&options.rows)).collect();
    let style = ProgressStyle::with_template("{pos}/{len} {msg}, {elapsed} so far")?;
    let progress = ProgressBar::new(asked.len() as u64).with_style(style);
    progress.enable_steady_tick(Duration::from_secs(1));
    let mut rows = vec![];
    for row in asked {
        progress.set_message(row.name);
        rows.push(compare(row, &contenders, options).await?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let mut stream_bytes = vec![];
    if "memory".contains(&options.rows) {
        for contender in contenders.into_iter().filter(Contender::has_processes) {
            let name = contender.name;
            drop(contender);
            // A fresh one: what an allocator keeps of the rows before would serve the streams.
            if let Ok(fresh) = contenders::start(name, &setup).await? {
                stream_bytes.push((name, bytes_per_stream(&fresh).await?));
            }
        }
    }
    let Options { rounds, seconds, .. } = *options;
    let figures = Figures { rounds, seconds, rows, stream_bytes, left_out };
    if let (Some(guide), Some(measured)) = (&options.guide, &options.measured) {
        guide::write_figures(guide, GUIDE_FIGURES, &format!("Measured on {measured}. {figures}"))?;
    }
    Ok(figures)
}

async fn compare(
    row: &Row,
    contenders: &[Contender],
    options: &Options,
) -> anyhow::Result<RowFigures> {
    let mut rounds: Vec<Vec<Costs>> = contenders.iter().map(|_| vec![]).collect();
    for number in 0..options.rounds as usize {
        for step in 0..contenders.len() {
            // Each round begins with another contender.
            let index = (number + step) % contenders.len();
            rounds[index].push(round(row, &contenders[index], options.seconds).await?);
        }
    }
    let medians: Vec<Costs> = rounds.iter().map(|costs| Costs::medians(costs)).collect();
    let has_processes = contenders.iter().map(Contender::has_processes);
    let measured = rounds.iter().zip(&medians).zip(has_processes).filter(|(_, has)| *has);
    let off = measured.flat_map(|((costs, middle), _)| {
        costs.iter().map(|costs| (costs.processor / middle.processor.max(1e-9) - 1.0).abs())
    });
    let noise = off.reduce(f64::max).unwrap_or_default();
    Ok(RowFigures {
        row: row.name,
        is_stream: row.request.chunks > 0,
        is_comparable: !row.request.has_session,
        noise,
        contenders: contenders.iter().map(|contender| contender.name).zip(medians).collect(),
    })
}

async fn round(row: &Row, contender: &Contender, seconds: f64) -> anyhow::Result<Costs> {
    // What is first done for a row, such as to connect to the engine, is not measured.
    let warm = Duration::from_secs_f64((seconds / 8.0).min(0.5));
    load::run(contender.addr, row.request, row.connections, warm).await?;
    let before = contender.processor_seconds()?;
    let time = Duration::from_secs_f64(seconds);
    let Seen { whole, first, took } =
        load::run(contender.addr, row.request, row.connections, time).await?;
    let spent = contender.processor_seconds()? - before;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let (requests, us) = (whole.len() as f64, |value: u64| value as f64);
    ensure!(requests > 0.0, "{} answered nothing in {seconds} s: {}", contender.name, row.name);
    Ok(Costs {
        p50: us(whole.value_at_quantile(0.5)),
        p99: us(whole.value_at_quantile(0.99)),
        first_byte_p50: us(first.value_at_quantile(0.5)),
        first_byte_p99: us(first.value_at_quantile(0.99)),
        processor: spent / requests * 1e6,
        per_second: requests / took.as_secs_f64(),
    })
}

/// Holds streams open, and returns the memory that each of them takes.
async fn bytes_per_stream(contender: &Contender) -> anyhow::Result<u64> {
    let before = contender.resident_bytes()?;
    let held = load::hold(contender.addr, HELD_STREAMS).await?;
    let after = contender.resident_bytes()?;
    drop(held);
    Ok(after.saturating_sub(before) / HELD_STREAMS as u64)
}

impl fmt::Display for Figures {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "Medians of {} rounds of {} s.\n", self.rounds, self.seconds)?;
        let mut names: Vec<&str> = self.stream_bytes.iter().map(|(name, _)| *name).collect();
        if let Some(row) = self.rows.first() {
            names = row.contenders.iter().map(|(name, _)| *name).collect();
        }
        writeln!(out, "| | {} | {BERTH} by the best peer |", names.join(" | "))?;
        writeln!(out, "|---|{}---|", "---|".repeat(names.len()))?;
        for row in &self.rows {
            row.write_lines(out)?;
        }
        let noises = self.rows.iter().map(|row| row.noise * 100.0);
        if !self.stream_bytes.is_empty() {
            let of = |name: &str| self.stream_bytes.iter().find(|(it, _)| *it == name);
            let cell = |name: &&str| {
                of(name).map_or("–".into(), |(_, bytes)| format!("{:.1}", *bytes as f64 / 1024.0))
            };
            let cells: Vec<String> = names.iter().map(cell).collect();
            writeln!(out, "| memory for an open stream, KiB | {} | |", cells.join(" | "))?;
        }
        if self.rounds > 1 && !self.rows.is_empty() {
            let noise = median(noises);
            writeln!(out, "\nFrom round to round, processor times differ by up to {noise:.0} %.")?;
        }
        self.left_out.iter().try_for_each(|why| writeln!(out, "Left out: {why}."))
    }
}

impl RowFigures {
    fn write_lines(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        type Figure = fn(&Costs) -> f64;
        let lines: [(&str, Figure, bool, bool); 6] = [
            ("p50, µs", |costs| costs.p50, true, !self.is_stream),
            ("p99, µs", |costs| costs.p99, true, !self.is_stream),
            ("first byte p50, µs", |costs| costs.first_byte_p50, true, self.is_stream),
            ("first byte p99, µs", |costs| costs.first_byte_p99, true, self.is_stream),
            ("processor, µs", |costs| costs.processor, true, true),
            ("per second", |costs| costs.per_second, false, true),
        ];
        for (what, figure, is_less_better, _) in lines.iter().filter(|(.., is_shown)| *is_shown) {
            let cells: Vec<String> =
                self.contenders.iter().map(|(_, costs)| format!("{:.0}", figure(costs))).collect();
            let of = |name: &str| {
                let found = self.contenders.iter().find(|(other, _)| *other == name);
                found.map(|(_, costs)| figure(costs))
            };
            let best = PEERS
                .iter()
                .filter_map(|name| of(name))
                .reduce(|one, other| if *is_less_better { one.min(other) } else { one.max(other) });
            let best = best.filter(|_| self.is_comparable);
            let ratio = of(BERTH).zip(best).map(|(berth, best)| format!("{:.2}", berth / best));
            let ratio = ratio.unwrap_or_default();
            writeln!(out, "| {}: {what} | {} | {ratio} |", self.row, cells.join(" | "))?;
        }
        Ok(())
    }
}

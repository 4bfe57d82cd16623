//! Compares Berth's overlap index and block hashing with the peer's, in one run.
//!
//! Both get the same chains, events and prompts. Times include the application of all events, and
//! answers are checked to be equal. For each figure, the better of the peer's two trees counts. The
//! exit status is 0 only if all targets hold.
//!
//! `cargo run --release --locked [-- --json] [--rounds N]`

mod contender;
mod measure;
mod memory;
mod workload;

use std::process::ExitCode;

use anyhow::{Context, Result};
use measure::{Figures, Round, median};
use serde_json::json;
use workload::{SHAPES, Workload};

const ROUNDS: usize = 7;

/// The ratio of the peer's figure to Berth's, and its target.
struct Row {
    name: String,
    unit: &'static str,
    /// The medians by contender.
    values: Vec<f64>,
    /// The ratios of all rounds, sorted.
    ratios: Vec<f64>,
    /// The least ratio allowed; `None` if the figure is for information only.
    target: Option<f64>,
}

impl Row {
    fn ratio(&self) -> f64 {
        median(&self.ratios)
    }

    fn highest(&self) -> f64 {
        self.ratios[self.ratios.len() - 1]
    }

    fn holds(&self) -> bool {
        self.target.is_none_or(|target| self.ratio() >= target)
    }

    /// Builds a row from the figures of each round, where less is better.
    fn from_rounds(
        name: String,
        unit: &'static str,
        rounds: &[Vec<f64>],
        target: Option<f64>,
    ) -> Self {
        let column = |at: usize| rounds.iter().map(|round| round[at]).collect::<Vec<_>>();
        let best = |round: &Vec<f64>| round[1..].iter().copied().fold(f64::INFINITY, f64::min);
        let mut ratios: Vec<f64> = rounds.iter().map(|round| best(round) / round[0]).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let values = (0..rounds[0].len()).map(|at| median(&column(at))).collect();
        Self { name, unit, values, ratios, target }
    }

    fn print(&self) {
        let value = |at: usize| self.values.get(at).map_or(String::new(), |v| format!("{v:.1}"));
        let ratio = format!("{:.2} [{:.2}..{:.2}]", self.ratio(), self.ratios[0], self.highest());
        let verdict = match self.target {
            None => String::new(),
            Some(target) if self.holds() => format!(">= {target:.2} ok"),
            Some(target) => format!(">= {target:.2} MISSED"),
        };
        let (name, unit) = (&self.name, self.unit);
        let (ours, one, two) = (value(0), value(1), value(2));
        println!("{name:<42}{ours:>9}{one:>12}{two:>10} {unit:<3}{ratio:>22}  {verdict}");
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "name": self.name, "unit": self.unit, "values": self.values, "ratio": self.ratio(),
            "ratio_min": self.ratios[0], "ratio_max": self.highest(),
            "target": self.target, "holds": self.holds(),
        })
    }
}

/// Returns the target for look-ups: several times faster where many workers answer.
fn look_up_target(shape: &workload::Shape) -> f64 {
    match (shape.turn_blocks, shape.workers) {
        (8, 128) => 3.0,
        (8, 32) => 2.0,
        _ => 1.0,
    }
}

fn rows(shape: &workload::Shape, rounds: &[Round]) -> Vec<Row> {
    let row = |what: &str, figure: fn(&Figures) -> f64, target: Option<f64>| {
        let figures: Vec<Vec<f64>> =
            rounds.iter().map(|round| round.iter().map(figure).collect()).collect();
        Row::from_rounds(format!("{}: {what}", shape.name), "ns", &figures, target)
    };
    vec![
        row("look-up p50", |f| f.look_up_p50, Some(look_up_target(shape))),
        row("look-up p99", |f| f.look_up_p99, None),
        row("store, a block", |f| f.store_per_block, Some(2.0)),
        row("remove, a block", |f| f.remove_per_block, Some(2.0)),
    ]
}

fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let (mut rounds, mut as_json) = (ROUNDS, false);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => as_json = true,
            "--rounds" => rounds = arguments.next().context("--rounds N")?.parse()?,
            "--memory" => {
                println!("{}", memory::measure(&arguments.next().context("--memory NAME")?)?);
                return Ok(ExitCode::SUCCESS);
            }
            other => anyhow::bail!("unknown argument {other}: use --json or --rounds N"),
        }
    }
    anyhow::ensure!(rounds > 0, "--rounds must be at least 1");
    println!("{:<42}{:>9}{:>12}{:>10}{:>26}", "", "berth", "compressed", "plain", "peer / berth");
    let mut table = vec![];
    let mut differ = 0;
    for shape in SHAPES {
        let workload = Workload::new(shape);
        let queries = workload.queries();
        differ += measure::disagreements(&workload, &queries);
        let measured: Vec<Round> =
            (0..rounds).map(|_| measure::round(&workload, &queries)).collect();
        for row in rows(&shape, &measured) {
            row.print();
            table.push(row);
        }
    }
    let hashed: Vec<Vec<f64>> = (0..rounds).map(|_| measure::hashing().to_vec()).collect();
    // The target is at most 1.5 times the peer's time.
    table.push(Row::from_rounds(
        "hashing 131,072 tokens".to_owned(),
        "µs",
        &hashed,
        Some(1.0 / 1.5),
    ));
    let memory = (0..rounds).map(|_| Ok(memory::bytes_per_residency()?.to_vec()));
    let memory: Vec<Vec<f64>> = memory.collect::<Result<_>>()?;
    table.push(Row::from_rounds("memory, a block on a worker".to_owned(), "B", &memory, Some(2.0)));
    table[table.len() - 2..].iter().for_each(Row::print);
    println!("answers that differ: {differ}");
    let holds = differ == 0 && table.iter().all(Row::holds);
    println!("{}", if holds { "all targets hold" } else { "a target is missed" });
    if as_json {
        let rows: Vec<_> = table.iter().map(Row::json).collect();
        println!("{}", json!({"rounds": rounds, "rows": rows, "differ": differ, "holds": holds}));
    }
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

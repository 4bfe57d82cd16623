//! Tables and pictures of what runs showed.

use std::path::Path;

use harness::guide;
use plotters::prelude::*;

use crate::{
    arms::{ARMS, Access, Arm},
    outcome::{Ending, Outcome, TurnOutcome},
    workload::Scenario,
};

/// The size of a picture in pixels.
const PICTURE: (u32, u32) = (760, 420);

/// All runs of an arm in a scenario.
struct Row<'a> {
    arm: Arm,
    runs: Vec<&'a Outcome>,
}

/// Returns the tables, one for each scenario.
#[must_use]
pub fn tables(outcomes: &[Outcome]) -> String {
    let tables = scenarios(outcomes).into_iter().map(|scenario| table(scenario, outcomes));
    tables.collect::<Vec<_>>().join("\n")
}

fn scenarios(outcomes: &[Outcome]) -> Vec<Scenario> {
    let mut scenarios = vec![];
    for outcome in outcomes {
        if !scenarios.contains(&outcome.scenario) {
            scenarios.push(outcome.scenario);
        }
    }
    scenarios
}

/// Whether all arms do equally well.
fn is_quiet(scenario: Scenario, outcomes: &[Outcome]) -> bool {
    let is_fine = |run: &Outcome| run.turns_lost == 0 && run.recomputed_tokens() == 0;
    outcomes.iter().filter(|run| run.scenario == scenario).all(is_fine)
}

fn rows(scenario: Scenario, outcomes: &[Outcome]) -> impl Iterator<Item = Row<'_>> {
    ARMS.into_iter().filter_map(move |arm| {
        let is_its = |run: &&Outcome| run.scenario == scenario && run.arm == arm.name;
        let runs: Vec<_> = outcomes.iter().filter(is_its).collect();
        (!runs.is_empty()).then_some(Row { arm, runs })
    })
}

fn table(scenario: Scenario, outcomes: &[Outcome]) -> String {
    let turns = turn_columns(scenario);
    let of_turns = turns.map(|(name, _)| name).join(" / ");
    let heads = [
        "arm".to_owned(),
        format!("main agent: cached, {of_turns}"),
        format!("its first token, ms, {of_turns}"),
        "computed again".to_owned(),
        "pool: peak, at the end".to_owned(),
        "given back".to_owned(),
        "freed after a close, ms".to_owned(),
        "sessions refused, given up".to_owned(),
        "turns lost".to_owned(),
        "wedged".to_owned(),
        "died".to_owned(),
    ];
    let mut lines = vec![heads.join(" | "), heads.map(|_| "---".to_owned()).join(" | ")];
    lines.extend(rows(scenario, outcomes).map(|row| row.cells(&turns).join(" | ")));
    let lines = lines.into_iter().map(|line| format!("| {line} |\n"));
    format!("{scenario}:\n\n{}", lines.collect::<String>())
}

type TurnFilter = fn(&TurnOutcome) -> bool;

/// Returns which turns of a main agent are shown together.
fn turn_columns(scenario: Scenario) -> [(&'static str, TurnFilter); 2] {
    match scenario {
        Scenario::Trees { .. } => {
            [("2nd", |turn| turn.index == 1), ("3rd", |turn| turn.index == 2)]
        }
        Scenario::Conversations { .. } | Scenario::NeverClosed => {
            [("first", |turn| turn.index == 0), ("later", |turn| turn.index > 0)]
        }
    }
}

impl Row<'_> {
    fn cells(&self, turns: &[(&str, TurnFilter)]) -> Vec<String> {
        let of_turns = |show: &dyn Fn(Vec<&TurnOutcome>) -> String| {
            turns.iter().map(|(_, filter)| show(self.main_turns(*filter))).collect::<Vec<_>>()
        };
        let cached = of_turns(&|turns| percent(cached_ratio(&turns)));
        let first_token = of_turns(&|turns| millis(median(turns.iter().map(|turn| turn.ttft_ms))));
        let freed = median(self.runs.iter().flat_map(|run| run.freed_ms.iter().copied()));
        let not_freed: usize = self.runs.iter().map(|run| run.not_freed).sum();
        // What was tagged, or demoted, stays in the cache after a close, and is evicted before what
        // sessions still have.
        let kept = if self.arm.access == Access::Bare { "never" } else { "stays cached" };
        let ended = |ending| self.runs.iter().filter(|run| run.ending == ending).count();
        let of_runs = |count: usize| format!("{count} of {}", self.runs.len());
        let peak = self.mean(|run| Some(run.physical?.peak));
        let floor = self.mean(|run| Some(run.physical?.floor));
        vec![
            format!("`{}`", self.arm.name),
            cached.join(" / "),
            first_token.join(" / "),
            percent(self.recomputed_ratio()),
            format!("{}, {}", percent(peak), percent(floor)),
            percent(self.mean(|run| run.physical?.reclaimed())),
            match (freed, not_freed) {
                (None, 0) => "–".to_owned(),
                (freed, 0) => millis(freed),
                (None, not) => format!("{not} × {kept}"),
                (freed, not) => format!("{}; {not} × {kept}", millis(freed)),
            },
            format!("{}, {}", self.sum(|run| run.opens_refused), self.sum(|run| run.given_up)),
            self.sum(|run| run.turns_lost),
            of_runs(ended(Ending::Wedged)),
            of_runs(ended(Ending::Died)),
        ]
    }

    /// Returns the runs that were not cut short: what is left of others says nothing beside them.
    fn complete(&self) -> impl Iterator<Item = &Outcome> {
        self.runs.iter().copied().filter(|run| run.ending == Ending::Complete)
    }

    fn main_turns(&self, filter: TurnFilter) -> Vec<&TurnOutcome> {
        let turns = self.complete().flat_map(|run| &run.turns);
        turns.filter(|turn| !turn.is_subagent && filter(turn)).collect()
    }

    fn sum(&self, count: impl Fn(&Outcome) -> usize) -> String {
        self.runs.iter().map(|run| count(run)).sum::<usize>().to_string()
    }

    fn mean(&self, figure: impl Fn(&Outcome) -> Option<f64>) -> Option<f64> {
        let figures: Vec<f64> = self.runs.iter().filter_map(|run| figure(run)).collect();
        (!figures.is_empty()).then(|| figures.iter().sum::<f64>() / figures.len() as f64)
    }

    /// Returns the part of what was computed before that was computed again.
    fn recomputed_ratio(&self) -> Option<f64> {
        let sum = |tokens: fn(&Outcome) -> u64| self.complete().map(tokens).sum::<u64>();
        let known = sum(Outcome::known_tokens);
        (known > 0).then(|| sum(Outcome::recomputed_tokens) as f64 / known as f64)
    }
}

fn cached_ratio(turns: &[&TurnOutcome]) -> Option<f64> {
    let sum = |tokens: fn(&TurnOutcome) -> u64| turns.iter().map(|turn| tokens(turn)).sum::<u64>();
    let prompt = sum(|turn| turn.prompt_tokens);
    (prompt > 0).then(|| sum(|turn| turn.cached_tokens) as f64 / prompt as f64)
}

fn median(figures: impl Iterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let last = figures.len().checked_sub(1)?;
    Some(f64::midpoint(figures[last / 2], figures[last.div_ceil(2)]))
}

fn percent(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{:.0} %", ratio * 100.0))
}

fn millis(millis: Option<f64>) -> String {
    millis.map_or_else(|| "–".to_owned(), |millis| format!("{millis:.0}"))
}

/// A picture of one figure of each arm over the size of the background load.
struct Picture<'a> {
    title: &'a str,
    unit: &'a str,
    figure: fn(&Row<'_>) -> Option<f64>,
}

/// Writes the tables into the part of the guide that is `stage`'s, and the pictures beside it.
///
/// # Errors
/// Fails if the guide has no such part, or a file can't be written.
pub fn write_guide(folder: &Path, stage: &str, outcomes: &[Outcome]) -> anyhow::Result<()> {
    let pictures = [
        Picture {
            title: "First token of the main agent's last turn",
            unit: "milliseconds",
            figure: |row| median(row.main_turns(|turn| turn.index == 2).iter().map(|t| t.ttft_ms)),
        },
        Picture {
            title: "KV that was computed again",
            unit: "% of what was computed before",
            figure: |row| row.recomputed_ratio().map(|ratio| ratio * 100.0),
        },
    ];
    let mut shown = String::new();
    for (number, picture) in (1..).zip(pictures) {
        let name = format!("pressure-{stage}-{number}.svg");
        picture.draw(&folder.join(&name), outcomes)?;
        shown.push_str(&format!("![{}]({name})\n\n", picture.title));
    }
    let (quiet, loud): (Vec<_>, Vec<_>) =
        scenarios(outcomes).into_iter().partition(|scenario| is_quiet(*scenario, outcomes));
    let quiet = quiet.into_iter().map(|scenario| {
        format!("{scenario}: in each arm, nothing is computed again and no turn is lost.\n\n")
    });
    let tables: Vec<_> = loud.into_iter().map(|scenario| table(scenario, outcomes)).collect();
    let mut measured: Vec<&str> = outcomes.iter().map(|run| &*run.measured).collect();
    measured.sort_unstable();
    measured.dedup();
    let measured = format!("Measured on {}.", measured.join(" and "));
    let (quiet, tables) = (quiet.collect::<String>(), tables.join("\n"));
    let text = format!("{measured}\n\n{shown}{quiet}{tables}");
    guide::write_figures(&folder.join("pressure.md"), stage, &text)
}

impl Picture<'_> {
    fn draw(&self, file: &Path, outcomes: &[Outcome]) -> anyhow::Result<()> {
        let lines = self.lines(outcomes);
        let points = lines.iter().flat_map(|(_, points)| points);
        let most = points.clone().map(|point| point.1).fold(1.0, f64::max) * 1.05;
        let last = points.map(|point| point.0).fold(1.0, f64::max);
        let area = SVGBackend::new(file, PICTURE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..last * 1.45, 0.0..most)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("tokens of all subagents, as a multiple of the pool")
            .y_desc(self.unit)
            .draw()?;
        for (index, (arm, points)) in lines.into_iter().enumerate() {
            let colour = Palette99::pick(index).stroke_width(2);
            chart
                .draw_series(LineSeries::new(points, colour).point_size(3))?
                .label(arm)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.2))
            .draw()?;
        area.present()?;
        Ok(())
    }

    /// Returns each arm's figures with one main agent.
    fn lines(&self, outcomes: &[Outcome]) -> Vec<(&'static str, Vec<(f64, f64)>)> {
        let mut lines = vec![];
        for arm in ARMS {
            let mut points = vec![];
            for scenario in scenarios(outcomes) {
                let Scenario::Trees { ratio, trees: 1 } = scenario else { continue };
                let row = rows(scenario, outcomes).find(|row| row.arm.name == arm.name);
                let figure = row.and_then(|row| (self.figure)(&row));
                points.extend(figure.map(|figure| (ratio, figure)));
            }
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            if !points.is_empty() {
                lines.push((arm.name, points));
            }
        }
        lines
    }
}

//! The agent's metrics: plain handles, base units, labels from small sets.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use proto::load::{Figure, LoadReport};

use crate::session::Outcome;

/// Seconds from 1 ms to 65 s, doubling: prefills span that range.
fn seconds() -> Histogram {
    Histogram::new((0..17).map(|step| 0.001 * f64::from(1 << step)))
}

/// All handles; clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    turns: Family<OutcomeLabel, Counter>,
    refusals: Family<CodeLabel, Counter>,
    first_byte: Histogram,
    turn: Histogram,
    ranks: Family<FigureLabel, Gauge>,
    engine_up: Gauge,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FigureLabel {
    dp_rank: u32,
    figure: &'static str,
}

impl Metrics {
    /// Registers everything under `registry`.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            turns: Family::default(),
            refusals: Family::default(),
            first_byte: seconds(),
            turn: seconds(),
            ranks: Family::default(),
            engine_up: Gauge::default(),
        };
        registry.register("turns", "Turns ended, by how", metrics.turns.clone());
        registry.register("refusals", "Turns refused by the agent", metrics.refusals.clone());
        let help = "From sending a turn to the head of its answer";
        let first_byte = metrics.first_byte.clone();
        registry.register_with_unit("time_to_first_byte", help, Unit::Seconds, first_byte);
        let help = "From sending a turn to the engine's last word";
        registry.register_with_unit("turn", help, Unit::Seconds, metrics.turn.clone());
        let help = "Figures of the load report: tokens, rows, turns, sessions";
        registry.register("rank_load", help, metrics.ranks.clone());
        registry.register("engine_up", "1 while the engine answers", metrics.engine_up.clone());
        metrics
    }

    /// A turn was refused here.
    pub fn refused(&self, code: &'static str) {
        self.refusals.get_or_create(&CodeLabel { code }).inc();
    }

    /// The head of an answer came.
    pub fn first_byte(&self, after: Duration) {
        self.first_byte.observe(after.as_secs_f64());
    }

    /// A turn ended.
    pub fn ended(&self, outcome: Outcome, after: Duration) {
        let outcome = match outcome {
            Outcome::Finished(_) => "finished",
            Outcome::Unheard(_) => "unheard",
            Outcome::Aborted => "aborted",
            Outcome::Refused => "refused",
            Outcome::Lost => "lost",
        };
        self.turns.get_or_create(&OutcomeLabel { outcome }).inc();
        self.turn.observe(after.as_secs_f64());
    }

    /// A report was published.
    pub fn reported(&self, report: &LoadReport) {
        self.engine_up.set(i64::from(report.unhealthy.is_none()));
        for rank in &report.ranks {
            let figures = [
                ("pool_used_tokens", rank.pool_used_tokens),
                ("pool_total_tokens", rank.pool_total_tokens),
                ("pinned_tokens", rank.pinned_tokens),
                ("resident_tokens_estimate", rank.resident_tokens_estimate),
                ("rows_held", rank.rows_held),
                ("rows_total", rank.rows_total),
                ("requests_running", rank.requests_running),
                ("requests_waiting", rank.requests_waiting),
            ];
            for (figure, value) in figures {
                self.set(rank.dp_rank, figure, value);
            }
            let count = |value: u32| Some(u64::from(value));
            self.set_value(rank.dp_rank, "sessions", count(rank.sessions));
            self.set_value(rank.dp_rank, "turns_running", count(rank.turns_running));
        }
    }

    fn set(&self, dp_rank: u32, figure: &'static str, value: Option<Figure>) {
        self.set_value(dp_rank, figure, value.map(|figure| figure.value));
    }

    /// An absent figure has no line, so that nobody reads it as zero.
    fn set_value(&self, dp_rank: u32, figure: &'static str, value: Option<u64>) {
        let label = FigureLabel { dp_rank, figure };
        match value {
            Some(value) => {
                let value = i64::try_from(value).unwrap_or(i64::MAX);
                self.ranks.get_or_create(&label).set(value);
            }
            None => drop(self.ranks.remove(&label)),
        }
    }
}

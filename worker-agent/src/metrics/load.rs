//! Lists the gauges of the load report: one for each figure, with its unit in the name.
//!
//! A load report says how full each data-parallel rank of the engine is. Each gauge has a function
//! that takes its value from a rank's part of the report.

use contract::load::{Figure, RankLoad};
use prometheus_client::metrics::{family::Family, gauge::Gauge};
use service::metrics::Registrar;

use super::{RankLabel, set_gauge};

/// One gauge: how Prometheus describes it, and where its value comes from.
struct LoadGauge {
    name: &'static str,
    help: &'static str,
    /// Empty for a count.
    unit: &'static str,
    value: fn(&RankLoad) -> Option<u64>,
}

const fn tokens(
    name: &'static str,
    help: &'static str,
    value: fn(&RankLoad) -> Option<u64>,
) -> LoadGauge {
    LoadGauge { name, help, unit: "tokens", value }
}

const fn count(
    name: &'static str,
    help: &'static str,
    value: fn(&RankLoad) -> Option<u64>,
) -> LoadGauge {
    LoadGauge { name, help, unit: "", value }
}

fn number(figure: Option<Figure>) -> Option<u64> {
    figure.map(|figure| figure.value)
}

/// All gauges of the load report.
const GAUGES: [LoadGauge; 26] = [
    tokens("pool_total", "Size of the KV pool", |rank| number(rank.pool_total_tokens)),
    tokens("pool_used", "KV that eviction can't free", |rank| number(rank.pool_used_tokens)),
    tokens("pool_available", "Free KV", |rank| number(rank.pool_available_tokens)),
    tokens("pool_evictable", "Cached KV that eviction can free", |rank| {
        number(rank.pool_evictable_tokens)
    }),
    tokens("pinned", "KV that pinned sessions hold", |rank| number(rank.pinned_tokens)),
    tokens("foreign", "Pinned KV of engine sessions that this agent didn't open", |rank| {
        number(rank.foreign_tokens)
    }),
    tokens("resident_estimate", "Upper bound of the KV of tagged sessions", |rank| {
        number(rank.resident_tokens_estimate)
    }),
    count("rows", "Request rows of the engine", |rank| number(rank.rows_total)),
    count("rows_held", "Request rows that pinned sessions hold", |rank| number(rank.rows_held)),
    count("requests_running", "Requests in the engine's running batch", |rank| {
        number(rank.requests_running)
    }),
    count("requests_waiting", "Requests in the engine's waiting queue", |rank| {
        number(rank.requests_waiting)
    }),
    count("sessions_open", "Sessions that are open on the rank", |rank| Some(rank.sessions.into())),
    count("turns_running", "Turns that the engine has", |rank| Some(rank.turns_running.into())),
    count("turns_running_max", "The most turns that the engine may have at once", |rank| {
        Some(rank.turns_running_max.into())
    }),
    count("turns_queued", "Turns that wait in the agent until the engine has room", |rank| {
        Some(rank.turns_queued.into())
    }),
    LoadGauge {
        name: "prefill_rate",
        help: "Prompt tokens that the engine computes while it does nothing else, as measured",
        unit: "tokens_per_second",
        value: |rank| number(rank.prefill_tokens_per_s),
    },
    tokens("prefill_backlog", "Prompt tokens of admitted turns that are not computed", |rank| {
        number(rank.prefill_backlog_tokens)
    }),
    tokens("staged_prefill_backlog", "Tokens of prompts that wait in staged prefill", |rank| {
        Some(rank.staged_prefill?.tokens)
    }),
    count("staged_prefill_prompts", "Prompts that wait in staged prefill", |rank| {
        Some(rank.staged_prefill?.prompts.into())
    }),
    tokens("staged_prefill_stage", "Tokens of one stage at the measured rate", |rank| {
        Some(rank.staged_prefill?.stage_tokens)
    }),
    tokens("host_total", "Room for copies of KV in the host's memory", |rank| {
        number(rank.host?.total_tokens)
    }),
    tokens("host_used", "KV copied to the host's memory", |rank| number(rank.host?.used_tokens)),
    tokens("host_evictable", "KV on the host that eviction can free, as estimated", |rank| {
        number(rank.host?.evictable_tokens)
    }),
    tokens("host_loading", "KV on its way from the host to the device", |rank| {
        number(rank.host?.loading_tokens)
    }),
    tokens("host_writing", "KV on its way from the device to the host", |rank| {
        number(rank.host?.writing_tokens)
    }),
    LoadGauge {
        name: "host_load_rate",
        help: "KV that the engine loads from the host, as measured, else by the settings",
        unit: "tokens_per_second",
        value: |rank| number(rank.host?.load_tokens_per_s),
    },
];

/// The gauges' values. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct LoadGauges([Family<RankLabel, Gauge>; GAUGES.len()]);

impl LoadGauges {
    pub(super) fn new(registry: &mut Registrar<'_>) -> Self {
        Self(GAUGES.map(|LoadGauge { name, help, unit, .. }| {
            registry.add(name, unit, help, Family::default())
        }))
    }

    /// Sets all gauges. A figure that the report lacks has no line.
    pub(super) fn set(&self, ranks: &[RankLoad]) {
        for (gauge, family) in GAUGES.iter().zip(&self.0) {
            for rank in ranks {
                let label = RankLabel { dp_rank: rank.dp_rank };
                set_gauge(family, &label, (gauge.value)(rank));
            }
        }
    }
}

//! Exports Prometheus metrics of workers and sessions, computed at each scrape.
//!
//! Without any message from an agent, workers become stale and load reports grow older.

use std::sync::Arc;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        MetricType,
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::Unit,
};

use super::{view::View, worker::WorkerState};
use crate::metrics::StateLabel;

#[derive(Debug)]
pub(crate) struct FleetCollector(pub(crate) Arc<View>);

impl Collector for FleetCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let now = service::clock::now();
        let view = self.0.load();
        let workers = Family::<StateLabel, Gauge>::default();
        for state in WorkerState::ALL {
            workers.get_or_create(&StateLabel { state: state.as_str() }).set(0);
        }
        for (worker, ..) in view.workers() {
            let state = view.state(worker, now).as_str();
            workers.get_or_create(&StateLabel { state }).inc();
        }
        let gauge = MetricType::Gauge;
        workers.encode(encoder.encode_descriptor("workers", "Workers by state", None, gauge)?)?;
        let reports = view.agents.iter().filter_map(|agent| agent.report.as_ref());
        let oldest_s = reports
            .map(|(_, at)| now.saturating_duration_since(*at).as_secs_f64())
            .fold(0.0_f64, f64::max);
        let help = "Age of the oldest load report of a connected agent";
        let unit = Unit::Seconds;
        ConstGauge::new(oldest_s).encode(encoder.encode_descriptor(
            "report_age_max",
            help,
            Some(&unit),
            gauge,
        )?)?;
        let sessions = i64::try_from(view.sessions.len()).unwrap_or(i64::MAX);
        let help = "Sessions in the agents' tables";
        ConstGauge::new(sessions).encode(encoder.encode_descriptor("sessions", help, None, gauge)?)
    }
}

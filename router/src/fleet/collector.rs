//! Exports Prometheus metrics of workers and sessions, computed at each scrape.
//!
//! Without any message from an agent, workers become stale and load reports grow older.

use std::sync::Arc;

use prometheus_client::{
    collector::Collector,
    encoding::DescriptorEncoder,
    metrics::gauge::{ConstGauge, Gauge},
};
use service::metrics::{By, encode, gauge};

use super::{view::View, worker::WorkerState};

#[derive(Debug)]
pub(crate) struct FleetCollector(pub(crate) Arc<View>);

impl Collector for FleetCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let now = service::clock::now();
        let view = self.0.load();
        let workers = By::<Gauge>::label("state");
        for state in WorkerState::ALL {
            workers.get(state.as_str()).set(0);
        }
        for (worker, ..) in view.workers() {
            workers.get(view.state(worker, now).as_str()).inc();
        }
        encode(&mut encoder, "workers", "", "Workers by state", &workers)?;
        let reports = view.agents.iter().filter_map(|agent| agent.report.as_ref());
        let oldest_s = reports
            .map(|(_, at)| now.saturating_duration_since(*at).as_secs_f64())
            .fold(0.0_f64, f64::max);
        let help = "Age of the oldest load report of a connected agent";
        encode(&mut encoder, "report_age_max", "seconds", help, &ConstGauge::new(oldest_s))?;
        let sessions = gauge(view.sessions.len() as u64);
        encode(&mut encoder, "sessions", "", "Sessions in the agents' tables", &sessions)
    }
}

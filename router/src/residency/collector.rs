//! Exports metrics of the index of resident blocks to Prometheus, read at each scrape.

use std::sync::Arc;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        MetricType,
        counter::ConstCounter,
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::Unit,
};

use super::{kv_index::KvIndex, kv_stream::KvPhase};
use crate::{fleet::view::View, metrics::StateLabel};

#[derive(Debug)]
pub(crate) struct KvIndexCollector {
    pub(crate) view: Arc<View>,
    pub(crate) kv_index: Arc<KvIndex>,
}

impl Collector for KvIndexCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let stats = self.kv_index.stats();
        let gauge = |value: u64| ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
        let gauges = MetricType::Gauge;
        let help = "Distinct blocks known to be resident on some worker";
        gauge(stats.blocks).encode(encoder.encode_descriptor(
            "overlap_blocks",
            help,
            None,
            gauges,
        )?)?;
        let help = "Memory of the index of resident blocks";
        let unit = Unit::Bytes;
        gauge(stats.bytes).encode(encoder.encode_descriptor(
            "overlap_index",
            help,
            Some(&unit),
            gauges,
        )?)?;
        for (name, help, value) in [
            (
                "overlap_blocks_dropped",
                "Blocks forgotten because memory was short",
                stats.dropped_blocks,
            ),
            (
                "overlap_blocks_orphaned",
                "Blocks not stored because their parent is unknown",
                stats.orphan_blocks,
            ),
            (
                "overlap_contradictions",
                "Blocks reported with two different prefixes",
                stats.contradictions,
            ),
        ] {
            let counter = MetricType::Counter;
            ConstCounter::new(value)
                .encode(encoder.encode_descriptor(name, help, None, counter)?)?;
        }
        let workers = Family::<StateLabel, Gauge>::default();
        for state in ["live", "snapshot", "unknown"] {
            workers.get_or_create(&StateLabel { state }).set(0);
        }
        for (worker, ..) in self.view.load().workers() {
            let state = match self.kv_index.worker_kv(worker).phase {
                KvPhase::Live { .. } => "live",
                KvPhase::Snapshot { .. } => "snapshot",
                KvPhase::Unknown { .. } => "unknown",
            };
            workers.get_or_create(&StateLabel { state }).inc();
        }
        let help = "Workers by the state of their stream of resident blocks";
        workers.encode(encoder.encode_descriptor("overlap_workers", help, None, gauges)?)
    }
}

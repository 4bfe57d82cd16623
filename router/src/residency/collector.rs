//! Exports metrics of the index of resident blocks to Prometheus, read at each scrape.

use std::sync::Arc;

use prometheus_client::{
    collector::Collector,
    encoding::DescriptorEncoder,
    metrics::{counter::ConstCounter, gauge::Gauge},
};
use service::metrics::{By, encode, gauge};

use super::{kv_index::KvIndex, kv_stream::KvPhase};
use crate::fleet::view::View;

#[derive(Debug)]
pub(crate) struct KvIndexCollector {
    pub(crate) view: Arc<View>,
    pub(crate) kv_index: Arc<KvIndex>,
}

impl Collector for KvIndexCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let stats = self.kv_index.stats();
        let help = "Distinct blocks known to be resident on some worker";
        encode(&mut encoder, "overlap_blocks", "", help, &gauge(stats.blocks))?;
        let help = "Memory of the index of resident blocks";
        encode(&mut encoder, "overlap_index", "bytes", help, &gauge(stats.bytes))?;
        let help = "Blocks forgotten because memory was short";
        let dropped = ConstCounter::new(stats.dropped_blocks);
        encode(&mut encoder, "overlap_blocks_dropped", "", help, &dropped)?;
        let help = "Blocks not stored because their parent is unknown";
        let orphans = ConstCounter::new(stats.orphan_blocks);
        encode(&mut encoder, "overlap_blocks_orphaned", "", help, &orphans)?;
        let help = "Blocks reported with two different prefixes";
        let contradictions = ConstCounter::new(stats.contradictions);
        encode(&mut encoder, "overlap_contradictions", "", help, &contradictions)?;
        let workers = By::<Gauge>::label("state");
        for state in ["live", "snapshot", "unknown"] {
            workers.get(state).set(0);
        }
        for (worker, ..) in self.view.load().workers() {
            let state = match self.kv_index.worker_kv(worker).phase {
                KvPhase::Live { .. } => "live",
                KvPhase::Snapshot { .. } => "snapshot",
                KvPhase::Unknown { .. } => "unknown",
            };
            workers.get(state).inc();
        }
        let help = "Workers by the state of their stream of resident blocks";
        encode(&mut encoder, "overlap_workers", "", help, &workers)
    }
}

//! Exports the metrics of the pools, read at each scrape.
//!
//! The labels name pools, never sharers: a router may have many thousands of sharers. The largest
//! share tells whether one of them presses the others.

use std::sync::Arc;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, family::Family, gauge::Gauge},
    registry::Unit,
};

use super::{SharedPool, Shares};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabel {
    pool: &'static str,
}

#[derive(Debug)]
pub(crate) struct SharesCollector(pub(crate) Arc<Shares>);

/// The figures of pools with the same unit.
#[derive(Debug, Default)]
struct Figures {
    limit: Family<PoolLabel, Gauge>,
    used: Family<PoolLabel, Gauge>,
    largest: Family<PoolLabel, Gauge>,
}

impl Figures {
    /// Adds the pools' numbers of clients to `sharers`.
    fn read<const N: usize>(pools: [&SharedPool; N], sharers: &Family<PoolLabel, Gauge>) -> Self {
        let figures = Self::default();
        for shared_pool in pools {
            let label = PoolLabel { pool: shared_pool.name };
            let pool = shared_pool.pool.lock();
            let set = |family: &Family<PoolLabel, Gauge>, value: u64| {
                family.get_or_create(&label).set(i64::try_from(value).unwrap_or(i64::MAX));
            };
            set(&figures.limit, pool.units());
            set(&figures.used, pool.used());
            set(&figures.largest, pool.largest_held());
            set(sharers, pool.sharers() as u64);
        }
        figures
    }
}

impl Collector for SharesCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let shares = &self.0;
        let sharers = Family::default();
        let turns = Figures::read([&shares.turns], &sharers);
        let bytes = Figures::read([&shares.body_bytes, &shares.tokenizer_bytes], &sharers);
        let unit = |name: &str| Unit::Other(name.to_owned());
        for (figures, unit) in [(turns, unit("turns")), (bytes, Unit::Bytes)] {
            let Figures { limit, used, largest } = figures;
            for (family, name, help) in [
                (limit, "share_limit", "What the clients share, by pool"),
                (used, "share_used", "What the clients hold together, by pool"),
                (largest, "share_largest", "The most that one client holds, by pool"),
            ] {
                let gauge = MetricType::Gauge;
                family.encode(encoder.encode_descriptor(name, help, Some(&unit), gauge)?)?;
            }
        }
        let help = "Clients that hold a part of a pool";
        sharers.encode(encoder.encode_descriptor("sharers", help, None, MetricType::Gauge)?)?;
        let rated = Gauge::<i64>::default();
        rated.set(i64::try_from(shares.rates.lock().len()).unwrap_or(i64::MAX));
        let help = "Keys with a limit per minute that is remembered";
        rated.encode(encoder.encode_descriptor("rated_keys", help, None, MetricType::Gauge)?)
    }
}

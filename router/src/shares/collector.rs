//! Exports the metrics of the pools, read at each scrape.
//!
//! The labels name pools, never sharers: a router may have many thousands of sharers. The largest
//! share tells whether one of them presses the others.

use std::sync::Arc;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, family::Family, gauge::Gauge},
};

use super::Shares;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabel {
    pool: &'static str,
}

/// Reads the pools at each scrape.
#[derive(Debug)]
pub(crate) struct SharesCollector(pub(crate) Arc<Shares>);

impl Collector for SharesCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let shares = &self.0;
        let [limit, used, largest, sharers]: [Family<PoolLabel, Gauge>; 4] = Default::default();
        for shared_pool in [&shares.turns, &shares.body_bytes, &shares.tokenizer_bytes] {
            let label = PoolLabel { pool: shared_pool.name };
            let pool = shared_pool.pool.lock();
            let set = |family: &Family<PoolLabel, Gauge>, value: u64| {
                family.get_or_create(&label).set(i64::try_from(value).unwrap_or(i64::MAX));
            };
            set(&limit, pool.units());
            set(&used, pool.used());
            set(&largest, pool.largest_held());
            set(&sharers, pool.sharers() as u64);
        }
        for (family, name, help) in [
            (limit, "share_limit", "Units of each pool that clients share"),
            (used, "share_used", "Units of each pool that are in use"),
            (largest, "share_largest", "Most units of each pool that one client holds"),
            (sharers, "sharers", "Clients that hold units of each pool"),
        ] {
            family.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let rated = Gauge::<i64>::default();
        rated.set(i64::try_from(shares.rates.lock().len()).unwrap_or(i64::MAX));
        let help = "Keys with a limit per minute that is remembered";
        rated.encode(encoder.encode_descriptor("rated_keys", help, None, MetricType::Gauge)?)
    }
}

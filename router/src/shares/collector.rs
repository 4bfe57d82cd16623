//! Exports the metrics of the pools, read at each scrape.
//!
//! The labels name pools, never sharers: a router may have many thousands of sharers. The largest
//! share tells whether one of them presses the others.

use std::sync::Arc;

use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, metrics::gauge::Gauge};
use service::metrics::{By, encode, gauge, to_i64};

use super::{SharedPool, Shares};

#[derive(Debug)]
pub(crate) struct SharesCollector(pub(crate) Arc<Shares>);

/// The figures of pools with the same unit.
#[derive(Debug)]
struct Figures {
    limit: By<Gauge>,
    used: By<Gauge>,
    largest: By<Gauge>,
}

impl Figures {
    /// Adds the pools' numbers of clients to `sharers`.
    fn read<const N: usize>(pools: [&SharedPool; N], sharers: &By<Gauge>) -> Self {
        let [limit, used, largest] = [(); 3].map(|()| By::label("pool"));
        let figures = Self { limit, used, largest };
        for shared_pool in pools {
            let pool = shared_pool.pool.lock();
            for (metric, value) in [
                (&figures.limit, pool.units()),
                (&figures.used, pool.used()),
                (&figures.largest, pool.largest_held()),
                (sharers, pool.sharers() as u64),
            ] {
                metric.get(shared_pool.name).set(to_i64(value));
            }
        }
        figures
    }
}

impl Collector for SharesCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let shares = &self.0;
        let sharers = By::label("pool");
        let turns = Figures::read([&shares.turns], &sharers);
        let bytes = Figures::read([&shares.body_bytes, &shares.tokenizer_bytes], &sharers);
        for (figures, unit) in [(turns, "turns"), (bytes, "bytes")] {
            for (metric, name, help) in [
                (&figures.limit, "share_limit", "What the clients share, by pool"),
                (&figures.used, "share_used", "What the clients hold together, by pool"),
                (&figures.largest, "share_largest", "The most that one client holds, by pool"),
            ] {
                encode(&mut encoder, name, unit, help, metric)?;
            }
        }
        let help = "Clients that hold a part of a pool";
        encode(&mut encoder, "sharers", "", help, &sharers)?;
        let rated = gauge(shares.rates.lock().len() as u64);
        let help = "Keys with a limit per minute that is remembered";
        encode(&mut encoder, "rated_keys", "", help, &rated)
    }
}

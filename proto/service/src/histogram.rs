//! Makes the histograms of both processes' metrics, with classic and native buckets.
//!
//! Prometheus asks for protobuf where native histograms are on, and then gets both: native buckets
//! are at most 9 % apart, wherever the values lie, and cost a series for the whole histogram.

use prometheus_client::metrics::histogram::{Histogram, NativeHistogramConfig};

/// Times from 1 ms to a minute need 16 doublings of 8 buckets each; beyond, neighbours are merged.
const NATIVE_BUCKETS_MAX: usize = 160;

/// Creates a histogram with these upper bounds of classic buckets.
pub fn create(bounds: impl IntoIterator<Item = f64>) -> Histogram {
    let native = NativeHistogramConfig::default().max_buckets(NATIVE_BUCKETS_MAX);
    Histogram::new_classic_and_native(bounds, native)
}

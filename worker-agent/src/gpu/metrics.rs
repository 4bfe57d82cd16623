//! Exports Prometheus metrics of the worker's GPUs and of the KV pools on them.
//!
//! A *device* is a GPU, or one of the *slices* into which MIG has divided a GPU. A *board* is a
//! whole GPU. The start of the agent (`lib.rs`) calls [`register`]. From then on, each scrape of
//! `/metrics` makes the metrics from the newest snapshot of the devices and the newest load report;
//! it calls no NVML. An absent value has no line, and neither has a device that is gone.
//!
//! The child `table` lists the metrics of devices. `deploy/docs/metrics.md` maps them to the
//! metrics of NVIDIA's exporter.

mod table;

use std::{fmt, sync::Arc, time::Instant};

use contract::load::{Device, LoadReport};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
    registry::Unit,
};
use service::metrics::Registrar;
use tokio::sync::watch;

use self::table::{DEVICE_METRICS, MetricSpec, float};
use super::tracker::{DeviceState, Snapshot};

/// Makes the metrics from the newest snapshot and the newest load report.
#[derive(Debug)]
struct DeviceCollector {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    report: watch::Receiver<Arc<LoadReport>>,
    /// Whether a metric without lines is named.
    shows_empty: bool,
}

/// Adds the metrics of devices and of their KV pools to `registry`.
pub fn register(
    registry: &mut Registrar<'_>,
    snapshot: watch::Receiver<Arc<Snapshot>>,
    report: watch::Receiver<Arc<LoadReport>>,
) {
    let shows_empty = registry.shows_empty();
    registry.add_collector(DeviceCollector { snapshot, report, shows_empty });
}

/// Label names and values.
type Labels = Vec<(&'static str, String)>;

/// One line of a metric: its labels and its value.
type Line = (Labels, f64);

/// One metric with its lines.
struct Metric {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    metric_type: MetricType,
    lines: Vec<Line>,
}

impl Collector for DeviceCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let report = Arc::clone(&self.report.borrow());
        let metrics = device_metrics(&snapshot).into_iter().chain(pool_metrics(&report));
        for metric in metrics.chain([age_metric(&snapshot, service::clock::now())]) {
            if self.shows_empty || !metric.lines.is_empty() {
                metric.encode(&mut encoder)?;
            }
        }
        Ok(())
    }
}

impl Metric {
    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Self { name, help, unit, metric_type, .. } = self;
        let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), *metric_type)?;
        for (labels, value) in &self.lines {
            let mut line = metric.encode_family(labels)?;
            match metric_type {
                MetricType::Counter => line.encode_counter::<NoLabelSet, _, f64>(value, None)?,
                _ => line.encode_gauge(value)?,
            }
        }
        Ok(())
    }
}

/// Returns the time since the devices were last read. The time grows while an NVML call hangs. A
/// machine without devices gets no line.
fn age_metric(snapshot: &Snapshot, now: Instant) -> Metric {
    let age = now.saturating_duration_since(snapshot.read_at).as_secs_f64();
    Metric {
        name: "gpu_readings_age",
        help: "Time since the GPUs were last read",
        unit: Some(Unit::Seconds),
        metric_type: MetricType::Gauge,
        lines: snapshot.devices.iter().take(1).map(|_| (vec![], age)).collect(),
    }
}

/// The values that one metric has for a device, each with its labels. The label for the device is
/// not among them. A value of `None` is absent and gets no line.
type DeviceValues = Vec<(Labels, Option<f64>)>;

/// Returns the metrics of the engine's devices, and of the boards whose slices are the engine's.
fn device_metrics(snapshot: &Snapshot) -> Vec<Metric> {
    let engine_devices: Vec<&DeviceState> =
        snapshot.devices.iter().filter(|device| device.is_engine_device).collect();
    let has_engine_slice = |board: &DeviceState| {
        let uuid = Some(board.identity.uuid.as_str());
        engine_devices.iter().any(|device| device.identity.parent_uuid.as_deref() == uuid)
    };
    let is_exported = |device: &&DeviceState| device.is_engine_device || has_engine_slice(device);
    let exported: Vec<&DeviceState> = snapshot.devices.iter().filter(is_exported).collect();
    let metric = |MetricSpec { name, help, unit, metric_type, device_values }: MetricSpec| {
        let lines = exported
            .iter()
            .flat_map(|device| device_lines(&device.identity.uuid, device_values(device)));
        let unit = unit.map(|unit| Unit::Other(unit.to_owned()));
        Metric { name, help, unit, metric_type, lines: lines.collect() }
    };
    DEVICE_METRICS.into_iter().map(metric).collect()
}

/// Returns the lines that one metric has for a device.
fn device_lines(uuid: &str, values: DeviceValues) -> Vec<Line> {
    let line = |(labels, value): (Labels, Option<f64>)| {
        let all_labels = [("gpu_uuid", uuid.to_owned())].into_iter().chain(labels);
        Some((all_labels.collect(), value?))
    };
    values.into_iter().filter_map(line).collect()
}

/// Returns the metrics of the data-parallel ranks' KV pools on their devices.
fn pool_metrics(report: &LoadReport) -> [Metric; 3] {
    let ranks_and_devices = || {
        let ranks = report.ranks.iter();
        ranks.flat_map(|rank| rank.devices.iter().map(move |device| (rank.dp_rank, device)))
    };
    let labels = |dp_rank: u32, device: &Device| -> Labels {
        vec![("gpu_uuid", device.uuid.clone()), ("dp_rank", dp_rank.to_string())]
    };
    let state_lines = ranks_and_devices().flat_map(|(dp_rank, device)| {
        let bytes_by_state = [
            ("pool", device.kv_pool_bytes),
            ("used", device.kv_used_bytes),
            ("pinned", device.kv_pinned_bytes),
            ("reclaimable", device.kv_reclaimable_bytes),
        ];
        bytes_by_state.into_iter().filter_map(move |(state, bytes)| {
            let state_label = [("state", state.to_owned())];
            Some(([labels(dp_rank, device), state_label.to_vec()].concat(), float(bytes?.value)))
        })
    });
    let usage_lines = ranks_and_devices().filter_map(|(dp_rank, device)| {
        Some((labels(dp_rank, device), device.kv_physical_usage()?.value))
    });
    // A pool is part of the engine's memory. A larger pool means that one of the figures is wrong.
    let excess_lines = ranks_and_devices().filter_map(|(dp_rank, device)| {
        let (pool, engine) = (device.kv_pool_bytes?, device.engine_bytes?);
        Some((labels(dp_rank, device), float(pool.value.saturating_sub(engine.value))))
    });
    let bytes = Some(Unit::Bytes);
    [
        Metric {
            name: "gpu_kv",
            help: "A rank's KV pool on the device, by state",
            unit: bytes.clone(),
            metric_type: MetricType::Gauge,
            lines: state_lines.collect(),
        },
        Metric {
            name: "gpu_kv_physical_usage",
            help: "The part of a rank's KV pool on the device that is not free, cached KV included",
            unit: Some(Unit::Other("ratio".to_owned())),
            metric_type: MetricType::Gauge,
            lines: usage_lines.collect(),
        },
        Metric {
            name: "gpu_kv_excess",
            help: "Bytes of the pool beyond the engine's memory by NVML: one figure is wrong",
            unit: bytes,
            metric_type: MetricType::Gauge,
            lines: excess_lines.collect(),
        },
    ]
}

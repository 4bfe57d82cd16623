//! Exports Prometheus metrics of the worker's GPUs and of the KV pools on them.
//!
//! A *device* is a GPU, or one of the *slices* into which MIG has divided a GPU. A *board* is a
//! whole GPU. The metrics are made at each scrape from the newest snapshot of the devices and the
//! newest load report. An absent value has no line, and neither has a device that is gone.
//! `deploy/docs/operations.md` maps these metrics to those of NVIDIA's exporter.

mod table;

use std::{fmt, sync::Arc, time::Instant};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
    registry::{Registry, Unit},
};
use proto::load::{Device, LoadReport};
use tokio::sync::watch;

use self::table::{Spec, TABLE, float};
use super::fleet::{DeviceState, Snapshot};

/// Makes the metrics from the newest snapshot and the newest load report.
#[derive(Debug)]
struct DeviceCollector {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    report: watch::Receiver<Arc<LoadReport>>,
}

/// Registers the devices' metrics.
pub fn register(
    registry: &mut Registry,
    snapshot: watch::Receiver<Arc<Snapshot>>,
    report: watch::Receiver<Arc<LoadReport>>,
) {
    registry.register_collector(Box::new(DeviceCollector { snapshot, report }));
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
    kind: MetricType,
    lines: Vec<Line>,
}

impl Collector for DeviceCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let report = Arc::clone(&self.report.borrow());
        for metric in device_metrics(&snapshot).into_iter().chain(pool_metrics(&report)) {
            metric.encode(&mut encoder)?;
        }
        encode_age(&snapshot, service::clock::now(), &mut encoder)
    }
}

impl Metric {
    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        if self.lines.is_empty() {
            return Ok(());
        }
        let Self { name, help, unit, kind, .. } = self;
        let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), *kind)?;
        for (labels, value) in &self.lines {
            let mut line = metric.encode_family(labels)?;
            match kind {
                MetricType::Counter => line.encode_counter::<NoLabelSet, _, f64>(value, None)?,
                _ => line.encode_gauge(value)?,
            }
        }
        Ok(())
    }
}

/// Encodes the age of the readings. The age grows if an NVML call hangs. A
/// machine without devices gets no line.
fn encode_age(
    snapshot: &Snapshot,
    now: Instant,
    encoder: &mut DescriptorEncoder<'_>,
) -> Result<(), fmt::Error> {
    let age = now.saturating_duration_since(snapshot.read_at).as_secs_f64();
    let metric = Metric {
        name: "gpu_readings_age",
        help: "Time since the GPUs were last read",
        unit: Some(Unit::Seconds),
        kind: MetricType::Gauge,
        lines: snapshot.devices.iter().take(1).map(|_| (vec![], age)).collect(),
    };
    metric.encode(encoder)
}

/// A device's values of one metric. Each has its labels, without the label for the device. A value
/// of `None` is absent and gets no line.
type DeviceValues = Vec<(Labels, Option<f64>)>;

/// Returns the metrics of the worker's devices, and of the boards whose slices are the worker's.
fn device_metrics(snapshot: &Snapshot) -> Vec<Metric> {
    let ours: Vec<&DeviceState> = snapshot.devices.iter().filter(|device| device.is_ours).collect();
    let has_our_slice = |board: &DeviceState| {
        let uuid = Some(board.identity.uuid.as_str());
        ours.iter().any(|device| device.identity.parent_uuid.as_deref() == uuid)
    };
    let shown: Vec<&DeviceState> =
        snapshot.devices.iter().filter(|device| device.is_ours || has_our_slice(device)).collect();
    let metric = |Spec { name, help, unit, kind, values_of }: Spec| {
        let lines =
            shown.iter().flat_map(|device| device_lines(&device.identity.uuid, values_of(device)));
        let unit = unit.map(|unit| Unit::Other(unit.to_owned()));
        Metric { name, help, unit, kind, lines: lines.collect() }
    };
    TABLE.into_iter().map(metric).collect()
}

/// Returns a device's lines of one metric.
fn device_lines(uuid: &str, values: DeviceValues) -> Vec<Line> {
    let line = |(labels, value): (Labels, Option<f64>)| {
        let labels = [("gpu_uuid", uuid.to_owned())].into_iter().chain(labels);
        Some((labels.collect(), value?))
    };
    values.into_iter().filter_map(line).collect()
}

/// Returns the metrics of the data-parallel ranks' KV pools on their devices.
fn pool_metrics(report: &LoadReport) -> [Metric; 2] {
    let devices = || {
        let ranks = report.ranks.iter();
        ranks.flat_map(|rank| rank.devices.iter().map(move |device| (rank.dp_rank, device)))
    };
    let labels = |dp_rank: u32, device: &Device| -> Labels {
        vec![("gpu_uuid", device.uuid.clone()), ("dp_rank", dp_rank.to_string())]
    };
    let state_lines = devices().flat_map(|(dp_rank, device)| {
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
    // A pool is part of the engine's memory, so a pool that is larger shows a wrong value.
    let pool_beyond_engine = devices().filter_map(|(dp_rank, device)| {
        let (pool, engine) = (device.kv_pool_bytes?, device.engine_bytes?);
        Some((labels(dp_rank, device), float(pool.value.saturating_sub(engine.value))))
    });
    let bytes = Some(Unit::Bytes);
    [
        Metric {
            name: "gpu_kv",
            help: "A rank's KV pool on the device, by state",
            unit: bytes.clone(),
            kind: MetricType::Gauge,
            lines: state_lines.collect(),
        },
        Metric {
            name: "gpu_kv_excess",
            help: "Bytes of the pool beyond the engine's memory by NVML: one figure is wrong",
            unit: bytes,
            kind: MetricType::Gauge,
            lines: pool_beyond_engine.collect(),
        },
    ]
}

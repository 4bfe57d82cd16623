//! Device metrics, made from the newest snapshot and report when they are asked for: a figure that
//! is absent has no line, and a device that has gone leaves none. `deploy/README.md` maps them to
//! those of NVIDIA's own exporter.

use std::{fmt, sync::Arc, time::Instant};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
    registry::{Registry, Unit},
};
use proto::load::{Device, LoadReport};
use tokio::sync::watch;

use super::fleet::{Seen, Snapshot};

/// Where the figures come from.
#[derive(Debug)]
struct Devices {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    report: watch::Receiver<Arc<LoadReport>>,
}

/// Registers the devices' metrics.
pub fn register(
    registry: &mut Registry,
    snapshot: watch::Receiver<Arc<Snapshot>>,
    report: watch::Receiver<Arc<LoadReport>>,
) {
    registry.register_collector(Box::new(Devices { snapshot, report }));
}

/// One line's labels besides the device, and its value.
type Line = (Vec<(&'static str, String)>, f64);

/// One metric.
struct Metric {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    kind: MetricType,
    lines: Vec<Line>,
}

impl Collector for Devices {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let report = Arc::clone(&self.report.borrow());
        for metric in of_devices(&snapshot).into_iter().chain(of_pools(&report)) {
            metric.encode(&mut encoder)?;
        }
        age(&snapshot, tokio::time::Instant::now().into_std(), &mut encoder)
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

/// How old the readings are: NVML's calls may hang.
fn age(
    snapshot: &Snapshot,
    now: Instant,
    encoder: &mut DescriptorEncoder<'_>,
) -> Result<(), fmt::Error> {
    let age = now.saturating_duration_since(snapshot.at).as_secs_f64();
    let metric = Metric {
        name: "gpu_readings_age",
        help: "Since the GPUs were last read",
        unit: Some(Unit::Seconds),
        kind: MetricType::Gauge,
        lines: snapshot.devices.iter().take(1).map(|_| (vec![], age)).collect(),
    };
    metric.encode(encoder)
}

/// A device's figures of one metric: what tells them apart, and each.
type Figures = Vec<(Option<(&'static str, String)>, Option<f64>)>;

/// Of the worker's devices, and the boards that its slices are of.
fn of_devices(snapshot: &Snapshot) -> Vec<Metric> {
    let ours: Vec<&Seen> = snapshot.devices.iter().filter(|seen| seen.ours).collect();
    let carries = |board: &Seen| {
        let uuid = Some(board.identity.uuid.as_str());
        ours.iter().any(|seen| seen.identity.parent_uuid.as_deref() == uuid)
    };
    let shown: Vec<&Seen> =
        snapshot.devices.iter().filter(|seen| seen.ours || carries(seen)).collect();
    let metric = |(name, help, unit, kind, figures): Row| Metric {
        lines: shown.iter().flat_map(|seen| lines(&seen.identity.uuid, figures(seen))).collect(),
        unit: unit.map(|unit| Unit::Other(unit.to_owned())),
        name,
        help,
        kind,
    };
    let mut metrics: Vec<Metric> =
        GAUGES.into_iter().map(|(n, h, u, f)| metric((n, h, u, MetricType::Gauge, f))).collect();
    let counters = COUNTERS.into_iter();
    metrics.extend(counters.map(|(n, h, u, f)| metric((n, h, u, MetricType::Counter, f))));
    metrics
}

fn lines(uuid: &str, figures: Figures) -> Vec<Line> {
    let line = |(label, value): (Option<(&'static str, String)>, Option<f64>)| {
        let labels = [("gpu_uuid", uuid.to_owned())].into_iter().chain(label);
        Some((labels.collect(), value?))
    };
    figures.into_iter().filter_map(line).collect()
}

type Row = (&'static str, &'static str, Option<&'static str>, MetricType, fn(&Seen) -> Figures);
type Spec = (&'static str, &'static str, Option<&'static str>, fn(&Seen) -> Figures);

fn one(value: Option<f64>) -> Figures {
    vec![(None, value)]
}

/// Figures told apart by one label.
fn each<const N: usize>(label: &'static str, of: [(&str, Option<f64>); N]) -> Figures {
    of.into_iter().map(|(name, value)| (Some((label, name.to_owned())), value)).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts beyond 2^53 are no device's")]
fn float(value: u64) -> f64 {
    value as f64
}

fn share(percent: Option<u32>) -> Option<f64> {
    percent.map(|percent| f64::from(percent) / 100.0)
}

const GAUGES: [Spec; 11] = [
    ("gpu_info", "1 for each device; its names", None, info),
    ("gpu_healthy", "1 while work on the device can be trusted", None, |seen| {
        one(Some(if seen.unhealthy.is_none() { 1.0 } else { 0.0 }))
    }),
    ("gpu_memory", "Device memory; of the engine: that of its processes", Some("bytes"), |seen| {
        let memory = seen.reading.memory;
        each(
            "kind",
            [
                ("total", memory.map(|memory| float(memory.total))),
                ("used", memory.map(|memory| float(memory.used))),
                ("reserved", memory.map(|memory| float(memory.reserved))),
                ("free", memory.map(|memory| float(memory.free))),
                ("engine", seen.engine_bytes.map(float)),
            ],
        )
    }),
    ("gpu_utilization", "Share of the time in which it worked", Some("ratio"), |seen| {
        each(
            "part",
            [
                ("sm", share(seen.reading.utilization_percent)),
                ("memory", share(seen.reading.memory_utilization_percent)),
            ],
        )
    }),
    ("gpu_power", "Of the board", Some("watts"), |seen| {
        one(seen.reading.power_milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3))
    }),
    ("gpu_temperature", "Of the chip, of its memory", Some("celsius"), |seen| {
        each(
            "part",
            [
                ("chip", seen.reading.temperature_celsius.map(f64::from)),
                ("memory", seen.reading.memory_temperature_celsius.map(float)),
            ],
        )
    }),
    ("gpu_clock", "Clocks now", Some("hertz"), |seen| {
        let hertz = |mhz: Option<u32>| mhz.map(|mhz| f64::from(mhz) * 1e6);
        each(
            "part",
            [
                ("sm", hertz(seen.reading.sm_clock_mhz)),
                ("memory", hertz(seen.reading.memory_clock_mhz)),
            ],
        )
    }),
    ("gpu_throttled", "1 while clocks are held down for the reason", None, |seen| {
        let reasons = seen.reading.throttled.iter().flatten();
        reasons.map(|&reason| (Some(("reason", reason.to_owned())), Some(1.0))).collect()
    }),
    ("gpu_remapped_rows", "Rows of memory replaced by spare ones", None, |seen| {
        let rows = seen.reading.rows;
        let flag = |flag: Option<bool>| flag.map(|flag| f64::from(u8::from(flag)));
        each(
            "state",
            [
                ("corrected", rows.corrected.map(float)),
                ("uncorrected", rows.uncorrected.map(float)),
                ("pending", flag(rows.pending)),
                ("failed", flag(rows.failed)),
            ],
        )
    }),
    ("gpu_counters", "Shares by hardware counters, where asked for", Some("ratio"), |seen| {
        let gpm = seen.reading.gpm.unwrap_or_default();
        each(
            "part",
            [
                ("sm", gpm.sm_ratio),
                ("sm_occupancy", gpm.sm_occupancy_ratio),
                ("tensor", gpm.tensor_ratio),
                ("memory_bandwidth", gpm.memory_bandwidth_ratio),
            ],
        )
    }),
    ("gpu_nvlink_rate", "Over all NVLinks, where asked for", Some("bytes_per_second"), |seen| {
        let gpm = seen.reading.gpm.unwrap_or_default();
        each(
            "direction",
            [
                ("sent", gpm.nvlink_sent_bytes_per_second),
                ("received", gpm.nvlink_received_bytes_per_second),
            ],
        )
    }),
];

const COUNTERS: [Spec; 7] = [
    ("gpu_energy", "Taken by the board", Some("joules"), |seen| {
        one(seen.reading.energy_millijoules.map(|millijoules| float(millijoules) / 1e3))
    }),
    ("gpu_pcie", "To and from the host", Some("bytes"), |seen| {
        each(
            "direction",
            [
                ("sent", seen.reading.pcie_sent_bytes.map(float)),
                ("received", seen.reading.pcie_received_bytes.map(float)),
            ],
        )
    }),
    ("gpu_pcie_replays", "PCIe packets sent again", None, |seen| {
        one(seen.reading.pcie_replays.map(f64::from))
    }),
    ("gpu_nvlink_errors", "Over all NVLinks", None, |seen| {
        let errors = seen.reading.nvlink_errors;
        each(
            "kind",
            [
                ("crc", errors.crc.map(float)),
                ("replay", errors.replay.map(float)),
                ("recovery", errors.recovery.map(float)),
            ],
        )
    }),
    ("gpu_ecc_errors", "Memory errors since the driver was loaded", None, |seen| {
        each(
            "kind",
            [
                ("corrected", seen.reading.ecc_corrected.map(float)),
                ("uncorrected", seen.reading.ecc_uncorrected.map(float)),
            ],
        )
    }),
    ("gpu_xids", "The driver's XID errors of the board, by number", None, |seen| {
        let xids = seen.xids.iter();
        xids.map(|(xid, count)| (Some(("xid", xid.to_string())), Some(float(*count)))).collect()
    }),
    ("gpu_reading_failures", "NVML calls that failed, by call", None, |seen| {
        let failures = seen.failures.iter();
        failures
            .map(|(call, count)| (Some(("call", (*call).to_owned())), Some(float(*count))))
            .collect()
    }),
];

/// The one metric with several labels more, in one figure.
fn info(seen: &Seen) -> Figures {
    vec![(Some(("name", seen.identity.name.clone())), Some(1.0))]
}

/// What the ranks' pools are on their devices.
fn of_pools(report: &LoadReport) -> [Metric; 2] {
    let devices = || {
        let ranks = report.ranks.iter();
        ranks.flat_map(|rank| rank.devices.iter().map(move |device| (rank.dp_rank, device)))
    };
    let labels = |dp_rank: u32, device: &Device| {
        vec![("gpu_uuid", device.uuid.clone()), ("dp_rank", dp_rank.to_string())]
    };
    let states = devices().flat_map(|(dp_rank, device)| {
        let states = [
            ("pool", device.kv_pool_bytes),
            ("used", device.kv_used_bytes),
            ("pinned", device.kv_pinned_bytes),
            ("reclaimable", device.kv_reclaimable_bytes),
        ];
        states.into_iter().filter_map(move |(state, bytes)| {
            let state = [("state", state.to_owned())];
            Some(([labels(dp_rank, device), state.to_vec()].concat(), float(bytes?.value)))
        })
    });
    let excess = devices().filter_map(|(dp_rank, device)| {
        let (pool, engine) = (device.kv_pool_bytes?, device.engine_bytes?);
        Some((labels(dp_rank, device), float(pool.value.saturating_sub(engine.value))))
    });
    let bytes = Some(Unit::Bytes);
    [
        Metric {
            name: "gpu_kv",
            help: "A rank's KV pool on the device, and what of it is in which state",
            unit: bytes.clone(),
            kind: MetricType::Gauge,
            lines: states.collect(),
        },
        Metric {
            name: "gpu_kv_excess",
            help: "Bytes of the pool beyond all that NVML says the engine uses: one is wrong",
            unit: bytes,
            kind: MetricType::Gauge,
            lines: excess.collect(),
        },
    ]
}

//! Lists all device metrics for the Prometheus export: name, help, unit and source of each.
//!
//! A *device* is a GPU, or one of the *slices* into which MIG has divided a GPU.

use prometheus_client::metrics::MetricType;

use super::{
    super::{fleet::DeviceState, reading::Identity},
    Figures,
};

/// The specification of one device metric.
pub(super) struct Spec {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) unit: Option<&'static str>,
    pub(super) kind: MetricType,
    /// Returns a device's values of the metric.
    pub(super) figures: fn(&DeviceState) -> Figures,
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    unit: Option<&'static str>,
    figures: fn(&DeviceState) -> Figures,
) -> Spec {
    Spec { name, help, unit, kind: MetricType::Gauge, figures }
}

const fn counter(
    name: &'static str,
    help: &'static str,
    unit: Option<&'static str>,
    figures: fn(&DeviceState) -> Figures,
) -> Spec {
    Spec { name, help, unit, kind: MetricType::Counter, figures }
}

/// All device metrics.
pub(super) const TABLE: [Spec; 18] = [
    gauge("gpu_info", "1 for each device; its names", None, info),
    gauge("gpu_healthy", "1 while work on the device can be trusted", None, |seen| {
        unlabeled(Some(if seen.unhealthy.is_none() { 1.0 } else { 0.0 }))
    }),
    gauge(
        "gpu_memory",
        "Device memory; kind engine is that of the engine's processes",
        Some("bytes"),
        |seen| {
            let memory = seen.reading.memory;
            labeled(
                "kind",
                [
                    ("total", memory.map(|memory| float(memory.total))),
                    ("used", memory.map(|memory| float(memory.used))),
                    ("reserved", memory.map(|memory| float(memory.reserved))),
                    ("free", memory.map(|memory| float(memory.free))),
                    ("engine", seen.engine_bytes.map(float)),
                ],
            )
        },
    ),
    gauge("gpu_utilization", "Share of time the part was busy", Some("ratio"), |seen| {
        labeled(
            "part",
            [
                ("sm", share(seen.reading.utilization_percent)),
                ("memory", share(seen.reading.memory_utilization_percent)),
            ],
        )
    }),
    gauge("gpu_power", "Power of the board", Some("watts"), |seen| {
        unlabeled(seen.reading.power_milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3))
    }),
    gauge("gpu_temperature", "Temperature, by part", Some("celsius"), |seen| {
        labeled(
            "part",
            [
                ("chip", seen.reading.temperature_celsius.map(f64::from)),
                ("memory", seen.reading.memory_temperature_celsius.map(float)),
            ],
        )
    }),
    gauge("gpu_clock", "Current clocks", Some("hertz"), |seen| {
        let hertz = |mhz: Option<u32>| mhz.map(|mhz| f64::from(mhz) * 1e6);
        labeled(
            "part",
            [
                ("sm", hertz(seen.reading.sm_clock_mhz)),
                ("memory", hertz(seen.reading.memory_clock_mhz)),
            ],
        )
    }),
    gauge("gpu_throttled", "1 while clocks are reduced for this reason", None, |seen| {
        let reasons = seen.reading.throttled.iter().flatten();
        reasons.map(|&reason| (vec![("reason", reason.to_owned())], Some(1.0))).collect()
    }),
    gauge("gpu_remapped_rows", "Rows of memory replaced by spare ones", None, |seen| {
        let rows = seen.reading.rows;
        let flag = |flag: Option<bool>| flag.map(|flag| f64::from(u8::from(flag)));
        labeled(
            "state",
            [
                ("corrected", rows.corrected.map(float)),
                ("uncorrected", rows.uncorrected.map(float)),
                ("pending", flag(rows.pending)),
                ("failed", flag(rows.failed)),
            ],
        )
    }),
    gauge("gpu_counters", "Shares by hardware counters, if enabled", Some("ratio"), |seen| {
        let gpm = seen.reading.gpm.unwrap_or_default();
        labeled(
            "part",
            [
                ("sm", gpm.sm_ratio),
                ("sm_occupancy", gpm.sm_occupancy_ratio),
                ("tensor", gpm.tensor_ratio),
                ("memory_bandwidth", gpm.memory_bandwidth_ratio),
            ],
        )
    }),
    gauge(
        "gpu_nvlink_rate",
        "Traffic over all NVLinks, if enabled",
        Some("bytes_per_second"),
        |seen| {
            let gpm = seen.reading.gpm.unwrap_or_default();
            labeled(
                "direction",
                [
                    ("sent", gpm.nvlink_sent_bytes_per_second),
                    ("received", gpm.nvlink_received_bytes_per_second),
                ],
            )
        },
    ),
    counter("gpu_energy", "Energy used by the board", Some("joules"), |seen| {
        unlabeled(seen.reading.energy_millijoules.map(|millijoules| float(millijoules) / 1e3))
    }),
    counter("gpu_pcie", "PCIe traffic to and from the host", Some("bytes"), |seen| {
        labeled(
            "direction",
            [
                ("sent", seen.reading.pcie_sent_bytes.map(float)),
                ("received", seen.reading.pcie_received_bytes.map(float)),
            ],
        )
    }),
    counter("gpu_pcie_replays", "PCIe packets sent again", None, |seen| {
        unlabeled(seen.reading.pcie_replays.map(f64::from))
    }),
    counter("gpu_nvlink_errors", "Errors over all NVLinks", None, |seen| {
        let errors = seen.reading.nvlink_errors;
        labeled(
            "kind",
            [
                ("crc", errors.crc.map(float)),
                ("replay", errors.replay.map(float)),
                ("recovery", errors.recovery.map(float)),
            ],
        )
    }),
    counter("gpu_ecc_errors", "Memory errors since the driver was loaded", None, |seen| {
        labeled(
            "kind",
            [
                ("corrected", seen.reading.ecc_corrected.map(float)),
                ("uncorrected", seen.reading.ecc_uncorrected.map(float)),
            ],
        )
    }),
    counter("gpu_xids", "The driver's XID errors of the board, by number", None, |seen| {
        let xids = seen.xids.iter();
        xids.map(|(xid, count)| (vec![("xid", xid.to_string())], Some(float(*count)))).collect()
    }),
    counter("gpu_reading_failures", "NVML calls that failed, by call", None, |seen| {
        let failures = seen.failures.iter();
        failures
            .map(|(call, count)| (vec![("call", (*call).to_owned())], Some(float(*count))))
            .collect()
    }),
];

/// Returns a metric's only value of a device.
fn unlabeled(value: Option<f64>) -> Figures {
    vec![(vec![], value)]
}

/// Returns values that differ in the label `label`. `values` has the label's value of each.
fn labeled<const N: usize>(label: &'static str, values: [(&str, Option<f64>); N]) -> Figures {
    values.into_iter().map(|(name, value)| (vec![(label, name.to_owned())], value)).collect()
}

/// Converts a count.
#[expect(clippy::cast_precision_loss, reason = "no device counts beyond 2^53")]
pub(super) fn float(value: u64) -> f64 {
    value as f64
}

/// Converts a percentage to a ratio from 0 to 1.
fn share(percent: Option<u32>) -> Option<f64> {
    percent.map(|percent| f64::from(percent) / 100.0)
}

/// Returns the device's names as labels, for joins with other metrics. A slice has the index and
/// the PCI address of its GPU, and the GPU's UUID as `parent_uuid`.
fn info(seen: &DeviceState) -> Figures {
    let Identity { name, index, pci_address, parent_uuid, .. } = &seen.identity;
    let labels = [
        Some(("name", name.clone())),
        Some(("index", index.to_string())),
        pci_address.clone().map(|address| ("pci_address", address)),
        parent_uuid.clone().map(|uuid| ("parent_uuid", uuid)),
    ];
    vec![(labels.into_iter().flatten().collect(), Some(1.0))]
}

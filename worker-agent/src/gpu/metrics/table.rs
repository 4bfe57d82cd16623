//! Lists all device metrics for the Prometheus export: name, help, unit and source of each.
//!
//! A *device* is a GPU, or one of the *slices* into which MIG has divided a GPU. Each metric has a
//! function that takes its values from a device's state. The parent module `metrics` calls these
//! functions at each scrape and adds the label `gpu_uuid`. It also makes the metrics of KV pools.

use prometheus_client::metrics::MetricType;

use super::{
    super::{reading::Identity, tracker::DeviceState},
    DeviceValues,
};

/// One device metric: how Prometheus describes it, and where its values come from.
pub(super) struct MetricSpec {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) unit: Option<&'static str>,
    pub(super) metric_type: MetricType,
    /// Returns the values that the metric has for a device.
    pub(super) device_values: fn(&DeviceState) -> DeviceValues,
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    unit: Option<&'static str>,
    device_values: fn(&DeviceState) -> DeviceValues,
) -> MetricSpec {
    MetricSpec { name, help, unit, metric_type: MetricType::Gauge, device_values }
}

const fn counter(
    name: &'static str,
    help: &'static str,
    unit: Option<&'static str>,
    device_values: fn(&DeviceState) -> DeviceValues,
) -> MetricSpec {
    MetricSpec { name, help, unit, metric_type: MetricType::Counter, device_values }
}

/// All device metrics.
pub(super) const DEVICE_METRICS: [MetricSpec; 20] = [
    gauge("gpu_info", "1 for each device; its names", None, info_values),
    gauge("gpu_healthy", "1 while work on the device can be trusted", None, |device| {
        unlabeled(Some(if device.unhealthy_reason.is_none() { 1.0 } else { 0.0 }))
    }),
    gauge(
        "gpu_memory",
        "Device memory; kind engine is that of the engine's processes",
        Some("bytes"),
        |device| {
            let memory = device.reading.memory;
            labeled(
                "kind",
                [
                    ("total", memory.map(|memory| float(memory.total))),
                    ("used", memory.map(|memory| float(memory.used))),
                    ("reserved", memory.map(|memory| float(memory.reserved))),
                    ("free", memory.map(|memory| float(memory.free))),
                    ("engine", device.engine_bytes.map(float)),
                ],
            )
        },
    ),
    gauge("gpu_utilization", "Share of time the part was busy", Some("ratio"), |device| {
        labeled(
            "part",
            [
                ("sm", ratio(device.reading.utilization_percent)),
                ("memory", ratio(device.reading.memory_utilization_percent)),
            ],
        )
    }),
    gauge("gpu_power", "Power of the board", Some("watts"), |device| {
        unlabeled(device.reading.power_milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3))
    }),
    gauge("gpu_temperature", "Temperature, by part", Some("celsius"), |device| {
        labeled(
            "part",
            [
                ("chip", device.reading.temperature_celsius.map(f64::from)),
                ("memory", device.reading.memory_temperature_celsius.map(float)),
            ],
        )
    }),
    gauge("gpu_clock", "Current clocks", Some("hertz"), |device| {
        let hertz = |mhz: Option<u32>| mhz.map(|mhz| f64::from(mhz) * 1e6);
        labeled(
            "part",
            [
                ("sm", hertz(device.reading.sm_clock_mhz)),
                ("memory", hertz(device.reading.memory_clock_mhz)),
            ],
        )
    }),
    gauge("gpu_throttled", "1 while clocks are reduced for this reason", None, |device| {
        let reasons = device.reading.throttle_reasons.iter().flatten();
        reasons.map(|&reason| (vec![("reason", reason.to_owned())], Some(1.0))).collect()
    }),
    gauge("gpu_remapped_rows", "Rows of memory replaced by spare ones", None, |device| {
        let rows = device.reading.remapped_rows;
        let (corrected, uncorrected) = (rows.corrected.map(float), rows.uncorrected.map(float));
        labeled("state", [("corrected", corrected), ("uncorrected", uncorrected)])
    }),
    gauge(
        "gpu_row_remap_pending",
        "1 while rows wait for a reset to be replaced",
        None,
        |device| flag(device.reading.remapped_rows.has_pending),
    ),
    gauge("gpu_row_remap_failed", "1 after rows could not be replaced", None, |device| {
        flag(device.reading.remapped_rows.has_failed)
    }),
    gauge("gpu_counters", "Shares by hardware counters, if enabled", Some("ratio"), |device| {
        let gpm = device.reading.gpm.unwrap_or_default();
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
        |device| {
            let gpm = device.reading.gpm.unwrap_or_default();
            labeled(
                "direction",
                [
                    ("sent", gpm.nvlink_sent_bytes_per_second),
                    ("received", gpm.nvlink_received_bytes_per_second),
                ],
            )
        },
    ),
    counter("gpu_energy", "Energy used by the board", Some("joules"), |device| {
        unlabeled(device.reading.energy_millijoules.map(|millijoules| float(millijoules) / 1e3))
    }),
    counter("gpu_pcie", "PCIe traffic to and from the host", Some("bytes"), |device| {
        labeled(
            "direction",
            [
                ("sent", device.reading.pcie_sent_bytes.map(float)),
                ("received", device.reading.pcie_received_bytes.map(float)),
            ],
        )
    }),
    counter("gpu_pcie_replays", "PCIe packets sent again", None, |device| {
        unlabeled(device.reading.pcie_replays.map(f64::from))
    }),
    counter("gpu_nvlink_errors", "Errors over all NVLinks", None, |device| {
        let errors = device.reading.nvlink_errors;
        labeled(
            "kind",
            [
                ("crc", errors.crc.map(float)),
                ("replay", errors.replay.map(float)),
                ("recovery", errors.recovery.map(float)),
            ],
        )
    }),
    counter("gpu_ecc_errors", "Memory errors since the driver was loaded", None, |device| {
        labeled(
            "kind",
            [
                ("corrected", device.reading.ecc_corrected.map(float)),
                ("uncorrected", device.reading.ecc_uncorrected.map(float)),
            ],
        )
    }),
    counter("gpu_xids", "The driver's XID errors of the board, by number", None, |device| {
        let xid_counts = device.xid_counts.iter();
        xid_counts
            .map(|(xid, count)| (vec![("xid", xid.to_string())], Some(float(*count))))
            .collect()
    }),
    counter("gpu_reading_failures", "NVML calls that failed, by call", None, |device| {
        let failure_counts = device.failure_counts.iter();
        failure_counts
            .map(|(call, count)| (vec![("call", (*call).to_owned())], Some(float(*count))))
            .collect()
    }),
];

/// Returns the values of a metric that has one value per device and no label of its own.
fn unlabeled(value: Option<f64>) -> DeviceValues {
    vec![(vec![], value)]
}

/// Returns the value of a metric that is 1 while something is so.
fn flag(is_so: Option<bool>) -> DeviceValues {
    unlabeled(is_so.map(|is_so| f64::from(u8::from(is_so))))
}

/// Returns the values of a metric that has several values per device. They differ in the label
/// `label`. `values` has pairs of a label value and the metric's value.
fn labeled<const N: usize>(label: &'static str, values: [(&str, Option<f64>); N]) -> DeviceValues {
    let values = values.into_iter();
    values.map(|(label_value, value)| (vec![(label, label_value.to_owned())], value)).collect()
}

/// Converts a count to the number type of metrics.
#[expect(clippy::cast_precision_loss, reason = "no device counts beyond 2^53")]
pub(super) fn float(value: u64) -> f64 {
    value as f64
}

/// Converts a percentage to a ratio from 0 to 1.
fn ratio(percent: Option<u32>) -> Option<f64> {
    percent.map(|percent| f64::from(percent) / 100.0)
}

/// Returns the device's names as labels, for joins with other metrics. A slice has the index and
/// the PCI address of its GPU, and the GPU's UUID as `parent_uuid`.
fn info_values(device: &DeviceState) -> DeviceValues {
    let Identity { name, index, pci_address, parent_uuid, .. } = &device.identity;
    let labels = [
        Some(("name", name.clone())),
        Some(("index", index.to_string())),
        pci_address.clone().map(|address| ("pci_address", address)),
        parent_uuid.clone().map(|uuid| ("parent_uuid", uuid)),
    ];
    vec![(labels.into_iter().flatten().collect(), Some(1.0))]
}

//! Reads all values of one device from NVML. Each call can fail without the others.
//!
//! A *device* is a GPU, or one of the slices into which MIG has divided a GPU. A *board* is a whole
//! GPU.

use nvml_wrapper::{
    Device,
    bitmasks::device::ThrottleReasons,
    enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor},
    enums::{
        device::{SampleValue, UsedGpuMemory},
        gpm::GpmMetricId,
    },
    error::NvmlError,
    gpm::{GpmSample, gpm_metrics_get},
    struct_wrappers::device::ProcessInfo,
    structs::device::FieldId,
    sys_exports::field_id,
};

use super::{Gpm, Identity, Reading, Trouble, UnsupportedCalls, trouble};
use crate::gpu::reading::{Memory, NvlinkErrors, Process, Recovery, Rows};

/// Reads one device through its NVML handle, which is valid while NVML stays loaded.
#[derive(Debug)]
pub(crate) struct DeviceReader<'n> {
    pub(crate) identity: Identity,
    /// The device's handle. If there is none, the error is the board's trouble, or `None` if the
    /// board isn't the cause.
    device: Result<Device<'n>, Option<Trouble>>,
    unsupported: UnsupportedCalls,
    /// Whether to read performance counters.
    reads_gpm: bool,
    /// The previous sample of the performance counters.
    gpm_sample: Option<GpmSample<'n>>,
}

/// The fields that are read in one call, each with the name under which its failures are counted.
const FIELDS: [(u32, &str); 12] = [
    (field_id::NVML_FI_DEV_MEMORY_TEMP, "memory_temperature"),
    (field_id::NVML_FI_DEV_REMAPPED_COR, "rows_corrected"),
    (field_id::NVML_FI_DEV_REMAPPED_UNC, "rows_uncorrected"),
    (field_id::NVML_FI_DEV_REMAPPED_PENDING, "rows_pending"),
    (field_id::NVML_FI_DEV_REMAPPED_FAILURE, "rows_failed"),
    (field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES, "pcie_sent"),
    (field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES, "pcie_received"),
    (field_id::NVML_FI_DEV_RESET_STATUS, "reset_status"),
    (field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, "recovery_action"),
    (field_id::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, "nvlink_crc"),
    (field_id::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, "nvlink_replay"),
    (field_id::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, "nvlink_recovery"),
];

/// The consequence of a failed call for the next reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// The board or the driver doesn't support the call, or the agent may not make it. The call
    /// isn't made again.
    Unsupported,
    /// There is no value at the moment.
    NoValue,
    /// The call should have worked. The failure is counted.
    Failed,
}

/// Returns the consequence of a call's error.
pub(super) fn failure(error: &NvmlError) -> Failure {
    match error {
        NvmlError::NotSupported
        | NvmlError::FailedToLoadSymbol(_)
        | NvmlError::FunctionNotFound
        | NvmlError::NoPermission
        | NvmlError::InvalidArg => Failure::Unsupported,
        NvmlError::NoData | NvmlError::NotFound => Failure::NoValue,
        _ => Failure::Failed,
    }
}

impl<'n> DeviceReader<'n> {
    pub(super) fn new(
        identity: Identity,
        device: Result<Device<'n>, Option<Trouble>>,
        reads_gpm: bool,
    ) -> Self {
        Self { identity, device, unsupported: UnsupportedCalls::new(), reads_gpm, gpm_sample: None }
    }

    /// Returns a GPU's index in NVML, which is valid while NVML stays loaded. `None` for a slice,
    /// or if the GPU can't be reached.
    pub(crate) fn nvml_index(&self) -> Option<u32> {
        let device = self.device.as_ref().ok().filter(|_| self.identity.parent_uuid.is_none());
        device?.index().ok()
    }

    /// Reads all values that the device provides.
    pub(crate) fn read(&mut self) -> Reading {
        let device = match &self.device {
            Ok(device) => device,
            Err(trouble) => return Reading { trouble: *trouble, ..Reading::default() },
        };
        let mut calls =
            CallRunner { unsupported: &mut self.unsupported, reading: Reading::default() };
        calls.read_memory(device);
        calls.read_activity(device);
        calls.read_errors(device);
        calls.read_fields(device);
        if self.reads_gpm {
            calls.reading.gpm = calls.read_gpm(device, &mut self.gpm_sample);
        }
        calls.reading
    }
}

/// Makes the calls of one reading. After a call that reports trouble with the board, no further
/// calls are made.
struct CallRunner<'a> {
    unsupported: &'a mut UnsupportedCalls,
    reading: Reading,
}

impl CallRunner<'_> {
    /// Makes a call of this name and returns its value. Returns `None` if the call fails or is left
    /// out.
    fn ask<T>(
        &mut self,
        call: &'static str,
        make_call: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Option<T> {
        if self.reading.trouble.is_some() || self.unsupported.contains(call) {
            return None;
        }
        make_call().map_err(|error| self.record_failure(call, &error)).ok()
    }

    /// Records the failure of a call.
    fn record_failure(&mut self, call: &'static str, error: &NvmlError) {
        if let Some(trouble) = trouble(error) {
            self.reading.trouble = Some(trouble);
            return;
        }
        match failure(error) {
            Failure::Unsupported => drop(self.unsupported.insert(call)),
            Failure::NoValue => {}
            Failure::Failed => self.reading.failed_calls.push(call),
        }
    }

    /// Reads the memory and the processes that use it.
    fn read_memory(&mut self, device: &Device<'_>) {
        self.reading.memory = self.ask("memory", || device.memory_info()).map(|memory| Memory {
            total: memory.total,
            used: memory.used,
            reserved: memory.reserved,
            free: memory.free,
        });
        let direct = self.ask("processes", || device.running_compute_processes());
        let by_mps = self.ask("mps_processes", || device.mps_running_compute_processes());
        let lists = [direct, by_mps].into_iter().flatten();
        self.reading.processes = lists
            .map(|list| list.iter().map(convert_process).collect::<Vec<_>>())
            .reduce(|direct, by_mps| [direct, by_mps].concat());
    }

    /// Reads utilization, power, temperature and clocks.
    fn read_activity(&mut self, device: &Device<'_>) {
        let rates = self.ask("utilization", || device.utilization_rates());
        self.reading.utilization_percent = rates.as_ref().map(|rates| rates.gpu.min(100));
        self.reading.memory_utilization_percent = rates.map(|rates| rates.memory.min(100));
        self.reading.power_milliwatts = self.ask("power", || device.power_usage());
        self.reading.energy_millijoules = self.ask("energy", || device.total_energy_consumption());
        self.reading.temperature_celsius =
            self.ask("temperature", || device.temperature(TemperatureSensor::Gpu));
        self.reading.sm_clock_mhz = self.ask("sm_clock", || device.clock_info(Clock::SM));
        self.reading.memory_clock_mhz =
            self.ask("memory_clock", || device.clock_info(Clock::Memory));
        self.reading.throttle_reasons = self
            .ask("throttle_reasons", || device.current_throttle_reasons())
            .map(throttle_reasons);
    }

    /// Reads the counts of PCIe and memory errors.
    fn read_errors(&mut self, device: &Device<'_>) {
        self.reading.pcie_replays = self.ask("pcie_replays", || device.pcie_replay_counter());
        let ecc = |kind| device.total_ecc_errors(kind, EccCounter::Volatile);
        self.reading.ecc_corrected = self.ask("ecc_corrected", || ecc(MemoryError::Corrected));
        self.reading.ecc_uncorrected =
            self.ask("ecc_uncorrected", || ecc(MemoryError::Uncorrected));
    }

    /// Reads [`FIELDS`]. All come in one call, but each can fail separately.
    fn read_fields(&mut self, device: &Device<'_>) {
        let wanted: Vec<(u32, &'static str)> =
            FIELDS.into_iter().filter(|(_, call)| !self.unsupported.contains(call)).collect();
        let ids: Vec<FieldId> = wanted.iter().map(|&(id, _)| FieldId(id)).collect();
        if ids.is_empty() {
            return;
        }
        let Some(values) = self.ask("fields", || device.field_values_for(&ids)) else { return };
        let mut values_by_id = std::collections::BTreeMap::new();
        for ((id, call), value) in wanted.into_iter().zip(values) {
            match value.and_then(|sample| sample.value) {
                Ok(value) => drop(values_by_id.insert(id, whole_number(&value))),
                Err(error) => self.record_failure(call, &error),
            }
        }
        let field = |id: u32| values_by_id.get(&id).copied().flatten();
        let flag = |id: u32| field(id).map(|value| value != 0);
        let reading = &mut self.reading;
        reading.memory_temperature_celsius = field(field_id::NVML_FI_DEV_MEMORY_TEMP);
        reading.rows = Rows {
            corrected: field(field_id::NVML_FI_DEV_REMAPPED_COR),
            uncorrected: field(field_id::NVML_FI_DEV_REMAPPED_UNC),
            has_pending: flag(field_id::NVML_FI_DEV_REMAPPED_PENDING),
            has_failed: flag(field_id::NVML_FI_DEV_REMAPPED_FAILURE),
        };
        reading.pcie_sent_bytes = field(field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES);
        reading.pcie_received_bytes = field(field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES);
        reading.reset_needed = flag(field_id::NVML_FI_DEV_RESET_STATUS);
        let recovery = field(field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION);
        reading.recovery = recovery.map(Recovery::from_nvml);
        reading.nvlink_errors = NvlinkErrors {
            crc: field(field_id::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
            replay: field(field_id::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL),
            recovery: field(field_id::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
        };
    }

    /// Reads the performance counters over the time since the sample `before`, and replaces it.
    fn read_gpm<'n>(
        &mut self,
        device: &Device<'n>,
        before: &mut Option<GpmSample<'n>>,
    ) -> Option<Gpm> {
        let supported = self.ask("gpm", || match device.gpm_support()? {
            true => Ok(()),
            false => Err(NvmlError::NotSupported),
        });
        supported?;
        let sample = self.ask("gpm", || device.gpm_sample())?;
        let ids = [
            GpmMetricId::SmUtil,
            GpmMetricId::SmOccupancy,
            GpmMetricId::AnyTensorUtil,
            GpmMetricId::DramBwUtil,
            GpmMetricId::NvlinkTotalTxPerSec,
            GpmMetricId::NvlinkTotalRxPerSec,
        ];
        let metrics = before.as_ref().and_then(|before| {
            self.ask("gpm", || gpm_metrics_get(device.nvml(), before, &sample, &ids))
        });
        *before = Some(sample);
        let values = metrics?.into_iter().map(|metric| metric.ok().map(|metric| metric.value));
        let [sm, occupancy, tensor, bandwidth, sent, received] =
            values.collect::<Vec<_>>().try_into().ok()?;
        let ratio = |percent: Option<f64>| percent.map(|percent| (percent / 100.0).clamp(0.0, 1.0));
        let bytes = |mib: Option<f64>| mib.map(|mib| mib * f64::from(1 << 20));
        Some(Gpm {
            sm_ratio: ratio(sm),
            sm_occupancy_ratio: ratio(occupancy),
            tensor_ratio: ratio(tensor),
            memory_bandwidth_ratio: ratio(bandwidth),
            nvlink_sent_bytes_per_second: bytes(sent),
            nvlink_received_bytes_per_second: bytes(received),
        })
    }
}

/// Converts a process. 0 bytes means unknown, because a process with a context always uses memory.
/// Drivers that translate pids between namespaces report 0.
fn convert_process(process: &ProcessInfo) -> Process {
    let bytes = match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) if bytes > 0 => Some(bytes),
        UsedGpuMemory::Used(_) | UsedGpuMemory::Unavailable => None,
    };
    Process { pid: process.pid, bytes }
}

/// Converts a field's value to a whole number. `None` for a negative value or a fraction: fields
/// are counts, flags or temperatures, and no working board is below zero degrees.
fn whole_number(value: &SampleValue) -> Option<u64> {
    match *value {
        SampleValue::U32(value) => Some(value.into()),
        SampleValue::U64(value) => Some(value),
        SampleValue::I64(value) => u64::try_from(value).ok(),
        SampleValue::F64(_) => None,
    }
}

/// Returns the names of the reasons why clocks are reduced, without idleness.
fn throttle_reasons(reasons: ThrottleReasons) -> Vec<&'static str> {
    let names = [
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "applications_clocks"),
        (ThrottleReasons::SW_POWER_CAP, "power_cap"),
        (ThrottleReasons::HW_SLOWDOWN, "hardware"),
        (ThrottleReasons::SYNC_BOOST, "sync_boost"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "software_thermal"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "hardware_thermal"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power_brake"),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display_clocks"),
    ];
    names
        .into_iter()
        .filter(|(reason, _)| reasons.contains(*reason))
        .map(|(_, name)| name)
        .collect()
}

//! Reads all values of one device from NVML. Each call can fail without the others.
//!
//! This module judges no value, and remembers only which calls the device doesn't support.

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

use super::{BoardFault, Gpm, Identity, Reading, UnsupportedCalls, board_fault};
use crate::gpu::reading::{Memory, NvlinkErrors, Process, RecoveryAction, RemappedRows};

/// The NVML handle is valid while NVML stays loaded.
#[derive(Debug)]
pub(crate) struct DeviceReader<'n> {
    pub(crate) identity: Identity,
    /// Without a handle: the fault of the board, or `None` if the board isn't the cause.
    handle: Result<Device<'n>, Option<BoardFault>>,
    unsupported_calls: UnsupportedCalls,
    reads_gpm: bool,
    /// Rates are computed from two samples.
    last_gpm_sample: Option<GpmSample<'n>>,
}

/// NVML's ids of the values, each with the name for counting its failures.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// The board or the driver doesn't support the call, or the agent may not make it.
    Unsupported,
    NoValue,
    /// The call should have worked. The failure is counted.
    Unexpected,
}

pub(super) fn failure_kind(error: &NvmlError) -> FailureKind {
    match error {
        NvmlError::NotSupported
        | NvmlError::FailedToLoadSymbol(_)
        | NvmlError::FunctionNotFound
        | NvmlError::NoPermission
        | NvmlError::InvalidArg => FailureKind::Unsupported,
        NvmlError::NoData | NvmlError::NotFound => FailureKind::NoValue,
        _ => FailureKind::Unexpected,
    }
}

impl<'n> DeviceReader<'n> {
    pub(super) fn new(
        identity: Identity,
        handle: Result<Device<'n>, Option<BoardFault>>,
        reads_gpm: bool,
    ) -> Self {
        let unsupported_calls = UnsupportedCalls::new();
        Self { identity, handle, unsupported_calls, reads_gpm, last_gpm_sample: None }
    }

    /// `None` for a slice, or if the GPU can't be reached.
    pub(crate) fn nvml_index(&self) -> Option<u32> {
        let gpu = self.handle.as_ref().ok().filter(|_| self.identity.parent_uuid.is_none());
        gpu?.index().ok()
    }

    pub(crate) fn read(&mut self) -> Reading {
        let device = match &self.handle {
            Ok(device) => device,
            Err(board_fault) => return Reading { board_fault: *board_fault, ..Reading::default() },
        };
        let mut calls =
            CallRunner { unsupported: &mut self.unsupported_calls, reading: Reading::default() };
        calls.read_memory(device);
        calls.read_activity(device);
        calls.read_errors(device);
        calls.read_fields(device);
        if self.reads_gpm {
            calls.reading.gpm = calls.read_gpm(device, &mut self.last_gpm_sample);
        }
        calls.reading
    }
}

/// After a call that reports a board fault, no further calls are made.
struct CallRunner<'a> {
    unsupported: &'a mut UnsupportedCalls,
    reading: Reading,
}

impl CallRunner<'_> {
    /// `None` if the call fails or isn't supported, or an earlier one reported a board fault.
    fn call_nvml<T>(
        &mut self,
        call_name: &'static str,
        make_call: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Option<T> {
        if self.reading.board_fault.is_some() || self.unsupported.contains(call_name) {
            return None;
        }
        make_call().map_err(|error| self.record_failure(call_name, &error)).ok()
    }

    fn record_failure(&mut self, call_name: &'static str, error: &NvmlError) {
        if let Some(board_fault) = board_fault(error) {
            self.reading.board_fault = Some(board_fault);
            return;
        }
        match failure_kind(error) {
            FailureKind::Unsupported => drop(self.unsupported.insert(call_name)),
            FailureKind::NoValue => {}
            FailureKind::Unexpected => self.reading.failed_calls.push(call_name),
        }
    }

    /// The processes use the memory directly or through MPS.
    fn read_memory(&mut self, device: &Device<'_>) {
        self.reading.memory =
            self.call_nvml("memory", || device.memory_info()).map(|memory| Memory {
                total: memory.total,
                used: memory.used,
                reserved: memory.reserved,
                free: memory.free,
            });
        let direct = self.call_nvml("processes", || device.running_compute_processes());
        let by_mps = self.call_nvml("mps_processes", || device.mps_running_compute_processes());
        let process_lists = [direct, by_mps].into_iter().flatten();
        self.reading.processes = process_lists
            .map(|list| list.iter().map(convert_process).collect::<Vec<_>>())
            .reduce(|direct, by_mps| [direct, by_mps].concat());
    }

    fn read_activity(&mut self, device: &Device<'_>) {
        let rates = self.call_nvml("utilization", || device.utilization_rates());
        self.reading.utilization_percent = rates.as_ref().map(|rates| rates.gpu.min(100));
        self.reading.memory_utilization_percent = rates.map(|rates| rates.memory.min(100));
        self.reading.power_milliwatts = self.call_nvml("power", || device.power_usage());
        self.reading.energy_millijoules =
            self.call_nvml("energy", || device.total_energy_consumption());
        self.reading.temperature_celsius =
            self.call_nvml("temperature", || device.temperature(TemperatureSensor::Gpu));
        self.reading.sm_clock_mhz = self.call_nvml("sm_clock", || device.clock_info(Clock::SM));
        self.reading.memory_clock_mhz =
            self.call_nvml("memory_clock", || device.clock_info(Clock::Memory));
        self.reading.throttle_reasons = self
            .call_nvml("throttle_reasons", || device.current_throttle_reasons())
            .map(throttle_reasons);
    }

    fn read_errors(&mut self, device: &Device<'_>) {
        self.reading.pcie_replays = self.call_nvml("pcie_replays", || device.pcie_replay_counter());
        let ecc = |kind| device.total_ecc_errors(kind, EccCounter::Volatile);
        self.reading.ecc_corrected =
            self.call_nvml("ecc_corrected", || ecc(MemoryError::Corrected));
        self.reading.ecc_uncorrected =
            self.call_nvml("ecc_uncorrected", || ecc(MemoryError::Uncorrected));
    }

    /// One call returns all of [`FIELDS`], but each field can fail separately.
    fn read_fields(&mut self, device: &Device<'_>) {
        let supported_fields: Vec<(u32, &'static str)> =
            FIELDS.into_iter().filter(|(_, name)| !self.unsupported.contains(name)).collect();
        let ids: Vec<FieldId> = supported_fields.iter().map(|&(id, _)| FieldId(id)).collect();
        if ids.is_empty() {
            return;
        }
        let Some(values) = self.call_nvml("fields", || device.field_values_for(&ids)) else {
            return;
        };
        let mut values_by_id = std::collections::BTreeMap::new();
        for ((id, name), value) in supported_fields.into_iter().zip(values) {
            match value.and_then(|sample| sample.value) {
                Ok(value) => drop(values_by_id.insert(id, whole_number(&value))),
                Err(error) => self.record_failure(name, &error),
            }
        }
        let field = |id: u32| values_by_id.get(&id).copied().flatten();
        let flag = |id: u32| field(id).map(|value| value != 0);
        let reading = &mut self.reading;
        reading.memory_temperature_celsius = field(field_id::NVML_FI_DEV_MEMORY_TEMP);
        reading.remapped_rows = RemappedRows {
            corrected: field(field_id::NVML_FI_DEV_REMAPPED_COR),
            uncorrected: field(field_id::NVML_FI_DEV_REMAPPED_UNC),
            has_pending: flag(field_id::NVML_FI_DEV_REMAPPED_PENDING),
            has_failed: flag(field_id::NVML_FI_DEV_REMAPPED_FAILURE),
        };
        reading.pcie_sent_bytes = field(field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES);
        reading.pcie_received_bytes = field(field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES);
        reading.reset_needed = flag(field_id::NVML_FI_DEV_RESET_STATUS);
        let recovery = field(field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION);
        reading.recovery_action = recovery.map(RecoveryAction::from_nvml);
        reading.nvlink_errors = NvlinkErrors {
            crc: field(field_id::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
            replay: field(field_id::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL),
            recovery: field(field_id::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
        };
    }

    /// `None` at the first reading, and if the device can't tell.
    fn read_gpm<'n>(
        &mut self,
        device: &Device<'n>,
        last_sample: &mut Option<GpmSample<'n>>,
    ) -> Option<Gpm> {
        let support = self.call_nvml("gpm", || match device.gpm_support()? {
            true => Ok(()),
            false => Err(NvmlError::NotSupported),
        });
        support?;
        let sample = self.call_nvml("gpm", || device.gpm_sample())?;
        let ids = [
            GpmMetricId::SmUtil,
            GpmMetricId::SmOccupancy,
            GpmMetricId::AnyTensorUtil,
            GpmMetricId::DramBwUtil,
            GpmMetricId::NvlinkTotalTxPerSec,
            GpmMetricId::NvlinkTotalRxPerSec,
        ];
        let metrics = last_sample.as_ref().and_then(|last_sample| {
            self.call_nvml("gpm", || gpm_metrics_get(device.nvml(), last_sample, &sample, &ids))
        });
        *last_sample = Some(sample);
        let values = metrics?.into_iter().map(|metric| metric.ok().map(|metric| metric.value));
        let [sm, sm_occupancy, tensor, memory_bandwidth, nvlink_sent, nvlink_received] =
            values.collect::<Vec<_>>().try_into().ok()?;
        let ratio = |percent: Option<f64>| percent.map(|percent| (percent / 100.0).clamp(0.0, 1.0));
        let bytes = |mib: Option<f64>| mib.map(|mib| mib * f64::from(1 << 20));
        Some(Gpm {
            sm_ratio: ratio(sm),
            sm_occupancy_ratio: ratio(sm_occupancy),
            tensor_ratio: ratio(tensor),
            memory_bandwidth_ratio: ratio(memory_bandwidth),
            nvlink_sent_bytes_per_second: bytes(nvlink_sent),
            nvlink_received_bytes_per_second: bytes(nvlink_received),
        })
    }
}

/// A size of 0 bytes becomes `None`, because a process with a context always uses memory: drivers
/// that translate pids between namespaces report 0.
fn convert_process(process: &ProcessInfo) -> Process {
    let bytes = match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) if bytes > 0 => Some(bytes),
        UsedGpuMemory::Used(_) | UsedGpuMemory::Unavailable => None,
    };
    Process { pid: process.pid, bytes }
}

/// `None` for a negative value or a fraction: fields are counts, flags or temperatures, and no
/// working board is below zero degrees.
fn whole_number(value: &SampleValue) -> Option<u64> {
    match *value {
        SampleValue::U32(value) => Some(value.into()),
        SampleValue::U64(value) => Some(value),
        SampleValue::I64(value) => u64::try_from(value).ok(),
        SampleValue::F64(_) => None,
    }
}

/// Leaves out idleness, which is no fault.
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

//! Calls that return a device's properties and readings.

#![expect(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as sys;
use serde_json::Number;

use crate::{
    abi::{
        Answer, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_SUPPORTED, Out, VERSION_MISMATCH, fill,
    },
    export::{export, export_device},
    machine::{Place, works},
    state::{Gpu, Process},
};

/// NVML's value for an unknown figure.
const NOT_AVAILABLE: u64 = u64::MAX;
/// NVML's value for no MIG instance.
const NO_INSTANCE: u32 = u32::MAX;

export_device! {
    nvmlDeviceGetUUID(uuid: Out<c_char>, length: c_uint) |gpu| uuid.text(length, &gpu.uuid);
    nvmlDeviceGetName(name: Out<c_char>, length: c_uint) |gpu| name.text(length, &gpu.name);
    nvmlDeviceGetPciInfo_v3(pci: Out<sys::nvmlPciInfo_t>) |gpu| pci.put(pci_info(gpu)?);
    nvmlDeviceGetMemoryInfo_v2(memory: Out<sys::nvmlMemory_v2_t>) |gpu| {
        let version = memory.get()?.version;
        if version as usize != size_of::<sys::nvmlMemory_v2_t>() | 2 << 24 {
            return Err(VERSION_MISMATCH);
        }
        let taken = gpu.memory_used.saturating_add(gpu.memory_reserved);
        memory.put(sys::nvmlMemory_v2_t {
            version,
            total: gpu.memory_total,
            reserved: gpu.memory_reserved,
            free: gpu.memory_total.saturating_sub(taken),
            used: gpu.memory_used,
        })
    };
    nvmlDeviceGetComputeRunningProcesses_v3(
        count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>
    ) |gpu| processes(&gpu.processes, &count, &infos);
    nvmlDeviceGetMPSComputeRunningProcesses_v3(
        count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>
    ) |gpu| processes(&gpu.mps_processes, &count, &infos);
    nvmlDeviceGetUtilizationRates(rates: Out<sys::nvmlUtilization_t>) |gpu| {
        let rate = |[gpu, memory]: [u32; 2]| sys::nvmlUtilization_t { gpu, memory };
        rates.put_some(gpu.utilization.map(rate))
    };
    nvmlDeviceGetPowerUsage(milliwatts: Out<c_uint>) |gpu| {
        milliwatts.put_some(gpu.power_milliwatts)
    };
    nvmlDeviceGetTotalEnergyConsumption(millijoules: Out<c_ulonglong>) |gpu| {
        millijoules.put_some(gpu.energy_millijoules)
    };
    nvmlDeviceGetTemperature(sensor: c_uint, celsius: Out<c_uint>) |gpu| match sensor {
        sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU => {
            celsius.put_some(gpu.temperature_celsius)
        }
        _ => Err(INVALID_ARGUMENT),
    };
    nvmlDeviceGetClockInfo(kind: c_uint, mhz: Out<c_uint>) |gpu| {
        let clocks = gpu.clocks_mhz.ok_or(NOT_SUPPORTED)?;
        mhz.put(*clocks.get(kind as usize).ok_or(INVALID_ARGUMENT)?)
    };
    nvmlDeviceGetCurrentClocksThrottleReasons(reasons: Out<c_ulonglong>) |gpu| {
        reasons.put_some(gpu.throttle_reasons)
    };
    nvmlDeviceGetPcieReplayCounter(replays: Out<c_uint>) |gpu| replays.put_some(gpu.pcie_replays);
    nvmlDeviceGetTotalEccErrors(
        kind: c_uint, _counter: c_uint, errors: Out<c_ulonglong>
    ) |gpu| {
        let counts = gpu.ecc_errors.ok_or(NOT_SUPPORTED)?;
        errors.put(*counts.get(kind as usize).ok_or(INVALID_ARGUMENT)?)
    };
    nvmlDeviceGetNumaNodeId(node: Out<c_uint>) |gpu| node.put_some(gpu.numa_node);
    nvmlDeviceGetFieldValues(count: c_int, values: Out<sys::nvmlFieldValue_t>) |gpu| {
        let count = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        (0..count).map(|index| values.offset(index)).try_for_each(|place| {
            let mut value = place.get()?;
            field(gpu, &mut value);
            place.put(value)
        })
    };
    nvmlDeviceGetSupportedEventTypes(types: Out<c_ulonglong>) |gpu| types.put(gpu.event_types);
}

export! {
    nvmlDeviceGetIndex(device: usize, index: Out<c_uint>) |machine| {
        works("nvmlDeviceGetIndex", &machine.device(device)?)?;
        let gpu = Place::from_handle(device)?.gpu;
        let place = machine.state.listed().position(|(listed, _)| listed == gpu);
        index.put(u32::try_from(place.ok_or(INVALID_ARGUMENT)?).map_err(|_| INVALID_ARGUMENT)?)
    };
}

fn pci_info(gpu: &Gpu) -> Result<sys::nvmlPciInfo_t, u32> {
    let number = |text: &str| u32::from_str_radix(text, 16).map_err(|_| INVALID_ARGUMENT);
    let parts: Vec<&str> = gpu.pci_address.split([':', '.']).collect();
    let [domain, bus, device, _function] = parts[..] else { return Err(INVALID_ARGUMENT) };
    let mut info = sys::nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: number(domain)?,
        bus: number(bus)?,
        device: number(device)?,
        pciDeviceId: 0x2335_10de,
        pciSubSystemId: 0x18be_10de,
        busId: [0; 32],
    };
    fill(&mut info.busId, &gpu.pci_address);
    // The legacy form has a domain of four digits.
    fill(&mut info.busIdLegacy, gpu.pci_address.get(4..).unwrap_or_default());
    Ok(info)
}

/// Writes the number of processes, and the list itself if it fits.
fn processes(list: &[Process], count: &Out<c_uint>, infos: &Out<sys::nvmlProcessInfo_t>) -> Answer {
    let room = count.get()? as usize;
    count.put(u32::try_from(list.len()).expect("as many as a test writes"))?;
    if room < list.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    list.iter().enumerate().try_for_each(|(index, process)| {
        infos.offset(index).put(sys::nvmlProcessInfo_t {
            pid: process.pid,
            usedGpuMemory: process.bytes.unwrap_or(NOT_AVAILABLE),
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        })
    })
}

/// Answers for one field, with the number in the state.
fn field(gpu: &Gpu, asked: &mut sys::nvmlFieldValue_t) {
    let Some(number) = gpu.fields.get(&asked.fieldId) else {
        asked.nvmlReturn = NOT_SUPPORTED;
        return;
    };
    asked.nvmlReturn = 0;
    (asked.valueType, asked.value) = value(number);
}

fn value(number: &Number) -> (sys::nvmlValueType_t, sys::nvmlValue_t) {
    let (unsigned, signed) = (number.as_u64(), number.as_i64());
    match (unsigned, signed) {
        (Some(ullVal), _) => (
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
            sys::nvmlValue_t { ullVal },
        ),
        (None, Some(sllVal)) => {
            (sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG, sys::nvmlValue_t { sllVal })
        }
        (None, None) => (
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_DOUBLE,
            sys::nvmlValue_t { dVal: number.as_f64().unwrap_or(f64::NAN) },
        ),
    }
}

//! The machine's state, which defines the result of each call: plain data, set from JSON.
//!
//! `null` for a reading means that the device doesn't support it. This module has no C and no
//! socket.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};

/// The state of the whole machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct State {
    pub(crate) driver_version: String,
    pub(crate) nvml_version: String,
    /// CUDA version; 13000 is CUDA 13.0.
    pub(crate) cuda_version: i32,
    /// GPUs by index.
    pub(crate) gpus: BTreeMap<u32, Gpu>,
    /// Return codes by symbol name, for every GPU and for calls without a GPU; `*` is for all other
    /// symbols.
    pub(crate) fail: BTreeMap<String, u32>,
}

/// One GPU. A MIG slice has the same type, with few readings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Gpu {
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) pci_address: String,
    pub(crate) memory_total: u64,
    pub(crate) memory_reserved: u64,
    pub(crate) memory_used: u64,
    pub(crate) processes: Vec<Process>,
    pub(crate) mps_processes: Vec<Process>,
    /// Percent of time in which a kernel ran, and in which memory was accessed.
    pub(crate) utilization: Option<[u32; 2]>,
    pub(crate) power_milliwatts: Option<u32>,
    pub(crate) energy_millijoules: Option<u64>,
    pub(crate) temperature_celsius: Option<u32>,
    /// Clocks: graphics, SM, memory, video.
    pub(crate) clocks_mhz: Option<[u32; 4]>,
    pub(crate) throttle_reasons: Option<u64>,
    pub(crate) pcie_replays: Option<u32>,
    /// Corrected and uncorrected errors; `None` without ECC.
    pub(crate) ecc_errors: Option<[u64; 2]>,
    pub(crate) numa_node: Option<u32>,
    /// Values by field id. An absent field is not supported.
    pub(crate) fields: BTreeMap<u32, Number>,
    /// Event types that may be registered, as a bit mask.
    pub(crate) event_types: u64,
    /// GPM metrics by id; `None`: the GPU has no GPM.
    pub(crate) gpm: Option<BTreeMap<u32, f64>>,
    /// MIG mode; `None`: the GPU has no MIG.
    pub(crate) mig: Option<bool>,
    /// MIG slices by index.
    pub(crate) slices: BTreeMap<u32, Slice>,
    /// Hidden, like a GPU that was absent when NVML was loaded: later GPUs move up one index.
    pub(crate) hidden: bool,
    /// Off the bus: every call returns `GPU_IS_LOST`.
    pub(crate) lost: bool,
    /// Return codes by symbol name, for this GPU; `*` is for all other symbols; 0 means no error.
    pub(crate) fail: BTreeMap<String, u32>,
}

/// A MIG slice.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Slice {
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) memory_total: u64,
    pub(crate) memory_reserved: u64,
    pub(crate) memory_used: u64,
    pub(crate) processes: Vec<Process>,
}

/// A process with a context on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// Device memory of the process, bytes; `None`: NVML doesn't know.
    pub(crate) bytes: Option<u64>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            driver_version: "580.159.03".into(),
            nvml_version: "13.580.159.03".into(),
            cuda_version: 13_000,
            gpus: BTreeMap::new(),
            fail: BTreeMap::new(),
        }
    }
}

impl Default for Gpu {
    fn default() -> Self {
        let field = |id: u32, value: u64| (id, Number::from(value));
        Self {
            uuid: String::new(),
            name: "NVIDIA H200".into(),
            pci_address: String::new(),
            memory_total: 150_754_820_096,
            memory_reserved: 618_659_840,
            memory_used: 0,
            processes: vec![],
            mps_processes: vec![],
            utilization: Some([0, 0]),
            power_milliwatts: Some(76_000),
            energy_millijoules: Some(1_000_000),
            temperature_celsius: Some(31),
            clocks_mhz: Some([345, 345, 3201, 765]),
            throttle_reasons: Some(1),
            pcie_replays: Some(0),
            ecc_errors: Some([0, 0]),
            numa_node: None,
            // Memory temperature; remapped rows (corrected, uncorrected, pending, failed); PCIe
            // bytes out and in; recovery action.
            fields: [
                (82, 34),
                (142, 0),
                (143, 0),
                (144, 0),
                (145, 0),
                (197, 0),
                (198, 0),
                (230, 0),
            ]
            .map(|(id, value)| field(id, value))
            .into(),
            event_types: 0x1f,
            gpm: Some([(2, 0.0), (3, 0.0), (5, 0.0), (10, 0.0)].into()),
            mig: Some(false),
            slices: BTreeMap::new(),
            hidden: false,
            lost: false,
            fail: BTreeMap::new(),
        }
    }
}

impl State {
    /// Returns a machine with `count` GPUs.
    pub(crate) fn with_gpus(count: u32) -> Self {
        let gpus = (0..count).map(|index| (index, Gpu::default())).collect();
        Self { gpus, ..Self::default() }.named()
    }

    /// Returns the visible GPUs in the order of NVML's indices, each with its index in the state.
    pub(crate) fn listed(&self) -> impl Iterator<Item = (u32, &Gpu)> {
        self.gpus.iter().filter(|(_, gpu)| !gpu.hidden).map(|(&index, gpu)| (index, gpu))
    }

    /// Gives default names to GPUs and slices without one.
    pub(crate) fn named(mut self) -> Self {
        for (index, gpu) in &mut self.gpus {
            if gpu.uuid.is_empty() {
                gpu.uuid = format!("GPU-00000000-0000-0000-0000-{index:012}");
            }
            if gpu.pci_address.is_empty() {
                gpu.pci_address = format!("00000000:{:02X}:00.0", 0x1b + index);
            }
        }
        self
    }

    /// Returns this state with `patch` merged: objects are merged, other values are replaced.
    ///
    /// # Errors
    /// When the patch has a field that the state doesn't have.
    pub(crate) fn patched(&self, patch: Value) -> Result<Self, String> {
        let mut value = serde_json::to_value(self).map_err(|error| error.to_string())?;
        merge(&mut value, patch);
        let state: Self = serde_json::from_value(value).map_err(|error| error.to_string())?;
        Ok(state.named())
    }
}

impl Slice {
    /// Returns the slice as a device; readings that only a whole board has are unsupported.
    pub(crate) fn device(&self, parent: &Gpu) -> Gpu {
        Gpu {
            uuid: self.uuid.clone(),
            name: self.name.clone(),
            pci_address: parent.pci_address.clone(),
            memory_total: self.memory_total,
            memory_reserved: self.memory_reserved,
            memory_used: self.memory_used,
            processes: self.processes.clone(),
            mps_processes: vec![],
            utilization: None,
            power_milliwatts: None,
            energy_millijoules: None,
            temperature_celsius: None,
            clocks_mhz: None,
            throttle_reasons: None,
            pcie_replays: None,
            ecc_errors: None,
            numa_node: None,
            fields: BTreeMap::new(),
            event_types: 0,
            gpm: None,
            mig: None,
            slices: BTreeMap::new(),
            hidden: parent.hidden,
            lost: parent.lost,
            fail: parent.fail.clone(),
        }
    }
}

fn merge(into: &mut Value, patch: Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, patch) => *into = patch,
    }
}

//! Defines the values that the agent reads from a device, without interpreting them.
//!
//! A *device* is a GPU, or one of the *slices* into which MIG has divided a GPU. A *board* is a
//! whole GPU. A value is absent if the board or the driver doesn't support it, or if there is no
//! value at the time.
//!
//! `nvml` fills these types, [`Identity`] when it lists the devices and [`Reading`] about once a
//! second. `tracker`, `health`, `select` and `metrics` interpret them.

/// The properties of a device that don't change while the agent runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// The UUID, or `index-N` for a GPU that never reported its UUID.
    pub uuid: String,
    /// The marketing name; may be empty.
    pub name: String,
    /// The index that NVML gave the GPU when it listed all of them. A slice has its GPU's index.
    pub index: u32,
    /// The PCI address in NVML's format. A slice has its GPU's address.
    pub pci_address: Option<String>,
    /// The UUID of the GPU that this is a MIG slice of; `None` for a GPU.
    pub parent_uuid: Option<String>,
    /// The NUMA node of the nearest host memory.
    pub numa_node: Option<u32>,
    /// Whether MIG has divided the GPU into slices. If so, work runs only on the slices.
    pub is_divided: bool,
}

impl Identity {
    /// Returns the UUID of the board: the GPU's own, or that of a slice's GPU.
    #[must_use]
    pub fn board_uuid(&self) -> &str {
        self.parent_uuid.as_deref().unwrap_or(&self.uuid)
    }
}

/// One reading of a device. Its many fields: one for each value that NVML reports.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// The device memory.
    pub memory: Option<Memory>,
    /// The processes with a context on the device. They include clients of MPS, which shares a GPU
    /// between processes.
    pub processes: Option<Vec<Process>>,
    /// The percentage of the last sample period in which a kernel ran.
    pub utilization_percent: Option<u32>,
    /// The percentage of the last sample period in which memory was read or written.
    pub memory_utilization_percent: Option<u32>,
    /// The power that the board uses.
    pub power_milliwatts: Option<u32>,
    /// The energy that the board has used since the driver was loaded.
    pub energy_millijoules: Option<u64>,
    /// The chip's temperature.
    pub temperature_celsius: Option<u32>,
    /// The memory's temperature.
    pub memory_temperature_celsius: Option<u64>,
    /// The clock of the SMs.
    pub sm_clock_mhz: Option<u32>,
    /// The clock of the memory.
    pub memory_clock_mhz: Option<u32>,
    /// The reasons why clocks are reduced, except idleness.
    pub throttle_reasons: Option<Vec<&'static str>>,
    /// Bytes sent to the host since the driver was loaded. The driver's counter may wrap.
    pub pcie_sent_bytes: Option<u64>,
    /// Bytes received from the host since the driver was loaded. The driver's counter may wrap.
    pub pcie_received_bytes: Option<u64>,
    /// The number of retransmitted PCIe packets.
    pub pcie_replays: Option<u32>,
    /// NVLink errors over all links.
    pub nvlink_errors: NvlinkErrors,
    /// Memory errors that ECC corrected since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Memory errors that ECC could not correct since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    /// Defective memory rows: how many were replaced by spare rows, and whether some could not be.
    pub remapped_rows: RemappedRows,
    /// The recovery action that the driver asks for.
    pub recovery_action: Option<RecoveryAction>,
    /// Whether a reset is needed, as older drivers report it.
    pub reset_needed: Option<bool>,
    /// Performance counters, if the settings enable them.
    pub gpm: Option<Gpm>,
    /// Why the board can't be used; `None` if no call reported a fault.
    pub board_fault: Option<BoardFault>,
    /// The names of the calls that failed, although the board supports them.
    pub failed_calls: Vec<&'static str>,
}

impl Reading {
    /// Whether the chip answered a call. Only values for which the driver must ask the chip count.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.memory.is_some()
            || self.utilization_percent.is_some()
            || self.power_milliwatts.is_some()
            || self.temperature_celsius.is_some()
    }
}

/// Device memory in bytes; `total` is the sum of the other three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// All memory.
    pub total: u64,
    /// Memory used by processes.
    pub used: u64,
    /// Memory reserved by the driver.
    pub reserved: u64,
    /// Free memory.
    pub free: u64,
}

/// A process with a context on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// The pid, in a namespace that the driver chooses; 0 for a process that isn't visible here.
    pub pid: u32,
    /// The device memory it uses, in bytes.
    pub bytes: Option<u64>,
}

/// NVLink errors since the driver was loaded, over all links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NvlinkErrors {
    /// Checksum errors.
    pub crc: Option<u64>,
    /// Replays: packets that were sent again.
    pub replay: Option<u64>,
    /// Recoveries: how often a link was brought up again.
    pub recovery: Option<u64>,
}

/// Defective rows of memory that the GPU replaces by spare rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemappedRows {
    /// Rows replaced after corrected errors.
    pub corrected: Option<u64>,
    /// Rows replaced after uncorrected errors.
    pub uncorrected: Option<u64>,
    /// Whether some replacements wait for the next reset.
    pub has_pending: Option<bool>,
    /// Whether some rows could not be replaced.
    pub has_failed: Option<bool>,
}

/// The recovery action that the driver asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    /// The driver asks for nothing.
    None,
    /// A reset of the GPU.
    Reset,
    /// A restart of the machine.
    Reboot,
    /// Other GPUs must stop using the GPU's memory.
    DrainPeers,
    /// The GPU's work must end, and then the GPU must be reset.
    DrainAndReset,
    /// An action that this build doesn't know.
    Other(u64),
}

impl RecoveryAction {
    /// Converts NVML's number.
    #[must_use]
    pub fn from_nvml(number: u64) -> Self {
        match number {
            0 => Self::None,
            1 => Self::Reset,
            2 => Self::Reboot,
            3 => Self::DrainPeers,
            4 => Self::DrainAndReset,
            other => Self::Other(other),
        }
    }
}

/// Why all calls to a board fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoardFault {
    /// The driver can't reach the board.
    Lost,
    /// The board must be reset first.
    ResetRequired,
    /// Calls fail without a specific reason.
    Unreachable,
}

/// NVML's GPU performance monitoring (GPM): hardware counters since the previous reading.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Gpm {
    /// The share of SMs that were busy, 0 to 1.
    pub sm_ratio: Option<f64>,
    /// The share of possible warps that were active, 0 to 1.
    pub sm_occupancy_ratio: Option<f64>,
    /// The share of the time in which tensor cores were busy, 0 to 1.
    pub tensor_ratio: Option<f64>,
    /// The share of the memory bandwidth that was used, 0 to 1.
    pub memory_bandwidth_ratio: Option<f64>,
    /// Bytes per second sent by this GPU over all NVLinks.
    pub nvlink_sent_bytes_per_second: Option<f64>,
    /// Bytes per second received by this GPU over all NVLinks.
    pub nvlink_received_bytes_per_second: Option<f64>,
}

//! Defines the values that the agent reads from a device, without interpreting them.
//!
//! A value is absent if the board or the driver doesn't support it, or has none at the time.

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// `index-N` for a GPU that never reported its UUID.
    pub uuid: String,
    /// Empty if there is no name.
    pub name: String,
    /// A slice has its GPU's index.
    pub index: u32,
    /// A slice has its GPU's address, in NVML's format.
    pub pci_address: Option<String>,
    /// `None` for a GPU.
    pub parent_uuid: Option<String>,
    pub numa_node: Option<u32>,
    /// MIG has divided the GPU, and work runs only on the slices.
    pub is_divided: bool,
}

impl Identity {
    #[must_use]
    pub fn board_uuid(&self) -> &str {
        self.parent_uuid.as_deref().unwrap_or(&self.uuid)
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    pub memory: Option<Memory>,
    /// Processes with a context on the device, clients of MPS (which shares a GPU) included.
    pub processes: Option<Vec<Process>>,
    /// The share of the last sample period in which a kernel ran.
    pub utilization_percent: Option<u32>,
    /// The share of the last sample period in which memory was read or written.
    pub memory_utilization_percent: Option<u32>,
    pub power_milliwatts: Option<u32>,
    /// A counter since the driver was loaded.
    pub energy_millijoules: Option<u64>,
    pub temperature_celsius: Option<u32>,
    pub memory_temperature_celsius: Option<u64>,
    pub sm_clock_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    /// Leaves out idleness.
    pub throttle_reasons: Option<Vec<&'static str>>,
    /// To the host. Counts from when the driver was loaded, and may wrap.
    pub pcie_sent_bytes: Option<u64>,
    /// From the host. Counts from when the driver was loaded, and may wrap.
    pub pcie_received_bytes: Option<u64>,
    pub pcie_replays: Option<u32>,
    pub nvlink_errors: NvlinkErrors,
    /// Memory errors that ECC corrected since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Those that ECC could not correct.
    pub ecc_uncorrected: Option<u64>,
    pub remapped_rows: RemappedRows,
    pub recovery_action: Option<RecoveryAction>,
    /// Older drivers report it.
    pub reset_needed: Option<bool>,
    pub gpm: Option<Gpm>,
    /// `None` if no call reported a fault.
    pub board_fault: Option<BoardFault>,
    /// Only calls that the board supports.
    pub failed_calls: Vec<&'static str>,
}

impl Reading {
    /// Only values for which the driver must ask the chip count.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.memory.is_some()
            || self.utilization_percent.is_some()
            || self.power_milliwatts.is_some()
            || self.temperature_celsius.is_some()
    }
}

/// All in bytes; `total` is the sum of the other three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    pub used: u64,
    pub reserved: u64,
    pub free: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// The driver chooses its namespace; 0 for a process that isn't visible here.
    pub pid: u32,
    pub bytes: Option<u64>,
}

/// Counters since the driver was loaded, over all links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NvlinkErrors {
    pub crc: Option<u64>,
    /// Packets that were sent again.
    pub replay: Option<u64>,
    /// How often a link was brought up again.
    pub recovery: Option<u64>,
}

/// Defective rows of memory that the GPU replaces by spare rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemappedRows {
    /// Rows replaced after corrected errors.
    pub corrected: Option<u64>,
    /// Rows replaced after uncorrected errors.
    pub uncorrected: Option<u64>,
    /// Some replacements wait for the next reset.
    pub has_pending: Option<bool>,
    pub has_failed: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    None,
    Reset,
    Reboot,
    /// Other GPUs must stop using the GPU's memory.
    DrainPeers,
    /// The GPU's own work must end before a reset.
    DrainAndReset,
    Other(u64),
}

impl RecoveryAction {
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
    ResetRequired,
    /// Calls fail without a specific reason.
    Unreachable,
}

/// Hardware counters since the previous reading. Ratios are from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Gpm {
    /// The share of SMs that were busy.
    pub sm_ratio: Option<f64>,
    /// The share of possible warps that were active.
    pub sm_occupancy_ratio: Option<f64>,
    /// The share of the time in which tensor cores were busy.
    pub tensor_ratio: Option<f64>,
    pub memory_bandwidth_ratio: Option<f64>,
    pub nvlink_sent_bytes_per_second: Option<f64>,
    pub nvlink_received_bytes_per_second: Option<f64>,
}

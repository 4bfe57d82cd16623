//! What is read of a device: plain values, each absent where the board, the driver or this moment
//! doesn't give it. No NVML here, and no judgement.

/// What stays the same while the agent runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// UUID, or `index-N` of a GPU that could never say it.
    pub uuid: String,
    /// Marketing name, may be empty.
    pub name: String,
    /// NVML's index while it listed all GPUs; a slice has its GPU's.
    pub index: u32,
    /// As NVML writes it; a slice has its GPU's.
    pub pci_address: Option<String>,
    /// The GPU that this is a MIG slice of.
    pub parent_uuid: Option<String>,
    /// Node of the host's memory that is nearest.
    pub numa_node: Option<u32>,
    /// Divided into slices: work runs on those, not on the whole.
    pub divided: bool,
}

impl Identity {
    /// The board: a GPU's own UUID, a slice's GPU's.
    #[must_use]
    pub fn board(&self) -> &str {
        self.parent_uuid.as_deref().unwrap_or(&self.uuid)
    }
}

/// One look at a device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// Device memory.
    pub memory: Option<Memory>,
    /// Who has a context, clients of MPS included.
    pub processes: Option<Vec<Process>>,
    /// A kernel ran; percent of the last sample period.
    pub utilization_percent: Option<u32>,
    /// Memory was read or written; percent of the last sample period.
    pub memory_utilization_percent: Option<u32>,
    /// Of the board.
    pub power_milliwatts: Option<u32>,
    /// Since the driver was loaded.
    pub energy_millijoules: Option<u64>,
    /// Of the chip.
    pub temperature_celsius: Option<u32>,
    /// Of the memory.
    pub memory_temperature_celsius: Option<u64>,
    /// Of the SMs.
    pub sm_clock_mhz: Option<u32>,
    /// Of the memory.
    pub memory_clock_mhz: Option<u32>,
    /// Why clocks are held down, idleness aside.
    pub throttled: Option<Vec<&'static str>>,
    /// To the host, since the driver was loaded; the driver's counter may wrap.
    pub pcie_sent_bytes: Option<u64>,
    /// From the host, likewise.
    pub pcie_received_bytes: Option<u64>,
    /// Packets sent again.
    pub pcie_replays: Option<u32>,
    /// Over all links.
    pub nvlink_errors: NvlinkErrors,
    /// Memory errors that ECC corrected since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Those that it could not.
    pub ecc_uncorrected: Option<u64>,
    /// Memory rows replaced, and those that could not be.
    pub rows: Rows,
    /// What the driver says has to be done before the board works again.
    pub recovery: Option<Recovery>,
    /// Older drivers' word for it: a reset is needed.
    pub reset_needed: Option<bool>,
    /// Performance counters, where the settings ask for them.
    pub gpm: Option<Gpm>,
    /// A call found that the board can't be used.
    pub trouble: Option<Trouble>,
    /// Calls that failed for another reason than that the board can't answer them.
    pub failed: Vec<&'static str>,
}

impl Reading {
    /// Did the chip answer? What the driver tells without asking it doesn't count.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.memory.is_some()
            || self.utilization_percent.is_some()
            || self.power_milliwatts.is_some()
            || self.temperature_celsius.is_some()
    }
}

/// Bytes of device memory; `total` is the sum of the other three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// By processes.
    pub used: u64,
    /// By the driver.
    pub reserved: u64,
    /// By nobody.
    pub free: u64,
}

/// A process with a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// In a namespace of the driver's choosing; 0: of one that isn't seen from here.
    pub pid: u32,
    /// Device memory.
    pub bytes: Option<u64>,
}

/// Errors on NVLink since the driver was loaded, over all links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NvlinkErrors {
    /// Checksums that were wrong.
    pub crc: Option<u64>,
    /// Packets sent again.
    pub replay: Option<u64>,
    /// Links brought up again.
    pub recovery: Option<u64>,
}

/// Rows of memory that were replaced by spare ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rows {
    /// After errors that ECC corrected.
    pub corrected: Option<u64>,
    /// After errors that it could not.
    pub uncorrected: Option<u64>,
    /// Some wait for the next reset.
    pub pending: Option<bool>,
    /// Some could not be replaced.
    pub failed: Option<bool>,
}

/// What the driver asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Nothing.
    None,
    /// A reset of the GPU.
    Reset,
    /// A restart of the machine.
    Reboot,
    /// That its peers stop using its memory.
    DrainPeers,
    /// That its work ends, then a reset.
    DrainAndReset,
    /// Something this build has no word for.
    Other(u64),
}

impl Recovery {
    /// From NVML's number.
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

/// Why no call about a board succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// The driver can't reach it.
    Lost,
    /// It has to be reset first.
    ResetRequired,
    /// Calls fail, and none says why.
    Unreachable,
}

/// Hardware counters over the time since the reading before.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Gpm {
    /// Share of SMs that were busy, 0 to 1.
    pub sm_ratio: Option<f64>,
    /// Share of the warps that could have been active.
    pub sm_occupancy_ratio: Option<f64>,
    /// Share of the time in which tensor cores were busy.
    pub tensor_ratio: Option<f64>,
    /// Share of the memory's bandwidth.
    pub memory_bandwidth_ratio: Option<f64>,
    /// Over all NVLinks, from this GPU.
    pub nvlink_sent_bytes_per_second: Option<f64>,
    /// Over all NVLinks, to this GPU.
    pub nvlink_received_bytes_per_second: Option<f64>,
}

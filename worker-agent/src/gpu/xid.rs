//! Decides which of the driver's XID errors are fatal for a board, and what an operator must do.
//!
//! After a *fatal* XID, the board can't be used until the GPU is reset or the machine is restarted.
//! The list follows the immediate actions in NVIDIA's catalog of XIDs for data center GPUs.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FatalXid {
    pub description: &'static str,
    pub operator_action: &'static str,
    /// After some forms of the XID the board continues to work. A driver that reports recovery
    /// actions knows the form, so its recovery action counts instead.
    pub has_harmless_forms: bool,
}

const RESET_GPU: &str = "reset the GPU";
const RESTART_MACHINE: &str = "restart the machine";

/// `None` for an XID after which the board continues to work.
#[must_use]
pub fn fatal_xid(number: u64) -> Option<FatalXid> {
    let always = |description, operator_action| {
        Some(FatalXid { description, operator_action, has_harmless_forms: false })
    };
    let sometimes = |description| {
        let operator_action = RESET_GPU;
        Some(FatalXid { description, operator_action, has_harmless_forms: true })
    };
    match number {
        46 => always("it stopped processing", RESET_GPU),
        48 => sometimes("a memory error that could not be corrected"),
        62 => always("its microcontroller halted", RESET_GPU),
        64 => always("a bad memory row could not be replaced", RESET_GPU),
        74 => sometimes("an NVLink failed"),
        79 => always("it fell off the bus", RESTART_MACHINE),
        95 => always("a memory error that reached several processes", RESET_GPU),
        109 => sometimes("a context switch timed out"),
        110 => always("a security fault", RESET_GPU),
        119 => always("its system processor did not answer", RESET_GPU),
        120 => always("its system processor failed", RESET_GPU),
        136 => sometimes("an NVLink could not be brought up"),
        140 => always("a memory error was not contained", RESET_GPU),
        143 => always("it failed to initialize", RESET_GPU),
        156 => sometimes("a faulty part was retired"),
        158 => always("it timed out permanently", RESET_GPU),
        _ => None,
    }
}

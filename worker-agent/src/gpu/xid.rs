//! Decides which of the driver's XID errors are fatal for a board, and what an operator must do.
//!
//! An *XID* is the driver's number for a GPU error, and a *board* is a whole GPU. After a *fatal*
//! XID, the board can't be used until the GPU is reset or the machine is restarted. The other XIDs
//! are errors of applications, replaced memory rows, and errors that affect only one process.
//!
//! [`fatal_xid`] is a fixed list. It follows the immediate actions in NVIDIA's catalog of XIDs for
//! data center GPUs. The module `health` calls it to judge a board. This module receives no XIDs
//! (`nvml` does), and counts none (`tracker` does).

/// A fatal XID of a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FatalXid {
    /// What happened, as a phrase for operators.
    pub description: &'static str,
    /// What an operator must do, as a phrase in the imperative.
    pub operator_action: &'static str,
    /// Whether the XID also has forms after which the board continues to work. If so, a driver that
    /// reports recovery actions knows which form occurred. Its recovery action then counts instead
    /// of the XID.
    pub has_harmless_forms: bool,
}

const RESET_GPU: &str = "reset the GPU";
const RESTART_MACHINE: &str = "restart the machine";

/// Returns what a fatal XID means. `None` for an XID after which the board continues to work.
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

//! Decides which of the driver's XID errors are fatal for a board, and what an operator must do.
//!
//! All other XIDs (application errors, replaced rows, errors contained to one process) are only
//! counted. The source is NVIDIA's catalog of XIDs for data center GPUs, immediate actions.

/// A fatal XID of a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fatal {
    /// What happened, as a phrase for operators.
    pub what: &'static str,
    /// What an operator must do.
    pub cure: &'static str,
    /// Whether only some forms of this XID are fatal. A driver that reports a recovery action knows
    /// which form it was.
    pub driver_knows: bool,
}

const RESET: &str = "reset the GPU";
const RESTART: &str = "restart the machine";

/// Returns `None` for an XID after which the board continues to work.
#[must_use]
pub fn fatal(number: u64) -> Option<Fatal> {
    let always = |what, cure| Some(Fatal { what, cure, driver_knows: false });
    let perhaps = |what| Some(Fatal { what, cure: RESET, driver_knows: true });
    match number {
        46 => always("it stopped processing", RESET),
        48 => perhaps("a memory error that could not be corrected"),
        62 => always("its microcontroller halted", RESET),
        64 => always("a bad memory row could not be replaced", RESET),
        74 => perhaps("an NVLink failed"),
        79 => always("it fell off the bus", RESTART),
        95 => always("a memory error that reached several processes", RESET),
        109 => perhaps("a context switch timed out"),
        110 => always("a security fault", RESET),
        119 => always("its system processor did not answer", RESET),
        120 => always("its system processor failed", RESET),
        136 => perhaps("an NVLink could not be brought up"),
        140 => always("a memory error was not contained", RESET),
        143 => always("it failed to initialize", RESET),
        156 => perhaps("a faulty part was retired"),
        158 => always("it timed out permanently", RESET),
        _ => None,
    }
}

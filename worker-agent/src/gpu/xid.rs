//! Decides which of the driver's XID errors are fatal for a board, and what an operator must do.
//!
//! An *XID* is the driver's number for a GPU error, and a *board* is a whole GPU. The agent only
//! counts all other XIDs: errors of applications, replaced memory rows, and errors that affect only
//! one process. The source is NVIDIA's catalog of XIDs for data center GPUs, by the immediate
//! action that it asks for.

/// A fatal XID of a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fatal {
    /// What happened, as a phrase for operators.
    pub what: &'static str,
    /// What an operator must do.
    pub cure: &'static str,
    /// Whether only some forms of this XID are fatal. If so, a driver that reports recovery actions
    /// knows which form occurred, and its recovery action counts instead of the XID.
    pub driver_knows: bool,
}

const RESET: &str = "reset the GPU";
const RESTART: &str = "restart the machine";

/// Returns what a fatal XID means. `None` for an XID after which the board continues to work.
#[must_use]
pub fn fatal(number: u64) -> Option<Fatal> {
    let always = |what, cure| Some(Fatal { what, cure, driver_knows: false });
    let sometimes = |what| Some(Fatal { what, cure: RESET, driver_knows: true });
    match number {
        46 => always("it stopped processing", RESET),
        48 => sometimes("a memory error that could not be corrected"),
        62 => always("its microcontroller halted", RESET),
        64 => always("a bad memory row could not be replaced", RESET),
        74 => sometimes("an NVLink failed"),
        79 => always("it fell off the bus", RESTART),
        95 => always("a memory error that reached several processes", RESET),
        109 => sometimes("a context switch timed out"),
        110 => always("a security fault", RESET),
        119 => always("its system processor did not answer", RESET),
        120 => always("its system processor failed", RESET),
        136 => sometimes("an NVLink could not be brought up"),
        140 => always("a memory error was not contained", RESET),
        143 => always("it failed to initialize", RESET),
        156 => sometimes("a faulty part was retired"),
        158 => always("it timed out permanently", RESET),
        _ => None,
    }
}

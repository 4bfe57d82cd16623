//! Decides which of the driver's XID errors are fatal for a board, and what an operator must do.
//!
//! An *XID* is the driver's number for a GPU error, and a *board* is a whole GPU. After a *fatal*
//! XID, the board can't be used until the GPU is reset or the machine is restarted. All other XIDs
//! are only counted, elsewhere: errors of applications, replaced memory rows, and errors that
//! affect only one process. The decision follows the immediate actions for which NVIDIA's catalog
//! of XIDs for data center GPUs asks.

/// A fatal XID of a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fatal {
    /// What happened, as a phrase for operators.
    pub description: &'static str,
    /// What an operator must do.
    pub cure: &'static str,
    /// Whether only some forms of this XID are fatal. If so, a driver that reports recovery actions
    /// knows which form occurred, and its recovery action counts instead of the XID.
    pub is_left_to_driver: bool,
}

const RESET: &str = "reset the GPU";
const RESTART: &str = "restart the machine";

/// Returns what a fatal XID means. `None` for an XID after which the board continues to work.
#[must_use]
pub fn fatal(number: u64) -> Option<Fatal> {
    let always = |description, cure| Some(Fatal { description, cure, is_left_to_driver: false });
    let sometimes = |description| Some(Fatal { description, cure: RESET, is_left_to_driver: true });
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

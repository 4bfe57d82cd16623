//! Which of the driver's XID errors mean that a board can't go on, and what is to be done then. The
//! rest (an application's fault, a row replaced, an error contained to one process) is counted.
//!
//! After NVIDIA's catalog of XIDs for data centre GPUs, immediate actions.

/// What an XID says of its board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fatal {
    /// What happened, in words.
    pub what: &'static str,
    /// What an operator does about it.
    pub cure: &'static str,
    /// Only one form of it is fatal, and a driver that tells its recovery action tells which.
    pub driver_knows: bool,
}

const RESET: &str = "reset the GPU";
const RESTART: &str = "restart the machine";

/// None for an XID after which the board goes on.
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
        143 => always("it did not initialise", RESET),
        156 => perhaps("a faulty part was retired"),
        158 => always("it timed out for good", RESET),
        _ => None,
    }
}

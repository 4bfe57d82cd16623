//! Measures an index's memory as growth of resident memory, each index in its own process.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{
    contender::{Compressed, Contender, Ours, Radix},
    workload::{MEMORY, Workload},
};

/// The contenders' names on the command line, in the order of all figures.
pub const CONTENDERS: [&str; 3] = ["berth", "compressed", "plain"];
/// The number of events per call, so that queued events don't count as memory of the index.
const EVENTS: usize = 256;

/// Returns the bytes per resident block of each contender, each measured in a new process.
pub fn bytes_per_residency() -> Result<[f64; 3]> {
    let measured = |name: &str| -> Result<f64> {
        let output = Command::new(std::env::current_exe()?).args(["--memory", name]).output()?;
        let text = String::from_utf8(output.stdout)?;
        text.trim().parse().with_context(|| format!("{name}: {text:?}"))
    };
    Ok([measured(CONTENDERS[0])?, measured(CONTENDERS[1])?, measured(CONTENDERS[2])?])
}

/// Returns the bytes per resident block of one contender, measured in this process.
pub fn measure(name: &str) -> Result<f64> {
    match name {
        "berth" => measure_growth::<Ours>(),
        "compressed" => measure_growth::<Compressed>(),
        "plain" => measure_growth::<Radix>(),
        _ => bail!("unknown contender {name}: use berth, compressed or plain"),
    }
}

fn measure_growth<C: Contender>() -> Result<f64> {
    let workload = Workload::new(MEMORY);
    let mut index = C::new();
    let before = resident_bytes()?;
    let mut residencies = 0;
    let mut events = (0..).zip(workload.stores()).peekable();
    while events.peek().is_some() {
        let some = events.by_ref().take(EVENTS).inspect(|(_, event)| {
            residencies += event.blocks.len();
        });
        index.apply(some.map(|(id, event)| C::event(id, event)).collect());
    }
    let grown = resident_bytes()?.saturating_sub(before);
    drop(index);
    Ok(grown as f64 / residencies as f64)
}

fn resident_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.split_whitespace().nth(1).context("no figure")?.parse()?;
    Ok(kib * 1024)
}

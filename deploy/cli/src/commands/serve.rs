//! Runs `berth serve`: becomes the program berth-serve, which holds the router and the agent.

use std::{ffi::OsString, os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use super::Outcome;
use crate::error::Error;

const PROGRAM: &str = "berth-serve";

/// Returns only if it fails.
pub fn run(arguments: &[OsString]) -> Result<Outcome, Error> {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    let program = beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from(PROGRAM));
    let source = Command::new(program).args(arguments).exec();
    Err(Error::Serve { source })
}

//! Reads the command line of a process, and the settings that a process of the fleet gets by it.

use std::{fmt::Display, io::Write as _, process::ExitCode};

use clap::Parser;
use serde::Serialize;

use crate::settings::{EXIT_USAGE, Problems, to_toml};

/// # Errors
/// Returns what the process ends with: 64 if the command line is invalid, 0 if it asks for help.
/// The message is printed.
pub fn parse<A: Parser>() -> Result<A, ExitCode> {
    A::try_parse().map_err(|error| {
        let _ = error.print();
        // The parser reports help and version as errors, too.
        ExitCode::from(if error.use_stderr() { EXIT_USAGE } else { 0 })
    })
}

/// Reads the settings that `load` makes of the command line. With `only_checks`, prints them
/// instead, after a look at the files that they name.
///
/// # Errors
/// Returns what the process ends with: 64 if the settings are wrong. The message is printed.
pub fn read_settings<A: Parser, C: Serialize>(
    only_checks: fn(&A) -> bool,
    load: fn(A) -> Result<C, Problems>,
    file_problems: fn(&C) -> Vec<String>,
) -> Result<C, ExitCode> {
    let wrong = |problems: &Problems| {
        print_error(&format_args!("{}: {problems}", A::command().get_name()));
        ExitCode::from(EXIT_USAGE)
    };
    let args = parse()?;
    let is_check = only_checks(&args);
    let config = load(args).map_err(|problems| wrong(&problems))?;
    if !is_check {
        return Ok(config);
    }
    let problems = file_problems(&config);
    if !problems.is_empty() {
        return Err(wrong(&Problems(problems)));
    }
    let printed = std::io::stdout().write_all(to_toml(&config).as_bytes());
    Err(if printed.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints to standard error. If that has gone too, nothing can be reported.
pub fn print_error(error: &dyn Display) {
    let _ = writeln!(std::io::stderr(), "{error}");
}

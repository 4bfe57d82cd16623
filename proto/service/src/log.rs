//! Sends logs to standard error: plain lines to a terminal, JSON to anything else.
//!
//! `BERTH_LOG` filters them, for example `info,router=debug`. They go to no file and are not
//! rotated: the supervisor does that.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging for the process. A second call changes nothing.
pub fn init() {
    let filter = EnvFilter::try_from_env("BERTH_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // If standard error is closed, reporting a failed write there would panic.
        .log_internal_errors(false);
    // Fails if logging was started before, for example by another test of this process.
    drop(if std::io::stderr().is_terminal() {
        logs.try_init()
    } else {
        logs.json().flatten_event(true).with_ansi(false).try_init()
    });
}

/// Formats an error and its sources on one line.
#[must_use]
pub fn describe_error(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

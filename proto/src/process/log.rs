//! Logs on standard error: JSON for machines, lines for a terminal. `BERTH_LOG` filters them, in
//! the form `info,router=debug`.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging for the process. A second call changes nothing.
pub fn init() {
    let filter = EnvFilter::try_from_env("BERTH_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // To say that a line could not be written to a closed standard error would panic.
        .log_internal_errors(false);
    // An error means that a subscriber is set already, which a test's process may have done.
    drop(if std::io::stderr().is_terminal() {
        logs.try_init()
    } else {
        logs.json().flatten_event(true).with_ansi(false).try_init()
    });
}

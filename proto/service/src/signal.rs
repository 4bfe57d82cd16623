//! Waits for a signal that tells the process to stop: SIGTERM from a supervisor, or Ctrl-C.
//!
//! The `main.rs` of router and agent wait for the signal, and then drain or stop the process.
//! This module stops nothing. Other signals, such as SIGHUP, keep their default effect.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};

/// A signal that tells the process to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGTERM. A supervisor stops the process, perhaps to start another one in its place.
    Terminate,
    /// SIGINT. A person stops the process.
    Interrupt,
}

/// Sets the signal handlers, and returns a future that ends with the first signal.
///
/// # Errors
/// When the operating system rejects a handler.
pub fn stop_signal() -> std::io::Result<impl Future<Output = StopSignal>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => StopSignal::Terminate,
            _ = interrupt.recv() => StopSignal::Interrupt,
        }
    })
}

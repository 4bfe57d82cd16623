//! Waits for a signal that tells the process to stop: SIGTERM from a supervisor, or Ctrl-C.
//!
//! The `main.rs` of router and agent wait for the signal, and then drain or stop the process.
//! This module stops nothing. Other signals, such as SIGHUP, keep their default effect.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// A signal that tells the process to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGTERM. A supervisor stops the process, perhaps to start another one in its place.
    Terminate,
    /// SIGINT. A person stops the process.
    Interrupt,
}

/// The signals that tell the process to stop, as they come.
#[derive(Debug)]
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// Sets the signal handlers.
    ///
    /// # Errors
    /// When the operating system rejects a handler.
    pub fn new() -> std::io::Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.terminate.recv() => StopSignal::Terminate,
            _ = self.interrupt.recv() => StopSignal::Interrupt,
        }
    }
}

//! Waits for a signal that tells the process to stop: SIGTERM from a supervisor, or Ctrl-C.
//!
//! The `main.rs` of router and agent wait for the signal, and then drain or stop the process.
//! This module stops nothing. SIGHUP, by which many servers read their settings again, must not end
//! all turns: it has no effect, and the log says why. Other signals keep their default effect.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

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
    hangup: Signal,
}

impl StopSignals {
    /// Sets the signal handlers.
    ///
    /// # Errors
    /// When the operating system rejects a handler.
    pub fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Self {
            terminate: signal(terminate)?,
            interrupt: signal(interrupt)?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> StopSignal {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return StopSignal::Terminate,
                _ = self.interrupt.recv() => return StopSignal::Interrupt,
                _ = self.hangup.recv() => info!(
                    "SIGHUP has no effect: changed certificates, tokens, keys and lists are read \
                     by themselves, and changed settings with a restart"
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    #[tokio::test]
    async fn a_hangup_stops_nothing() {
        let mut signals = StopSignals::new().unwrap();
        kill_process(getpid(), Signal::HUP).unwrap();
        let stopped = tokio::time::timeout(std::time::Duration::from_millis(300), signals.next());
        assert!(stopped.await.is_err());
        kill_process(getpid(), Signal::TERM).unwrap();
        assert_eq!(signals.next().await, StopSignal::Terminate);
    }
}

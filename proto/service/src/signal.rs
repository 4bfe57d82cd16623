//! Waits for a signal that tells the process to stop: SIGTERM from a supervisor, or Ctrl-C.
//!
//! SIGHUP, by which many servers read their settings again, must not end all turns: it has no
//! effect, and the log says why. Other signals keep their default effect.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGTERM. A supervisor stops the process, perhaps to start another one in its place.
    Terminate,
    /// SIGINT. A person stops the process.
    Interrupt,
}

#[derive(Debug)]
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl StopSignals {
    pub fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Self {
            terminate: signal(terminate)?,
            interrupt: signal(interrupt)?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

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

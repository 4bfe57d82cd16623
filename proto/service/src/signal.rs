//! Waits for a signal to stop: SIGTERM from a supervisor, or Ctrl-C.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};

/// Returns a future that ends with the first signal. The handlers are set before this returns.
///
/// # Errors
/// When the operating system rejects a handler.
pub fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

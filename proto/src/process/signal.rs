//! Waiting for the operator's word to stop: SIGTERM from a supervisor, Ctrl-C from a person.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};

/// A future that ends with the first signal. The handlers are set when this returns.
///
/// # Errors
/// When the system takes no handlers.
pub fn stop() -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

//! Loads a session's KV from the host's memory to its device, before its next turn.

use contract::id::SessionKey;
use tonic::Code;

use super::{Error, Lifecycle};

impl Lifecycle {
    /// Returns how many tokens begin to be loaded.
    pub(crate) async fn prefetch(&self, key: &SessionKey) -> Result<u64, Error> {
        let (worker, name) = self.worker_of(key).await?;
        let prefetched = match self.control_clients.get(worker.agent) {
            Ok(control) => control.prefetch(key).await,
            Err(status) => Err(status),
        };
        prefetched.map_err(|status| match status.code() {
            Code::NotFound => Error::Unknown,
            Code::Unimplemented => Error::NoPrefetch(name),
            _ => Error::from_agent(status),
        })
    }
}

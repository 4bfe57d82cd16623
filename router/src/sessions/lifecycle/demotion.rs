//! Demotes sessions: their KV goes to the radix trees of their engines, and their history stays.
//!
//! A pinned session keeps its KV and a request row to itself, also between its turns. After a
//! demotion others can use both, and the next turn computes what was evicted meanwhile.

use contract::id::SessionKey;
use tonic::Code;

use super::{Error, Lifecycle};

impl Lifecycle {
    /// Returns when the engine has demoted the session, also if it was demoted before.
    pub(crate) async fn demote(&self, key: &SessionKey) -> Result<(), Error> {
        let (worker, name) = self.worker_of(key).await?;
        let demoted = match self.control_clients.get(worker.agent) {
            Ok(control) => control.demote(key).await,
            Err(status) => Err(status),
        };
        demoted.map_err(|status| match status.code() {
            Code::NotFound => Error::Unknown,
            Code::Unimplemented => Error::NoDemotion(name),
            _ => Error::from_agent(status),
        })
    }
}

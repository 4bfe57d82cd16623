//! Demotes sessions: their KV goes to the radix trees of their engines, and their history stays.
//!
//! A pinned session keeps its KV and a request row to itself, also between its turns. After a
//! demotion others can use both, and the next turn computes what was evicted meanwhile.

use contract::id::SessionKey;
use tonic::Code;

use super::{Error, SessionService, decide};
use crate::placement::session_status::SessionStatus;

impl SessionService {
    /// Returns when the engine has demoted the session, also if it was demoted before.
    pub(crate) async fn demote(&self, key: &SessionKey) -> Result<(), Error> {
        let status = self.directory.status_after_reconnect(key).await;
        let view = self.directory.view();
        let worker = match status {
            SessionStatus::Closing => return Err(decide::Error::Closing.into()),
            SessionStatus::Lost { worker, is_agent_up, .. } => {
                let worker = view.name(worker);
                return Err(decide::Error::SessionLost { worker, agent_up: is_agent_up }.into());
            }
            status => status.owned_worker().ok_or(Error::Unknown)?,
        };
        let demoted = match self.control_clients.get(worker.agent) {
            Ok(control) => control.demote(key).await,
            Err(status) => Err(status),
        };
        demoted.map_err(|status| match status.code() {
            Code::NotFound => Error::Unknown,
            Code::Unimplemented => Error::NoDemotion(view.name(worker)),
            _ => Error::from_agent(status),
        })
    }
}

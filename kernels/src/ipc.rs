//! Audits from another process (tier 2), by a shared row table and CUDA IPC.
//!
//! The engine publishes its row table and exports `req_to_token`. The agent maps both and copies
//! rows while the engine runs on. The engine's side is a [`Publisher`], which is told about each
//! step of the scheduler. The agent's side is a [`Remote`], an accountant over the engine's memory:
//! its snapshot is the table of the newest step that is done, and it checks the versions against a
//! table at least as new as the newest step that has begun. The agent doesn't see the free lists
//! and the radix tree, so its reports are [`crate::report::Scope::Partial`]. Memory that can't be
//! shared is refused; accounting inside the engine works for such memory.

mod publisher;
mod remote;

pub use publisher::Publisher;
pub use remote::{Remote, RemoteReport};

use crate::{account, cuda, table};

/// Why an audit from another process is impossible or failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("req_to_token can't be shared: audit inside the engine instead")]
    Unshared(#[source] Option<cuda::Error>),
    #[error("req_to_token is on another GPU than the opened device: open that GPU")]
    OtherGpu,
    #[error("the engine's export is smaller than its table: {bytes} bytes")]
    Export { bytes: u64 },
    #[error("no step of the engine is done yet: try again")]
    NoStep,
    #[error("the engine overwrites its tables faster than they are read: use more tables")]
    Overrun,
    #[error("a step ended without a beginning: begin it first")]
    NoBeginning,
    #[error(transparent)]
    Table(#[from] table::Error),
    #[error(transparent)]
    Account(#[from] account::Error),
    #[error(transparent)]
    Device(#[from] cuda::Error),
}

impl From<account::SnapshotError> for Error {
    fn from(error: account::SnapshotError) -> Self {
        Self::Account(error.into())
    }
}

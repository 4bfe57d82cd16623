//! Lets the agent audit an engine's rows from its own process, through CUDA IPC and a shared table.
//!
//! Such an audit reads which pages the rows of the engine's `req_to_token` name. A row's *version*
//! is a number that changes whenever the engine may have rewritten the row. *CUDA IPC* lets one
//! process map the device memory of another process.
//!
//! The engine's side is a [`Publisher`], which the C library (`capi`) calls. It exports
//! `req_to_token` to other processes. At each step of the scheduler, it publishes a table of the
//! live rows and their versions; see [`crate::table`].
//!
//! The agent's side is a [`RemoteAuditor`]. It copies the rows while the engine runs:
//! 1. It copies the rows that the table of the newest finished step lists.
//! 2. After the copy, it reads which step has begun by then. If that is a later step, it waits for
//!    the table of that step, or for a newer table.
//! 3. It drops the rows whose version differs in that table: they may have changed during the copy.
//!
//! The agent doesn't see the free lists and the radix tree, so the scope of its reports is
//! [`crate::report::Scope::Partial`]. If CUDA IPC can't share the engine's memory, the engine can
//! still make audits in its own process, with [`crate::account`].

mod publisher;
mod remote;

pub use publisher::Publisher;
pub use remote::{RemoteAuditor, RemoteReport};

use crate::{account, cuda, table};

/// Why an audit from another process is impossible or failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("req_to_token can't be shared: audit inside the engine instead")]
    Unshared(#[source] Option<cuda::Error>),
    #[error("req_to_token is on another GPU than the opened device: open that GPU")]
    OtherGpu,
    #[error("the engine's export is smaller than its table: {bytes} bytes")]
    ExportTooSmall { bytes: u64 },
    #[error("no step of the engine is done yet: try again")]
    NoStep,
    #[error("the engine overwrites its tables faster than they are read: use more tables")]
    Overrun,
    #[error("a step ended without a beginning: begin it first")]
    StepNotBegun,
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

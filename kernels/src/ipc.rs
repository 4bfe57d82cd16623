//! Audits from another process (tier 2): the engine publishes its row table and exports
//! `req_to_token`; the agent maps both and copies rows while the engine runs on.
//!
//! The engine's side is a [`Publisher`], told of each step of the scheduler. The agent's is a
//! [`Remote`]: an accountant over the engine's memory, whose cut is the table of the newest step
//! that is done, and whose second look at the versions is the table of the newest step that has
//! begun. Of free lists and tree it knows nothing, so its reports are
//! [`crate::report::Scope::Partial`]. Memory that can't be shared is refused; accounting inside the
//! engine works there.

mod publisher;
mod remote;

pub use publisher::Publisher;
pub use remote::{Audited, Remote};

use crate::{account, cuda, table};

/// Why there is no audit across processes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("req_to_token can't be shared: account inside the engine instead")]
    Unshared(#[source] Option<cuda::Error>),
    #[error("req_to_token lies on another GPU than the one that was opened")]
    OtherGpu,
    #[error("the engine's export is smaller than its table: {bytes} bytes")]
    Export { bytes: u64 },
    #[error("no step of the engine is done yet: ask again")]
    NoStep,
    #[error("the engine is faster than its ring of tables: give it more")]
    Overrun,
    #[error("a step is published that didn't begin")]
    NoBeginning,
    #[error(transparent)]
    Table(#[from] table::Error),
    #[error(transparent)]
    Account(#[from] account::Error),
    #[error(transparent)]
    Device(#[from] cuda::Error),
}

impl From<account::CutError> for Error {
    fn from(error: account::CutError) -> Self {
        Self::Account(error.into())
    }
}

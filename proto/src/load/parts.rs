//! Parts of an agent's description: the model's files, and what its shim and its engine can't do.

use serde::{Deserialize, Serialize};

use super::{Error, Retention};
use crate::v1;

/// Hash and size of the files with which an engine turns text and messages into tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct ModelFiles {
    /// SHA-256 over the files: equal on every agent that has the same files.
    pub hash: [u8; 32],
    /// Size of all files together, bytes.
    pub bytes: u64,
}

/// A function of the shim that is off. The shim is the agent's code inside the engine's process.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct FunctionOff {
    /// Name of the function: `reports`, `demotion`, `audit`, `republishing`, `guarding` or
    /// `trimming`.
    pub function: String,
    /// Why it is off, for an operator: the engine lacks a part, or its configuration rules it out.
    pub reason: String,
}

impl From<v1::FunctionOff> for FunctionOff {
    fn from(wire: v1::FunctionOff) -> Self {
        Self { function: wire.function, reason: wire.reason }
    }
}

impl From<FunctionOff> for v1::FunctionOff {
    fn from(off: FunctionOff) -> Self {
        Self { function: off.function, reason: off.reason }
    }
}

/// A retention that an engine doesn't offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetentionOff {
    /// The retention.
    pub retention: Retention,
    /// Why it is not offered, for an operator: a flag that is missing, or one beside which the
    /// retention is unsafe.
    pub reason: String,
}

impl TryFrom<v1::RetentionOff> for RetentionOff {
    type Error = Error;

    fn try_from(wire: v1::RetentionOff) -> Result<Self, Error> {
        Ok(Self { retention: Retention::from_wire(wire.retention)?, reason: wire.reason })
    }
}

impl From<RetentionOff> for v1::RetentionOff {
    fn from(off: RetentionOff) -> Self {
        Self { retention: off.retention.to_wire(), reason: off.reason }
    }
}

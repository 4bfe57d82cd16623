//! Parts of an agent's description: the model's files, and what its shim and its engine can't do.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Error, Retention};
use crate::v1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelFiles {
    /// The SHA-256 is equal on every agent that has the same files.
    pub hash: [u8; 32],
    /// The size of all files together.
    pub bytes: u64,
}

#[derive(
    Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(default)]
pub struct FunctionOff {
    /// `reports`, `demotion`, `audit`, `republishing`, `guarding` or `trimming`.
    pub function: String,
    /// For an operator: the engine lacks a part, or its configuration rules the function out.
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

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RetentionOff {
    pub retention: Retention,
    /// Tells an operator which flag is missing, or beside which the retention is unsafe.
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

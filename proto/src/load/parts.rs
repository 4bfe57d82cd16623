//! Parts of an agent's description: the model's files, and what its shim can't do.

use serde::Serialize;

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
    /// Name of the function: `reports`, `demotion`, `audit`, `republishing` or `trimming`.
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

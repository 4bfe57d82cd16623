//! How an engine in prefill or decode mode hands over KV, as its agent describes it.
//!
//! Prefill/decode disaggregation splits a turn (one request and its answer) between two engines.
//! The *prefill* engine computes the prompt's KV, the *decode* engine takes the KV and generates
//! the answer. Both find each other through the prefill engine's *bootstrap server*. The router's
//! `fleet` decides by these values which engines form a pair.

use serde::Serialize;

use super::{EngineFacts, Error};
use crate::v1;

/// Which part of a turn an engine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineRole {
    /// Whole turns.
    Aggregated,
    /// Prompts. It hands their KV to a decode engine.
    Prefill,
    /// Answers. It takes the prompt's KV from a prefill engine.
    Decode,
}

/// How an engine in prefill or decode mode hands over the KV of a prompt, or takes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KvTransfer {
    /// Host at which decode engines reach the bootstrap server. `None`: the host at which the
    /// router reaches the agent.
    pub bootstrap_host: Option<String>,
    /// Port of the bootstrap server, which only a prefill engine has.
    pub bootstrap_port: u16,
    /// Name of the transfer backend, such as `mooncake`.
    pub backend: String,
    /// Data type of the KV cache, as the engine's flag names it.
    pub kv_dtype: String,
    /// Number of tensor parallel ranks; never 0.
    pub tp_size: u32,
    /// Whether a decode engine keeps a radix cache, and so takes only the KV that it lacks.
    pub decode_cache: bool,
    /// Bytes of KV per token, on all devices of a rank together.
    pub kv_bytes_per_token: Option<u64>,
}

impl EngineFacts {
    /// Returns which part of a turn the engine runs.
    #[must_use]
    pub fn role(&self) -> EngineRole {
        match self.disaggregation.as_str() {
            "prefill" => EngineRole::Prefill,
            "decode" => EngineRole::Decode,
            _ => EngineRole::Aggregated,
        }
    }
}

impl EngineRole {
    /// Returns the name used in JSON and in messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl TryFrom<v1::KvTransfer> for KvTransfer {
    type Error = Error;

    fn try_from(wire: v1::KvTransfer) -> Result<Self, Error> {
        let impossible = |field, value: u32| Error::Impossible { field, value: u64::from(value) };
        if wire.tp_size == 0 {
            return Err(impossible("transfer.tp_size", 0));
        }
        let bootstrap_port = u16::try_from(wire.bootstrap_port)
            .map_err(|_| impossible("transfer.bootstrap_port", wire.bootstrap_port))?;
        Ok(Self {
            bootstrap_host: Some(wire.bootstrap_host).filter(|host| !host.is_empty()),
            bootstrap_port,
            backend: wire.backend,
            kv_dtype: wire.kv_dtype,
            tp_size: wire.tp_size,
            decode_cache: wire.decode_cache,
            kv_bytes_per_token: Some(wire.kv_bytes_per_token).filter(|bytes| *bytes > 0),
        })
    }
}

impl From<KvTransfer> for v1::KvTransfer {
    fn from(transfer: KvTransfer) -> Self {
        Self {
            bootstrap_host: transfer.bootstrap_host.unwrap_or_default(),
            bootstrap_port: transfer.bootstrap_port.into(),
            backend: transfer.backend,
            kv_dtype: transfer.kv_dtype,
            tp_size: transfer.tp_size,
            decode_cache: transfer.decode_cache,
            kv_bytes_per_token: transfer.kv_bytes_per_token.unwrap_or(0),
        }
    }
}

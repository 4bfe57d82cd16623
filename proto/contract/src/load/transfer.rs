//! How an engine in prefill or decode mode hands over KV, as its agent describes it.
//!
//! The *prefill* engine computes the prompt's KV, the *decode* engine takes the KV and generates
//! the answer. Both find each other through the prefill engine's *bootstrap server*.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{EngineFacts, Error};
use crate::v1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineRole {
    Aggregated,
    /// Computes prompts, and hands their KV to a decode engine.
    Prefill,
    /// Generates answers. It takes the prompt's KV from a prefill engine.
    Decode,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct KvTransfer {
    /// Decode engines reach the bootstrap server there. `None`: the host at which the router
    /// reaches the agent.
    pub bootstrap_host: Option<String>,
    /// Of the bootstrap server, which only a prefill engine has.
    pub bootstrap_port: u16,
    /// Such as `mooncake`.
    pub backend: String,
    /// Named as in the engine's flag.
    pub kv_dtype: String,
    /// Never 0.
    pub tp_size: u32,
    /// Whether a decode engine keeps a radix cache, and so takes only the KV that it lacks.
    pub decode_cache: bool,
    /// Counts all devices of a rank together.
    pub kv_bytes_per_token: Option<u64>,
}

impl EngineFacts {
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
    /// JSON and messages have this name.
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

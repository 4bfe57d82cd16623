//! The settings of prefill and decode mode.

use crate::millis;
use std::time::Duration;

/// Which part of a request the engine runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineMode {
    /// All of it.
    #[default]
    Null,
    Prefill,
    Decode,
}

impl EngineMode {
    /// Returns the name that the engine gives the role.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// Returns how the engine chooses the DP rank of a request that names none. A prompt's is that
    /// of its room, so that the decode engine knows it.
    pub(crate) fn load_balance_method(self) -> &'static str {
        match self {
            Self::Prefill => "follow_bootstrap_room",
            Self::Null | Self::Decode => "round_robin",
        }
    }
}

/// A fault of hand-offs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum HandOffFault {
    #[default]
    None,
    /// The prefill engine never learns of the decode engine.
    Bootstrap,
    /// The KV doesn't arrive.
    Transfer,
    /// The decode engine has no room for the KV.
    Memory,
    /// The prefill engine runs the request on another DP rank than the room names.
    Rank,
}

/// The settings of prefill and decode mode.
#[derive(Clone, Debug, PartialEq, clap::Args)]
pub struct HandOffConfig {
    #[arg(long = "disaggregation-mode", value_enum, default_value = "null")]
    pub mode: EngineMode,
    /// The bootstrap server's port; 0 takes a free port.
    #[arg(long = "disaggregation-bootstrap-port", default_value_t = 8998)]
    pub bootstrap_port: u16,
    #[arg(long = "disaggregation-transfer-backend", default_value = "mooncake")]
    pub transfer_backend: String,
    #[arg(long = "disaggregation-decode-enable-radix-cache")]
    pub decode_radix_cache: bool,
    #[arg(long, default_value = "auto")]
    pub kv_cache_dtype: String,
    #[arg(long, default_value_t = 1)]
    pub tp_size: u32,
    /// The longest wait for the other engine, in milliseconds. A prefill engine reads it from
    /// `SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`, a decode engine from
    /// `SGLANG_DISAGGREGATION_WAITING_TIMEOUT`.
    #[arg(long = "bootstrap-timeout-ms", default_value = "300000", value_parser = millis)]
    pub bootstrap_timeout: Duration,
    /// The fault that hand-offs have here.
    #[arg(long = "hand-off-fault", value_enum, default_value = "none")]
    pub fault: HandOffFault,
    /// The share of the hand-offs that have the fault, in thousandths.
    #[arg(long = "hand-off-fault-per-mille", default_value_t = 1000)]
    pub fault_per_mille: u32,
}

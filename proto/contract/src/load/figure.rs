//! Numbers with their source and age, and how full a KV pool is.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Device, RankLoad};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Usage fields of finished turns.
    Usage,
    /// The engine's `/v1/loads`.
    Loads,
    /// The engine's `/server_info`.
    ServerInfo,
    /// The agent's own ledger of admitted turns.
    Ledger,
    /// An upper bound of the KV that may still be in the radix tree.
    Estimate,
    Shim,
    /// The GPU's driver.
    Nvml,
    /// The agent's settings, until something is measured.
    Setting,
    /// In JSON of a newer router. No agent reports it.
    #[default]
    #[serde(other)]
    Unknown,
}

/// The name of the field that holds the figure contains the unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Figure {
    pub value: u64,
    pub source: Source,
    /// The time between sampling and sending, by the agent's monotonic clock.
    pub age_ms: u32,
}

/// Has the source and age of the figure from which it is computed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, ToSchema)]
pub struct Ratio {
    /// 0 to 1.
    pub value: f64,
    pub source: Source,
    pub age_ms: u32,
}

impl Ratio {
    /// `None` if the whole is nothing.
    #[expect(clippy::cast_precision_loss, reason = "figures are below 2^53")]
    fn new(part: Figure, whole: Figure) -> Option<Self> {
        let value = part.value.min(whole.value) as f64 / whole.value as f64;
        let Figure { source, age_ms, .. } = part;
        (whole.value > 0).then_some(Self { value, source, age_ms })
    }
}

impl RankLoad {
    /// Counts KV that is held, and cached KV that eviction can free. `None` without the shim,
    /// because nobody else knows what is free.
    #[must_use]
    pub fn kv_physical_usage(&self) -> Option<Ratio> {
        let (free, total) = (self.pool_available_tokens?, self.pool_total_tokens?);
        let used_tokens = total.value.saturating_sub(free.value);
        Ratio::new(Figure { value: used_tokens, ..free }, total)
    }
}

impl Device {
    /// The share is the rank's: each device has its share of the KV of each token.
    #[must_use]
    pub fn kv_physical_usage(&self) -> Option<Ratio> {
        Ratio::new(self.kv_used_bytes?, self.kv_pool_bytes?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_used_as_far_as_its_pool_is_not_free() {
        let figure = |value, source| Some(Figure { value, source, age_ms: 7 });
        let mut device = Device {
            kv_pool_bytes: figure(400, Source::ServerInfo),
            kv_used_bytes: figure(100, Source::Shim),
            ..Device::default()
        };
        let quarter = Ratio { value: 0.25, source: Source::Shim, age_ms: 7 };
        assert_eq!(device.kv_physical_usage(), Some(quarter));
        device.kv_pool_bytes = figure(0, Source::ServerInfo);
        assert_eq!(device.kv_physical_usage(), None, "a pool of nothing");
        device.kv_used_bytes = None;
        assert_eq!(device.kv_physical_usage(), None, "unknown");
    }
}

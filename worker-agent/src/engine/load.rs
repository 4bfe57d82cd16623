//! Holds a sample of the engine's load, as `/v1/loads` reports it.

use std::{net::SocketAddr, time::Instant};

use contract::count;
use serde::Deserialize;

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct RankSample {
    pub dp_rank: u32,
    #[serde(deserialize_with = "count::read")]
    pub num_running_reqs: u64,
    #[serde(deserialize_with = "count::read")]
    pub num_waiting_reqs: u64,
    /// Tokens that can't be evicted.
    #[serde(deserialize_with = "count::read")]
    pub num_used_tokens: u64,
    #[serde(deserialize_with = "count::read")]
    pub max_total_num_tokens: u64,
    /// Decreases only when the engine restarts.
    #[serde(default)]
    pub total_prefill_uncached_tokens: u64,
    #[serde(default)]
    pub total_prefill_busy_us: Option<u64>,
    /// The engine's estimate.
    #[serde(default, deserialize_with = "count::read_option")]
    pub num_waiting_uncached_tokens: Option<u64>,
    /// When the scheduler took these figures, in seconds of the engine's clock. 0: unknown.
    #[serde(default)]
    pub timestamp: f64,
}

impl RankSample {
    /// The result is in microseconds of the engine's clock.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a positive float saturates"
    )]
    pub fn snapshot_us(&self) -> Option<u64> {
        (self.timestamp > 0.0).then_some((self.timestamp * 1e6) as u64)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct LoadSample {
    /// When the answer arrived.
    pub at: Instant,
    /// In rank order.
    pub ranks: Vec<RankSample>,
    /// The local address of the connection that brought the answer.
    pub connection: Option<SocketAddr>,
    /// The engine then takes requests, and runs none.
    pub is_paused: bool,
}

#[cfg(test)]
mod tests {
    use contract::count::COUNT_MAX;

    use super::*;

    #[test]
    fn absurd_figures_of_an_engine_can_be_added() {
        let text = r#"{"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":18446744073709551615,
            "num_used_tokens":18446744073709551615,"max_total_num_tokens":2,
            "num_waiting_uncached_tokens":18446744073709551615,"timestamp":1e300}"#;
        let rank: RankSample = serde_json::from_str(text).unwrap();
        assert_eq!((rank.num_running_reqs, rank.max_total_num_tokens), (1, 2));
        let counts = [rank.num_waiting_reqs, rank.num_used_tokens];
        assert_eq!((counts, rank.num_waiting_uncached_tokens), ([COUNT_MAX; 2], Some(COUNT_MAX)));
    }
}

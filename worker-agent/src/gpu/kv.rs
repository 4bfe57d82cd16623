//! Converts a rank's KV pool figures from tokens to bytes, for each device's load report. Pure.

use contract::load::{Device, Figure, RankLoad, Source};

/// With tensor parallelism, each device holds an equal share of the KV of each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// On this device.
    pub bytes: u64,
    /// Of the whole pool.
    pub tokens: u64,
    /// Where `bytes` comes from.
    pub source: Source,
}

impl Pool {
    fn bytes_for(&self, tokens: Figure) -> Option<Figure> {
        let bytes = u128::from(self.bytes) * u128::from(tokens.value.min(self.tokens));
        let bytes = bytes.checked_div(u128::from(self.tokens))?;
        Some(Figure { value: u64::try_from(bytes).ok()?, ..tokens })
    }

    pub fn fill_device(&self, load: &RankLoad, device: &mut Device) {
        let in_bytes = |tokens: Option<Figure>| tokens.and_then(|tokens| self.bytes_for(tokens));
        let used_tokens = load.pool_available_tokens.map(|available| Figure {
            value: self.tokens.saturating_sub(available.value),
            ..available
        });
        let pool_bytes = Figure { value: self.bytes, source: self.source, age_ms: 0 };
        device.kv_pool_bytes = Some(pool_bytes);
        device.kv_used_bytes = in_bytes(used_tokens);
        device.kv_pinned_bytes = in_bytes(load.pinned_tokens);
        device.kv_reclaimable_bytes = in_bytes(load.pool_evictable_tokens);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn figure(value: u64) -> Figure {
        Figure { value, source: Source::Shim, age_ms: 3 }
    }

    proptest! {
        #[test]
        fn a_part_in_bytes_is_the_same_part_of_the_pool(
            bytes in 1_u64..1 << 40,
            tokens in 1_u64..1 << 32,
            part in 0_u64..=100,
        ) {
            let pool = Pool { bytes, tokens, source: Source::ServerInfo };
            let of = figure(u64::try_from(u128::from(tokens) * u128::from(part) / 100).unwrap());
            let shown = pool.bytes_for(of).unwrap();
            prop_assert!(shown.value <= bytes, "never more than the pool");
            prop_assert_eq!((shown.source, shown.age_ms), (Source::Shim, 3));
            let exact = u128::from(bytes) * u128::from(of.value) / u128::from(tokens);
            prop_assert_eq!(u128::from(shown.value), exact);
        }
    }

    #[test]
    fn a_pool_without_tokens_has_no_bytes_in_any_state() {
        let pool = Pool { bytes: 100, tokens: 0, source: Source::Shim };
        assert_eq!(pool.bytes_for(figure(1)), None);
    }
}

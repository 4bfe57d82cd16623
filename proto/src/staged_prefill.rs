//! The HTTP request by which a router asks an agent to compute a long prompt in stages.
//!
//! An engine computes one prompt to its end before it begins another, so shorter prompts wait
//! behind a long one. In staged prefill, the agent sends the engine one part (a stage) of the long
//! prompt after the other. The engine computes shorter prompts between two stages.
//!
//! The router posts the prompt's token ids, four little-endian bytes each, to [`PATH`] on the
//! agent's data port, before it sends the prompt's turn. The agent answers when all stages but the
//! last are in the engine's cache, or when staging fails. The answer says how many tokens the
//! engine still has to compute. In both cases the router then sends the turn as usual.
//!
//! The router's `turn/staged_prefill.rs` sends the request, and the agent's `staged_prefill`
//! answers. This module has only the format of both and the size of a stage. It decides neither
//! which prompts are long nor in what order they are computed.

use bytes::Bytes;
use http::{HeaderMap, HeaderName};

/// The path for prompts to stage, on the agent's data port.
pub const PATH: &str = "/berth/staged-prefill";

/// Answer header: the number of the prompt's tokens that are not in the engine's cache.
pub const UNCACHED_TOKENS: HeaderName = HeaderName::from_static("x-berth-left-tokens");

/// Prefill rate, in tokens per second, that is assumed until the engine's own rate is measured: a
/// cautious figure for a 70B model on one node.
pub const PREFILL_TOKENS_PER_S_ASSUMED: u64 = 10_000;
/// Smallest stage, in tokens. Each forward pass has a fixed cost, which would dominate smaller
/// stages.
const STAGE_TOKENS_MIN: u64 = 256;

/// Bytes per token id.
const TOKEN_ID_BYTES: usize = 4;

/// Returns the number of tokens in a stage that takes `prefill_stage_ms` milliseconds at
/// `tokens_per_s` prefill tokens per second.
#[must_use]
pub fn stage_tokens(prefill_stage_ms: u64, tokens_per_s: u64) -> u64 {
    (tokens_per_s.saturating_mul(prefill_stage_ms) / 1000).max(STAGE_TOKENS_MIN)
}

/// Encodes token ids as a request body.
#[must_use]
pub fn encode(ids: &[u32]) -> Bytes {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// Returns the token ids in a request body, in order; `None` if the length isn't a multiple of
/// four.
#[must_use]
pub fn decode(bytes: &[u8]) -> Option<impl ExactSizeIterator<Item = u32>> {
    let (ids, trailing_bytes) = bytes.as_chunks::<TOKEN_ID_BYTES>();
    trailing_bytes.is_empty().then(|| ids.iter().map(|id| u32::from_le_bytes(*id)))
}

/// Reads the [`UNCACHED_TOKENS`] header of an answer. Returns `None` if it is absent or invalid.
#[must_use]
pub fn uncached_tokens(headers: &HeaderMap) -> Option<u64> {
    headers.get(UNCACHED_TOKENS)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_stage_has_the_tokens_that_the_engine_computes_in_its_time() {
        assert_eq!(stage_tokens(600, 20_000), 12_000);
        assert_eq!(stage_tokens(600, 1), STAGE_TOKENS_MIN);
    }

    proptest! {
        #[test]
        fn token_ids_survive_encoding(ids in prop::collection::vec(any::<u32>(), 0..50), cut in 1..4_usize) {
            let bytes = encode(&ids);
            prop_assert_eq!(decode(&bytes).map(Vec::from_iter), Some(ids.clone()));
            if !ids.is_empty() {
                prop_assert!(decode(&bytes[cut..]).is_none());
            }
        }
    }
}

//! The slow lane: how a router has an agent compute a long prompt in pieces, before it sends the
//! turn itself. An engine computes a prompt to its end before it begins the next; between pieces,
//! shorter prompts get their turn.
//!
//! The router posts the prompt's token ids, four little-endian bytes each, to [`PATH`] of the
//! agent's data port. The answer comes when all but a last piece is in the engine's cache, or when
//! it can't be, and says what is left; either way the router sends the turn then, as it would have.

use bytes::Bytes;
use http::{HeaderMap, HeaderName};

/// Where an agent takes prompts, beside the engine's routes.
pub const PATH: &str = "/berth/lane";

/// On the answer: how many tokens of the prompt are not in the cache.
pub const LEFT: HeaderName = HeaderName::from_static("x-berth-left-tokens");

/// As a 70B model on one node does, cautiously: until an engine's own rate is measured.
pub const PREFILL_TOKENS_PER_S_ASSUMED: u64 = 10_000;
/// A pass has a cost of its own: smaller pieces would be mostly that.
const PIECE_TOKENS_MIN: u64 = 256;

/// Bytes of a token id.
const ID_BYTES: usize = 4;

/// Tokens of a piece that takes so long, by how many the engine computes in a second.
#[must_use]
pub fn piece_tokens(piece_ms: u64, tokens_per_s: u64) -> u64 {
    (tokens_per_s.saturating_mul(piece_ms) / 1000).max(PIECE_TOKENS_MIN)
}

/// A prompt as it travels.
#[must_use]
pub fn encode(ids: &[u32]) -> Bytes {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// The token ids of such bytes, in order; none where they are no ids.
#[must_use]
pub fn decode(bytes: &[u8]) -> Option<impl ExactSizeIterator<Item = u32>> {
    let (ids, rest) = bytes.as_chunks::<ID_BYTES>();
    rest.is_empty().then(|| ids.iter().map(|id| u32::from_le_bytes(*id)))
}

/// What an answer says is left; none where it doesn't.
#[must_use]
pub fn left_tokens(headers: &HeaderMap) -> Option<u64> {
    headers.get(LEFT)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_piece_is_what_the_engine_computes_in_its_time() {
        assert_eq!(piece_tokens(600, 20_000), 12_000);
        assert_eq!(piece_tokens(600, 1), PIECE_TOKENS_MIN);
    }

    proptest! {
        #[test]
        fn ids_travel(ids in prop::collection::vec(any::<u32>(), 0..50), cut in 1..4_usize) {
            let bytes = encode(&ids);
            prop_assert_eq!(decode(&bytes).map(Vec::from_iter), Some(ids.clone()));
            if !ids.is_empty() {
                prop_assert!(decode(&bytes[cut..]).is_none());
            }
        }
    }
}

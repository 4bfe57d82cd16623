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
use http::{HeaderMap, HeaderName, HeaderValue};

/// The path for prompts to stage, on the agent's data port.
pub const PATH: &str = "/berth/staged-prefill";

/// Answer header: the number of the prompt's tokens that are not in the engine's cache.
pub const UNCACHED_TOKENS: HeaderName = HeaderName::from_static("x-berth-left-tokens");

/// Request header: the cache salt of the turn, with which its stages must be computed. The engine
/// shares KV only among requests with the same salt.
pub const CACHE_SALT: HeaderName = HeaderName::from_static("x-berth-cache-salt");
/// The longest salt in the header, in bytes. The router's own salts have 32.
const CACHE_SALT_BYTES_MAX: usize = 256;

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

/// Returns the header value for a salt; `None` if the salt is too long, or has other characters
/// than letters, digits and `- _`. Prompts with such a salt are not staged.
#[must_use]
pub fn salt_header(salt: &str) -> Option<HeaderValue> {
    let is_legal = !salt.is_empty()
        && salt.len() <= CACHE_SALT_BYTES_MAX
        && salt.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if is_legal { HeaderValue::from_str(salt).ok() } else { None }
}

/// Reads the [`CACHE_SALT`] header of a request; `None` if it is absent.
///
/// # Errors
/// When [`salt_header`] doesn't make such a header.
pub fn cache_salt(headers: &HeaderMap) -> Result<Option<String>, InvalidSalt> {
    let Some(value) = headers.get(CACHE_SALT) else { return Ok(None) };
    let salt = value.to_str().map_err(|_| InvalidSalt)?;
    salt_header(salt).map(|_| Some(salt.to_owned())).ok_or(InvalidSalt)
}

/// A salt in a header that isn't one of [`salt_header`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the {CACHE_SALT} header is no salt; only a router may send it")]
pub struct InvalidSalt;

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

    #[test]
    fn only_salts_that_can_stand_in_a_header_and_in_json_are_sent() {
        let salt = "0aZ-_".repeat(51);
        let mut headers = HeaderMap::new();
        assert_eq!(cache_salt(&headers), Ok(None));
        headers.insert(CACHE_SALT, salt_header(&salt).unwrap());
        assert_eq!(cache_salt(&headers), Ok(Some(salt)));
        for bad in ["", "a\"", "a\\", "é", "a b", "a\n", &"a".repeat(257)] {
            assert_eq!(salt_header(bad), None, "{bad:?}");
        }
        headers.insert(CACHE_SALT, HeaderValue::from_static("a\",\"x\":\""));
        assert_eq!(cache_salt(&headers), Err(InvalidSalt));
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

//! The HTTP request by which a router asks an agent to compute a long prompt in stages.
//!
//! An engine computes one prompt to its end before it begins another, so shorter prompts wait
//! behind a long one. In staged prefill, it computes them between two parts (stages) of the long
//! prompt.
//!
//! The router posts the prompt's token ids, four little-endian bytes each, before it sends the
//! prompt's turn. The agent answers when all stages but the last are in the engine's cache, or when
//! staging fails. In both cases the router then sends the turn as usual.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

/// A path of the agent's data port.
pub const PATH: &str = "/berth/staged-prefill";

/// An answer says how many tokens of the prompt are not in the engine's cache.
pub const UNCACHED_TOKENS: HeaderName = HeaderName::from_static("x-berth-left-tokens");

/// A request has the turn's cache salt, with which its stages must be computed. The engine shares
/// KV only among requests with the same salt.
pub const CACHE_SALT: HeaderName = HeaderName::from_static("x-berth-cache-salt");
/// The router's own salts have 32 bytes.
const CACHE_SALT_BYTES_MAX: usize = 256;

/// Assumed until the engine's own rate is measured: a cautious figure for a 70B model on one node.
pub const PREFILL_TOKENS_PER_S_ASSUMED: u64 = 10_000;
/// Each forward pass has a fixed cost, which would dominate smaller stages.
const STAGE_TOKENS_MIN: u64 = 256;

const TOKEN_ID_BYTES: usize = 4;

#[must_use]
pub fn stage_tokens(prefill_stage_ms: u64, tokens_per_s: u64) -> u64 {
    (tokens_per_s.saturating_mul(prefill_stage_ms) / 1000).max(STAGE_TOKENS_MIN)
}

#[must_use]
pub fn encode(ids: &[u32]) -> Bytes {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// `None` if the length isn't a multiple of four.
#[must_use]
pub fn decode(bytes: &[u8]) -> Option<impl ExactSizeIterator<Item = u32>> {
    let (ids, trailing_bytes) = bytes.as_chunks::<TOKEN_ID_BYTES>();
    trailing_bytes.is_empty().then(|| ids.iter().map(|id| u32::from_le_bytes(*id)))
}

/// `None` if the salt is too long, or has other characters than letters, digits and `- _`. Prompts
/// with such a salt are not staged.
#[must_use]
pub fn salt_header(salt: &str) -> Option<HeaderValue> {
    let is_legal = !salt.is_empty()
        && salt.len() <= CACHE_SALT_BYTES_MAX
        && salt.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if is_legal { HeaderValue::from_str(salt).ok() } else { None }
}

/// `None` if the header is absent.
pub fn cache_salt(headers: &HeaderMap) -> Result<Option<String>, InvalidSalt> {
    let Some(value) = headers.get(CACHE_SALT) else { return Ok(None) };
    let salt = value.to_str().map_err(|_| InvalidSalt)?;
    salt_header(salt).map(|_| Some(salt.to_owned())).ok_or(InvalidSalt)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the {CACHE_SALT} header is no salt; only a router may send it")]
pub struct InvalidSalt;

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

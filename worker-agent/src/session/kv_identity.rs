//! Names what the KV of a turn depends on besides its tokens and the weights, as one small value.
//!
//! The engine keeps the KV of requests with other adapters, cache salts or extra keys apart, but it
//! appends a turn to a streaming session whatever the turn names. So the table compares the value
//! of each turn with that of its session's KV. The value holds hashes, no text. A name doesn't tell
//! whether its adapter was replaced; `table::histories::losses` handles that.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvIdentity {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adapter: Option<u64>,
    /// The hash of the cache salt and the extra key; `None` without both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scope: Option<u128>,
    /// Whether the body doesn't say what the engine will take. Such a turn continues no KV.
    #[serde(skip)]
    is_unknown: bool,
}

impl KvIdentity {
    pub const NONE: Self = Self { adapter: None, scope: None, is_unknown: false };
    /// Matches no other, not even itself.
    pub const UNKNOWN: Self = Self { adapter: None, scope: None, is_unknown: true };

    /// An empty text counts as none, as for the engine.
    #[must_use]
    pub fn new(adapter: Option<&str>, cache_salt: Option<&str>, extra_key: Option<&str>) -> Self {
        let cache_salt = cache_salt.filter(|text| !text.is_empty());
        let extra_key = extra_key.filter(|text| !text.is_empty());
        let has_scope = cache_salt.is_some() || extra_key.is_some();
        Self {
            adapter: adapter.filter(|name| !name.is_empty()).map(hash_adapter),
            scope: has_scope.then(|| hash_scope(cache_salt, extra_key)),
            is_unknown: false,
        }
    }

    #[must_use]
    pub fn matches(self, other: Self) -> bool {
        self == other && self.is_known()
    }

    #[must_use]
    pub fn is_known(self) -> bool {
        !self.is_unknown
    }

    #[must_use]
    pub fn adapter(self) -> Option<u64> {
        self.adapter
    }
}

pub(super) fn hash_adapter(name: &str) -> u64 {
    u64::from_be_bytes(first_bytes(Sha256::digest(name).as_slice()))
}

/// Each text goes with its length, so that a part of one can't pass for a part of the other.
fn hash_scope(cache_salt: Option<&str>, extra_key: Option<&str>) -> u128 {
    let mut hasher = Sha256::new();
    for text in [cache_salt, extra_key] {
        let text = text.unwrap_or_default();
        hasher.update((text.len() as u64).to_be_bytes());
        hasher.update(text);
    }
    u128::from_be_bytes(first_bytes(hasher.finalize().as_slice()))
}

fn first_bytes<const N: usize>(digest: &[u8]) -> [u8; N] {
    *digest.first_chunk().expect("a SHA-256 has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_match_and_each_other_name_is_another_context() {
        let all = [
            KvIdentity::default(),
            KvIdentity::new(Some("sql"), None, None),
            KvIdentity::new(Some("sql2"), None, None),
            KvIdentity::new(None, Some("sql"), None),
            KvIdentity::new(None, None, Some("sql")),
            KvIdentity::new(None, Some("a"), Some("bc")),
            KvIdentity::new(None, Some("ab"), Some("c")),
            KvIdentity::new(Some("sql"), Some("ab"), Some("c")),
        ];
        for (n, one) in all.iter().enumerate() {
            for (m, other) in all.iter().enumerate() {
                assert_eq!(one.matches(*other), n == m, "{n} and {m}");
            }
            let line = serde_json::to_string(one).unwrap();
            assert_eq!(serde_json::from_str::<KvIdentity>(&line).unwrap(), *one, "{line}");
        }
        assert!(!KvIdentity::UNKNOWN.matches(KvIdentity::UNKNOWN));
    }

    #[test]
    fn an_empty_text_is_none() {
        let empty = KvIdentity::new(Some(""), Some(""), Some(""));
        assert!(empty.matches(KvIdentity::default()));
    }
}

//! The engine's block hash: SHA-256, chained over the pages of a prefix.

use super::super::request::Space;
use sha2::{Digest as _, Sha256};

/// A page's digest, the input of the next page's digest. The first eight bytes are the page's name
/// in events.
pub(in super::super) type BlockDigest = [u8; 32];

/// Returns the digest to which the first page of a prefix is chained: none, unless the caller has a
/// salt. An extra key separates prefixes in the tree but does not change their hashes.
pub(in super::super) fn seed(space: &Space) -> Option<BlockDigest> {
    let salt = space.cache_salt.as_ref()?;
    let tagged = Sha256::new().chain_update(b"sglang-cache-salt-v1\0");
    Some(tagged.chain_update(salt.as_bytes()).finalize().into())
}

/// Returns the digests of the full pages of `tokens`, in order.
pub(in super::super) fn chain(
    mut previous: Option<BlockDigest>,
    tokens: &[u32],
    page_size: usize,
) -> Vec<BlockDigest> {
    let page = |tokens: &[u32]| {
        let mut hash = Sha256::new();
        if let Some(previous) = previous {
            hash.update(previous);
        }
        tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        let digest: BlockDigest = hash.finalize().into();
        previous = Some(digest);
        digest
    };
    tokens.chunks_exact(page_size).map(page).collect()
}

/// Returns the name of a page in events.
pub(in super::super) fn name(digest: &BlockDigest) -> i64 {
    let first = digest.first_chunk().expect("a digest has 32 bytes");
    i64::from_be_bytes(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(salt: Option<&str>, tokens: std::ops::RangeInclusive<u32>, page: usize) -> Vec<i64> {
        let space = Space { cache_salt: salt.map(str::to_owned), ..Space::default() };
        let tokens: Vec<u32> = tokens.collect();
        chain(seed(&space), &tokens, page).iter().map(name).collect()
    }

    /// The expected names were published by a real engine or computed by its rule.
    #[test]
    fn names_are_the_engine_s() {
        let table = [
            (None, 1..=8, 4, vec![-3_488_128_144_981_237_669, 5_674_439_469_042_975_057]),
            (
                None,
                1..=3,
                1,
                vec![
                    7_470_307_888_890_966_271,
                    -1_634_645_291_211_865_391,
                    7_325_169_757_385_981_536,
                ],
            ),
            (None, 100..=115, 16, vec![3_783_480_490_812_179_100]),
            (None, 70..=101, 16, vec![4_380_312_118_098_159_035, -7_597_334_153_683_123_947]),
            (
                Some("tenant-a"),
                1..=8,
                4,
                vec![3_718_046_898_735_569_995, 3_308_615_664_605_479_373],
            ),
        ];
        for (salt, tokens, page, expected) in table {
            assert_eq!(names(salt, tokens, page), expected);
        }
    }

    #[test]
    fn a_partial_page_has_no_name() {
        assert_eq!(names(None, 1..=7, 4), names(None, 1..=4, 4));
    }
}

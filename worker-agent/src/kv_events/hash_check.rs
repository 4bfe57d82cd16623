//! Checks the page hashes in the engine's KV events against the pages' tokens.
//!
//! SGLang computes a page's SHA-256 digest from the digest of the page before it and from the
//! page's own tokens. An event has the digest's first 64 bits.

use std::collections::{HashMap, VecDeque};

use sha2::{Digest as _, Sha256};

use super::decode::{PageHash, Stored};

/// These take about three megabytes. A page whose parent's digest was dropped can't be checked.
const DIGESTS_MAX: usize = 32_768;
/// The engine hashes it before a client's cache salt.
const SALT_TAG: &[u8] = b"sglang-cache-salt-v1\0";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Right,
    /// The tokens differ, or the engine hashes by another rule.
    Wrong,
    /// The parent's digest was dropped, or the pages belong to a LoRA adapter: then the hash also
    /// covers a value that the events don't contain.
    Unknown,
}

type PageDigest = [u8; 32];

#[derive(Debug, Default)]
pub struct Verifier {
    digests: HashMap<PageHash, PageDigest>,
    oldest_first: VecDeque<PageHash>,
}

impl Verifier {
    pub fn check(&mut self, stored: &Stored) -> Verdict {
        if stored.lora.is_some() {
            return Verdict::Unknown;
        }
        let mut parent_digest = match (stored.parent, &stored.cache_salt) {
            (None, None) => None,
            (None, Some(salt)) => {
                Some(Sha256::new().chain_update(SALT_TAG).chain_update(salt).finalize().into())
            }
            (Some(parent), _) => match self.digests.get(&parent) {
                Some(digest) => Some(*digest),
                None => return Verdict::Unknown,
            },
        };
        let page_tokens = stored.tokens.chunks(stored.page_tokens as usize);
        let first_tokens = page_tokens.clone().skip(1).map(|tokens| tokens[0]);
        let tokens_after = first_tokens.map(Some).chain([stored.next_token]);
        for ((page, tokens), token_after) in stored.pages.iter().zip(page_tokens).zip(tokens_after)
        {
            // `next_token` is present only if the engine hashes token pairs.
            let token_after = stored.next_token.and(token_after);
            let digest = hash_page(parent_digest, tokens, token_after);
            if page_hash_of(digest) != *page {
                return Verdict::Wrong;
            }
            self.remember(*page, digest);
            parent_digest = Some(digest);
        }
        Verdict::Right
    }

    fn remember(&mut self, page: PageHash, digest: PageDigest) {
        if self.digests.insert(page, digest).is_some() {
            return;
        }
        self.oldest_first.push_back(page);
        if self.oldest_first.len() > DIGESTS_MAX {
            let oldest = self.oldest_first.pop_front().expect("the queue is longer than its bound");
            self.digests.remove(&oldest);
        }
    }
}

fn page_hash_of(digest: PageDigest) -> PageHash {
    let (first_bytes, _) = digest.split_first_chunk().expect("a digest has 32 bytes");
    PageHash(u64::from_be_bytes(*first_bytes))
}

/// `token_after` is the token after the page, if the engine hashes token pairs.
fn hash_page(
    parent_digest: Option<PageDigest>,
    tokens: &[u64],
    token_after: Option<u64>,
) -> PageDigest {
    let mut hasher = Sha256::new();
    if let Some(parent_digest) = parent_digest {
        hasher.update(parent_digest);
    }
    // If a token needs more than four bytes, the engine hashes a mark and eight bytes of each.
    let mut all_tokens = tokens.iter().chain(&token_after);
    let is_wide = all_tokens.any(|&token| u32::try_from(token).is_err());
    if is_wide {
        hasher.update([0xff]);
    }
    let mut hash_token = |token: u64| {
        let bytes = token.to_le_bytes();
        hasher.update(if is_wide { &bytes[..] } else { &bytes[..4] });
    };
    match token_after {
        None => tokens.iter().for_each(|&token| hash_token(token)),
        Some(token_after) => {
            let following = tokens[1..].iter().copied().chain([token_after]);
            tokens.iter().zip(following).for_each(|(&token, next_token)| {
                hash_token(token);
                hash_token(next_token);
            });
        }
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::{super::decode::Medium, *};

    fn stored(tokens: &[u64], page_tokens: u32, pages: &[i64]) -> Stored {
        Stored {
            pages: pages.iter().map(|page| PageHash(page.cast_unsigned())).collect(),
            parent: None,
            tokens: tokens.to_vec(),
            next_token: None,
            page_tokens,
            medium: Medium::Gpu,
            lora: None,
            cache_salt: None,
        }
    }

    fn salted(tokens: &[u64], page_tokens: u32, pages: &[i64]) -> Stored {
        Stored { cache_salt: Some("tenant-a".to_owned()), ..stored(tokens, page_tokens, pages) }
    }

    fn upto(from: u64, to: u64) -> Vec<u64> {
        (from..=to).collect()
    }

    #[test]
    fn hashes_are_what_the_engine_says() {
        let live = [58, 94, 246, 96, 32, 49, 180, 11, 21, 35, 63, 207, 129, 53, 102, 164];
        let eight = [-3_488_128_144_981_237_669, 5_674_439_469_042_975_057];
        let three =
            [7_470_307_888_890_966_271, -1_634_645_291_211_865_391, 7_325_169_757_385_981_536];
        let two = [4_380_312_118_098_159_035, -7_597_334_153_683_123_947];
        let salted_eight = [3_718_046_898_735_569_995, 3_308_615_664_605_479_373];
        let pairs = [-1_303_529_142_941_650_691, 7_461_429_976_246_528_554];
        let pairs = Stored { next_token: Some(5), ..stored(&upto(1, 4), 2, &pairs) };
        for right in [
            stored(&upto(1, 8), 4, &eight),
            stored(&upto(1, 3), 1, &three),
            stored(&upto(100, 115), 16, &[3_783_480_490_812_179_100]),
            stored(&upto(70, 101), 16, &two),
            stored(&live, 16, &[-2_412_557_082_921_441_767]),
            salted(&live, 16, &[52_338_890_174_869_915]),
            salted(&upto(1, 8), 4, &salted_eight),
            pairs,
        ] {
            assert_eq!(Verifier::default().check(&right), Verdict::Right, "{right:?}");
            let mut wrong = right.clone();
            wrong.tokens[1] += 1;
            assert_eq!(Verifier::default().check(&wrong), Verdict::Wrong, "{wrong:?}");
        }
    }

    #[test]
    fn a_page_is_checked_where_its_parent_is_known() {
        let mut verifier = Verifier::default();
        let whole =
            stored(&upto(70, 101), 16, &[4_380_312_118_098_159_035, -7_597_334_153_683_123_947]);
        let (mut first, mut second) = (whole.clone(), whole.clone());
        (first.pages, first.tokens) = (whole.pages[..1].to_vec(), upto(70, 85));
        (second.pages, second.tokens) = (whole.pages[1..].to_vec(), upto(86, 101));
        second.parent = Some(whole.pages[0]);
        assert_eq!(verifier.check(&second), Verdict::Unknown);
        assert_eq!(verifier.check(&first), Verdict::Right);
        assert_eq!(verifier.check(&second), Verdict::Right);
        second.lora = Some("sql".to_owned());
        assert_eq!(verifier.check(&second), Verdict::Unknown);
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let mut verifier = Verifier::default();
        for page in 0..2 * DIGESTS_MAX as u64 {
            verifier.remember(PageHash(page), [0; 32]);
        }
        assert_eq!(
            (verifier.digests.len(), verifier.oldest_first.len()),
            (DIGESTS_MAX, DIGESTS_MAX)
        );
        assert!(verifier.digests.contains_key(&PageHash(2 * DIGESTS_MAX as u64 - 1)));
    }
}

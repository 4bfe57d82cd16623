//! Cuts prompts into routing blocks, so that agents and routers name the same parts of a prompt.
//!
//! A routing block is 64 tokens of a prompt, or one page of the engine's KV pool if the engine has
//! larger pages.
//!
//! A block's hash also covers all tokens before the block, so one hash identifies a whole prefix:
//!
//! ```text
//! root    = xxh3(version ‖ tokens per block: u32 ‖ lora ‖ namespace ‖ cache salt)
//! sum(b)  = Σ token i × K[i], modulo 2^64; K[i] is the i-th output of SplitMix64 with bit 0 set
//! hash(b) = xxh3(hash of the previous block, or root ‖ sum(b)), then `group` and `index` set:
//!
//! 63           40 39                        3 2       0
//! | group        | own                       | index  |
//! ```
//!
//! - `index` is the number of blocks before the block in its prompt, modulo 8.
//! - `group` holds hash bits of the group's first block, the one with `index` 0. All eight blocks
//!   have the same `group`, so an index finds all of them by one entry.
//! - `own` holds bits of the block's own hash.
//!
//! The root stands before the first block, and has `index` 7. It covers what keeps the KV of equal
//! tokens apart ([`Scheme`]): each text is `00` if absent, else `01 ‖ length: u64 ‖ bytes`. All
//! integers are little-endian.
//!
//! The engine's page size and page hashes are not part of the identity, so all engines with pages
//! of 1 to 64 tokens have the same block hashes. The sum can be continued from any token, so code
//! that follows an engine's pages keeps an eight-byte sum for a partial block, and not its tokens.
//! The hash is not cryptographic: a client that makes two prompts collide causes a wrong guess
//! about where KV is, and can't read that KV.

use xxhash_rust::xxh3::xxh3_64;

use crate::table::KEY_BITS;

/// Every root has it. Raise it when the hash rule changes.
const VERSION: u8 = 1;

/// Engines with smaller pages have blocks of this size too. Long blocks keep lists short: a prompt
/// of 128k tokens has 2,048 blocks. Short blocks lose less at a prompt's end, where half a block
/// isn't counted on average: 32 tokens take about a millisecond of prefill.
pub const BLOCK_TOKENS_MIN: u32 = 64;
/// Engines have pages of 1 to 256 tokens.
pub const BLOCK_TOKENS_MAX: u32 = 256;

/// The factors `K[i]` of a block's token sum, by a token's position in its block.
const TOKEN_FACTORS: [u64; BLOCK_TOKENS_MAX as usize] = {
    let mut factors = [0; BLOCK_TOKENS_MAX as usize];
    // The seed is the ASCII bytes of "berth_kv".
    let mut state = 0x6265_7274_685f_6b76_u64;
    let mut index = 0;
    while index < factors.len() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        factors[index] = (mixed ^ (mixed >> 31)) | 1;
        index += 1;
    }
    factors
};

/// The page size, in tokens, is 0 or above [`BLOCK_TOKENS_MAX`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a page has 1 to {BLOCK_TOKENS_MAX} tokens, this one has {0}; set the engine's page size")]
pub struct Error(pub u32);

/// The identity of a block together with everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// Says which memory of a worker has a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    Device,
    /// The engine uses this KV after it has copied it to the device.
    Host,
}

pub const GROUP_BLOCKS: usize = 8;
/// Hash bits in `group`, which is a key in a [`crate::table::RunTable`]. In an index of a hundred
/// million blocks, less than one other group has the same key on average.
const GROUP_BITS: u32 = KEY_BITS;
const INDEX_BITS: u32 = 3;
const OWN_BITS: u32 = 64 - GROUP_BITS - INDEX_BITS;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
const GROUP_MASK: u64 = u64::MAX << (64 - GROUP_BITS);

impl BlockHash {
    #[must_use]
    pub fn index_in_group(self) -> usize {
        usize::from(self.0.to_le_bytes()[0]) % GROUP_BLOCKS
    }

    /// All blocks of a group have the same key.
    #[must_use]
    pub fn group_key(self) -> u64 {
        self.0 >> (64 - GROUP_BITS)
    }

    /// The upper bits of `own`.
    #[must_use]
    pub fn own_key(self) -> u64 {
        (self.0 & !GROUP_MASK) >> (INDEX_BITS + OWN_BITS - GROUP_BITS)
    }

    /// Without a parent, whether this block can be a prompt's first block. Compares only group and
    /// index, because the other bits can't be checked without the block's tokens.
    #[must_use]
    pub fn can_follow(self, parent: Option<Self>) -> bool {
        let expected_index =
            parent.map_or(0, |parent| (parent.index_in_group() + 1) % GROUP_BLOCKS);
        let same_group_parent = parent.filter(|_| expected_index > 0);
        let expected_group = same_group_parent.map_or(self.group_key(), Self::group_key);
        self.index_in_group() == expected_index && self.group_key() == expected_group
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockTokens(u32);

impl BlockTokens {
    pub fn for_page(page_tokens: u32) -> Result<Self, Error> {
        match page_tokens {
            1..=BLOCK_TOKENS_MAX => Ok(Self(page_tokens.max(BLOCK_TOKENS_MIN))),
            _ => Err(Error(page_tokens)),
        }
    }

    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }
}

/// Everything besides tokens that a block's identity depends on.
#[derive(Debug, Clone, Copy)]
pub struct Scheme<'a> {
    pub block_tokens: BlockTokens,
    pub lora: Option<&'a str>,
    /// The request's extra key.
    pub namespace: Option<&'a str>,
    pub cache_salt: Option<&'a str>,
}

impl Scheme<'_> {
    #[must_use]
    pub fn plain(block_tokens: BlockTokens) -> Self {
        Self { block_tokens, lora: None, namespace: None, cache_salt: None }
    }

    /// Stands before a prompt's first block.
    #[must_use]
    pub fn root(&self) -> BlockHash {
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&self.block_tokens.0.to_le_bytes());
        for part in [self.lora, self.namespace, self.cache_salt] {
            let Some(text) = part else {
                bytes.push(0);
                continue;
            };
            bytes.push(1);
            bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
        BlockHash(xxh3_64(&bytes) | INDEX_MASK)
    }
}

/// `parent` is a block or a root. `token_sum` is `sum(b)` of the module's documentation.
#[must_use]
pub fn hash_after(parent: BlockHash, token_sum: u64) -> BlockHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&parent.0.to_le_bytes());
    bytes[8..].copy_from_slice(&token_sum.to_le_bytes());
    let hash = xxh3_64(&bytes) & !INDEX_MASK;
    match parent.0.wrapping_add(1) & INDEX_MASK {
        0 => BlockHash(hash),
        index => BlockHash(parent.0 & GROUP_MASK | hash & !GROUP_MASK | index),
    }
}

/// Hashes the blocks of a growing prompt, without hashing a token twice. A copy of a chain
/// continues from the point at which it was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    block_tokens: usize,
    /// The hash of the last full block, or the root.
    last_hash: BlockHash,
    full_blocks: u64,
    partial_tokens: usize,
    partial_sum: u64,
}

impl Chain {
    #[must_use]
    pub fn new(scheme: &Scheme<'_>) -> Self {
        let block_tokens = scheme.block_tokens.0 as usize;
        let last_hash = scheme.root();
        Self { block_tokens, last_hash, full_blocks: 0, partial_tokens: 0, partial_sum: 0 }
    }

    /// The chain of a prompt that was hashed before, up to `tokens` tokens. `last_hash` and
    /// `partial_sum` are what the methods of these names returned at that point.
    #[must_use]
    pub fn resume(
        block_tokens: BlockTokens,
        last_hash: BlockHash,
        tokens: u64,
        partial_sum: u64,
    ) -> Self {
        let full_blocks = tokens / u64::from(block_tokens.0);
        let partial_tokens = usize::try_from(tokens % u64::from(block_tokens.0))
            .expect("a block has at most 256 tokens");
        let block_tokens = block_tokens.0 as usize;
        Self { block_tokens, last_hash, full_blocks, partial_tokens, partial_sum }
    }

    /// Returns the root, if there is no full block.
    #[must_use]
    pub fn last_hash(&self) -> BlockHash {
        self.last_hash
    }

    /// The weighted sum of the tokens after the last full block.
    #[must_use]
    pub fn partial_sum(&self) -> u64 {
        self.partial_sum
    }

    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.full_blocks * self.block_tokens as u64 + self.partial_tokens as u64
    }

    /// Appends to `hashes` the hash of each block that the tokens fill.
    pub fn push(&mut self, tokens: &[u32], hashes: &mut Vec<BlockHash>) {
        hashes.reserve((self.partial_tokens + tokens.len()) / self.block_tokens);
        let mut remaining = tokens;
        while !remaining.is_empty() {
            let missing_tokens = self.block_tokens - self.partial_tokens;
            let (in_block, after_block) = remaining.split_at(missing_tokens.min(remaining.len()));
            let tokens_and_factors = in_block.iter().zip(&TOKEN_FACTORS[self.partial_tokens..]);
            self.partial_sum = tokens_and_factors
                .fold(self.partial_sum, |sum, (&token, factor)| {
                    sum.wrapping_add(u64::from(token).wrapping_mul(*factor))
                });
            self.partial_tokens += in_block.len();
            if self.partial_tokens == self.block_tokens {
                self.last_hash = hash_after(self.last_hash, self.partial_sum);
                hashes.push(self.last_hash);
                self.full_blocks += 1;
                (self.partial_tokens, self.partial_sum) = (0, 0);
            }
            remaining = after_block;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plain(page_tokens: u32) -> Scheme<'static> {
        Scheme::plain(BlockTokens::for_page(page_tokens).unwrap())
    }

    fn hashed(scheme: &Scheme<'_>, parts: &[&[u32]]) -> Vec<BlockHash> {
        let (mut chain, mut hashes) = (Chain::new(scheme), vec![]);
        for part in parts {
            chain.push(part, &mut hashes);
        }
        let tokens: usize = parts.iter().map(|part| part.len()).sum();
        assert_eq!(chain.tokens(), tokens as u64);
        hashes
    }

    /// The rule of the module's documentation, computed step by step.
    fn hashed_by_the_rule(scheme: &Scheme<'_>, tokens: &[u32]) -> Vec<BlockHash> {
        let (mut last, mut group, mut index) = (scheme.root().0, 0, 0);
        let blocks = tokens.chunks_exact(scheme.block_tokens.get() as usize);
        let hash = |block: &[u32]| {
            let terms = block.iter().zip(TOKEN_FACTORS);
            let terms = terms.map(|(&token, factor)| u128::from(token) * u128::from(factor));
            let sum = u64::try_from(terms.sum::<u128>() % (1 << 64)).unwrap();
            last = xxh3_64(&[last.to_le_bytes(), sum.to_le_bytes()].concat()) / 8 * 8 + index % 8;
            if index % 8 > 0 {
                last = group + last % (1 << 40);
            }
            group = last >> 40 << 40;
            index += 1;
            BlockHash(last)
        };
        blocks.map(hash).collect()
    }

    /// Agents and routers of different releases compare these hashes: they may change only with
    /// `VERSION`.
    #[test]
    fn block_hashes_stay_the_same_between_releases() {
        let tokens: Vec<u32> = (0..640).collect();
        let lora = Scheme { lora: Some("sql"), ..plain(16) };
        let spaced = Scheme { namespace: Some("a"), cache_salt: Some("b"), ..plain(16) };
        let hex =
            |scheme: &Scheme<'_>, at: usize| format!("{:016x}", hashed(scheme, &[&tokens])[at].0);
        assert_eq!(hex(&plain(16), 0), "5dbe2c189668cb30");
        assert_eq!(hex(&plain(16), 1), "5dbe2c41abb45f79");
        assert_eq!(hex(&plain(16), 7), "5dbe2c724c81541f");
        assert_eq!(hex(&plain(16), 8), "7794c39cc5b543b8");
        assert_eq!(hex(&plain(16), 9), "7794c34642822d79");
        assert_eq!(hex(&plain(128), 1), "19f05f5409d77239");
        assert_eq!(hex(&lora, 1), "7be7fd7ef1f29a21");
        assert_eq!(hex(&spaced, 1), "6a8a5533d5d09b89");
    }

    #[test]
    fn a_block_is_64_tokens_or_the_page() {
        let tokens = |page| BlockTokens::for_page(page).map(BlockTokens::get);
        assert_eq!([tokens(1), tokens(64), tokens(65)], [Ok(64), Ok(64), Ok(65)]);
        assert_eq!(
            [tokens(256), tokens(0), tokens(257)],
            [Ok(256), Err(Error(0)), Err(Error(257))]
        );
    }

    #[test]
    fn different_schemes_have_different_roots() {
        let (a, b) = (Some("a"), Some("b"));
        let schemes = [
            plain(1),
            plain(128),
            Scheme { lora: a, ..plain(1) },
            Scheme { namespace: a, ..plain(1) },
            Scheme { cache_salt: a, ..plain(1) },
            Scheme { lora: Some(""), ..plain(1) },
            Scheme { lora: a, namespace: b, ..plain(1) },
            Scheme { lora: Some("ab"), namespace: Some(""), ..plain(1) },
        ];
        let mut roots: Vec<BlockHash> = schemes.iter().map(Scheme::root).collect();
        roots.sort_unstable();
        roots.dedup();
        assert_eq!(roots.len(), schemes.len());
    }

    proptest! {
        #[test]
        fn a_prompt_in_parts_has_the_same_hashes_as_in_one(
            tokens in prop::collection::vec(any::<u32>(), 0..900),
            cuts in prop::collection::vec(0..900_usize, 0..8),
            page_tokens in 1..=256_u32,
        ) {
            let scheme = plain(page_tokens);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
            cuts.extend([0, tokens.len()]);
            cuts.sort_unstable();
            let parts: Vec<&[u32]> = cuts.windows(2).map(|ends| &tokens[ends[0]..ends[1]]).collect();
            let hashes = hashed(&scheme, &parts);
            prop_assert_eq!(&hashes, &hashed_by_the_rule(&scheme, &tokens));
            let (mut resumed, mut chain) = (vec![], Chain::new(&scheme));
            for part in parts {
                let (last_hash, sum) = (chain.last_hash(), chain.partial_sum());
                chain = Chain::resume(scheme.block_tokens, last_hash, chain.tokens(), sum);
                chain.push(part, &mut resumed);
            }
            prop_assert_eq!(&resumed, &hashes);
            let mut parent = None;
            for hash in hashes {
                prop_assert!(hash.can_follow(parent));
                parent = Some(hash);
            }
        }

        #[test]
        fn a_changed_token_changes_its_block_and_all_later_ones(
            tokens in prop::collection::vec(any::<u32>(), 192),
            at in 0..192_usize,
        ) {
            let mut other = tokens.clone();
            other[at] ^= 1;
            let (one, two) = (hashed(&plain(1), &[&tokens]), hashed(&plain(1), &[&other]));
            let same = one.iter().zip(&two).take_while(|(one, two)| one == two).count();
            let equal = one.iter().zip(&two).filter(|(one, two)| one == two).count();
            prop_assert_eq!((same, equal), (at / 64, at / 64));
        }
    }
}

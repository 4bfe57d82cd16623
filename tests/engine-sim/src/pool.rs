//! The paged KV pool: page ids, the free list, and the content of each slot.
//!
//! The "KV" of a token is its token id, written into the slot. The digest of a row's pages stands
//! for the attention over them, so reading a wrong page changes the answer. Page 0 is padding and
//! never free.

/// Base of the polynomial digest. It is odd, so that multiplication modulo 2^64 is invertible.
const BASE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The pages of one rank.
#[derive(Debug)]
pub(super) struct PagePool {
    page_size: usize,
    slots: Vec<u32>,
    /// The digest of each page: the sum of (token + 1) x BASE^offset over its slots. `write`
    /// updates it.
    digests: Vec<u64>,
    powers: Vec<u64>,
    /// The free pages. The pool takes pages from the end, so that freed pages are reused first and
    /// a page with two owners shows at once.
    free: Vec<u32>,
}

impl PagePool {
    pub(super) fn new(pages: u32, page_size: usize) -> PagePool {
        assert!(page_size.is_power_of_two(), "page size {page_size} is not a power of two");
        let powers = std::iter::successors(Some(1u64), |p| Some(p.wrapping_mul(BASE)));
        let powers: Vec<u64> = powers.take(page_size).collect();
        let slots = (pages as usize + 1) * page_size;
        PagePool {
            page_size,
            slots: vec![0; slots],
            digests: vec![powers.iter().fold(0, |a, &p| a.wrapping_add(p)); pages as usize + 1],
            powers,
            free: (1..=pages).rev().collect(),
        }
    }

    /// Returns the number of pages, without the padding page.
    pub(super) fn pages(&self) -> usize {
        self.digests.len() - 1
    }

    pub(super) fn free_pages(&self) -> &[u32] {
        &self.free
    }

    /// Returns the number of pages that `tokens` tokens occupy.
    pub(super) fn pages_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size)
    }

    pub(super) fn take_page(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub(super) fn return_pages(&mut self, pages: impl IntoIterator<Item = u32>) {
        self.free.extend(pages);
        debug_assert!(self.free.len() <= self.pages(), "more pages freed than exist");
    }

    /// Copies a page with its KV from another pool.
    pub(super) fn copy_page(&mut self, from: &PagePool, page: u32, to: u32) {
        let slots = |page: u32| {
            let first = page as usize * self.page_size;
            first..first + self.page_size
        };
        let (source, target) = (slots(page), slots(to));
        self.slots[target].copy_from_slice(&from.slots[source]);
        self.digests[to as usize] = from.digests[page as usize];
    }

    /// Writes the KV of `token` at position `at` of the row made of `pages`.
    pub(super) fn write(&mut self, pages: &[u32], at: usize, token: u32) {
        let page = pages[at / self.page_size] as usize;
        let offset = at % self.page_size;
        let slot = &mut self.slots[page * self.page_size + offset];
        let change = u64::from(token).wrapping_sub(u64::from(*slot));
        *slot = token;
        let term = change.wrapping_mul(self.powers[offset]);
        self.digests[page] = self.digests[page].wrapping_add(term);
    }

    /// Returns the digest of the first `len` tokens that the pages actually hold. The digest
    /// doesn't depend on the page size, so every worker gives the same answer to the same context.
    pub(super) fn digest(&self, pages: &[u32], len: usize) -> u64 {
        let full = (len / self.page_size).min(pages.len());
        let page_power = self.powers[self.page_size - 1].wrapping_mul(BASE);
        let (mut digest, mut power) = (0u64, 1u64);
        for &page in &pages[..full] {
            digest = digest.wrapping_add(self.digests[page as usize].wrapping_mul(power));
            power = power.wrapping_mul(page_power);
        }
        if let Some(&page) = pages.get(full) {
            let start = page as usize * self.page_size;
            let tail = &self.slots[start..start + len % self.page_size];
            for (&token, &at) in tail.iter().zip(&self.powers) {
                let term = (u64::from(token) + 1).wrapping_mul(at).wrapping_mul(power);
                digest = digest.wrapping_add(term);
            }
        }
        scramble(digest ^ len as u64)
    }
}

/// The digest of a token sequence outside the pool; equals the digest of a row with these tokens.
#[derive(Debug)]
pub(super) struct TokenDigest {
    sum: u64,
    power: u64,
    len: u64,
}

impl Default for TokenDigest {
    fn default() -> TokenDigest {
        TokenDigest { sum: 0, power: 1, len: 0 }
    }
}

impl TokenDigest {
    pub(super) fn push(&mut self, token: u32) {
        let term = (u64::from(token) + 1).wrapping_mul(self.power);
        self.sum = self.sum.wrapping_add(term);
        self.power = self.power.wrapping_mul(BASE);
        self.len += 1;
    }

    pub(super) fn value(&self) -> u64 {
        scramble(self.sum ^ self.len)
    }
}

/// One round of a multiply-xorshift mixer: every input bit affects every output bit.
pub(super) fn scramble(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_follows_contents() {
        let mut pool = PagePool::new(4, 4);
        for at in 0..6 {
            pool.write(&[1, 2], at, 10 + u32::try_from(at).unwrap());
            pool.write(&[3, 4], at, 10 + u32::try_from(at).unwrap());
        }
        assert_eq!(pool.digest(&[1, 2], 6), pool.digest(&[3, 4], 6));
        assert_ne!(pool.digest(&[1, 2], 6), pool.digest(&[1, 2], 5));
        let before = pool.digest(&[1, 2], 4);
        pool.write(&[3], 2, 99);
        assert_eq!(pool.digest(&[1], 4), before);
        assert_ne!(pool.digest(&[1, 2], 6), pool.digest(&[3, 2], 6));
        let mut small = PagePool::new(6, 1);
        for at in 0..6 {
            small.write(&[6, 5, 4, 3, 2, 1], at, 10 + u32::try_from(at).unwrap());
        }
        assert_eq!(small.digest(&[6, 5, 4, 3, 2, 1], 6), pool.digest(&[1, 2], 6));
        let mut bare = TokenDigest::default();
        (0..6).for_each(|at| bare.push(10 + at));
        assert_eq!(bare.value(), pool.digest(&[1, 2], 6));
    }
}

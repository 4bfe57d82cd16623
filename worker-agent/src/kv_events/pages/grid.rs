//! Converts between page numbers and block numbers of a prompt, for the index of resident pages.
//!
//! Both are numbered from 0 and begin at token 0. A page is never larger than a block. If the page
//! size doesn't divide the block size, some blocks end inside a page.

use std::ops::Range;

use blocks::block::BlockTokens;

#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    page_tokens: usize,
    block_tokens: usize,
}

impl Grid {
    pub(super) fn new(page_tokens: u32, block_tokens: BlockTokens) -> Self {
        Self { page_tokens: page_tokens as usize, block_tokens: block_tokens.get() as usize }
    }

    pub(super) fn page_tokens(&self) -> u32 {
        u32::try_from(self.page_tokens).expect("`new` took it from a u32")
    }

    pub(super) fn page_is_block(&self) -> bool {
        self.page_tokens == self.block_tokens
    }

    /// In a prompt's first `pages` pages.
    pub(super) fn tokens_in(&self, pages: usize) -> u64 {
        pages as u64 * self.page_tokens as u64
    }

    /// Within a prompt's first `pages` pages.
    pub(super) fn blocks_ended_in(&self, pages: usize) -> usize {
        pages * self.page_tokens / self.block_tokens
    }

    pub(super) fn pages_of(&self, block: usize) -> Range<usize> {
        let (first_token, end_token) = (block * self.block_tokens, (block + 1) * self.block_tokens);
        first_token / self.page_tokens..end_token.div_ceil(self.page_tokens)
    }

    pub(super) fn blocks_touching(&self, from: usize, to: usize) -> Range<usize> {
        let (first_token, end_token) = (from * self.page_tokens, to * self.page_tokens);
        first_token / self.block_tokens..end_token.div_ceil(self.block_tokens)
    }
}

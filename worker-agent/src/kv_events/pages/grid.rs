//! Converts between page counts and block counts.
//!
//! Both begin at token 0, and a page is never larger than a block. If the page size doesn't divide
//! the block size, blocks end inside pages.

use std::ops::Range;

use proto::block::BlockTokens;

/// The sizes of pages and blocks, in tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    page: usize,
    block: usize,
}

impl Grid {
    pub(super) fn new(page_tokens: u32, block_tokens: BlockTokens) -> Self {
        Self { page: page_tokens as usize, block: block_tokens.get() as usize }
    }

    pub(super) fn page_tokens(&self) -> u32 {
        u32::try_from(self.page).expect("`new` took it from a u32")
    }

    /// Whether every page is exactly one block.
    pub(super) fn page_is_block(&self) -> bool {
        self.page == self.block
    }

    /// Returns the number of tokens in `pages` pages.
    pub(super) fn tokens(&self, pages: usize) -> u64 {
        pages as u64 * self.page as u64
    }

    /// Returns the number of blocks that end within the first `pages` pages.
    pub(super) fn blocks(&self, pages: usize) -> usize {
        pages * self.page / self.block
    }

    /// Returns the pages that contain tokens of a block.
    pub(super) fn pages_of(&self, block: usize) -> Range<usize> {
        block * self.block / self.page..((block + 1) * self.block).div_ceil(self.page)
    }

    /// Returns the blocks that contain tokens of the pages `from..to`.
    pub(super) fn blocks_over(&self, from: usize, to: usize) -> Range<usize> {
        from * self.page / self.block..(to * self.page).div_ceil(self.block)
    }
}

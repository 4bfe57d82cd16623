//! How pages and blocks lie over one another: both begin at token 0, and a page is never larger
//! than a block. Pages that don't divide a block have ends of blocks inside them.

use std::ops::Range;

use proto::block::BlockTokens;

/// The sizes, in tokens.
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
        u32::try_from(self.page).expect("it was one")
    }

    /// Whether every page is a block.
    pub(super) fn is_whole(&self) -> bool {
        self.page == self.block
    }

    /// Tokens of so many pages.
    pub(super) fn tokens(&self, pages: usize) -> u64 {
        pages as u64 * self.page as u64
    }

    /// Blocks that have ended after so many pages.
    pub(super) fn blocks(&self, pages: usize) -> usize {
        pages * self.page / self.block
    }

    /// The pages that have tokens of a block.
    pub(super) fn pages_of(&self, block: usize) -> Range<usize> {
        block * self.block / self.page..((block + 1) * self.block).div_ceil(self.page)
    }

    /// The blocks that have tokens of pages from one to before another.
    pub(super) fn blocks_over(&self, from: usize, to: usize) -> Range<usize> {
        from * self.page / self.block..(to * self.page).div_ceil(self.block)
    }
}

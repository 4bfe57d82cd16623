//! Names of the model's blocks: chained hashes, as agents and routers compute them from tokens.

use blocks::block::{self, BlockHash, BlockTokens, Scheme};

/// The predecessor of a first block, which has none.
const NONE: u32 = u32::MAX;

/// The names given so far, by block number.
#[derive(Debug, Default)]
pub(super) struct BlockNames {
    hashes: Vec<Option<BlockHash>>,
    before: Vec<u32>,
}

impl BlockNames {
    /// Returns the names of a chain's blocks; a block has the same name in every chain.
    pub(super) fn name_chain(&mut self, chain: &[u32]) -> Vec<BlockHash> {
        let page = BlockTokens::for_page(1).expect("pages of one token have blocks");
        let (mut last, mut before) = (Scheme::plain(page).root(), NONE);
        let mut named = Vec::with_capacity(chain.len());
        for &number in chain {
            let at = number as usize;
            if at >= self.hashes.len() {
                self.hashes.resize(at + 1, None);
                self.before.resize(at + 1, NONE);
            }
            last =
                *self.hashes[at].get_or_insert_with(|| block::hash_after(last, u64::from(number)));
            self.before[at] = before;
            before = number;
            named.push(last);
        }
        named
    }

    /// Returns the names of blocks that were named before.
    pub(super) fn names(&self, blocks: &[u32]) -> Vec<BlockHash> {
        blocks.iter().map(|&number| self.name(number)).collect()
    }

    /// Groups blocks into runs of successive blocks. Each run comes with the name of the block
    /// before it.
    pub(super) fn name_runs(&self, blocks: &[u32]) -> Vec<(Option<BlockHash>, Vec<BlockHash>)> {
        let mut runs: Vec<(Option<BlockHash>, Vec<BlockHash>)> = vec![];
        let mut last = None;
        for &number in blocks {
            let before = self.before[number as usize];
            match runs.last_mut() {
                Some((_, run)) if last == Some(before) => run.push(self.name(number)),
                _ => {
                    let parent = (before != NONE).then(|| self.name(before));
                    runs.push((parent, vec![self.name(number)]));
                }
            }
            last = Some(number);
        }
        runs
    }

    fn name(&self, number: u32) -> BlockHash {
        self.hashes[number as usize].expect("a block was named when its turn was placed")
    }
}

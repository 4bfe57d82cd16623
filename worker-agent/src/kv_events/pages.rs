//! Maps the engine's resident pages to routing blocks. Pure.
//!
//! It tracks which pages are resident and reports which blocks become resident or stop being so. A
//! block is resident while all its pages are. It keeps hashes and sums but no tokens: about 30
//! bytes a page.
//!
//! Pages are kept in *runs* (parts of a prefix chain without a branch), which form a tree like the
//! engine's radix tree. Prompts may branch inside a block. Then the last pages of a run belong to
//! an incomplete block, and each child run completes that block in its own way.

mod check;
mod grid;
mod residency;
mod runs;
#[cfg(test)]
mod tests;

use proto::{
    block::{BlockHash, BlockTokens, Chain, Scheme, Tier},
    table::{Entry, KEY_BITS, PLACES, RunId, Table},
};

use self::grid::Grid;
use super::decode::{CacheEvent, Medium, PageHash, Stored};

/// The empty run at the root of the tree; all prompts begin here.
const ROOT: RunId = 0;
/// The maximum pages of a run: a page's depth modulo this number must be unique in its run.
const RUN_PAGES_MAX: usize = PLACES as usize;
/// The bits of a stored page hash that say in which tiers the page is resident.
const TIERS: u64 = 0b11;

/// Why pages were rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The event's page size differs from the described one.
    #[error("a page has {found} tokens, not {expected}; the engine must be described again")]
    PageTokens {
        /// Tokens per page in the event.
        found: u32,
        /// Tokens per page in the engine's description.
        expected: u32,
    },
    /// The parent page is unknown: its event was lost or never sent.
    #[error("the parent of these pages is unknown; earlier events were lost")]
    Orphan,
    /// A page is already known behind another page: the engine contradicts itself, or an event was
    /// lost.
    #[error("a page is already known after another parent; earlier events were lost")]
    Elsewhere,
    /// A token is wider than 32 bits, as the hash of an image is. Prompts as routers know them have
    /// no such token.
    #[error("a token is not a 32-bit id; its pages can't be used for routing")]
    Token,
    /// More pages are resident than the engine can hold.
    #[error("more than {0} pages are resident; earlier events were lost")]
    Full(usize),
}

/// A change of resident blocks, as routers need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Blocks became resident, in prefix order.
    Stored {
        /// The tier that holds the blocks.
        tier: Tier,
        /// The block before the first one; `None` at the beginning of a prompt.
        parent: Option<BlockHash>,
        /// The blocks' hashes; at least one.
        blocks: Vec<BlockHash>,
    },
    /// Blocks are no longer resident in one tier.
    Removed {
        /// The tier that held the blocks.
        tier: Tier,
        /// The blocks' hashes; at least one.
        blocks: Vec<BlockHash>,
    },
    /// All blocks are gone.
    Cleared,
}

/// The resident pages of one rank.
#[derive(Debug)]
pub struct Pages {
    grid: Grid,
    block_tokens: BlockTokens,
    pages_max: usize,
    runs: Vec<Run>,
    free: Vec<RunId>,
    table: Table,
    /// The number of distinct pages.
    count: usize,
    /// Bytes of memory held by the lists of all runs.
    lists_bytes: usize,
}

/// A part of a prefix chain without a branch.
#[derive(Debug)]
struct Run {
    /// Each page's hash, with its last two bits replaced by the tiers in which the page is
    /// resident.
    pages: Vec<u64>,
    /// The sum over the tokens of the incomplete block after each page (see [`Chain::sum`]). Empty
    /// if a page is a whole block.
    sums: Vec<u64>,
    /// The blocks that end in this run.
    blocks: Vec<BlockHash>,
    /// The last block that ends before this run (or the root of its scheme), and the token sum
    /// before the run's first page.
    last: BlockHash,
    sum: u64,
    /// The number of pages before this run.
    start: u32,
    parent: RunId,
    first_child: RunId,
    older: RunId,
    younger: RunId,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            pages: vec![],
            sums: vec![],
            blocks: vec![],
            last: BlockHash(0),
            sum: 0,
            start: 0,
            parent: ROOT,
            first_child: ROOT,
            older: ROOT,
            younger: ROOT,
        }
    }
}

/// A position between two pages: after the first `pages` pages of `run`.
#[derive(Debug, Clone, Copy)]
struct Place {
    run: RunId,
    pages: usize,
}

/// Returns the key of a page in the table.
fn table_key(page: u64) -> u64 {
    page >> (64 - KEY_BITS)
}

/// Returns a page's hash without its last two bits, which are used for tiers.
fn masked(page: PageHash) -> u64 {
    page.0 & !TIERS
}

fn tier_bit(tier: Tier) -> u64 {
    match tier {
        Tier::Device => 0b01,
        Tier::Host => 0b10,
    }
}

impl Pages {
    /// Creates an empty set for pages of `page_tokens` tokens, at most `pages_max` of them.
    ///
    /// # Errors
    /// When no block size exists for such pages.
    pub fn new(page_tokens: u32, pages_max: usize) -> Result<Self, proto::block::Error> {
        let block_tokens = BlockTokens::for_page(page_tokens)?;
        let grid = Grid::new(page_tokens, block_tokens);
        let (runs, free, table) = (vec![Run::default()], vec![], Table::new());
        let (count, lists_bytes) = (0, 0);
        Ok(Self { grid, block_tokens, pages_max, runs, free, table, count, lists_bytes })
    }

    /// Returns the number of distinct resident pages.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the bytes of memory held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let runs = self.runs.capacity() * size_of::<Run>();
        let free = self.free.capacity() * size_of::<RunId>();
        runs + free + self.lists_bytes + self.table.bytes()
    }

    /// Applies an event and appends the resulting changes of blocks to `deltas`. If a page is
    /// rejected, the pages before it are kept and the ones after it are ignored.
    ///
    /// # Errors
    /// When pages that became resident are rejected.
    pub fn apply(&mut self, event: &CacheEvent, deltas: &mut Vec<Delta>) -> Result<(), Error> {
        match event {
            CacheEvent::Stored(stored) => self.apply_stored(stored, deltas),
            CacheEvent::Removed { pages, medium } => {
                if let Some(tier) = medium_tier(*medium) {
                    self.apply_removed(pages, tier, deltas);
                }
                Ok(())
            }
            CacheEvent::Cleared => {
                (self.runs, self.free) = (vec![Run::default()], vec![]);
                (self.table, self.count, self.lists_bytes) = (Table::new(), 0, 0);
                deltas.push(Delta::Cleared);
                Ok(())
            }
        }
    }

    fn apply_stored(&mut self, stored: &Stored, deltas: &mut Vec<Delta>) -> Result<(), Error> {
        let Some(tier) = medium_tier(stored.medium) else { return Ok(()) };
        let (found, expected) = (stored.page_tokens, self.grid.page_tokens());
        if found != expected {
            return Err(Error::PageTokens { found, expected });
        }
        let mut place = match stored.parent {
            None => Place { run: ROOT, pages: 0 },
            Some(parent) => {
                let (run, at) = self.find(parent).ok_or(Error::Orphan)?;
                Place { run, pages: at + 1 }
            }
        };
        let mut done = 0;
        while let Some(&first) = stored.pages.get(done) {
            let inside = &self.run(place.run).pages[place.pages..];
            if !inside.is_empty() {
                let pairs = inside.iter().zip(&stored.pages[done..]);
                let same = pairs.take_while(|(own, page)| *own & !TIERS == masked(**page)).count();
                if same == 0 {
                    place.run = self.split(place.run, place.pages).0;
                } else {
                    self.mark_resident(place.run, place.pages..place.pages + same, tier, deltas);
                    (place.pages, done) = (place.pages + same, done + same);
                }
                continue;
            }
            match self.find(first) {
                Some((run, 0)) if self.run(run).parent == place.run => {
                    place = Place { run, pages: 0 };
                }
                Some(_) => return Err(Error::Elsewhere),
                None => {
                    let before = self.count;
                    let appended = self.append(place, stored, done);
                    let Place { run, pages } = appended.at;
                    let added = self.count - before;
                    self.mark_resident(run, pages - added..pages, tier, deltas);
                    (place, done) = (appended.at, done + added);
                    appended.stopped.map_or(Ok(()), Err)?;
                }
            }
        }
        Ok(())
    }

    fn apply_removed(&mut self, pages: &[PageHash], tier: Tier, deltas: &mut Vec<Delta>) {
        let mut at = 0;
        while let Some(&first) = pages.get(at) {
            at += 1;
            let Some((run, place)) = self.find(first) else { continue };
            // An engine removes all pages of a node at once: release neighbours together, in either
            // order.
            let (mut from, mut to) = (place, place + 1);
            let own = &self.run(run).pages;
            let matches = |place: Option<usize>, at: usize| {
                let own = place.and_then(|place| own.get(place));
                own.zip(pages.get(at)).is_some_and(|(own, page)| own & !TIERS == masked(*page))
            };
            while matches(Some(to), at) {
                (at, to) = (at + 1, to + 1);
            }
            while matches(from.checked_sub(1), at) {
                (at, from) = (at + 1, from - 1);
            }
            self.mark_gone(run, from..to, tier, deltas);
        }
    }

    fn run(&self, run: RunId) -> &Run {
        &self.runs[run as usize]
    }

    fn run_mut(&mut self, run: RunId) -> &mut Run {
        &mut self.runs[run as usize]
    }

    /// Returns the run that holds a page, and the page's index in it.
    fn find(&self, page: PageHash) -> Option<(RunId, usize)> {
        self.table.find(table_key(page.0), |Entry { run, place }| {
            let content = self.run(run);
            let place = (place.wrapping_sub(content.start) % PLACES) as usize;
            let own = content.pages.get(place)?;
            (own & !TIERS == masked(page)).then_some((run, place))
        })
    }

    /// Returns the hash chain as it stands after `place`, to hash the pages that follow.
    fn resume_chain(&self, place: Place, stored: &Stored) -> Chain {
        if place.run == ROOT {
            let lora = stored.lora.as_deref();
            let cache_salt = stored.cache_salt.as_deref();
            let plain = Scheme::plain(self.block_tokens);
            return Chain::new(&Scheme { lora, cache_salt, ..plain });
        }
        let run = self.run(place.run);
        let depth = run.start as usize + place.pages;
        let ended = self.grid.blocks(depth) - self.grid.blocks(run.start as usize);
        let last = ended.checked_sub(1).map_or(run.last, |at| run.blocks[at]);
        let before = |at: usize| run.sums.get(at).copied().unwrap_or(0);
        let sum = place.pages.checked_sub(1).map_or(run.sum, before);
        Chain::resume(self.block_tokens, last, self.grid.tokens(depth), sum)
    }
}

fn medium_tier(medium: Medium) -> Option<Tier> {
    match medium {
        Medium::Gpu => Some(Tier::Device),
        Medium::Cpu => Some(Tier::Host),
        Medium::Other => None,
    }
}

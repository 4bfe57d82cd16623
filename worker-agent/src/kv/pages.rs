//! The engine's pages as routing blocks. It follows which pages are resident, and says which
//! blocks became or ceased to be: a block is resident where all its pages are. Pure; it keeps
//! hashes and sums, no tokens: some 30 bytes a page.
//!
//! Pages are kept in runs, pieces of a chain without a branch, in a tree as the engine has one. A
//! branch may leave a block at any of its pages, so the last pages of a run may be the first of a
//! block that ends in its children, in each of them another.

mod check;
mod grid;
mod publish;
mod shape;
#[cfg(test)]
mod tests;

use proto::{
    block::{BlockHash, BlockTokens, Chain, Scheme, Tier},
    table::{Entry, KEY_BITS, PLACES, RunId, Table},
};

use self::grid::Grid;
use super::frame::{Event, Medium, PageHash, Stored};

/// The empty run at which all prompts begin.
const ROOT: RunId = 0;
/// Pages of a run at most: a place is unique in it.
const RUN_PAGES_MAX: usize = PLACES as usize;
/// Bits of a page for the tiers in which it is resident.
const TIERS: u64 = 0b11;

/// Why pages were not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The engine's pages are of another size.
    #[error("a page has {found} tokens, not {expected}; the engine has to be described anew")]
    PageTokens {
        /// In the event.
        found: u32,
        /// As the engine was described.
        expected: u32,
    },
    /// An event was lost, or never sent.
    #[error("the page that these follow is not known; events were lost before")]
    Orphan,
    /// The engine contradicts itself, or an event was lost.
    #[error("a page is known after another one; events were lost before")]
    Elsewhere,
    /// An image or the like: no prompt says so.
    #[error("a token is no 32-bit id; such pages can't be routed by")]
    Token,
    /// More pages than the engine has.
    #[error("more than {0} pages are resident; events were lost before")]
    Full(usize),
}

/// What a router has to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Blocks became resident, each after the one before it.
    Stored {
        /// Where.
        tier: Tier,
        /// The block before the first; none at the beginning of a prompt.
        parent: Option<BlockHash>,
        /// At least one.
        blocks: Vec<BlockHash>,
    },
    /// Blocks are resident no more.
    Removed {
        /// Where they were.
        tier: Tier,
        /// At least one.
        blocks: Vec<BlockHash>,
    },
    /// Nothing is resident any more.
    Cleared,
}

/// The pages of one rank.
#[derive(Debug)]
pub struct Pages {
    grid: Grid,
    block_tokens: BlockTokens,
    pages_max: usize,
    runs: Vec<Run>,
    free: Vec<RunId>,
    table: Table,
    /// Distinct pages.
    count: usize,
    /// Memory that the lists of all runs hold.
    lists_bytes: usize,
}

/// A piece of a chain without a branch.
#[derive(Debug)]
struct Run {
    /// Each page's hash, but the last two bits say in which tiers it is resident.
    pages: Vec<u64>,
    /// What the tokens of the block that is not full come to after each page. Empty where every
    /// page is a block.
    sums: Vec<u64>,
    /// The blocks that end in it.
    blocks: Vec<BlockHash>,
    /// The last block before it, or the root of its scheme, and the sum before its first page.
    last: BlockHash,
    sum: u64,
    /// Pages before it.
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

/// Between two pages: after the first `pages` pages of a run.
#[derive(Debug, Clone, Copy)]
struct Place {
    run: RunId,
    pages: usize,
}

/// By what a page is in the table.
fn key(page: u64) -> u64 {
    page >> (64 - KEY_BITS)
}

/// A page's hash without tiers.
fn name(page: PageHash) -> u64 {
    page.0 & !TIERS
}

fn bit(tier: Tier) -> u64 {
    match tier {
        Tier::Device => 0b01,
        Tier::Host => 0b10,
    }
}

impl Pages {
    /// None yet, of an engine with pages of so many tokens, and at most `pages_max` of them.
    ///
    /// # Errors
    /// When there are no blocks for such pages.
    pub fn new(page_tokens: u32, pages_max: usize) -> Result<Self, proto::block::Error> {
        let block_tokens = BlockTokens::for_page(page_tokens)?;
        let grid = Grid::new(page_tokens, block_tokens);
        let (runs, free, table) = (vec![Run::default()], vec![], Table::new());
        let (count, lists_bytes) = (0, 0);
        Ok(Self { grid, block_tokens, pages_max, runs, free, table, count, lists_bytes })
    }

    /// Distinct pages resident.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Memory held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let runs = self.runs.capacity() * size_of::<Run>();
        let free = self.free.capacity() * size_of::<RunId>();
        runs + free + self.lists_bytes + self.table.bytes()
    }

    /// Takes what happened, and appends what that means for blocks. What came before a reason to
    /// refuse the rest is kept.
    ///
    /// # Errors
    /// When pages that became resident can't be taken.
    pub fn apply(&mut self, event: &Event, deltas: &mut Vec<Delta>) -> Result<(), Error> {
        match event {
            Event::Stored(stored) => self.stored(stored, deltas),
            Event::Removed { pages, medium } => {
                if let Some(tier) = tier(*medium) {
                    self.removed(pages, tier, deltas);
                }
                Ok(())
            }
            Event::Cleared => {
                (self.runs, self.free) = (vec![Run::default()], vec![]);
                (self.table, self.count, self.lists_bytes) = (Table::new(), 0, 0);
                deltas.push(Delta::Cleared);
                Ok(())
            }
        }
    }

    fn stored(&mut self, stored: &Stored, deltas: &mut Vec<Delta>) -> Result<(), Error> {
        let Some(tier) = tier(stored.medium) else { return Ok(()) };
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
                let same = pairs.take_while(|(own, page)| *own & !TIERS == name(**page)).count();
                if same == 0 {
                    place.run = self.split(place.run, place.pages).0;
                } else {
                    self.hold(place.run, place.pages..place.pages + same, tier, deltas);
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
                    self.hold(run, pages - added..pages, tier, deltas);
                    (place, done) = (appended.at, done + added);
                    appended.stopped.map_or(Ok(()), Err)?;
                }
            }
        }
        Ok(())
    }

    fn removed(&mut self, pages: &[PageHash], tier: Tier, deltas: &mut Vec<Delta>) {
        let mut at = 0;
        while let Some(&first) = pages.get(at) {
            at += 1;
            let Some((run, place)) = self.find(first) else { continue };
            // An engine names the pages of a node at once: take them as one piece, in either order.
            let (mut from, mut to) = (place, place + 1);
            let own = &self.run(run).pages;
            let is = |place: Option<usize>, at: usize| {
                let own = place.and_then(|place| own.get(place));
                own.zip(pages.get(at)).is_some_and(|(own, page)| own & !TIERS == name(*page))
            };
            while is(Some(to), at) {
                (at, to) = (at + 1, to + 1);
            }
            while is(from.checked_sub(1), at) {
                (at, from) = (at + 1, from - 1);
            }
            self.release(run, from..to, tier, deltas);
        }
    }

    fn run(&self, run: RunId) -> &Run {
        &self.runs[run as usize]
    }

    fn run_mut(&mut self, run: RunId) -> &mut Run {
        &mut self.runs[run as usize]
    }

    /// The run that has a page, and where.
    fn find(&self, page: PageHash) -> Option<(RunId, usize)> {
        self.table.find(key(page.0), |Entry { run, place }| {
            let of = self.run(run);
            let place = (place.wrapping_sub(of.start) % PLACES) as usize;
            let own = of.pages.get(place)?;
            (own & !TIERS == name(page)).then_some((run, place))
        })
    }

    /// Where hashing goes on after some page.
    fn chain(&self, place: Place, stored: &Stored) -> Chain {
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

fn tier(medium: Medium) -> Option<Tier> {
    match medium {
        Medium::Gpu => Some(Tier::Device),
        Medium::Cpu => Some(Tier::Host),
        Medium::Other => None,
    }
}

//! Tracks one rank's resident pages, and computes which of the routers' blocks are resident. Pure.
//!
//! A *block*, the unit in which routers count a prompt, has at least as many tokens as a page, and
//! may begin or end inside a page. It is resident while all its pages are. Only hashes are stored,
//! no tokens: about 30 bytes a page.
//!
//! A *branch* is a position after which known prompts have different pages. A *run* is a series of
//! consecutive pages without a branch between them. The runs form a tree like the engine's radix
//! tree. Prompts may branch inside a block: then the run before the branch ends with the beginning
//! of that block, and each child run completes it with other tokens.

mod check;
mod grid;
mod residency;
mod runs;
#[cfg(test)]
mod tests;

use blocks::{
    block::{BlockHash, BlockTokens, Chain, Scheme, Tier},
    kv::Change,
    table::{Entry, KEY_BITS, PLACE_MODULUS, RunId, RunTable},
};

use self::grid::Grid;
use super::decode::{CacheEvent, Medium, PageHash, Stored};

/// An empty run, at which all prompts begin. In a link to a child or sibling, this id means that
/// there is none.
const ROOT: RunId = 0;
/// The table stores a page's number in its prompt only modulo this maximum, so two pages of a
/// longer run could have the same entry.
const RUN_PAGES_MAX: usize = PLACE_MODULUS as usize;
/// In a stored hash, these bits say in which tiers the page is resident.
const TIER_BITS: u64 = 0b11;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The event's page size differs from that of the engine's `/server_info`.
    #[error("a page has {found} tokens, not {expected}; the engine must be described again")]
    PageTokens {
        /// The number in the event.
        found: u32,
        expected: u32,
    },
    #[error("the parent of these pages is unknown; earlier events were lost")]
    UnknownParent,
    #[error("a page is already known after another parent; earlier events were lost")]
    OtherParent,
    /// The engine puts the hash of an image in place of tokens; routers can't compute it from a
    /// prompt.
    #[error("a token is not a 32-bit id; its pages can't be used for routing")]
    WideToken,
    /// The bound is of all pages or of one tier.
    #[error("more than {0} pages are resident; earlier events were lost")]
    TooManyPages(usize),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierPages {
    pub device: usize,
    pub host: usize,
}

impl TierPages {
    /// A page that is in both tiers counts twice.
    #[must_use]
    pub fn total(self) -> usize {
        self.device.saturating_add(self.host)
    }

    #[must_use]
    pub fn in_tier(self, tier: Tier) -> usize {
        match tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
        }
    }

    pub(super) fn in_tier_mut(&mut self, tier: Tier) -> &mut usize {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
        }
    }
}

/// All resident pages of one rank, and the pages before them in their prompts.
#[derive(Debug)]
pub struct Pages {
    grid: Grid,
    block_tokens: BlockTokens,
    /// The sum bounds all tracked pages. The last event before a tier's bound is applied whole.
    pages_max: TierPages,
    runs: Vec<Run>,
    free_ids: Vec<RunId>,
    /// The keys are the pages' hashes.
    table: RunTable,
    page_count: usize,
    resident: TierPages,
    lists_bytes: usize,
}

/// The blocks of a run are those that end in it.
#[derive(Debug)]
struct Run {
    /// In each hash, [`TIER_BITS`] say in which tiers the page is resident.
    pages: Vec<u64>,
    /// For each page: the token sum (see [`Chain::sum`]) of the block that the page leaves unended,
    /// from which that block's hash is computed. Empty if every page is a whole block.
    open_sums: Vec<u64>,
    blocks: Vec<BlockHash>,
    /// The last block that ends before this run. Without one, the start value of the prompt's block
    /// hashes ([`Scheme::root`]), which depends on the LoRA adapter and the cache salt.
    block_before: BlockHash,
    /// The sum of the block that has begun but not ended before the run's first page.
    open_sum_before: u64,
    /// The number of the run's first page in its prompt.
    start_page: u32,
    parent: RunId,
    /// The head of the list of children, which are linked as siblings.
    first_child: RunId,
    previous_sibling: RunId,
    next_sibling: RunId,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            pages: vec![],
            open_sums: vec![],
            blocks: vec![],
            block_before: BlockHash(0),
            open_sum_before: 0,
            start_page: 0,
            parent: ROOT,
            first_child: ROOT,
            previous_sibling: ROOT,
            next_sibling: ROOT,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Position {
    run: RunId,
    pages_before: usize,
}

fn table_key(page: u64) -> u64 {
    page >> (64 - KEY_BITS)
}

fn without_tier_bits(page: PageHash) -> u64 {
    page.0 & !TIER_BITS
}

/// Ignores the tier bits.
fn is_page(known: u64, page: PageHash) -> bool {
    known & !TIER_BITS == without_tier_bits(page)
}

fn tier_bit(tier: Tier) -> u64 {
    match tier {
        Tier::Device => 0b01,
        Tier::Host => 0b10,
    }
}

impl Pages {
    /// Fails if no block size exists for such pages.
    pub fn new(page_tokens: u32, pages_max: TierPages) -> Result<Self, blocks::block::Error> {
        let block_tokens = BlockTokens::for_page(page_tokens)?;
        let grid = Grid::new(page_tokens, block_tokens);
        let (runs, free_ids, table) = (vec![Run::default()], vec![], RunTable::new());
        Ok(Self {
            grid,
            block_tokens,
            pages_max,
            runs,
            free_ids,
            table,
            page_count: 0,
            resident: TierPages::default(),
            lists_bytes: 0,
        })
    }

    /// Includes pages that are no longer resident but come before a resident page.
    #[must_use]
    pub fn count(&self) -> usize {
        self.page_count
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        let runs = self.runs.capacity() * size_of::<Run>();
        let free_ids = self.free_ids.capacity() * size_of::<RunId>();
        runs + free_ids + self.lists_bytes + self.table.bytes()
    }

    #[must_use]
    pub fn reset_change(&self) -> Change {
        Change::Reset { block_tokens: self.block_tokens }
    }

    /// The event's pages before a rejected one are kept, and those after it are ignored.
    pub fn apply(&mut self, event: &CacheEvent, changes: &mut Vec<Change>) -> Result<(), Error> {
        match event {
            CacheEvent::Stored(stored) => self.apply_stored(stored, changes),
            CacheEvent::Removed { pages, medium } => {
                if let Some(tier) = medium_tier(*medium) {
                    self.apply_removed(pages, tier, changes);
                }
                Ok(())
            }
            CacheEvent::Cleared => {
                (self.runs, self.free_ids) = (vec![Run::default()], vec![]);
                (self.table, self.page_count, self.lists_bytes) = (RunTable::new(), 0, 0);
                self.resident = TierPages::default();
                changes.extend([self.reset_change(), Change::Complete]);
                Ok(())
            }
        }
    }

    fn apply_stored(&mut self, stored: &Stored, changes: &mut Vec<Change>) -> Result<(), Error> {
        let Some(tier) = medium_tier(stored.medium) else { return Ok(()) };
        let (found, expected) = (stored.page_tokens, self.grid.page_tokens());
        if found != expected {
            return Err(Error::PageTokens { found, expected });
        }
        let mut position = match stored.parent {
            None => Position { run: ROOT, pages_before: 0 },
            Some(parent) => {
                let (run, parent_index) = self.find_page(parent).ok_or(Error::UnknownParent)?;
                Position { run, pages_before: parent_index + 1 }
            }
        };
        if self.resident.in_tier(tier) >= self.pages_max.in_tier(tier) {
            return Err(Error::TooManyPages(self.pages_max.in_tier(tier)));
        }
        // A round begins at `position`, after `applied` pages of the event.
        let mut applied = 0;
        while let Some(&next_page) = stored.pages.get(applied) {
            let rest_of_run = &self.run(position.run).pages[position.pages_before..];
            if !rest_of_run.is_empty() {
                let pairs = rest_of_run.iter().zip(&stored.pages[applied..]);
                let same_count = pairs.take_while(|(known, page)| is_page(**known, **page)).count();
                if same_count == 0 {
                    // The event branches off inside this run.
                    position.run = self.split(position.run, position.pages_before).0;
                } else {
                    let same_pages = position.pages_before..position.pages_before + same_count;
                    position.pages_before = same_pages.end;
                    applied += same_count;
                    self.mark_resident(position.run, same_pages, tier, changes);
                }
                continue;
            }
            match self.find_page(next_page) {
                // The event continues in a known child run.
                Some((run, 0)) if self.run(run).parent == position.run => {
                    position = Position { run, pages_before: 0 };
                }
                Some(_) => return Err(Error::OtherParent),
                None => {
                    let count_before = self.page_count;
                    let appended = self.append(position, stored, applied);
                    let Position { run, pages_before } = appended.end;
                    let added = self.page_count - count_before;
                    self.mark_resident(run, pages_before - added..pages_before, tier, changes);
                    (position, applied) = (appended.end, applied + added);
                    appended.rejection.map_or(Ok(()), Err)?;
                }
            }
        }
        Ok(())
    }

    fn apply_removed(&mut self, pages: &[PageHash], tier: Tier, changes: &mut Vec<Change>) {
        let mut handled = 0;
        while let Some(&first_page) = pages.get(handled) {
            handled += 1;
            let Some((run, index)) = self.find_page(first_page) else { continue };
            // An engine removes all pages of a radix tree node at once, listed from the first page
            // on or from the last one back. Gather neighbours in the run, to mark them together.
            let (mut from, mut to) = (index, index + 1);
            let run_pages = &self.run(run).pages;
            let is_event_page = |run_index: Option<usize>, event_index: usize| {
                let known = run_index.and_then(|index| run_pages.get(index));
                let page = pages.get(event_index);
                known.zip(page).is_some_and(|(known, page)| is_page(*known, *page))
            };
            while is_event_page(Some(to), handled) {
                (handled, to) = (handled + 1, to + 1);
            }
            while is_event_page(from.checked_sub(1), handled) {
                (handled, from) = (handled + 1, from - 1);
            }
            self.mark_gone(run, from..to, tier, changes);
        }
    }

    fn run(&self, run: RunId) -> &Run {
        &self.runs[run as usize]
    }

    fn run_mut(&mut self, run: RunId) -> &mut Run {
        &mut self.runs[run as usize]
    }

    fn find_page(&self, page: PageHash) -> Option<(RunId, usize)> {
        self.table.find(table_key(page.0), |Entry { run, place }| {
            let content = self.run(run);
            let index = (place.wrapping_sub(content.start_page) % PLACE_MODULUS) as usize;
            let known = content.pages.get(index)?;
            is_page(*known, page).then_some((run, index))
        })
    }

    fn resume_chain(&self, position: Position, stored: &Stored) -> Chain {
        if position.run == ROOT {
            let lora = stored.lora.as_deref();
            let cache_salt = stored.cache_salt.as_deref();
            let plain_scheme = Scheme::plain(self.block_tokens);
            return Chain::new(&Scheme { lora, cache_salt, ..plain_scheme });
        }
        let run = self.run(position.run);
        let depth = run.start_page as usize + position.pages_before;
        let blocks_before_run = self.grid.blocks_ended_in(run.start_page as usize);
        let blocks = self.grid.blocks_ended_in(depth) - blocks_before_run;
        let last_block = blocks.checked_sub(1).map_or(run.block_before, |index| run.blocks[index]);
        let sum_after = |index: usize| run.open_sums.get(index).copied().unwrap_or(0);
        let open_sum = position.pages_before.checked_sub(1).map_or(run.open_sum_before, sum_after);
        Chain::resume(self.block_tokens, last_block, self.grid.tokens_in(depth), open_sum)
    }
}

/// `None` for a memory that routing ignores.
pub(super) fn medium_tier(medium: Medium) -> Option<Tier> {
    match medium {
        Medium::Gpu => Some(Tier::Device),
        Medium::Cpu => Some(Tier::Host),
        Medium::Other => None,
    }
}

//! Tests [`Pages`] against a naive oracle.
//!
//! The oracle keeps the set of resident pages. For every block ever seen, it checks whether all its
//! pages are in the set.

use std::collections::{HashMap, HashSet};

use blocks::block::{Chain, hash_after};
use proptest::prelude::*;

use super::*;

const UNBOUNDED: TierPages = TierPages { device: usize::MAX, host: usize::MAX };

fn device_pages(device: usize) -> TierPages {
    TierPages { device, host: 0 }
}

/// A prompt made of letters, each of which stands for a few pages.
struct Prompt {
    pages: Vec<PageHash>,
    tokens: Vec<u64>,
}

fn pages_per_letter(page_tokens: u32) -> usize {
    16_usize.div_ceil(page_tokens as usize)
}

fn prompt(letters: &[u8], page_tokens: u32) -> Prompt {
    let (mut pages, mut tokens, mut last) = (vec![], vec![], BlockHash(7));
    for &letter in letters {
        for page in 0..pages_per_letter(page_tokens) {
            // Any chained hash will do: `Pages` doesn't check the engine's hashes.
            last = hash_after(last, u64::from(letter));
            pages.push(PageHash(last.0));
            let token = |at: u64| u64::from(letter) * 1000 + page as u64 * 7 + at % 13;
            tokens.extend((0..u64::from(page_tokens)).map(token));
        }
    }
    Prompt { pages, tokens }
}

/// The event that stores a prompt's pages, beginning with page `from`.
fn stored(prompt: &Prompt, from: usize, page_tokens: u32, medium: Medium) -> Stored {
    Stored {
        pages: prompt.pages[from..].to_vec(),
        parent: from.checked_sub(1).map(|at| prompt.pages[at]),
        tokens: prompt.tokens[from * page_tokens as usize..].to_vec(),
        next_token: None,
        page_tokens,
        medium,
        lora: None,
        cache_salt: None,
    }
}

fn medium(tier: Tier) -> Medium {
    match tier {
        Tier::Device => Medium::Gpu,
        Tier::Host => Medium::Cpu,
    }
}

#[derive(Debug, Clone)]
enum Step {
    Store { tier: Tier, letters: Vec<u8>, from: usize },
    Remove { tier: Tier, letters: Vec<u8>, from: usize, count: usize, reverse: bool },
    Clear,
}

fn letters() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![12 => Just(0_u8), 2 => Just(1), 1 => Just(2)], 1..24)
}

fn step() -> impl Strategy<Value = Step> {
    let tier = || prop_oneof![4 => Just(Tier::Device), 1 => Just(Tier::Host)];
    let place = 0..1000_usize;
    prop_oneof![
        20 => (tier(), letters(), place.clone())
            .prop_map(|(tier, letters, from)| Step::Store { tier, letters, from }),
        12 => (tier(), letters(), place.clone(), place, any::<bool>())
            .prop_map(|(tier, letters, from, count, reverse)| {
                Step::Remove { tier, letters, from, count, reverse }
            }),
        1 => Just(Step::Clear),
    ]
}

#[derive(Debug, Default)]
struct Oracle {
    resident: HashSet<(Tier, PageHash)>,
    parents: HashMap<PageHash, PageHash>,
    /// The pages of every block that was ever part of a prompt.
    blocks: HashMap<BlockHash, Vec<PageHash>>,
    published: HashSet<(Tier, BlockHash)>,
}

impl Oracle {
    /// Whether the page, or any page that follows it, is resident.
    fn knows(&self, page: PageHash) -> bool {
        self.resident.iter().any(|(_, held)| {
            let up = |held: &PageHash| self.parents.get(held).copied();
            std::iter::successors(Some(*held), up).any(|above| above == page)
        })
    }

    fn step(&mut self, pages: &mut Pages, step: &Step, page_tokens: u32) {
        let mut changes = vec![];
        match step {
            Step::Store { tier, letters, from } => {
                let prompt = prompt(letters, page_tokens);
                let from = from % prompt.pages.len();
                let event = CacheEvent::Stored(stored(&prompt, from, page_tokens, medium(*tier)));
                let taken = pages.apply(&event, &mut changes);
                let is_orphan = from > 0 && !self.knows(prompt.pages[from - 1]);
                assert_eq!(taken, if is_orphan { Err(Error::UnknownParent) } else { Ok(()) });
                if !is_orphan {
                    self.learn(&prompt, page_tokens);
                    self.resident.extend(prompt.pages[from..].iter().map(|page| (*tier, *page)));
                }
            }
            Step::Remove { tier, letters, from, count, reverse } => {
                let prompt = prompt(letters, page_tokens);
                let from = from % prompt.pages.len();
                let count = 1 + count % (prompt.pages.len() - from);
                let mut gone = prompt.pages[from..from + count].to_vec();
                if *reverse {
                    gone.reverse();
                }
                for page in &gone {
                    self.resident.remove(&(*tier, *page));
                }
                let event = CacheEvent::Removed { pages: gone, medium: medium(*tier) };
                pages.apply(&event, &mut changes).unwrap();
            }
            Step::Clear => {
                self.resident.clear();
                pages.apply(&CacheEvent::Cleared, &mut changes).unwrap();
            }
        }
        for change in changes {
            publish(&mut self.published, change);
        }
    }

    fn learn(&mut self, prompt: &Prompt, page_tokens: u32) {
        for pair in prompt.pages.windows(2) {
            self.parents.insert(pair[1], pair[0]);
        }
        let block_tokens = BlockTokens::for_page(page_tokens).unwrap();
        let tokens = prompt.tokens.iter().map(|&token| u32::try_from(token).unwrap());
        let tokens: Vec<u32> = tokens.collect();
        let mut hashes = vec![];
        Chain::new(&Scheme::plain(block_tokens)).push(&tokens, &mut hashes);
        let (block, page) = (block_tokens.get() as usize, page_tokens as usize);
        for (at, hash) in hashes.into_iter().enumerate() {
            let touched = |page_at: &usize| {
                page_at * page < (at + 1) * block && at * block < (page_at + 1) * page
            };
            let pages = (0..prompt.pages.len()).filter(touched).map(|page| prompt.pages[page]);
            self.blocks.insert(hash, pages.collect());
        }
    }

    fn expected(&self) -> HashSet<(Tier, BlockHash)> {
        let mut expected = HashSet::new();
        for tier in [Tier::Device, Tier::Host] {
            let resident = |page: &PageHash| self.resident.contains(&(tier, *page));
            let whole = self.blocks.iter().filter(|(_, pages)| pages.iter().all(resident));
            expected.extend(whole.map(|(hash, _)| (tier, *hash)));
        }
        expected
    }
}

/// Applies a change to what a router would know. Each block must be reported only once.
fn publish(published: &mut HashSet<(Tier, BlockHash)>, change: Change) {
    match change {
        Change::Stored { tier, parent, blocks } => {
            let mut parent = parent;
            for block in blocks {
                assert!(block.can_follow(parent), "{block:?} after {parent:?}");
                assert!(published.insert((tier, block)), "{block:?} was told before");
                parent = Some(block);
            }
        }
        Change::Removed { tier, blocks } => {
            for block in blocks {
                assert!(published.remove(&(tier, block)), "{block:?} was not resident");
            }
        }
        Change::Reset { .. } => published.clear(),
        Change::Complete => assert!(published.is_empty(), "only a reset is complete at once"),
        Change::Unknown { .. } => panic!("pages are known"),
    }
}

proptest! {
    #[test]
    fn a_block_is_resident_while_all_its_pages_are(
        steps in prop::collection::vec(step(), 1..40),
        page_tokens in prop::sample::select(vec![1, 3, 16, 32, 48, 63, 64, 100, 128, 256]),
    ) {
        let mut pages = Pages::new(page_tokens, UNBOUNDED).unwrap();
        let mut oracle = Oracle::default();
        for step in &steps {
            oracle.step(&mut pages, step, page_tokens);
            pages.check_invariants();
            prop_assert_eq!(&oracle.published, &oracle.expected(), "after {:?}", step);
        }
        let mut snapshot = HashSet::new();
        pages.snapshot().for_each(|change| publish(&mut snapshot, change));
        prop_assert_eq!(snapshot, oracle.published);
    }

    /// An engine that contradicts itself: pages in any order, after any parent.
    #[test]
    fn nonsense_breaks_nothing(
        steps in prop::collection::vec(
            (any::<bool>(), prop::option::of(0..40_u64), prop::collection::vec(0..40_u64, 1..9)),
            1..60,
        ),
    ) {
        // Only three keys, so that lookups must compare the other bits of the hashes.
        let page = |at: u64| PageHash((at % 3) << 40 | at << 2);
        let mut pages = Pages::new(16, device_pages(30)).unwrap();
        for (stores, parent, named) in steps {
            let named: Vec<PageHash> = named.into_iter().map(page).collect();
            let event = if stores {
                let tokens = vec![1; 16 * named.len()];
                let prompt = Prompt { pages: named, tokens };
                let stored = stored(&prompt, 0, 16, Medium::Gpu);
                CacheEvent::Stored(Stored { parent: parent.map(page), ..stored })
            } else {
                CacheEvent::Removed { pages: named, medium: Medium::Gpu }
            };
            let _ = pages.apply(&event, &mut vec![]);
            pages.check_invariants();
        }
    }
}

fn apply(pages: &mut Pages, event: Stored) -> (Result<(), Error>, Vec<Change>) {
    let mut changes = vec![];
    let taken = pages.apply(&CacheEvent::Stored(event), &mut changes);
    pages.check_invariants();
    (taken, changes)
}

#[test]
fn what_cannot_be_taken_is_refused_and_what_came_before_is_kept() {
    let all = prompt(&[1; 10], 16);
    let mut pages = Pages::new(16, device_pages(8)).unwrap();
    let other = stored(&all, 0, 16, Medium::Gpu);
    let other = Stored { page_tokens: 32, ..other };
    let wrong = Error::PageTokens { found: 32, expected: 16 };
    assert_eq!(apply(&mut pages, other), (Err(wrong), vec![]));
    let mut image = stored(&all, 0, 16, Medium::Gpu);
    image.tokens[70] = 1 << 40;
    let (taken, changes) = apply(&mut pages, image);
    assert_eq!((taken, pages.count(), changes.len()), (Err(Error::WideToken), 4, 1));
    let (taken, changes) = apply(&mut pages, stored(&all, 4, 16, Medium::Gpu));
    assert_eq!((taken, pages.count(), changes.len()), (Err(Error::TooManyPages(8)), 8, 1));
    let (taken, changes) = apply(&mut pages, stored(&all, 9, 16, Medium::Gpu));
    assert_eq!((taken, changes), (Err(Error::UnknownParent), vec![]));
    let (taken, changes) = apply(&mut pages, stored(&all, 0, 16, Medium::Other));
    assert_eq!((taken, changes), (Ok(()), vec![]));
}

#[test]
fn each_tier_has_a_bound_of_its_own() {
    let mut pages = Pages::new(16, TierPages { device: 4, host: 8 }).unwrap();
    let prompts: Vec<Prompt> = (1..6).map(|seed| prompt(&[seed; 2], 16)).collect();
    // Pages on the host alone fill the host's bound, and say nothing of the device's.
    for prompt in &prompts[..4] {
        assert_eq!(apply(&mut pages, stored(prompt, 0, 16, Medium::Gpu)).0, Ok(()));
        assert_eq!(apply(&mut pages, stored(prompt, 0, 16, Medium::Cpu)).0, Ok(()));
        let (named, medium) = (prompt.pages.clone(), Medium::Gpu);
        let removed = CacheEvent::Removed { pages: named, medium };
        pages.apply(&removed, &mut vec![]).unwrap();
        pages.check_invariants();
    }
    let host_full = apply(&mut pages, stored(&prompts[4], 0, 16, Medium::Cpu)).0;
    assert_eq!(host_full, Err(Error::TooManyPages(8)));
    for prompt in &prompts[3..] {
        assert_eq!(apply(&mut pages, stored(prompt, 0, 16, Medium::Gpu)).0, Ok(()));
    }
    let device_full = apply(&mut pages, stored(&prompts[0], 0, 16, Medium::Gpu)).0;
    assert_eq!(device_full, Err(Error::TooManyPages(4)));
}

#[test]
fn schemes_have_blocks_of_their_own() {
    let blocks = |lora: Option<&str>, salt: Option<&str>| {
        let mut pages = Pages::new(64, UNBOUNDED).unwrap();
        let plain = stored(&prompt(&[1], 64), 0, 64, Medium::Gpu);
        let (lora, cache_salt) = (lora.map(str::to_owned), salt.map(str::to_owned));
        apply(&mut pages, Stored { lora, cache_salt, ..plain }).1
    };
    let all = [blocks(None, None), blocks(Some("a"), None), blocks(None, Some("a"))];
    assert!(all[0] != all[1] && all[0] != all[2] && all[1] != all[2]);
}

/// Speculative decoding hashes token pairs; the blocks of the prompt stay the same.
#[test]
fn pairs_of_tokens_have_the_blocks_of_their_tokens() {
    let mut single = Pages::new(16, UNBOUNDED).unwrap();
    let plain = stored(&prompt(&[1; 9], 16), 0, 16, Medium::Gpu);
    let pairs = Stored { next_token: Some(5), ..plain.clone() };
    let mut paired = Pages::new(16, UNBOUNDED).unwrap();
    assert_eq!(apply(&mut single, plain), apply(&mut paired, pairs));
}

/// Conversations of agents: a shared system prompt, then a part of their own that grows turn by
/// turn. The bound of 32 bytes a block holds where a page is a block. Smaller pages must be tracked
/// one by one, because each can be evicted by itself: a block of 64 pages costs 64 times as much as
/// a page.
#[test]
fn a_block_takes_at_most_32_bytes_and_a_smaller_page_at_most_33() {
    for (page_tokens, conversations, bytes_max) in
        [(1, 24, 33.0), (16, 200, 33.0), (64, 400, 32.0), (256, 1600, 32.0)]
    {
        let mut pages = Pages::new(page_tokens, UNBOUNDED).unwrap();
        let (system, turn) = (8192 / page_tokens as usize, 2048 / page_tokens as usize);
        for turns in 0..8 {
            for conversation in 0..conversations {
                let mut last = BlockHash(7);
                let page = |at: usize| {
                    let own = if at < system { 0 } else { 1 + conversation };
                    last = hash_after(last, own);
                    PageHash(last.0)
                };
                let all: Vec<PageHash> = (0..system + (turns + 1) * turn).map(page).collect();
                let tokens = vec![conversation; all.len() * page_tokens as usize];
                let from = if turns == 0 { 0 } else { system + turns * turn };
                let prompt = Prompt { pages: all, tokens };
                let event = stored(&prompt, from, page_tokens, Medium::Gpu);
                pages.apply(&CacheEvent::Stored(event), &mut vec![]).unwrap();
            }
        }
        let bytes = pages.bytes() as f64 / pages.count() as f64;
        assert!(bytes <= bytes_max, "{bytes:.1} bytes for a page of {page_tokens} tokens");
    }
}

//! Tests [`RankCache`] with a publisher that keeps its last messages and may lose some.

use std::collections::HashSet;

use blocks::block::BlockHash;
use proptest::prelude::*;

use super::*;

/// A page is exactly one block, so that the resident blocks are easy to compute.
const PAGE_TOKENS: u32 = 64;

/// The MessagePack encoding of a publisher's message, with only the fields that are read.
fn pool(device: usize, host: usize) -> TierPages {
    TierPages { device, host }
}

fn message(events: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![0x93, 0xcb];
    bytes.extend([0; 8]);
    bytes.push(0x90 + u8::try_from(events.len()).unwrap());
    events.iter().for_each(|event| bytes.extend(event));
    bytes.push(0);
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [&[0xa0 + u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
}

fn hash(page: u64) -> Vec<u8> {
    [&[0xcf][..], &page.to_be_bytes()].concat()
}

/// The event that stores the only page of a prompt. The adapter name keeps its hash from being
/// checked.
fn stored(page: u64) -> Vec<u8> {
    let mut tokens = vec![0xdc, 0, 64];
    tokens.extend([u8::try_from(page).unwrap(); 64]);
    let named = |name: &str, value: Vec<u8>| [text(name), value].concat();
    [
        vec![0x85],
        named("type", text("BlockStored")),
        named("block_hashes", [vec![0x91], hash(page << 32)].concat()),
        named("token_ids", tokens),
        named("block_size", vec![64]),
        named("lora_name", text("a")),
    ]
    .concat()
}

fn removed(page: u64) -> Vec<u8> {
    let hashes = [text("block_hashes"), vec![0x91], hash(page << 32)].concat();
    [vec![0x82], text("type"), text("BlockRemoved"), hashes].concat()
}

/// Returns an event by which the page became resident in the host's memory too.
fn stored_on_host(page: u64) -> Vec<u8> {
    let mut event = stored(page);
    event[0] += 1;
    [event, text("medium"), text("CPU_PINNED")].concat()
}

fn cleared() -> Vec<u8> {
    [vec![0x81], text("type"), text("AllBlocksCleared")].concat()
}

/// What a watcher knows. It requests a snapshot at each [`RankStep::SendSnapshot`].
#[derive(Debug, Default)]
struct Watcher {
    blocks: HashSet<BlockHash>,
    /// Whether all resident blocks are in `blocks`.
    is_complete: bool,
    replay: Option<u64>,
}

impl Watcher {
    fn hear(&mut self, rank: &RankCache, steps: Vec<RankStep>) {
        for step in steps {
            match step {
                RankStep::RequestReplay(from) => self.replay = Some(from),
                RankStep::Send(changes) => self.apply(changes),
                RankStep::SendSnapshot => {
                    let all =
                        rank.snapshot().expect("`SendSnapshot` comes only when a snapshot exists");
                    self.blocks = HashSet::from([BlockHash(1)]);
                    self.apply(all);
                }
            }
        }
    }

    fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Reset { .. } | Change::Unknown { .. } => {
                    self.blocks.clear();
                    self.is_complete = false;
                }
                Change::Stored { blocks, .. } => self.blocks.extend(blocks),
                Change::Removed { blocks, .. } => {
                    blocks.iter().for_each(|block| assert!(self.blocks.remove(block)));
                }
                Change::Complete => self.is_complete = true,
            }
        }
    }
}

/// An engine's cache and its publisher.
#[derive(Debug, Default)]
struct Engine {
    resident: Vec<u64>,
    sent: Vec<Vec<u8>>,
}

impl Engine {
    /// Stores or removes a page, and publishes the change.
    fn change(&mut self, page: u64) {
        let event = match self.resident.iter().position(|&held| held == page) {
            Some(at) => {
                self.resident.swap_remove(at);
                removed(page)
            }
            None => {
                self.resident.push(page);
                stored(page)
            }
        };
        self.sent.push(message(&[event]));
    }

    fn publish_tree(&mut self) {
        self.sent.push(message(&[cleared()]));
        let pages = self.resident.clone();
        self.sent.extend(pages.into_iter().map(|page| message(&[stored(page)])));
    }
}

/// Answers replay requests until none is left.
fn answer(rank: &mut RankCache, watcher: &mut Watcher, engine: &Engine, buffer: usize) {
    while let Some(from) = watcher.replay.take() {
        let oldest = engine.sent.len().saturating_sub(buffer);
        for number in oldest.max(usize::try_from(from).unwrap())..engine.sent.len() {
            let steps = rank.take_replayed(number as u64, engine.sent[number].clone());
            watcher.hear(rank, steps);
        }
        let steps = rank.end_replay();
        watcher.hear(rank, steps);
    }
}

/// The engine's resident blocks, computed by another rank that has seen every event.
fn truth(engine: &Engine) -> HashSet<BlockHash> {
    let (mut rank, mut watcher) =
        (RankCache::new(PAGE_TOKENS, pool(1000, 0)).unwrap(), Watcher::default());
    let mut fresh = Engine { resident: engine.resident.clone(), sent: vec![] };
    fresh.publish_tree();
    let steps = rank.reset_for_connection();
    watcher.hear(&rank, steps);
    answer(&mut rank, &mut watcher, &fresh, usize::MAX);
    watcher.blocks
}

proptest! {
    #[test]
    fn what_is_told_is_resident_and_all_of_it_once_the_tree_was_published(
        steps in prop::collection::vec((1..12_u64, prop::bool::weighted(0.8), 0..4_u8), 1..80),
        before in 0..40_usize,
        buffer in 1..60_usize,
    ) {
        let mut rank = RankCache::new(PAGE_TOKENS, pool(1000, 0)).unwrap();
        let mut watcher = Watcher::default();
        let mut engine = Engine::default();
        // The agent starts beside an engine that already runs.
        (0..before as u64).for_each(|page| engine.change(1 + page * 5 % 12));
        let connected = rank.reset_for_connection();
        watcher.hear(&rank, connected);
        prop_assert_eq!(rank.snapshot(), None);
        answer(&mut rank, &mut watcher, &engine, buffer);
        for (page, comes, kind) in steps {
            let from = engine.sent.len();
            engine.change(page);
            if kind == 0 && rank.needs_republished_tree() {
                engine.publish_tree();
            }
            for number in from..engine.sent.len() {
                if comes {
                    let steps = rank.take_live(number as u64, engine.sent[number].clone());
                    watcher.hear(&rank, steps);
                }
            }
            if kind < 2 {
                answer(&mut rank, &mut watcher, &engine, buffer);
            }
        }
        // The last message may have been lost: the rank looks for it after a quiet period.
        answer(&mut rank, &mut watcher, &engine, buffer);
        let looked = rank.request_replay();
        watcher.hear(&rank, looked);
        answer(&mut rank, &mut watcher, &engine, buffer);
        let truth = truth(&engine);
        prop_assert!(watcher.blocks.is_subset(&truth), "{:?}", watcher.blocks);
        prop_assert!(!watcher.is_complete || watcher.blocks == truth);
        prop_assert_eq!(watcher.is_complete, !rank.needs_republished_tree());
        let resident: u64 = rank.resident_blocks().iter().map(|(_, blocks)| blocks).sum();
        prop_assert_eq!(resident, watcher.blocks.len() as u64);
    }
}

#[test]
fn a_wrong_hash_and_a_wrong_message_are_counted_and_not_told() {
    let (mut rank, mut watcher) =
        (RankCache::new(PAGE_TOKENS, pool(1000, 0)).unwrap(), Watcher::default());
    let connected = rank.reset_for_connection();
    watcher.hear(&rank, connected);
    let ended = rank.end_replay();
    watcher.hear(&rank, ended);
    let mut plain = stored(3);
    // Without an adapter name, the hash must match the tokens.
    let at = plain.windows(4).position(|bytes| bytes == b"lora").unwrap();
    plain[at] = b'x';
    let steps = rank.take_live(0, message(&[plain, stored(4)]));
    watcher.hear(&rank, steps);
    assert_eq!(watcher.blocks.len(), 1);
    assert!(rank.take_rejection().unwrap().contains("hash"));
    let counts = rank.take_counts();
    assert_eq!((counts.stored, counts.mismatches, counts.malformed), (2, 1, 0));
    // A truncated message can't be applied, so everything known so far may be outdated.
    let steps = rank.take_live(1, message(&[stored(5)])[..40].to_vec());
    watcher.hear(&rank, steps);
    assert_eq!((watcher.blocks.len(), rank.needs_republished_tree()), (0, true));
    assert_eq!(rank.take_counts().malformed, 1);
    let steps = rank.take_live(2, message(&[cleared()]));
    watcher.hear(&rank, steps);
    assert!(!rank.needs_republished_tree());
}

#[test]
fn what_was_lost_has_made_room_when_as_much_as_the_pool_holds_was_stored_since() {
    let pool_pages = 3;
    let mut rank = RankCache::new(PAGE_TOKENS, pool(pool_pages, 0)).unwrap();
    let mut watcher = Watcher::default();
    let connected = rank.reset_for_connection();
    watcher.hear(&rank, connected);
    // The first message received is number 7: the seven before it are lost.
    for (number, page) in [(7, 1), (8, 2), (9, 3)] {
        assert!(!watcher.is_complete, "before {number}");
        let steps = if number == 7 {
            rank.take_replayed(number, message(&[stored(page)]))
        } else {
            rank.take_live(number, message(&[stored(page)]))
        };
        watcher.hear(&rank, steps);
        if number == 7 {
            let ended = rank.end_replay();
            watcher.hear(&rank, ended);
        }
    }
    assert_eq!((watcher.blocks.len(), watcher.is_complete), (3, true));
}

#[test]
fn pages_on_the_host_make_room_only_there() {
    let mut rank = RankCache::new(PAGE_TOKENS, pool(1, 2)).unwrap();
    let mut watcher = Watcher::default();
    let connected = rank.reset_for_connection();
    watcher.hear(&rank, connected);
    let steps = rank.take_replayed(7, message(&[stored(1), stored(2)]));
    watcher.hear(&rank, steps);
    let ended = rank.end_replay();
    watcher.hear(&rank, ended);
    assert!(!watcher.is_complete, "the host's pages of before the loss may be there");
    for (number, page) in [(8, 1), (9, 2)] {
        assert!(!watcher.is_complete, "before {number}");
        let steps = rank.take_live(number, message(&[stored_on_host(page)]));
        watcher.hear(&rank, steps);
    }
    assert!(watcher.is_complete);
}

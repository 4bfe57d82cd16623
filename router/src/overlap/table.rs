//! Where a block is: from its hash to a run and a place in it, eight bytes an entry. The table
//! keeps no hashes: it proposes, and its caller, who has the runs, says which proposal is right.
//!
//! Open addressing with linear probing, in shards that grow one by one, so that a large index never
//! stops to move all of itself. An entry has enough of its hash to be moved without asking anyone.
//!
//! ```text
//! 63        40 39              12 11       0
//! | tag      | run              | place    |      0 = free: there is no run 0
//! ```

use proto::block::BlockHash;

use super::RunId;

/// Bits of a hash kept in an entry: its home in a shard of any size, and a tag besides.
const TAG_BITS: u32 = 24;
const PLACE_BITS: u32 = 12;
const RUN_BITS: u32 = 28;
/// Runs there can be, the root included: more than fit in any memory.
pub(super) const RUNS_MAX: usize = 1 << RUN_BITS;
/// Places of a run.
pub(super) const PLACES: u32 = 1 << PLACE_BITS;
/// A table of a million blocks grows in steps of 16 thousand entries: some 50 µs.
const SHARDS: usize = 64;
/// Entries of a shard that begins to fill.
const SHARD_ENTRIES_MIN: usize = 16;

/// Entries in shards by the low bits of the hash.
#[derive(Debug)]
pub(super) struct Table {
    shards: Vec<Shard>,
    entries: usize,
    bytes: usize,
}

#[derive(Debug, Default, Clone)]
struct Shard {
    slots: Vec<u64>,
    used: usize,
}

/// What an entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) run: RunId,
    /// The block's depth in its chain, modulo [`PLACES`].
    pub(super) place: u32,
}

impl Entry {
    pub(super) fn new(run: RunId, depth: usize) -> Self {
        Self { run, place: low(depth as u64) % PLACES }
    }

    fn pack(self, hash: BlockHash) -> u64 {
        tag(hash) << (64 - TAG_BITS) | u64::from(self.run) << PLACE_BITS | u64::from(self.place)
    }

    fn unpack(slot: u64) -> Self {
        let run = low(slot >> PLACE_BITS) & ((1 << RUN_BITS) - 1);
        Self { run, place: low(slot) % PLACES }
    }
}

fn tag(hash: BlockHash) -> u64 {
    hash.0 >> (64 - TAG_BITS)
}

fn shard(hash: BlockHash) -> usize {
    low(hash.0) as usize % SHARDS
}

#[expect(clippy::cast_possible_truncation, reason = "the caller wants low bits only")]
fn low(word: u64) -> u32 {
    word as u32
}

/// Where in so many slots a tag belongs; keeps the order of tags, so that growing is one sweep.
fn home(tag: u64, slots: usize) -> usize {
    low((tag * slots as u64) >> TAG_BITS) as usize
}

impl Shard {
    fn put(&mut self, slot: u64) {
        let mut at = home(slot >> (64 - TAG_BITS), self.slots.len());
        while self.slots[at] != 0 {
            at = self.after(at);
        }
        self.slots[at] = slot;
        self.used += 1;
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// Probing is short while a fifth of the slots is free. Returns the bytes that it grew by.
    fn make_room(&mut self) -> usize {
        let slots = self.slots.len();
        if (self.used + 1) * 5 > slots * 4 {
            let grown = (slots + slots / 2).max(SHARD_ENTRIES_MIN);
            let old = std::mem::replace(&mut self.slots, vec![0; grown]);
            self.used = 0;
            old.into_iter().filter(|&slot| slot != 0).for_each(|slot| self.put(slot));
        }
        (self.slots.len() - slots) * size_of::<u64>()
    }

    fn position(&self, slot: u64) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = home(slot >> (64 - TAG_BITS), self.slots.len());
        while self.slots[at] != 0 {
            if self.slots[at] == slot {
                return Some(at);
            }
            at = self.after(at);
        }
        None
    }

    /// Frees a slot and closes the gap, so that no probe ends early.
    fn take(&mut self, mut gap: usize) {
        let mut at = gap;
        loop {
            at = self.after(at);
            let slot = self.slots[at];
            if slot == 0 {
                break;
            }
            let home = home(slot >> (64 - TAG_BITS), self.slots.len());
            // May it move to the gap: does its home not lie behind the gap?
            let stays = if gap < at { gap < home && home <= at } else { gap < home || home <= at };
            if !stays {
                self.slots[gap] = slot;
                gap = at;
            }
        }
        self.slots[gap] = 0;
        self.used -= 1;
    }
}

impl Table {
    pub(super) fn new() -> Self {
        Self { shards: vec![Shard::default(); SHARDS], entries: 0, bytes: 0 }
    }

    /// Entries in use.
    pub(super) fn len(&self) -> usize {
        self.entries
    }

    /// Memory held.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first proposal that `accept` makes something of.
    pub(super) fn find<T>(
        &self,
        hash: BlockHash,
        mut accept: impl FnMut(Entry) -> Option<T>,
    ) -> Option<T> {
        let shard = &self.shards[shard(hash)];
        if shard.slots.is_empty() {
            return None;
        }
        let tag = tag(hash);
        let mut at = home(tag, shard.slots.len());
        loop {
            let slot = shard.slots[at];
            if slot == 0 {
                return None;
            }
            if slot >> (64 - TAG_BITS) == tag
                && let Some(found) = accept(Entry::unpack(slot))
            {
                return Some(found);
            }
            at = shard.after(at);
        }
    }

    /// Adds a block that is not in it.
    pub(super) fn insert(&mut self, hash: BlockHash, entry: Entry) {
        let shard = &mut self.shards[shard(hash)];
        self.bytes += shard.make_room();
        shard.put(entry.pack(hash));
        self.entries += 1;
    }

    /// Takes a block out.
    pub(super) fn remove(&mut self, hash: BlockHash, entry: Entry) {
        let shard = &mut self.shards[shard(hash)];
        let at = shard.position(entry.pack(hash)).expect("every block of a run has its entry");
        shard.take(at);
        self.entries -= 1;
    }

    /// Moves a block to another run, at the same depth.
    pub(super) fn rename(&mut self, hash: BlockHash, entry: Entry, run: RunId) {
        let shard = &mut self.shards[shard(hash)];
        let at = shard.position(entry.pack(hash)).expect("every block of a run has its entry");
        shard.slots[at] = Entry { run, ..entry }.pack(hash);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_entry_keeps_what_it_was_given() {
        let entry = Entry::new((1 << RUN_BITS) - 1, 5 * PLACES as usize + 17);
        assert_eq!(entry.place, 17);
        assert_eq!(Entry::unpack(entry.pack(BlockHash(u64::MAX))), entry);
    }

    proptest! {
        /// Few tags and few shards, so that probes run into each other and around the end.
        #[test]
        fn it_holds_what_a_map_holds(
            steps in prop::collection::vec((0..4_u8, 0..40_u64), 1..400),
        ) {
            let hash = |key: u64| BlockHash((u64::MAX << 43) + ((key % 5) << 40) + ((key / 5) << 8));
            let mut table = Table::new();
            let mut map = HashMap::new();
            for (kind, key) in steps {
                let found = table.find(hash(key), |entry| {
                    (u64::from(entry.place) == key).then_some(entry.run)
                });
                prop_assert_eq!(found, map.get(&key).copied());
                let entry = |run| Entry { run, place: low(key) };
                match (kind, found) {
                    (0 | 1, None) => {
                        table.insert(hash(key), entry(7));
                        map.insert(key, 7);
                    }
                    (2, Some(run)) => {
                        table.remove(hash(key), entry(run));
                        map.remove(&key);
                    }
                    (3, Some(run)) => {
                        table.rename(hash(key), entry(run), run + 1);
                        map.insert(key, run + 1);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.len(), map.len());
            }
        }
    }
}

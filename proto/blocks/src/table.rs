//! A table from the hashes of blocks (router) or pages (agent) to their places in a prefix tree.
//!
//! The tree is compressed to *runs*: unbranched parts, whose blocks follow each other. The caller
//! stores the runs and knows where each begins. The table maps a key, 24 bits of a block's hash, to
//! the block's run and its *place*: the number of blocks before it in its prompt, modulo 4096.
//!
//! The table stores no full hashes, so several blocks may have one key. [`RunTable::find`] offers
//! the entries of a key to the caller, which compares full hashes and accepts the right entry.
//!
//! The entries of a *shard* are in a hash table of their own, so a large index never pauses to move
//! all of its entries. An entry is packed into one word, which contains its key:
//!
//! ```text
//! 63        40 39              12 11       0
//! | key        | run              | place    |
//! ```

use hashbrown::HashTable;

/// Bits per key.
pub const KEY_BITS: u32 = 24;
const PLACE_BITS: u32 = 12;
const RUN_BITS: u32 = 28;
/// The number of distinct run ids, 268 million. Memory runs out before the ids do.
pub const RUNS_MAX: usize = 1 << RUN_BITS;
/// The number of distinct values of [`Entry::place`].
pub const PLACE_MODULUS: u32 = 1 << PLACE_BITS;
const SHARD_BITS: u32 = 6;
/// Number of shards. With 64, a step by which a table of ten million blocks grows moves some
/// 150,000 entries.
const SHARD_COUNT: usize = 1 << SHARD_BITS;
/// Spreads a key over a word: hashbrown takes a slot by the low bits, and compares the top ones.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The id of a run. The caller assigns ids from 1; 0 is no run.
pub type RunId = u32;

/// Maps keys to entries, which say in which run and at which place a block is. The low bits of the
/// key choose the shard.
#[derive(Debug)]
pub struct RunTable {
    shards: [HashTable<u64>; SHARD_COUNT],
    /// Number of entries in use.
    entry_count: usize,
    /// Memory of all shards, in bytes.
    bytes: usize,
}

/// The position that an entry points to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The run.
    pub run: RunId,
    /// The number of blocks between the root of the tree and this block, modulo [`PLACE_MODULUS`].
    pub place: u32,
}

impl Entry {
    /// Makes the entry of a block in `run` that has `depth` blocks before it.
    #[must_use]
    pub fn new(run: RunId, depth: usize) -> Self {
        Self { run, place: low_bits(depth as u64) % PLACE_MODULUS }
    }

    fn pack(self, key: u64) -> u64 {
        key << (64 - KEY_BITS) | u64::from(self.run) << PLACE_BITS | u64::from(self.place)
    }

    fn unpack(packed: u64) -> Self {
        let run = low_bits(packed >> PLACE_BITS) & ((1 << RUN_BITS) - 1);
        Self { run, place: low_bits(packed) % PLACE_MODULUS }
    }
}

fn key_of(packed: u64) -> u64 {
    packed >> (64 - KEY_BITS)
}

fn shard_index(key: u64) -> usize {
    low_bits(key) as usize % SHARD_COUNT
}

/// Returns the hash of an entry in its shard.
fn hash_of(key: u64) -> u64 {
    (key >> SHARD_BITS).wrapping_mul(SPREAD)
}

fn hash_of_packed(packed: &u64) -> u64 {
    hash_of(key_of(*packed))
}

/// Moves a full shard into one with room for an eighth more.
///
/// A removed entry may leave a place that only a move frees. Hashbrown would double a table that is
/// more than half in use, however few entries it has gained: where entries are replaced all the
/// time, as in a full pool, that takes up to 33 bytes an entry.
fn make_room(shard: &mut HashTable<u64>) {
    let mut roomy = HashTable::with_capacity(shard.len() + shard.len() / 8 + 1);
    for &packed in &*shard {
        roomy.insert_unique(hash_of_packed(&packed), packed, hash_of_packed);
    }
    *shard = roomy;
}

#[expect(clippy::cast_possible_truncation, reason = "the caller wants low bits only")]
fn low_bits(word: u64) -> u32 {
    word as u32
}

impl Default for RunTable {
    fn default() -> Self {
        Self::new()
    }
}

impl RunTable {
    /// Makes an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self { shards: [const { HashTable::new() }; SHARD_COUNT], entry_count: 0, bytes: 0 }
    }

    /// Returns the number of entries in use.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        self.entry_count
    }

    /// Returns the memory of all entries, free ones too, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Calls `accept` with the entries stored under the key, until it returns `Some`. Returns that
    /// result, or `None` if `accept` rejects all of them.
    pub fn find<T>(&self, key: u64, mut accept: impl FnMut(Entry) -> Option<T>) -> Option<T> {
        let mut accepted = None;
        self.shards[shard_index(key)].find(hash_of(key), |&packed| {
            if key_of(packed) == key {
                accepted = accept(Entry::unpack(packed));
            }
            accepted.is_some()
        });
        accepted
    }

    /// Adds an entry, unless `is_same_block` accepts an entry already stored under the key. Returns
    /// whether the entry was added.
    pub fn insert(
        &mut self,
        key: u64,
        entry: Entry,
        is_same_block: impl Fn(Entry) -> bool,
    ) -> bool {
        let is_there = |entry| is_same_block(entry).then_some(());
        if self.find(key, is_there).is_some() {
            return false;
        }
        let shard = &mut self.shards[shard_index(key)];
        let old_bytes = shard.allocation_size();
        if shard.len() == shard.capacity() {
            make_room(shard);
        }
        shard.insert_unique(hash_of(key), entry.pack(key), hash_of_packed);
        self.bytes = self.bytes + shard.allocation_size() - old_bytes;
        self.entry_count += 1;
        true
    }

    /// Removes an entry.
    ///
    /// # Panics
    /// When the entry isn't in the table.
    pub fn remove(&mut self, key: u64, entry: Entry) {
        let packed = entry.pack(key);
        let shard = &mut self.shards[shard_index(key)];
        let found = shard.find_entry(hash_of(key), |&other| other == packed);
        found.expect("the caller added this entry").remove();
        self.entry_count -= 1;
    }

    /// Changes the run to which an entry points, for a caller that splits or joins runs. The key
    /// and the place stay.
    ///
    /// # Panics
    /// When the entry isn't in the table.
    pub fn set_run(&mut self, key: u64, entry: Entry, run: RunId) {
        let packed = entry.pack(key);
        let shard = &mut self.shards[shard_index(key)];
        let found = shard.find_mut(hash_of(key), |&other| other == packed);
        *found.expect("the caller added this entry") = Entry { run, ..entry }.pack(key);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_entry_survives_packing() {
        let entry = Entry::new((1 << RUN_BITS) - 1, 5 * PLACE_MODULUS as usize + 17);
        assert_eq!(entry.place, 17);
        let slot = entry.pack((1 << KEY_BITS) - 1);
        assert_eq!((Entry::unpack(slot), key_of(slot)), (entry, (1 << KEY_BITS) - 1));
    }

    #[test]
    fn a_table_whose_entries_are_replaced_takes_no_more_memory() {
        const ENTRIES: u64 = 20_000;
        // As irregular as hashes: evenly spread keys would leave no place in use for ever.
        let key = |number: u64| {
            let word = number.wrapping_mul(SPREAD);
            (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> (64 - KEY_BITS)
        };
        let entry = |number: u64| Entry { run: low_bits(number), place: 0 };
        let mut table = RunTable::new();
        for number in 1..=ENTRIES * 11 {
            assert!(table.insert(key(number), entry(number), |_| false));
            if let Some(oldest) = number.checked_sub(ENTRIES).filter(|&oldest| oldest > 0) {
                table.remove(key(oldest), entry(oldest));
            }
        }
        let shards: usize = table.shards.iter().map(HashTable::allocation_size).sum();
        assert_eq!(table.bytes(), shards);
        let bytes_per_entry = table.bytes() / table.entry_count();
        assert!(bytes_per_entry <= 23, "{bytes_per_entry} bytes an entry");
    }

    proptest! {
        /// All keys are in one shard, and several blocks have each.
        #[test]
        fn a_table_holds_the_same_entries_as_a_map(
            steps in prop::collection::vec((0..5_u8, 0..60_u64), 1..600),
        ) {
            let key = |name: u64| (name % 5) << SHARD_BITS;
            let mut table = RunTable::new();
            let mut map = HashMap::new();
            for (kind, name) in steps {
                let found = table.find(key(name), |entry| {
                    (u64::from(entry.place) == name).then_some(entry.run)
                });
                prop_assert_eq!(found, map.get(&name).copied());
                let entry = |run| Entry { run, place: low_bits(name) };
                match (kind, found) {
                    (0 | 1, None) => {
                        prop_assert!(table.insert(key(name), entry(7), |_| false));
                        map.insert(name, 7);
                    }
                    (2 | 3, Some(run)) => {
                        table.remove(key(name), entry(run));
                        map.remove(&name);
                    }
                    (4, Some(run)) => {
                        table.set_run(key(name), entry(run), run + 1);
                        map.insert(name, run + 1);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.entry_count(), map.len());
            }
        }
    }
}

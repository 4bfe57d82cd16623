//! A hash table with eight bytes per entry, for the indexes of blocks (router) and pages (agent).
//!
//! Such an index is a prefix tree of prompts, compressed to *runs*. A run is an unbranched part of
//! the tree: blocks (or pages) that follow each other. The caller stores the runs: the router in
//! `residency/index`, the agent in `kv_events/pages`. This table maps a key, 24 bits of a block's
//! hash, to the block's run and its *place*. The place is the number of blocks before the block in
//! its prompt, modulo 4096. The caller knows where each run begins, so the place tells it the
//! block's index in the run.
//!
//! The table stores no full hashes, so several blocks may have one key. [`RunTable::find`] offers
//! the entries of a key to the caller, which compares full hashes and accepts the right entry. The
//! table is no cache: it evicts nothing and has no limit of its own.
//!
//! A *bucket* is one cache line of entries. An entry is in the bucket that its key selects, its
//! *home*, or in the first bucket after its home that had room. A *shard* is a group of buckets
//! that grows alone, so a large index never pauses to move all of its entries. An entry contains
//! its whole key, so the table moves an entry without asking the caller.
//!
//! The table is our own code, because hashbrown's takes more memory. In tables of 0.3 to 10
//! million entries, an entry takes 11.5 to 14.2 bytes, 12.8 on average. In a
//! `hashbrown::HashTable` for each shard, which always doubles, the same entry takes 10.4 to 20.5
//! bytes, 15.0 on average. A look-up that finds its entry takes a fifth less time than in
//! hashbrown's table, and one that doesn't twice the time (2026-11-23, two busy cores).
//!
//! An entry is packed into one word. The word 0 is a free slot, because there is no run 0:
//!
//! ```text
//! 63        40 39              12 11       0
//! | key        | run              | place    |
//! ```

/// Bits per key.
pub const KEY_BITS: u32 = 24;
const PLACE_BITS: u32 = 12;
const RUN_BITS: u32 = 28;
/// The number of distinct run ids, 268 million. Memory runs out before the ids do.
pub const RUNS_MAX: usize = 1 << RUN_BITS;
/// The number of distinct values of [`Entry::place`].
pub const PLACE_MODULUS: u32 = 1 << PLACE_BITS;
const SHARD_BITS: u32 = 6;
/// Number of shards. With 64, a table of ten million blocks grows in steps of some 30,000 entries,
/// which take about 100 µs each.
const SHARD_COUNT: usize = 1 << SHARD_BITS;
/// Entries per bucket. The eighth word of the cache line is [`Bucket::control`].
const BUCKET_SLOTS: usize = 7;
/// A word with the value 1 in each of the lower seven bytes. In [`Bucket::control`], these bytes
/// hold the tags.
const TAG_ONES: u64 = 0x0001_0101_0101_0101;
/// Number of entries up to which a shard doubles. A larger shard grows by a quarter, to leave less
/// memory unused: it takes 11 to 14 bytes per entry.
const DOUBLING_ENTRIES_MAX: usize = 512;

/// The id of a run. The caller assigns ids from 1; 0 is no run.
pub type RunId = u32;

/// Maps keys to entries, which say in which run and at which place a block is. The low bits of the
/// key choose the shard.
#[derive(Debug)]
pub struct RunTable {
    shards: Vec<Shard>,
    /// Number of entries in use.
    entry_count: usize,
    /// Memory of all buckets, in bytes.
    bytes: usize,
}

/// The entries of all keys with the same low bits.
#[derive(Debug, Default, Clone)]
struct Shard {
    buckets: Vec<Bucket>,
    /// Number of entries in use.
    entry_count: usize,
}

/// One cache line of entries. Used slots come first, free slots after them.
#[derive(Debug, Default, Clone, Copy)]
#[repr(align(64))]
struct Bucket {
    /// The tag of each entry (see [`tag`]) in the lower seven bytes, slot 0 in the lowest. The
    /// number of entries in the top byte.
    control: u64,
    /// The packed entries; 0 if free.
    slots: [u64; BUCKET_SLOTS],
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

/// Returns one byte of the key: the tag by which a bucket tells most of its keys apart.
fn tag(key: u64) -> u64 {
    key >> SHARD_BITS & 0xff
}

#[expect(clippy::cast_possible_truncation, reason = "the caller wants low bits only")]
fn low_bits(word: u64) -> u32 {
    word as u32
}

impl Bucket {
    /// Returns the number of entries in use.
    fn len(&self) -> usize {
        low_bits(self.control >> 56) as usize
    }

    fn is_full(&self) -> bool {
        self.len() == BUCKET_SLOTS
    }

    /// Returns the indices of the slots that may hold the key. All slots with the key's tag are
    /// among them. A borrow in the subtraction can add a slot with another tag, so the caller
    /// compares keys.
    fn candidate_slots(&self, key: u64) -> impl Iterator<Item = usize> {
        let differs = self.control ^ (tag(key) * TAG_ONES);
        // The top bit of each byte that is zero in `differs`.
        let mut matches = differs.wrapping_sub(TAG_ONES) & !differs & (TAG_ONES << 7);
        std::iter::from_fn(move || {
            let slot_index = matches.trailing_zeros() as usize / 8;
            // Clear the lowest bit that is set.
            matches &= matches.wrapping_sub(1);
            (slot_index < BUCKET_SLOTS).then_some(slot_index)
        })
    }

    /// Returns the entries stored under the key.
    fn entries_with_key(&self, key: u64) -> impl Iterator<Item = Entry> {
        let candidates = self.candidate_slots(key).map(|slot_index| self.slots[slot_index]);
        candidates.filter(move |&packed| packed != 0 && key_of(packed) == key).map(Entry::unpack)
    }

    /// Returns the index of the slot that holds this packed entry.
    fn slot_of(&self, packed: u64) -> Option<usize> {
        self.candidate_slots(key_of(packed)).find(|&slot_index| self.slots[slot_index] == packed)
    }

    /// Adds a packed entry to a bucket that isn't full.
    fn push(&mut self, packed: u64) {
        let free_index = self.len();
        self.slots[free_index] = packed;
        self.control += (1 << 56) | tag(key_of(packed)) << (8 * free_index);
    }

    /// Removes the entry in a slot and returns it packed. The bucket's last entry takes the slot.
    fn take_slot(&mut self, slot_index: usize) -> u64 {
        let last_index = self.len() - 1;
        let moved_tag = self.control >> (8 * last_index) & 0xff;
        let control = self.control & !(0xff << (8 * slot_index)) | moved_tag << (8 * slot_index);
        self.control = (control & !(0xff << (8 * last_index))) - (1 << 56);
        self.slots.swap(slot_index, last_index);
        std::mem::take(&mut self.slots[last_index])
    }
}

impl Shard {
    /// Returns the index of a key's home bucket. A larger key never has an earlier home, so growing
    /// the shard moves the entries in one sweep.
    fn home_bucket(&self, key: u64) -> usize {
        low_bits(((key >> SHARD_BITS) * self.buckets.len() as u64) >> (KEY_BITS - SHARD_BITS))
            as usize
    }

    /// Returns the index of the bucket after this one. The first bucket follows the last.
    fn bucket_after(&self, bucket_index: usize) -> usize {
        if bucket_index + 1 == self.buckets.len() { 0 } else { bucket_index + 1 }
    }

    /// Makes room for one more entry. Grows the shard if less than a fifth of its slots would stay
    /// free, so that most buckets aren't full. Returns the bytes by which the shard grew.
    fn make_room(&mut self) -> usize {
        let old_count = self.buckets.len();
        if (self.entry_count + 1) * 5 <= old_count * BUCKET_SLOTS * 4 {
            return 0;
        }
        let added_count =
            if self.entry_count < DOUBLING_ENTRIES_MAX { old_count.max(2) } else { old_count / 4 };
        let empty_buckets = vec![Bucket::default(); old_count + added_count];
        let old_buckets = std::mem::replace(&mut self.buckets, empty_buckets);
        for packed in old_buckets.iter().flat_map(|bucket| &bucket.slots[..bucket.len()]) {
            self.put(*packed);
        }
        added_count * size_of::<Bucket>()
    }

    /// Puts a packed entry into the first bucket with room, beginning with its home.
    fn put(&mut self, packed: u64) {
        let mut bucket_index = self.home_bucket(key_of(packed));
        while self.buckets[bucket_index].is_full() {
            bucket_index = self.bucket_after(bucket_index);
        }
        self.buckets[bucket_index].push(packed);
    }

    /// Returns the indices of the bucket and of the slot that hold a packed entry.
    fn position(&self, packed: u64) -> Option<(usize, usize)> {
        if self.buckets.is_empty() {
            return None;
        }
        let mut bucket_index = self.home_bucket(key_of(packed));
        loop {
            let bucket = &self.buckets[bucket_index];
            if let Some(slot_index) = bucket.slot_of(packed) {
                return Some((bucket_index, slot_index));
            }
            if !bucket.is_full() {
                return None;
            }
            bucket_index = self.bucket_after(bucket_index);
        }
    }

    /// Removes an entry. If its bucket was full, entries may have overflowed from this bucket into
    /// later ones. Moves one such entry back into the gap, then another into the gap that the first
    /// move leaves, and so on until a bucket that wasn't full.
    fn remove_at(&mut self, bucket_index: usize, slot_index: usize) {
        self.entry_count -= 1;
        let mut was_full = self.buckets[bucket_index].is_full();
        self.buckets[bucket_index].take_slot(slot_index);
        // Bucket indices: where a slot is free, and up to where entries were looked at.
        let (mut gap, mut scanned) = (bucket_index, bucket_index);
        while was_full {
            scanned = self.bucket_after(scanned);
            was_full = self.buckets[scanned].is_full();
            let bucket = &self.buckets[scanned];
            let movable = bucket.slots[..bucket.len()].iter().position(|packed| {
                let home = self.home_bucket(key_of(*packed));
                // An entry may move back to the gap unless its home is after the gap, because
                // look-ups begin at the home. Buckets are a ring, so the gap may have a larger
                // index than the scanned bucket.
                if gap < scanned {
                    home <= gap || scanned < home
                } else {
                    home <= gap && scanned < home
                }
            });
            if let Some(slot_index) = movable {
                let packed = self.buckets[scanned].take_slot(slot_index);
                self.buckets[gap].push(packed);
                gap = scanned;
            }
        }
    }
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
        Self { shards: vec![Shard::default(); SHARD_COUNT], entry_count: 0, bytes: 0 }
    }

    /// Returns the number of entries in use.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        self.entry_count
    }

    /// Returns the memory of all buckets, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Calls `accept` with the entries stored under the key, until it returns `Some`. Returns that
    /// result, or `None` if `accept` rejects all of them.
    pub fn find<T>(&self, key: u64, mut accept: impl FnMut(Entry) -> Option<T>) -> Option<T> {
        let shard = &self.shards[shard_index(key)];
        if shard.buckets.is_empty() {
            return None;
        }
        let mut bucket_index = shard.home_bucket(key);
        loop {
            let bucket = &shard.buckets[bucket_index];
            if let Some(accepted) = bucket.entries_with_key(key).find_map(&mut accept) {
                return Some(accepted);
            }
            if !bucket.is_full() {
                return None;
            }
            bucket_index = shard.bucket_after(bucket_index);
        }
    }

    /// Adds an entry, unless `is_same_block` accepts an entry already stored under the key. Returns
    /// whether the entry was added.
    pub fn insert(
        &mut self,
        key: u64,
        entry: Entry,
        is_same_block: impl Fn(Entry) -> bool,
    ) -> bool {
        let shard = &mut self.shards[shard_index(key)];
        self.bytes += shard.make_room();
        let mut bucket_index = shard.home_bucket(key);
        loop {
            let bucket = &mut shard.buckets[bucket_index];
            if bucket.entries_with_key(key).any(&is_same_block) {
                return false;
            }
            if !bucket.is_full() {
                bucket.push(entry.pack(key));
                shard.entry_count += 1;
                self.entry_count += 1;
                return true;
            }
            bucket_index = shard.bucket_after(bucket_index);
        }
    }

    /// Removes an entry.
    ///
    /// # Panics
    /// When the entry isn't in the table.
    pub fn remove(&mut self, key: u64, entry: Entry) {
        let shard = &mut self.shards[shard_index(key)];
        let (bucket_index, slot_index) =
            shard.position(entry.pack(key)).expect("the caller added this entry");
        shard.remove_at(bucket_index, slot_index);
        self.entry_count -= 1;
    }

    /// Changes the run to which an entry points, for a caller that splits or joins runs. The key
    /// and the place stay.
    ///
    /// # Panics
    /// When the entry isn't in the table.
    pub fn set_run(&mut self, key: u64, entry: Entry, run: RunId) {
        let shard = &mut self.shards[shard_index(key)];
        let (bucket_index, slot_index) =
            shard.position(entry.pack(key)).expect("the caller added this entry");
        shard.buckets[bucket_index].slots[slot_index] = Entry { run, ..entry }.pack(key);
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

    proptest! {
        /// All keys are in one shard and belong to its first and last buckets, so buckets fill up
        /// and overflow, also from the last bucket to the first.
        #[test]
        fn a_table_holds_the_same_entries_as_a_map(
            steps in prop::collection::vec((0..5_u8, 0..60_u64), 1..600),
        ) {
            let homes = [0, 1, 1 << 17, (1 << 18) - 2, (1 << 18) - 1];
            let key = |name: u64| homes[low_bits(name) as usize % 5] << SHARD_BITS;
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

//! The hash table of an index of blocks or pages, with eight bytes per entry.
//!
//! It maps a key, 24 bits of a hash, to a run and a place in the run. A run is an unbranched part
//! of a chain of blocks. The table stores no full hashes. It proposes entries, and its caller,
//! which stores the runs, decides which proposal is right.
//!
//! An entry is in the bucket (one cache line) that its key selects, or in a later bucket if those
//! before are full. Shards grow one at a time, so a large index never pauses to move all of its
//! entries. An entry contains its whole key, so it can be moved without asking the caller.
//!
//! ```text
//! 63        40 39              12 11       0
//! | key        | run              | place    |      0 = free: there is no run 0
//! ```

/// Bits per key.
pub const KEY_BITS: u32 = 24;
const PLACE_BITS: u32 = 12;
const RUN_BITS: u32 = 28;
/// The most run ids there can be; memory runs out earlier.
pub const RUNS_MAX: usize = 1 << RUN_BITS;
/// The number of distinct places in a run.
pub const PLACES: u32 = 1 << PLACE_BITS;
const SHARD_BITS: u32 = 6;
/// Number of shards: a table of ten million blocks grows in steps of some 30 thousand entries,
/// about 100 µs each.
const SHARDS: usize = 1 << SHARD_BITS;
/// Entries per bucket. The eighth word of the cache line tells which entries may have a key.
const BUCKET_SLOTS: usize = 7;
/// A one in each of the seven bytes of a bucket's control word that hold an entry's tag.
const TAG_ONES: u64 = 0x0001_0101_0101_0101;
/// Number of entries up to which a shard doubles. A larger shard grows by a quarter, to leave less
/// memory unused: 11 to 14 bytes per entry.
const SHARD_DOUBLING_MAX: usize = 512;

/// The number of a run: an unbranched part of a chain. 0 is no run.
pub type RunId = u32;

/// Entries, divided into shards by the low bits of the key.
#[derive(Debug)]
pub struct Table {
    shards: Vec<Shard>,
    entries: usize,
    bytes: usize,
}

#[derive(Debug, Default, Clone)]
struct Shard {
    buckets: Vec<Bucket>,
    used: usize,
}

/// One cache line of entries; the free slots are the last ones.
#[derive(Debug, Default, Clone, Copy)]
#[repr(align(64))]
struct Bucket {
    /// The tag of each entry from the lowest byte up, and the number of entries in the top byte.
    control: u64,
    slots: [u64; BUCKET_SLOTS],
}

/// The position that an entry points to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The run.
    pub run: RunId,
    /// The depth in the chain, modulo [`PLACES`].
    pub place: u32,
}

impl Entry {
    /// Makes the entry of a position at `depth` blocks from the root of its chain.
    #[must_use]
    pub fn new(run: RunId, depth: usize) -> Self {
        Self { run, place: low_bits(depth as u64) % PLACES }
    }

    fn pack(self, key: u64) -> u64 {
        key << (64 - KEY_BITS) | u64::from(self.run) << PLACE_BITS | u64::from(self.place)
    }

    fn unpack(slot: u64) -> Self {
        let run = low_bits(slot >> PLACE_BITS) & ((1 << RUN_BITS) - 1);
        Self { run, place: low_bits(slot) % PLACES }
    }
}

fn key_of(slot: u64) -> u64 {
    slot >> (64 - KEY_BITS)
}

fn shard_index(key: u64) -> usize {
    low_bits(key) as usize % SHARDS
}

/// Returns one byte of the key, which tells most keys of one bucket apart.
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

    /// Returns the slots whose tag equals the key's, and rarely a slot whose tag differs.
    fn candidates(&self, key: u64) -> impl Iterator<Item = usize> {
        let differs = self.control ^ (tag(key) * TAG_ONES);
        // The top bit of each byte that is zero in `differs`.
        let mut same = differs.wrapping_sub(TAG_ONES) & !differs & (TAG_ONES << 7);
        std::iter::from_fn(move || {
            let at = same.trailing_zeros() as usize / 8;
            same &= same.wrapping_sub(1);
            (at < BUCKET_SLOTS).then_some(at)
        })
    }

    /// Returns the entries stored under the key.
    fn proposals(&self, key: u64) -> impl Iterator<Item = Entry> {
        let slots = self.candidates(key).map(|at| self.slots[at]);
        slots.filter(move |&slot| slot != 0 && key_of(slot) == key).map(Entry::unpack)
    }

    fn position(&self, slot: u64) -> Option<usize> {
        self.candidates(key_of(slot)).find(|&at| self.slots[at] == slot)
    }

    /// Adds an entry to a bucket that isn't full.
    fn push(&mut self, slot: u64) {
        let at = self.len();
        self.slots[at] = slot;
        self.control += (1 << 56) | tag(key_of(slot)) << (8 * at);
    }

    /// Removes the entry in slot `at` and returns it.
    fn remove_at(&mut self, at: usize) -> u64 {
        let last = self.len() - 1;
        let moved = self.control >> (8 * last) & 0xff;
        let cleared = self.control & !(0xff << (8 * at)) | moved << (8 * at);
        self.control = (cleared & !(0xff << (8 * last))) - (1 << 56);
        self.slots.swap(at, last);
        std::mem::take(&mut self.slots[last])
    }
}

impl Shard {
    /// Returns the bucket a key belongs to. Buckets follow the order of keys, so growing is one
    /// sweep.
    fn home_bucket(&self, key: u64) -> usize {
        low_bits(((key >> SHARD_BITS) * self.buckets.len() as u64) >> (KEY_BITS - SHARD_BITS))
            as usize
    }

    fn next_bucket(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    /// Grows the shard if less than a fifth of its slots would be free; most buckets then aren't
    /// full. Returns the bytes by which it grew.
    fn make_room(&mut self) -> usize {
        let buckets = self.buckets.len();
        if (self.used + 1) * 5 <= buckets * BUCKET_SLOTS * 4 {
            return 0;
        }
        let more = if self.used < SHARD_DOUBLING_MAX { buckets.max(2) } else { buckets / 4 };
        let old = std::mem::replace(&mut self.buckets, vec![Bucket::default(); buckets + more]);
        for slot in old.iter().flat_map(|bucket| &bucket.slots[..bucket.len()]) {
            self.put(*slot);
        }
        more * size_of::<Bucket>()
    }

    fn put(&mut self, slot: u64) {
        let mut at = self.home_bucket(key_of(slot));
        while self.buckets[at].is_full() {
            at = self.next_bucket(at);
        }
        self.buckets[at].push(slot);
    }

    /// Returns the bucket and slot of an entry.
    fn position(&self, slot: u64) -> Option<(usize, usize)> {
        if self.buckets.is_empty() {
            return None;
        }
        let mut at = self.home_bucket(key_of(slot));
        loop {
            let bucket = &self.buckets[at];
            if let Some(place) = bucket.position(slot) {
                return Some((at, place));
            }
            if !bucket.is_full() {
                return None;
            }
            at = self.next_bucket(at);
        }
    }

    /// Removes an entry. If its bucket was full, moves back an entry that had overflowed from
    /// there.
    fn remove_at(&mut self, mut gap: usize, place: usize) {
        self.used -= 1;
        let mut was_full = self.buckets[gap].is_full();
        self.buckets[gap].remove_at(place);
        let mut at = gap;
        while was_full {
            at = self.next_bucket(at);
            was_full = self.buckets[at].is_full();
            let bucket = &self.buckets[at];
            let comes_back = bucket.slots[..bucket.len()].iter().position(|slot| {
                let home = self.home_bucket(key_of(*slot));
                // Whether the entry may move into the gap: its home isn't between the gap and its
                // bucket.
                if gap < at { home <= gap || at < home } else { home <= gap && at < home }
            });
            if let Some(place) = comes_back {
                let slot = self.buckets[at].remove_at(place);
                self.buckets[gap].push(slot);
                gap = at;
            }
        }
    }
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

impl Table {
    /// Makes an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self { shards: vec![Shard::default(); SHARDS], entries: 0, bytes: 0 }
    }

    /// Returns the number of entries in use.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Returns the bytes of memory held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the first result that `accept` gives for an entry stored under the key.
    pub fn find<T>(&self, key: u64, mut accept: impl FnMut(Entry) -> Option<T>) -> Option<T> {
        let shard = &self.shards[shard_index(key)];
        if shard.buckets.is_empty() {
            return None;
        }
        let mut at = shard.home_bucket(key);
        loop {
            let bucket = &shard.buckets[at];
            if let Some(found) = bucket.proposals(key).find_map(&mut accept) {
                return Some(found);
            }
            if !bucket.is_full() {
                return None;
            }
            at = shard.next_bucket(at);
        }
    }

    /// Adds an entry, unless `is_known` accepts an entry already stored under the key. Returns
    /// whether the entry was added.
    pub fn insert(&mut self, key: u64, entry: Entry, is_known: impl Fn(Entry) -> bool) -> bool {
        let shard = &mut self.shards[shard_index(key)];
        self.bytes += shard.make_room();
        let mut at = shard.home_bucket(key);
        loop {
            let bucket = &mut shard.buckets[at];
            if bucket.proposals(key).any(&is_known) {
                return false;
            }
            if !bucket.is_full() {
                bucket.push(entry.pack(key));
                shard.used += 1;
                self.entries += 1;
                return true;
            }
            at = shard.next_bucket(at);
        }
    }

    /// Removes an entry.
    ///
    /// # Panics
    /// When the entry isn't in the table.
    pub fn remove(&mut self, key: u64, entry: Entry) {
        let shard = &mut self.shards[shard_index(key)];
        let (at, place) = shard.position(entry.pack(key)).expect("the caller added this entry");
        shard.remove_at(at, place);
        self.entries -= 1;
    }

    /// Changes the run of an entry.
    ///
    /// # Panics
    /// When the entry isn't in the table.
    pub fn rename(&mut self, key: u64, entry: Entry, run: RunId) {
        let shard = &mut self.shards[shard_index(key)];
        let (at, place) = shard.position(entry.pack(key)).expect("the caller added this entry");
        shard.buckets[at].slots[place] = Entry { run, ..entry }.pack(key);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_entry_survives_packing() {
        let entry = Entry::new((1 << RUN_BITS) - 1, 5 * PLACES as usize + 17);
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
            let mut table = Table::new();
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
                        table.rename(key(name), entry(run), run + 1);
                        map.insert(name, run + 1);
                    }
                    _ => {}
                }
                prop_assert_eq!(table.entries(), map.len());
            }
        }
    }
}

//! Caches the block hashes of tokenized text, so that only a prompt's new text is tokenized. Pure.
//!
//! [`split_at_marks`] cuts a prompt's text into segments before certain special tokens, the
//! *marks*. A segment's tokens don't depend on the text before or after it. The cache holds no
//! text: it stores the block hashes of a segment under a key that identifies all the text up to its
//! end.
//!
//! Each segment belongs to the client that had it tokenized. If memory is short, the client with
//! the most cached bytes loses its least recently used segment. So a client with many prompts
//! pushes out its own segments only.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::Arc,
};

use blocks::block::{BlockHash, Chain};
use xxhash_rust::xxh3::xxh3_128;

/// The entry itself, and its share of the map and of the queue, without its hashes.
const ENTRY_BYTES: usize = 192;

/// Identifies a prompt's text from its beginning to the end of a segment.
type PrefixKey = u128;

#[derive(Debug)]
pub(super) struct SegmentCache {
    entries: HashMap<PrefixKey, Entry>,
    owners: HashMap<Arc<str>, Owned>,
    /// The same clients by the memory of their entries.
    by_bytes: BTreeSet<(usize, Arc<str>)>,
    bytes: usize,
    bytes_max: usize,
    /// Number of prompts looked up so far. Serves as a clock.
    lookups: u64,
}

#[derive(Debug, Default)]
struct Owned {
    bytes: usize,
    /// The key of each entry, once, with the entry's `last_lookup` when its key was queued.
    eviction_queue: VecDeque<(u64, PrefixKey)>,
}

#[derive(Debug)]
struct Entry {
    /// Of the prompt up to this segment's end.
    chain: Chain,
    /// The blocks that became full in this segment.
    hashes: Box<[BlockHash]>,
    /// The value of [`SegmentCache::lookups`] when the entry was last used.
    last_lookup: u64,
}

#[derive(Debug, Clone)]
pub(super) struct HashedPrefix {
    key: PrefixKey,
    pub(super) chain: Chain,
    pub(super) hashes: Vec<BlockHash>,
}

impl HashedPrefix {
    /// `chain` and `hashes` are of the tokens that precede the text, such as one of its begin.
    pub(super) fn new(chain: Chain, hashes: Vec<BlockHash>) -> Self {
        let start_parts =
            [chain.last_hash().0, chain.tokens(), chain.partial_sum()].map(u64::to_le_bytes);
        Self { key: xxh3_128(start_parts.as_flattened()), chain, hashes }
    }

    fn key_after(&self, segment: &str) -> PrefixKey {
        let key_parts = [self.key, xxh3_128(segment.as_bytes())].map(u128::to_le_bytes);
        xxh3_128(key_parts.as_flattened())
    }
}

impl SegmentCache {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            entries: HashMap::new(),
            owners: HashMap::new(),
            by_bytes: BTreeSet::new(),
            bytes: 0,
            bytes_max,
            lookups: 0,
        }
    }

    /// Returns how many of the leading `segments` were cached.
    pub(super) fn extend_by_cached(
        &mut self,
        prefix: &mut HashedPrefix,
        segments: &[&str],
    ) -> usize {
        self.lookups += 1;
        for (cached_count, segment) in segments.iter().enumerate() {
            let key = prefix.key_after(segment);
            let Some(entry) = self.entries.get_mut(&key) else { return cached_count };
            entry.last_lookup = self.lookups;
            prefix.key = key;
            prefix.chain = entry.chain;
            prefix.hashes.extend_from_slice(&entry.hashes);
        }
        segments.len()
    }

    pub(super) fn extend_and_cache(
        &mut self,
        owner: &Arc<str>,
        prefix: &mut HashedPrefix,
        segment: &str,
        tokens: &[u32],
    ) {
        let hashes_before = prefix.hashes.len();
        prefix.key = prefix.key_after(segment);
        prefix.chain.push(tokens, &mut prefix.hashes);
        let hashes = Box::from(&prefix.hashes[hashes_before..]);
        if let Some(entry) = self.entries.get_mut(&prefix.key) {
            // Another turn cached the segment meanwhile.
            entry.last_lookup = self.lookups;
            return;
        }
        let last_lookup = self.lookups;
        let entry = Entry { chain: prefix.chain, hashes, last_lookup };
        let bytes = entry.bytes();
        self.entries.insert(prefix.key, entry);
        self.bytes += bytes;
        self.change_owned(owner, |owned| {
            owned.bytes += bytes;
            owned.eviction_queue.push_back((last_lookup, prefix.key));
        });
        self.evict_to_bound();
    }

    /// Evicts from the client that has most. An entry that was used since it was queued goes to the
    /// end of the queue instead.
    fn evict_to_bound(&mut self) {
        while self.bytes > self.bytes_max {
            let Some((_, owner)) = self.by_bytes.last() else { return };
            let owner = Arc::clone(owner);
            let owned = self.owners.get_mut(&owner).expect("a client by its bytes has entries");
            let queued = owned.eviction_queue.pop_front();
            let (lookup_when_queued, key) = queued.expect("each entry is queued");
            let last_lookup = self.entries[&key].last_lookup;
            if last_lookup > lookup_when_queued {
                owned.eviction_queue.push_back((last_lookup, key));
            } else if let Some(entry) = self.entries.remove(&key) {
                self.bytes -= entry.bytes();
                self.change_owned(&owner, |owned| owned.bytes -= entry.bytes());
            }
        }
    }

    fn change_owned(&mut self, owner: &Arc<str>, change: impl FnOnce(&mut Owned)) {
        let owned = self.owners.entry(Arc::clone(owner)).or_default();
        self.by_bytes.remove(&(owned.bytes, Arc::clone(owner)));
        change(owned);
        if owned.bytes > 0 {
            self.by_bytes.insert((owned.bytes, Arc::clone(owner)));
        } else {
            self.owners.remove(owner);
        }
    }

    #[cfg(test)]
    fn check_invariants(&self) {
        assert_eq!(self.bytes, self.entries.values().map(Entry::bytes).sum::<usize>());
        assert!(self.bytes <= self.bytes_max);
        let owned = || self.owners.values();
        assert_eq!(self.bytes, owned().map(|owned| owned.bytes).sum::<usize>());
        let queued = || owned().flat_map(|owned| &owned.eviction_queue);
        assert_eq!(queued().count(), self.entries.len());
        let is_used_since =
            |(queued, key): &(u64, PrefixKey)| self.entries[key].last_lookup >= *queued;
        assert!(queued().all(is_used_since));
        let by_bytes = self.owners.iter().map(|(owner, owned)| (owned.bytes, Arc::clone(owner)));
        assert_eq!(by_bytes.collect::<BTreeSet<_>>(), self.by_bytes);
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + size_of_val(&*self.hashes)
    }
}

/// No mark may be empty or be part of another mark.
pub(super) fn split_at_marks<'a>(text: &'a str, marks: &[String]) -> Vec<&'a str> {
    let mut first_characters: Vec<char> =
        marks.iter().filter_map(|mark| mark.chars().next()).collect();
    first_characters.sort_unstable();
    first_characters.dedup();
    let find_mark_start = |from: usize| match first_characters[..] {
        [] => None,
        // A search for a single character is by far the fastest.
        [character] => text[from..].find(character),
        _ => text[from..].find(&first_characters[..]),
    };
    let (mut segments, mut segment_start, mut search_start) = (vec![], 0, 0);
    while let Some(index) = find_mark_start(search_start).map(|offset| search_start + offset) {
        let mark = marks.iter().find(|mark| text[index..].starts_with(mark.as_str()));
        if mark.is_some() && index > segment_start {
            segments.push(&text[segment_start..index]);
            segment_start = index;
        }
        let character_bytes = text[index..].chars().next().map_or(1, char::len_utf8);
        search_start = index + mark.map_or(character_bytes, String::len);
    }
    if segment_start < text.len() {
        segments.push(&text[segment_start..]);
    }
    segments
}

#[cfg(test)]
mod tests {
    use blocks::block::{BlockTokens, Scheme};
    use proptest::prelude::*;

    use super::*;

    fn start() -> HashedPrefix {
        let scheme = Scheme::plain(BlockTokens::for_page(1).unwrap());
        HashedPrefix::new(Chain::new(&scheme), vec![])
    }

    fn tokens(segment: &str) -> Vec<u32> {
        segment.bytes().map(u32::from).collect()
    }

    #[test]
    fn a_text_is_cut_before_its_marks() {
        let marks = ["<a>".to_owned(), "<b>".to_owned(), "[x]".to_owned()];
        let cases: [(&str, &[&str]); 6] = [
            ("", &[]),
            ("é<é", &["é<é"]),
            ("<a>1<b>2", &["<a>1", "<b>2"]),
            ("0<<a><a>[x]<b", &["0<", "<a>", "<a>", "[x]<b"]),
            ("[[x]", &["[", "[x]"]),
            ("<a", &["<a"]),
        ];
        for (text, want) in cases {
            assert_eq!(split_at_marks(text, &marks), want, "{text}");
        }
        assert_eq!(split_at_marks("<a>", &[]), ["<a>"]);
        assert_eq!(split_at_marks("1<a>2", &marks[..1]), ["1", "<a>2"]);
    }

    proptest! {
        /// Whatever is cached, a prompt's blocks are those of its tokens.
        #[test]
        fn blocks_are_those_of_the_whole_text(
            texts in prop::collection::vec(("(<a>[xy]{0,90}){0,6}", 0..3_u8), 1..30),
            bytes_max in 0..6000_usize,
        ) {
            let marks = ["<a>".to_owned()];
            let mut cache = SegmentCache::new(bytes_max);
            for (text, client) in texts {
                let owner: Arc<str> = client.to_string().into();
                let segments = split_at_marks(&text, &marks);
                prop_assert_eq!(segments.concat(), text.clone());
                let mut prefix = start();
                let from = cache.extend_by_cached(&mut prefix, &segments);
                for segment in &segments[from..] {
                    cache.extend_and_cache(&owner, &mut prefix, segment, &tokens(segment));
                    cache.check_invariants();
                }
                let mut whole = start();
                whole.chain.push(&tokens(&text), &mut whole.hashes);
                prop_assert_eq!((prefix.chain, prefix.hashes), (whole.chain, whole.hashes));
            }
        }
    }

    /// Caches a text for a client. Returns how many of its segments were new.
    fn new_segments_of(cache: &mut SegmentCache, client: &str, text: &str) -> usize {
        let marks = ["<a>".to_owned()];
        let segments = split_at_marks(text, &marks);
        let mut prefix = start();
        let from = cache.extend_by_cached(&mut prefix, &segments);
        for segment in &segments[from..] {
            cache.extend_and_cache(&client.into(), &mut prefix, segment, &tokens(segment));
        }
        segments.len() - from
    }

    #[test]
    fn a_client_with_many_prompts_pushes_out_its_own_alone() {
        let mut cache = SegmentCache::new(8 * (ENTRY_BYTES + 8));
        assert_eq!(new_segments_of(&mut cache, "user", "<a>1<a>2<a>3"), 3);
        for number in 10..60 {
            new_segments_of(&mut cache, "hog", &format!("<a>{number}"));
        }
        assert_eq!(new_segments_of(&mut cache, "user", "<a>1<a>2<a>3"), 0);
        assert_eq!(new_segments_of(&mut cache, "hog", "<a>59"), 0, "it has the rest");
        assert_eq!(new_segments_of(&mut cache, "hog", "<a>10"), 1);
    }

    #[test]
    fn what_is_used_is_kept_and_what_is_new_is_all_that_costs() {
        let mut cache = SegmentCache::new(4 * (ENTRY_BYTES + 8));
        let mut new_segments = |text: &str| new_segments_of(&mut cache, "a", text);
        assert_eq!(new_segments("<a>1<a>2"), 2);
        assert_eq!(new_segments("<a>1<a>2<a>3"), 1);
        assert_eq!(
            [
                new_segments("<a>4"),
                new_segments("<a>1<a>2<a>3"),
                new_segments("<a>5"),
                new_segments("<a>6")
            ],
            [1, 0, 1, 1]
        );
        assert_eq!(new_segments("<a>1"), 0, "used later than 4 and 5");
        assert_eq!(new_segments("<a>4"), 1);
    }
}

//! Defines the layout of the file in which the engine shares its live rows with the agent.
//!
//! [`super`] explains the file's tables, epochs and the words `begun` and `done`. The modules
//! `writer` and `reader` define the order in which the words are written and read.
//!
//! The file consists of 64-bit words, little-endian. A word that holds two values has one value in
//! its low half and the other in its high half. `r2t` stands for `req_to_token`. An export is a
//! description of an r2t in GPU memory, with which another process can map it.
//!
//! | byte | word |
//! |---|---|
//! | 0 | magic |
//! | 8 | version (low), tables in the ring (high) |
//! | 16 | rows of a table, at most (low), tokens of a page (high) |
//! | 24 | pages of the pool (low), rows of r2t (high) |
//! | 32 | entries from one row of r2t to the next (low), 1 if r2t is exported (high) |
//! | 40, 48, 56 | export: offset, bytes, 0 |
//! | 64 to 127 | export: the CUDA driver's handle |
//! | 128, 136 | UUID of the GPU |
//! | 1024 | `begun` |
//! | 1088 | `done` |
//! | 1152 | the newest epoch whose table has been published |
//! | 1216 | 1 once the engine has closed the table |
//! | 4096 | the ring of tables |
//!
//! A table has 8 words and then its rows. The words are: epoch (0 while the table is being
//! written), number of rows, 6 unused. A row has four words: row (low) and tokens (high); session
//! (low) and 0 (high); version; key.

use super::Error;
use memmap2::MmapRaw;
use std::sync::atomic::AtomicU64;

/// The first word of every file.
const MAGIC: u64 = u64::from_le_bytes(*b"BerthKVT");
const VERSION: u32 = 1;
/// The maximum number of rows of one table. An audit can take as many.
pub const ROWS_MAX: u32 = 1 << 16;
/// The byte of the file at which the ring of tables begins. Before it is one memory page, which has
/// the head (the facts that don't change) and the words that a GPU may write.
pub(crate) const RING_START_BYTE: usize = 4096;
/// The number of words of the head: the constant facts in bytes 0 to 143.
const HEAD_WORDS: usize = 18;
/// The number of words of a table before its rows.
const TABLE_HEAD_WORDS: usize = 8;
/// The number of words of a row.
const ROW_WORDS: usize = 4;

// Offsets of the words that change. Each word has a cache line of its own.
pub(crate) const BEGUN_BYTE: usize = 1024;
pub(crate) const DONE_BYTE: usize = 1088;
const NEWEST_TABLE_BYTE: usize = 1152;
const CLOSED_BYTE: usize = 1216;

/// A description of `req_to_token` with which another process can open it by CUDA IPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The CUDA driver's handle of the allocation that holds `req_to_token`.
    pub handle: [u8; 64],
    /// Bytes from the beginning of the allocation to `req_to_token`.
    pub offset: u64,
    /// Length of `req_to_token` in bytes.
    pub bytes: u64,
    /// The GPU's UUID, because two processes may number their GPUs differently.
    pub uuid: [u8; 16],
}

/// Facts about the pool and the engine's table `req_to_token` (r2t). They don't change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolFacts {
    pub page_tokens: u32,
    /// Pages of the pool, including the padding page.
    pub pages: u32,
    pub r2t_rows: u32,
    /// The number of entries from one row to the next.
    pub r2t_stride: u32,
    /// `None` if `req_to_token` is in the engine's own host memory.
    pub export: Option<Export>,
}

/// One live row after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRow {
    /// The row's index in `req_to_token`.
    pub row: u32,
    /// The number of tokens whose slots are allocated.
    pub len: u32,
    /// The session's number: small, and the same for all rows of the session.
    pub session: u32,
    /// A number that changes whenever a step has rewritten any token slot in `[0, len)`. It never
    /// returns to an older value.
    pub version: u64,
    /// The key by which the agent knows the session.
    pub key: u64,
}

/// The size of the ring, and so of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingSize {
    /// The number of tables in the ring.
    pub(super) tables: u32,
    /// The maximum number of rows of one table.
    pub(super) rows_max: u32,
}

impl RingSize {
    pub(super) fn new(tables: u32, rows_max: u32) -> Result<Self, Error> {
        let is_allowed = (2..=64).contains(&tables) && (1..=ROWS_MAX).contains(&rows_max);
        let error = Error::RingSize { rows: rows_max, tables };
        if is_allowed { Ok(Self { tables, rows_max }) } else { Err(error) }
    }

    /// Returns the number of words of one table.
    fn table_words(self) -> usize {
        TABLE_HEAD_WORDS + self.rows_max as usize * ROW_WORDS
    }

    /// Returns the length of the file in bytes.
    pub(super) fn file_bytes(self) -> usize {
        RING_START_BYTE + self.tables as usize * self.table_words() * 8
    }
}

/// The mapped file, accessed as atomic words that the other process may change at any time.
#[derive(Debug)]
pub(super) struct FileWords {
    map: MmapRaw,
    size: RingSize,
}

impl FileWords {
    /// Wraps a mapping. Returns [`Error::UnknownFormat`] if it is smaller than `size` requires.
    pub(super) fn new(map: MmapRaw, size: RingSize) -> Result<Self, Error> {
        if map.len() < size.file_bytes() {
            Err(Error::UnknownFormat)
        } else {
            Ok(Self { map, size })
        }
    }

    pub(super) fn size(&self) -> RingSize {
        self.size
    }

    #[cfg(feature = "cuda")]
    pub(super) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    fn word_at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.map.len() / 8, "the word is outside the mapping");
        // SAFETY: the word is inside the mapping, which starts at a page boundary and lives as long
        // as `self`. All processes only access it as atomic words.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(index)) }
    }

    /// Returns the words of the head, which [`head_values`] computes and [`read_head`] reads.
    pub(super) fn head_words(&self) -> [&AtomicU64; HEAD_WORDS] {
        std::array::from_fn(|index| self.word_at(index))
    }

    pub(super) fn begun_word(&self) -> &AtomicU64 {
        self.word_at(BEGUN_BYTE / 8)
    }

    pub(super) fn done_word(&self) -> &AtomicU64 {
        self.word_at(DONE_BYTE / 8)
    }

    pub(super) fn newest_word(&self) -> &AtomicU64 {
        self.word_at(NEWEST_TABLE_BYTE / 8)
    }

    pub(super) fn closed_word(&self) -> &AtomicU64 {
        self.word_at(CLOSED_BYTE / 8)
    }

    /// Returns the place in the ring for the table of an epoch. The place may hold the table of an
    /// older or a newer epoch.
    pub(super) fn table_place(&self, epoch: u64) -> TablePlace<'_> {
        let ring_index = usize::try_from(epoch % u64::from(self.size.tables))
            .expect("a ring has at most 64 tables");
        let start = RING_START_BYTE / 8 + ring_index * self.size.table_words();
        TablePlace {
            epoch: self.word_at(start),
            row_count: self.word_at(start + 1),
            rows_start: start + TABLE_HEAD_WORDS,
        }
    }

    /// Returns the words of a row. `rows_start` is that of the table's [`TablePlace`], and `index`
    /// is the row's index in the table.
    pub(super) fn row(&self, rows_start: usize, index: usize) -> [&AtomicU64; ROW_WORDS] {
        std::array::from_fn(|word| self.word_at(rows_start + index * ROW_WORDS + word))
    }
}

/// A place for one table in the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct TablePlace<'a> {
    /// The epoch of the table that the place holds; 0 while a table is being written.
    pub(super) epoch: &'a AtomicU64,
    pub(super) row_count: &'a AtomicU64,
    /// Index of the first row's first word.
    pub(super) rows_start: usize,
}

impl TableRow {
    pub(super) fn to_words(self) -> [u64; ROW_WORDS] {
        [join_halves(self.row, self.len), join_halves(self.session, 0), self.version, self.key]
    }

    pub(super) fn from_words(words: [u64; ROW_WORDS]) -> Self {
        let [(row, len), (session, _)] = [halves(words[0]), halves(words[1])];
        Self { row, len, session, version: words[2], key: words[3] }
    }
}

/// Returns the values of the head's words, in the order of the file.
pub(super) fn head_values(facts: &PoolFacts, size: RingSize) -> [u64; HEAD_WORDS] {
    let mut words = [0; HEAD_WORDS];
    words[0] = MAGIC;
    words[1] = join_halves(VERSION, size.tables);
    words[2] = join_halves(size.rows_max, facts.page_tokens);
    words[3] = join_halves(facts.pages, facts.r2t_rows);
    words[4] = join_halves(facts.r2t_stride, u32::from(facts.export.is_some()));
    if let Some(Export { handle, offset, bytes, uuid }) = &facts.export {
        (words[5], words[6]) = (*offset, *bytes);
        let handle_and_uuid = handle.as_chunks().0.iter().chain(uuid.as_chunks().0);
        for (word, bytes) in words[8..].iter_mut().zip(handle_and_uuid) {
            *word = u64::from_le_bytes(*bytes);
        }
    }
    words
}

/// Reads the values of a head's words. Returns [`Error::UnknownFormat`] if they are not a head of
/// this version.
pub(super) fn read_head(words: &[u64; HEAD_WORDS]) -> Result<(PoolFacts, RingSize), Error> {
    let (version, tables) = halves(words[1]);
    if words[0] != MAGIC || version != VERSION {
        return Err(Error::UnknownFormat);
    }
    let (rows_max, page_tokens) = halves(words[2]);
    let (pages, r2t_rows) = halves(words[3]);
    let (r2t_stride, is_exported) = halves(words[4]);
    let mut handle_and_uuid = words[8..].iter().flat_map(|word| word.to_le_bytes());
    let export = Export {
        handle: std::array::from_fn(|_| handle_and_uuid.next().unwrap_or(0)),
        offset: words[5],
        bytes: words[6],
        uuid: std::array::from_fn(|_| handle_and_uuid.next().unwrap_or(0)),
    };
    let export = (is_exported != 0).then_some(export);
    let facts = PoolFacts { page_tokens, pages, r2t_rows, r2t_stride, export };
    Ok((facts, RingSize::new(tables, rows_max).map_err(|_| Error::UnknownFormat)?))
}

/// Returns a word with these two halves.
fn join_halves(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Returns the low and the high half of a word.
fn halves(word: u64) -> (u32, u32) {
    let half = |shift: u32| u32::try_from(word >> shift & 0xFFFF_FFFF).expect("masked to 32 bits");
    (half(0), half(32))
}

//! The layout of the table file: 64-bit words, little-endian like both sides.
//!
//! | byte | word |
//! |---|---|
//! | 0 | magic |
//! | 8 | version (low half), tables in the ring |
//! | 16 | rows of a table, at most (low), tokens of a page |
//! | 24 | pages of the pool (low), rows of `req_to_token` |
//! | 32 | entries from row to row (low), 1 if exported |
//! | 40, 48, 56 | export: offset, bytes, 0 |
//! | 64 to 127 | export: the driver's handle |
//! | 128, 136 | UUID of the GPU |
//! | 1024 | `begun` |
//! | 1088 | `done` |
//! | 1152 | the newest epoch whose table has been published |
//! | 1216 | 1 once the engine has closed the table |
//! | 4096 | the ring: epoch (0 while it is being written), number of rows, 6 unused, then rows |
//!
//! A row has four words: row (low) and tokens; session (low) and 0; version; key.

use super::Error;
use memmap2::MmapRaw;
use std::sync::atomic::AtomicU64;

const MAGIC: u64 = u64::from_le_bytes(*b"BerthKVT");
const VERSION: u32 = 1;
/// Rows of one table, at most; the accountant takes as many.
pub const ROWS_MAX: u32 = 1 << 16;
/// Size of the page with the head and all words that a device writes into.
pub(crate) const HEAD_BYTES: usize = 4096;
/// Words of the head, which lies before `begun`.
const HEAD_WORDS: usize = 18;
const TABLE_HEAD_WORDS: usize = 8;
const ROW_WORDS: usize = 4;

/// Offsets of the shared words, each in a cache line of its own.
pub(crate) const BEGUN_BYTE: usize = 1024;
pub(crate) const DONE_BYTE: usize = 1088;
const NEWEST_BYTE: usize = 1152;
const CLOSED_BYTE: usize = 1216;

/// A description of `req_to_token` with which another process can open it by CUDA IPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    pub handle: [u8; 64],
    pub offset: u64,
    pub bytes: u64,
    /// The GPU's UUID, because two processes may number their GPUs differently.
    pub uuid: [u8; 16],
}

/// Facts about the pool and the table `req_to_token`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolFacts {
    pub page_tokens: u32,
    /// Pages of the pool, including the padding page.
    pub pages: u32,
    pub r2t_rows: u32,
    pub r2t_stride: u32,
    /// `None` if `req_to_token` is in the engine's own host memory.
    pub export: Option<Export>,
}

/// One live row after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRow {
    pub row: u32,
    pub len: u32,
    /// The session's number: small, and the same for all rows of the session.
    pub session: u32,
    /// Changes whenever a step has rewritten any token slot in `[0, len)`.
    pub version: u64,
    /// The key by which the agent knows the session.
    pub key: u64,
}

/// The size of a table file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingSize {
    pub(super) tables: u32,
    pub(super) rows_max: u32,
}

impl RingSize {
    pub(super) fn new(tables: u32, rows_max: u32) -> Result<Self, Error> {
        let sound = (2..=64).contains(&tables) && (1..=ROWS_MAX).contains(&rows_max);
        let error = Error::Size { rows: rows_max, tables };
        if sound { Ok(Self { tables, rows_max }) } else { Err(error) }
    }

    fn table_words(self) -> usize {
        TABLE_HEAD_WORDS + self.rows_max as usize * ROW_WORDS
    }

    pub(super) fn bytes(self) -> usize {
        HEAD_BYTES + self.tables as usize * self.table_words() * 8
    }
}

/// A mapped file, accessed as atomic words that the other process may change at any time.
#[derive(Debug)]
pub(super) struct Words {
    map: MmapRaw,
    size: RingSize,
}

impl Words {
    /// Wraps a mapping; [`Error::Foreign`] if it is smaller than `size` requires.
    pub(super) fn new(map: MmapRaw, size: RingSize) -> Result<Self, Error> {
        if map.len() < size.bytes() { Err(Error::Foreign) } else { Ok(Self { map, size }) }
    }

    pub(super) fn size(&self) -> RingSize {
        self.size
    }

    #[cfg(feature = "cuda")]
    pub(super) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    fn word_at(&self, word: usize) -> &AtomicU64 {
        assert!(word < self.map.len() / 8, "the word is outside the mapping");
        // SAFETY: the word is inside the mapping, which starts at a page boundary and lives as long
        // as `self`. All processes only access it as atomic words.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(word)) }
    }

    /// Returns the words that [`head`] computes and [`read_head`] reads.
    pub(super) fn head(&self) -> [&AtomicU64; HEAD_WORDS] {
        std::array::from_fn(|word| self.word_at(word))
    }

    pub(super) fn begun(&self) -> &AtomicU64 {
        self.word_at(BEGUN_BYTE / 8)
    }

    pub(super) fn done(&self) -> &AtomicU64 {
        self.word_at(DONE_BYTE / 8)
    }

    pub(super) fn newest(&self) -> &AtomicU64 {
        self.word_at(NEWEST_BYTE / 8)
    }

    pub(super) fn closed(&self) -> &AtomicU64 {
        self.word_at(CLOSED_BYTE / 8)
    }

    /// Returns an epoch's place in the ring: its number, its row count, and the index of its first
    /// row.
    pub(super) fn table(&self, epoch: u64) -> (&AtomicU64, &AtomicU64, usize) {
        let turn = usize::try_from(epoch % u64::from(self.size.tables))
            .expect("a ring has at most 64 tables");
        let first = HEAD_BYTES / 8 + turn * self.size.table_words();
        (self.word_at(first), self.word_at(first + 1), first + TABLE_HEAD_WORDS)
    }

    /// Returns the words of row `i` of a table.
    pub(super) fn row(&self, rows: usize, i: usize) -> [&AtomicU64; ROW_WORDS] {
        std::array::from_fn(|word| self.word_at(rows + i * ROW_WORDS + word))
    }
}

impl TableRow {
    pub(super) fn to_words(self) -> [u64; ROW_WORDS] {
        [pair(self.row, self.len), pair(self.session, 0), self.version, self.key]
    }

    pub(super) fn from_words(words: [u64; ROW_WORDS]) -> Self {
        let [(row, len), (session, _)] = [halves(words[0]), halves(words[1])];
        Self { row, len, session, version: words[2], key: words[3] }
    }
}

/// Returns the words of the head, from byte 0 on.
pub(super) fn head(facts: &PoolFacts, size: RingSize) -> [u64; HEAD_WORDS] {
    let mut words = [0; HEAD_WORDS];
    words[0] = MAGIC;
    words[1] = pair(VERSION, size.tables);
    words[2] = pair(size.rows_max, facts.page_tokens);
    words[3] = pair(facts.pages, facts.r2t_rows);
    words[4] = pair(facts.r2t_stride, u32::from(facts.export.is_some()));
    if let Some(Export { handle, offset, bytes, uuid }) = &facts.export {
        (words[5], words[6]) = (*offset, *bytes);
        let names = handle.as_chunks().0.iter().chain(uuid.as_chunks().0);
        for (word, name) in words[8..].iter_mut().zip(names) {
            *word = u64::from_le_bytes(*name);
        }
    }
    words
}

/// Reads the words of a head; [`Error::Foreign`] if they are not a head of this version.
pub(super) fn read_head(words: &[u64; HEAD_WORDS]) -> Result<(PoolFacts, RingSize), Error> {
    let (version, tables) = halves(words[1]);
    if words[0] != MAGIC || version != VERSION {
        return Err(Error::Foreign);
    }
    let (rows_max, page_tokens) = halves(words[2]);
    let (pages, r2t_rows) = halves(words[3]);
    let (r2t_stride, exported) = halves(words[4]);
    let mut names = words[8..].iter().flat_map(|word| word.to_le_bytes());
    let export = Export {
        handle: std::array::from_fn(|_| names.next().unwrap_or(0)),
        offset: words[5],
        bytes: words[6],
        uuid: std::array::from_fn(|_| names.next().unwrap_or(0)),
    };
    let export = (exported != 0).then_some(export);
    let facts = PoolFacts { page_tokens, pages, r2t_rows, r2t_stride, export };
    Ok((facts, RingSize::new(tables, rows_max).map_err(|_| Error::Foreign)?))
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn halves(word: u64) -> (u32, u32) {
    let half = |shift: u32| u32::try_from(word >> shift & 0xFFFF_FFFF).expect("masked to 32 bits");
    (half(0), half(32))
}

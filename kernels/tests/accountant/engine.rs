//! A small random engine whose correct audit result is known by construction.

use fastrand::Rng;
use kernels::{
    account::{Accountant, IdList, Pool, PoolBuffer, RequestTable, Snapshot, SnapshotRow, Stream},
    report::Report,
};

/// Token slots per row.
const STRIDE: u32 = 1 << 10;

/// A pool with sessions whose prefixes are in a radix tree.
pub(crate) struct Engine {
    pub(crate) shift: u32,
    pub(crate) pages: u32,
    pub(crate) r2t: Vec<i32>,
    /// KV buffers as 16-byte words; buffer `b` has `words[b]` words per page.
    pub(crate) kv: Vec<Vec<u128>>,
    words: Vec<usize>,
    pub(crate) rows: Vec<SnapshotRow>,
    /// The pages that each row references.
    pub(crate) row_pages: Vec<Vec<u32>>,
    pub(crate) keys: Vec<u64>,
    /// The free pages' ids, in two lists.
    pub(crate) free: [Vec<i64>; 2],
    /// The radix tree's token slots.
    pub(crate) tree: Vec<i64>,
    pub(crate) tree_pages: Vec<u32>,
    pub(crate) digest_pages_max: u32,
}

impl Engine {
    /// Makes a sound engine: each page is free, in the tree, or private to one session.
    pub(crate) fn random(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let (shift, pages) = (random.u32(0..=6), random.u32(70..400));
        let mut unused: Vec<u32> = (1..pages).collect();
        random.shuffle(&mut unused);
        let take = |unused: &mut Vec<u32>, n: usize| unused.split_off(unused.len() - n);
        let tree_pages = take(&mut unused, random.usize(4..20));
        let sessions = random.u32(2..7);
        let row_tokens_max = STRIDE.min(16 << shift);
        let words = (0..random.usize(1..4)).map(|_| random.usize(1..4)).collect::<Vec<_>>();
        let kv = words.iter().map(|&n| random_words(&mut random, n * pages as usize)).collect();
        let (mut rows, mut row_pages) = (vec![], vec![]);
        for session in 0..sessions {
            let held = random.u32(2..=row_tokens_max >> shift);
            let protected = random.u32(0..held).min(3);
            let mut named = tree_pages[..protected as usize].to_vec();
            named.extend(take(&mut unused, (held - protected) as usize));
            let len = (held << shift) - random.u32(0..1 << shift);
            rows.push(SnapshotRow {
                row: session + 1,
                len,
                session,
                sealed_tokens: random.u32(0..=len),
                protected_tokens: protected << shift,
                version: random.u64(..),
            });
            row_pages.push(named);
        }
        let mut engine = Self {
            shift,
            pages,
            r2t: vec![-1; ((sessions + 1) * STRIDE) as usize],
            kv,
            words,
            rows,
            row_pages,
            keys: (0..sessions).map(|_| random.u64(..)).collect(),
            free: [vec![], vec![]],
            tree: vec![],
            tree_pages,
            digest_pages_max: 64,
        };
        for page in unused {
            engine.free[random.usize(0..2)].push(page.into());
        }
        engine.tree = engine.tree_pages.iter().flat_map(|&page| engine.slots(page)).collect();
        random.shuffle(&mut engine.tree);
        engine.write_rows();
        engine
    }

    /// Makes an engine with random faults in its lists.
    pub(crate) fn chaotic(seed: u64) -> Self {
        let mut random = Rng::with_seed(!seed);
        let mut engine = Self::random(seed);
        for entry in &mut engine.r2t {
            if random.u8(..) < 8 {
                *entry =
                    random.i32(-9..i32::try_from(engine.pages << engine.shift).expect("small") + 9);
            }
        }
        for list in engine.free.iter_mut().chain([&mut engine.tree]) {
            for _ in 0..random.usize(0..9) {
                list.push(random.i64(-3..i64::from(engine.pages) + 3));
            }
        }
        for row in &mut engine.rows {
            row.session = random.u32(0..u32::try_from(engine.keys.len()).expect("small"));
            row.protected_tokens = random.u32(0..=row.len);
        }
        engine
    }

    /// Returns all token slots of a page.
    pub(crate) fn slots(&self, page: u32) -> impl Iterator<Item = i64> + use<> {
        slots(page, self.shift)
    }

    /// Writes the rows' slots as `row_pages` says.
    pub(crate) fn write_rows(&mut self) {
        for (row, pages) in self.rows.iter().zip(&self.row_pages) {
            let start = (row.row * STRIDE) as usize;
            let slots = pages.iter().flat_map(|&page| slots(page, self.shift));
            for (entry, slot) in self.r2t[start..].iter_mut().zip(slots) {
                *entry = i32::try_from(slot).expect("small");
            }
        }
    }

    /// Returns the entry of `r2t` that names page `page` of a row.
    pub(crate) fn entry(&mut self, row: usize, page: usize) -> &mut i32 {
        &mut self.r2t[(self.rows[row].row * STRIDE) as usize + (page << self.shift)]
    }

    /// Flips one bit of a page's KV.
    pub(crate) fn flip(&mut self, random: &mut Rng, page: u32) {
        let buffer = random.usize(0..self.kv.len());
        let word = page as usize * self.words[buffer] + random.usize(0..self.words[buffer]);
        self.kv[buffer][word] ^= 1 << random.u32(0..128);
    }

    /// Returns the pages of a row outside its protected part.
    pub(crate) fn private(&self, row: usize) -> &[u32] {
        let protected = self.rows[row].protected_tokens;
        &self.row_pages[row][(protected >> self.shift) as usize..]
    }

    /// Returns the full pages of a row's sealed part.
    pub(crate) fn sealed(&self, row: usize) -> &[u32] {
        &self.row_pages[row][..(self.rows[row].sealed_tokens >> self.shift) as usize]
    }

    pub(crate) fn pool(&self) -> Pool {
        let buffers = self.kv.iter().zip(&self.words);
        let buffers = buffers
            .map(|(kv, n)| PoolBuffer { addr: address(kv), page_bytes: 16 * *n as u64 })
            .collect();
        let rows = u32::try_from(self.r2t.len()).expect("small") / STRIDE;
        let table = RequestTable { addr: address(&self.r2t), rows, stride: STRIDE };
        // SAFETY: each test keeps its engine longer than its accountants. It changes entries and KV
        // only between audits, or when a fake device tells when it reads.
        unsafe { Pool::new(1 << self.shift, self.pages, table, buffers).expect("a sound pool") }
    }

    /// Begins an audit.
    pub(crate) fn begin(&self, accountant: &mut Accountant) {
        let list = |ids: &Vec<i64>| {
            // SAFETY: no test changes a list during an audit.
            unsafe { IdList::new(address(ids), ids.len() as u64) }
        };
        let free = self.free.each_ref().map(list);
        let snapshot = Snapshot {
            rows: &self.rows,
            keys: &self.keys,
            free: &free,
            tree: list(&self.tree),
            digest_pages_max: self.digest_pages_max,
        };
        accountant.begin(&snapshot, Stream::default()).expect("nothing is wrong with the snapshot");
    }

    /// Returns the current versions of the rows.
    pub(crate) fn now(&self) -> Vec<(u32, u64)> {
        self.rows.iter().map(|row| (row.row, row.version)).collect()
    }

    /// Runs a complete audit in which no row changes.
    pub(crate) fn audit(&self, accountant: &mut Accountant) -> Report {
        self.begin(accountant);
        while !accountant.is_ready().expect("the device works") {
            std::thread::yield_now();
        }
        accountant.finish(&self.now()).expect("the device works")
    }
}

fn slots(page: u32, shift: u32) -> impl Iterator<Item = i64> {
    (i64::from(page) << shift)..(i64::from(page) + 1) << shift
}

fn address<T>(values: &[T]) -> u64 {
    values.as_ptr().expose_provenance() as u64
}

fn random_words(random: &mut Rng, n: usize) -> Vec<u128> {
    (0..n).map(|_| random.u128(..)).collect()
}

//! Defines what each GPU kernel of page accounting computes: one plain Rust function per kernel.
//!
//! Audits on a CPU count with these functions, and tests compare the GPU kernels with them. All
//! arithmetic is on integers and independent of order, so all results must be bit-equal.
//!
//! The input is the engine's table `req_to_token`: a row per request or session, and in the row one
//! token slot per token. A row is live if a request or session uses it. A page is a group of
//! consecutive token slots. Page 0 is the engine's padding page: no live row may name it, and it is
//! never free. In the *page list*, each page of each live row has one entry, a *page reference*.

use std::collections::{BTreeMap, BTreeSet};

/// Entry of the page list for a bad slot: a token slot that is not the first slot of a page.
pub const PAGE_BAD: u32 = u32::MAX;
pub const OWNER_NONE: u32 = u32::MAX;
pub const OWNER_SHARED: u32 = u32::MAX - 1;

/// A live row of `req_to_token`, or a part of a live row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LiveRow {
    /// The row's index in `req_to_token`.
    pub row: u32,
    pub len: u32,
    pub session: u32,
    /// Index of the row's first entry in the page list.
    pub list_start: u32,
}

impl LiveRow {
    pub fn pages(&self, page_shift: u32) -> u32 {
        let pages = u64::from(self.len).div_ceil(1 << page_shift);
        u32::try_from(pages).expect("a row has no more pages than tokens")
    }
}

/// Sets [`LiveRow::list_start`] of each row, one after another. Returns the list's length.
pub fn lay_out(rows: &mut [LiveRow], page_shift: u32) -> u64 {
    let mut list_len = 0;
    for row in rows {
        row.list_start = u32::try_from(list_len).unwrap_or(u32::MAX);
        list_len += u64::from(row.pages(page_shift));
    }
    list_len
}

/// The result of [`session_pages`] for one session, in pages unless a field says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SessionPages {
    pub refs: u64,
    /// The number of distinct pages that no other session references.
    pub exclusive_pages: u64,
    /// In units of 2^-32 page: each reference adds one page divided by all references to that page.
    pub share_q32: u64,
    /// Contiguous runs in each row. A transfer of the session's KV needs one descriptor per run.
    pub runs: u64,
    /// The number of unused token slots in the last pages of the session's rows.
    pub tail_tokens: u64,
    /// Pages that no other session references, and that are not in the radix tree.
    pub freed_by_close: u64,
}

/// The reference count and the owner of every page, indexed by page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marks {
    pub refcnt: Vec<u32>,
    /// A session's number, [`OWNER_NONE`] or [`OWNER_SHARED`].
    pub owner: Vec<u32>,
}

impl Marks {
    /// Shared pages outside the radix tree: sessions share only through it, so each is a fault.
    pub fn aliased_pages(&self, tree: &PageSet) -> u64 {
        let owners = self.owner.iter().zip(&tree.has);
        owners.filter(|&(&owner, &is_in_tree)| owner == OWNER_SHARED && !is_in_tree).count() as u64
    }
}

/// A set of pages made from a list of ids, and the numbers of faults in the list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageSet {
    /// Whether the set has the page, indexed by page.
    pub has: Vec<bool>,
    /// The number of entries that name a page again. In a free list, these are double frees.
    pub duplicates: u64,
    pub outside_pool: u64,
}

impl PageSet {
    pub fn runs(&self) -> u64 {
        let has_previous = std::iter::once(&false).chain(&self.has);
        let pairs = self.has.iter().zip(has_previous);
        pairs.filter(|&(&has, &has_previous)| has && !has_previous).count() as u64
    }
}

/// Pages counted by whether a page is free, a row references it, and the radix tree has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// Neither free, referenced nor in the radix tree: without faults 1, the padding page.
    pub leaked: u64,
    pub free: u64,
    /// Referenced by rows and not in the radix tree.
    pub private: u64,
    /// In the radix tree and not referenced.
    pub cached: u64,
    /// In the radix tree and referenced.
    pub cached_in_use: u64,
    /// Free and at the same time referenced or in the tree.
    pub corrupt: u64,
}

impl From<[u64; 8]> for ClassCounts {
    fn from(counts: [u64; 8]) -> ClassCounts {
        let [leaked, cached, private, cached_in_use, free, corrupt @ ..] = counts;
        ClassCounts { leaked, free, private, cached, cached_in_use, corrupt: corrupt.iter().sum() }
    }
}

/// `kv_gather_pages`: returns the page list, and the number of bad slots. Only the slot of a page's
/// first token is read. A slot is bad unless it is positive, a multiple of the page size and inside
/// the pool.
pub fn gather_pages(
    req_to_token: &[i32],
    stride: usize,
    rows: &[LiveRow],
    page_shift: u32,
    npages: u32,
) -> (Vec<u32>, u64) {
    let list_end = |row: &LiveRow| row.list_start as usize + row.pages(page_shift) as usize;
    let mut page_list = vec![PAGE_BAD; rows.iter().map(list_end).max().unwrap_or(0)];
    let mut bad_slots = 0;
    for row in rows {
        for page_index in 0..row.pages(page_shift) as usize {
            let column = page_index << page_shift;
            let index = row.row as usize * stride + column;
            let entry = req_to_token.get(index).filter(|_| column < stride);
            let slot = entry.and_then(|&slot| u32::try_from(slot).ok()).unwrap_or(0);
            let page = slot >> page_shift;
            let is_sound = slot > 0 && page < npages && page << page_shift == slot;
            page_list[row.list_start as usize + page_index] =
                if is_sound { page } else { PAGE_BAD };
            bad_slots += u64::from(!is_sound);
        }
    }
    (page_list, bad_slots)
}

/// `kv_mark`: each page's reference count, and the session whose rows reference the page.
pub fn mark(rows: &[LiveRow], page_list: &[u32], page_shift: u32, npages: u32) -> Marks {
    let mut refcnt = vec![0; npages as usize];
    let mut owner = vec![OWNER_NONE; npages as usize];
    for row in rows {
        for &page in row_pages(row, page_list, page_shift) {
            let Some(count) = refcnt.get_mut(page as usize) else { continue };
            *count += 1;
            let owner = &mut owner[page as usize];
            *owner = match *owner {
                OWNER_NONE => row.session,
                same if same == row.session => same,
                _ => OWNER_SHARED,
            };
        }
    }
    Marks { refcnt, owner }
}

/// `kv_session`: by session number.
pub fn session_pages(
    rows: &[LiveRow],
    page_list: &[u32],
    marks: &Marks,
    tree: &PageSet,
    page_shift: u32,
) -> BTreeMap<u32, SessionPages> {
    // Two rows of one session may reference the same page, which must count once as exclusive.
    let mut counted_exclusive = BTreeSet::new();
    let mut by_number: BTreeMap<u32, SessionPages> = BTreeMap::new();
    for row in rows {
        let session = by_number.entry(row.session).or_default();
        let pages = row_pages(row, page_list, page_shift);
        let mut previous_page = None;
        for &page in pages {
            let previous = previous_page.replace(page);
            let Some(&refcnt) = marks.refcnt.get(page as usize) else { continue };
            session.refs += 1;
            session.share_q32 += (1 << 32) / u64::from(refcnt.max(1));
            let is_run_start = previous.is_none_or(|previous| previous.wrapping_add(1) != page);
            session.runs += u64::from(is_run_start);
            if marks.owner[page as usize] == row.session && counted_exclusive.insert(page) {
                session.exclusive_pages += 1;
                session.freed_by_close += u64::from(!tree.has[page as usize]);
            }
        }
        session.tail_tokens += ((pages.len() as u64) << page_shift) - u64::from(row.len);
    }
    by_number
}

pub fn list_to_set(ids: impl IntoIterator<Item = u32>, npages: u32) -> PageSet {
    slots_to_set(ids.into_iter().map(i64::from), 0, npages)
}

/// `kv_list_to_bitmap` for token slots. Only a page's first slot names the page; the others need
/// only be inside the pool.
pub fn slots_to_set(slots: impl IntoIterator<Item = i64>, page_shift: u32, npages: u32) -> PageSet {
    let mut set = PageSet { has: vec![false; npages as usize], duplicates: 0, outside_pool: 0 };
    for slot in slots {
        let page = usize::try_from(slot >> page_shift).ok();
        match page.and_then(|page| set.has.get_mut(page)) {
            None => set.outside_pool += 1,
            Some(has) if slot & ((1 << page_shift) - 1) == 0 => {
                set.duplicates += u64::from(std::mem::replace(has, true));
            }
            Some(_) => {}
        }
    }
    set
}

/// `kv_classify`: pages by class number, the sum of 4 for a free page, 2 for a referenced one, and
/// 1 for one in the radix tree.
pub fn class_counts(free: &PageSet, marks: &Marks, tree: &PageSet) -> [u64; 8] {
    let mut counts = [0; 8];
    for (page, &refcnt) in marks.refcnt.iter().enumerate() {
        let bits = [free.has[page], refcnt > 0, tree.has[page]];
        counts[bits.iter().fold(0, |class, &bit| class << 1 | usize::from(bit))] += 1;
    }
    counts
}

pub fn classify(free: &PageSet, marks: &Marks, tree: &PageSet) -> ClassCounts {
    class_counts(free, marks, tree).into()
}

/// One KV buffer of a pool: all its bytes, and the bytes per page (a multiple of 16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBytes<'a> {
    pub bytes: &'a [u8],
    pub page_bytes: usize,
}

/// `kv_digest_pages`: over all buffers; 0 for a page outside the pool. Words may be added in any
/// order, but two words that change places change the digest, as each is mixed with its buffer's
/// number and its index. The digest finds accidental changes, not forged ones.
pub fn page_digest(buffers: &[KvBytes<'_>], pages: &[u32]) -> Vec<u64> {
    pages.iter().map(|&page| digest_page(buffers, page as usize).unwrap_or(0)).collect()
}

fn digest_page(buffers: &[KvBytes<'_>], page: usize) -> Option<u64> {
    let mut sum = 0u64;
    for (buffer_number, buffer) in (1u64..).zip(buffers) {
        let start = page.checked_mul(buffer.page_bytes)?;
        let bytes = buffer.bytes.get(start..start.checked_add(buffer.page_bytes)?)?;
        for (word_index, word) in (0u64..).zip(bytes.chunks_exact(8)) {
            let word = u64::from_le_bytes(word.try_into().expect("a chunk of 8"));
            let salt = (buffer_number << 32 | word_index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            sum = sum.wrapping_add(mix(word ^ salt));
        }
    }
    Some(sum)
}

/// Mixes a word so that every input bit affects every output bit (the finalizer of splitmix64).
fn mix(mut word: u64) -> u64 {
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

fn row_pages<'a>(row: &LiveRow, page_list: &'a [u32], page_shift: u32) -> &'a [u32] {
    let start = row.list_start as usize;
    &page_list[start..start + row.pages(page_shift) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a table, its stride and its live rows, with 4-token pages, from (session, tokens,
    /// pages).
    fn pool(rows: &[(u32, u32, &[u32])]) -> (Vec<i32>, usize, Vec<LiveRow>) {
        let ld = 64;
        let mut r2t = vec![0; ld * rows.len()];
        let mut live = Vec::new();
        let mut list_start = 0;
        for (row, &(session, len, pages)) in rows.iter().enumerate() {
            for (i, &page) in pages.iter().enumerate() {
                r2t[row * ld + i * 4] = i32::try_from(page * 4).unwrap();
            }
            let row = u32::try_from(row).unwrap();
            live.push(LiveRow { row, len, session, list_start });
            list_start += u32::try_from(pages.len()).unwrap();
        }
        (r2t, ld, live)
    }

    fn no_tree() -> PageSet {
        list_to_set([], 64)
    }

    fn held_pages(marks: &Marks) -> u64 {
        marks.refcnt.iter().filter(|&&count| count > 0).count() as u64
    }

    fn shared_pages(marks: &Marks) -> u64 {
        marks.owner.iter().filter(|&&owner| owner == OWNER_SHARED).count() as u64
    }

    #[test]
    fn shared_prefix_counts_once() {
        let (r2t, ld, rows) = pool(&[(7, 10, &[1, 2, 3]), (8, 8, &[1, 5])]);
        let (page_list, bad) = gather_pages(&r2t, ld, &rows, 2, 8);
        assert_eq!((page_list.as_slice(), bad), ([1, 2, 3, 1, 5].as_slice(), 0));
        let marks = mark(&rows, &page_list, 2, 8);
        assert_eq!((held_pages(&marks), shared_pages(&marks)), (4, 1));
        let by = session_pages(&rows, &page_list, &marks, &no_tree(), 2);
        let half = 1u64 << 31;
        let (one, two) = (by[&7], by[&8]);
        assert_eq!((one.refs, one.exclusive_pages, one.runs, one.tail_tokens), (3, 2, 1, 2));
        assert_eq!((two.refs, two.exclusive_pages, two.runs, two.tail_tokens), (2, 1, 2, 0));
        assert_eq!(one.share_q32 + two.share_q32, 4 << 32);
        assert_eq!(two.share_q32, (1 << 32) + half);
    }

    #[test]
    fn leak_double_free_and_corruption_are_told_apart() {
        let (r2t, ld, rows) = pool(&[(1, 8, &[1, 2])]);
        let (page_list, _) = gather_pages(&r2t, ld, &rows, 2, 8);
        let marks = mark(&rows, &page_list, 2, 8);
        let free = list_to_set([3, 3, 2, 99], 8);
        assert_eq!((free.duplicates, free.outside_pool), (1, 1));
        let classes = classify(&free, &marks, &list_to_set([1, 4], 8));
        let want =
            ClassCounts { leaked: 4, free: 1, private: 0, cached: 1, cached_in_use: 1, corrupt: 1 };
        assert_eq!(classes, want);
    }

    #[test]
    fn bad_slots_are_counted_not_followed() {
        let rows = [LiveRow { row: 0, len: 12, session: 1, list_start: 0 }];
        let mut r2t = vec![0; 16];
        (r2t[0], r2t[4], r2t[8]) = (-4, 5, 400);
        let (page_list, bad) = gather_pages(&r2t, 16, &rows, 2, 8);
        assert_eq!((page_list, bad), (vec![PAGE_BAD; 3], 3));
    }

    #[test]
    fn a_close_frees_what_nobody_else_and_no_tree_has() {
        let (r2t, ld, rows) = pool(&[(7, 12, &[1, 2, 3]), (7, 8, &[3, 4]), (8, 4, &[2])]);
        let (page_list, _) = gather_pages(&r2t, ld, &rows, 2, 8);
        let marks = mark(&rows, &page_list, 2, 8);
        let freed = |tree: &PageSet, number| {
            session_pages(&rows, &page_list, &marks, tree, 2)[&number].freed_by_close
        };
        assert_eq!(freed(&no_tree(), 7), 3, "1, 3 and 4; page 3 once, though two rows name it");
        assert_eq!(freed(&list_to_set([1, 2, 6], 8), 7), 2, "the tree keeps page 1");
        assert_eq!(freed(&no_tree(), 8), 0, "page 2 is shared");
    }

    #[test]
    fn sharing_is_an_alarm_outside_the_tree_alone() {
        let (r2t, ld, rows) = pool(&[(1, 8, &[1, 2]), (2, 8, &[1, 2]), (2, 4, &[3]), (2, 4, &[3])]);
        let (page_list, _) = gather_pages(&r2t, ld, &rows, 2, 8);
        let marks = mark(&rows, &page_list, 2, 8);
        assert_eq!(shared_pages(&marks), 2, "two rows of one session share nothing");
        assert_eq!(marks.aliased_pages(&list_to_set([1], 8)), 1);
    }

    #[test]
    fn a_bad_entry_ends_a_run() {
        let (mut r2t, ld, rows) = pool(&[(1, 20, &[1, 2, 3, 4, 4])]);
        let runs = |r2t: &[i32]| {
            let (page_list, _) = gather_pages(r2t, ld, &rows, 2, 8);
            let marks = mark(&rows, &page_list, 2, 8);
            session_pages(&rows, &page_list, &marks, &no_tree(), 2)[&1].runs
        };
        assert_eq!(runs(&r2t), 2, "a page named twice in a row is no run");
        r2t[4] = -1;
        assert_eq!(runs(&r2t), 3);
    }

    #[test]
    fn a_page_is_named_by_its_first_slot() {
        let set = slots_to_set([16, 17, 18, 19, 20, 16, 31, 32, -1, -4], 2, 8);
        assert_eq!(
            (set.duplicates, set.outside_pool),
            (1, 3),
            "16 again; 32, -1 and -4 are nowhere"
        );
        let pages: Vec<usize> = (0..8).filter(|&page| set.has[page]).collect();
        assert_eq!(pages, [4, 5], "31 lies in page 7, and doesn't name it");
        assert_eq!(list_to_set([0, 1, 3, 5, 6, 7], 8).runs(), 3);
    }

    #[test]
    fn tokens_are_pages_where_a_page_is_one_token() {
        let rows = [LiveRow { row: 0, len: 3, session: 0, list_start: 0 }];
        let (page_list, bad) = gather_pages(&[5, 0, 6], 3, &rows, 0, 7);
        assert_eq!((page_list.as_slice(), bad), ([5, PAGE_BAD, 6].as_slice(), 1), "0 is padding");
        assert_eq!(gather_pages(&[], 0, &[], 0, 0), (vec![], 0));
    }

    /// The expected digests were computed by a separate program.
    #[test]
    fn digests_are_these_figures() {
        let (one, two): (Vec<u8>, Vec<u8>) = ((0..96).collect(), (0..64).rev().collect());
        let one = KvBytes { bytes: &one, page_bytes: 48 };
        let two = KvBytes { bytes: &two, page_bytes: 32 };
        let want = [0xc7dd_2d82_2169_435b, 0xdde8_3ecc_6236_788b, 0];
        assert_eq!(page_digest(&[one, two], &[0, 1, 2]), want);
        assert_ne!(page_digest(&[two, one], &[0])[0], want[0], "buffers have their order");
        assert_eq!(page_digest(&[], &[3]), [0]);
    }

    /// Checks all invariants on random pools; a failure names its seed.
    #[test]
    fn laws_hold_on_random_pools() {
        for seed in 0..500u32 {
            let mut state = seed.wrapping_mul(2_654_435_761) | 1;
            let mut below = |n: u32| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 16) % n
            };
            let npages = 4 + below(40);
            let lists: Vec<Vec<u32>> = (0..below(6))
                .map(|_| (0..below(9)).map(|_| 1 + below(npages - 1)).collect())
                .collect();
            let rows: Vec<(u32, u32, &[u32])> = lists
                .iter()
                .map(|pages| {
                    let len = u32::try_from(pages.len() * 4).unwrap();
                    (below(3), len.saturating_sub(below(4)), pages.as_slice())
                })
                .collect();
            let (r2t, ld, rows) = pool(&rows);
            let (page_list, bad) = gather_pages(&r2t, ld, &rows, 2, npages);
            assert_eq!(bad, 0, "seed {seed}");
            let marks = mark(&rows, &page_list, 2, npages);
            let mut reversed = rows.clone();
            reversed.reverse();
            assert_eq!(marks, mark(&reversed, &page_list, 2, npages), "seed {seed}: order matters");
            let by = session_pages(&rows, &page_list, &marks, &no_tree(), 2);
            let refs: u64 = by.values().map(|s| s.refs).sum();
            let exclusive: u64 = by.values().map(|s| s.exclusive_pages).sum();
            let pss: u64 = by.values().map(|s| s.share_q32).sum();
            let named: u64 = marks.refcnt.iter().map(|&n| u64::from(n)).sum();
            assert_eq!(refs, named, "seed {seed}");
            assert_eq!(exclusive, held_pages(&marks) - shared_pages(&marks), "seed {seed}");
            let lost = (held_pages(&marks) << 32) - pss;
            assert!(lost <= refs, "seed {seed}: the shares add up to the pages held");
            let free = list_to_set((0..below(20)).map(|_| below(npages)), npages);
            let tree = list_to_set((0..below(20)).map(|_| below(npages)), npages);
            let c = classify(&free, &marks, &tree);
            let all = c.leaked + c.free + c.private + c.cached + c.cached_in_use + c.corrupt;
            assert_eq!(all, u64::from(npages), "seed {seed}: every page has one class");
        }
    }
}

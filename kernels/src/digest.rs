//! Chooses the sealed pages whose contents an audit digests, and finds the pages that changed.
//!
//! A session's *key* changes when its KV is computed anew, or when it may have given up a page. A
//! page is *sealed* if the engine must not rewrite any of its tokens while the key stays the same.
//! So a sealed page whose *digest*, a hash of its contents, changes under the same key is a fault.
//!
//! All pages are too many for one audit, so each audit digests one *window* of page references (a
//! reference is one page of one row), and the next window begins where this one ends. A full
//! [`DigestMemory`] forgets a page that it has compared for a new one. So over many audits it
//! covers a pool that has more pages than the memory.

use crate::report::DigestCounts;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
};

/// 65,536 entries of about 60 bytes are 4 MiB.
pub const REMEMBERED_PAGES_MAX: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DigestRow {
    pub key: u64,
    pub row: u32,
    pub pages: u32,
    /// Number of the row's sealed pages, which are its first ones; may be 0.
    pub sealed_pages: u32,
}

/// In which order the caller copies the rows' page references, and which of them it digests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DigestPlan {
    /// Indexes into the `rows` of [`DigestMemory::plan`], ordered so that the window is contiguous.
    pub order: Vec<usize>,
    /// The page references to digest, as a range of those of all rows in `order`, one row after the
    /// other. Some can be of unsealed pages: their digests must not get to
    /// [`DigestMemory::compare`].
    pub window: Range<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DigestedPage {
    pub key: u64,
    /// The session's index in the snapshot.
    pub session: u32,
    pub page: u32,
    pub digest: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChangedPage {
    pub page: u32,
    pub session: u32,
}

type KeyAndPage = (u64, u32);

/// The first digest of a page under one key.
#[derive(Clone, Copy, Debug)]
struct FirstDigest {
    digest: u64,
    was_compared: bool,
}

/// The place of a window's first page. Rows are ordered by key, then by row number.
#[derive(Clone, Copy, Debug, Default)]
struct WindowStart {
    key: u64,
    row: u32,
    page_index: u32,
}

#[derive(Clone, Debug)]
pub struct DigestMemory {
    remembered: BTreeMap<KeyAndPage, FirstDigest>,
    remembered_max: usize,
    /// The compared pages, in the order of their first comparison. A full memory drops the first.
    drop_order: VecDeque<KeyAndPage>,
    next_window: WindowStart,
}

impl DigestMemory {
    pub fn new(remembered_max: usize) -> Self {
        Self {
            remembered: BTreeMap::new(),
            remembered_max,
            drop_order: VecDeque::new(),
            next_window: WindowStart::default(),
        }
    }

    /// The window holds at most `pages_max` page references.
    pub fn plan(&mut self, rows: &[DigestRow], pages_max: u32) -> DigestPlan {
        let has_sealed = |&index: &usize| rows[index].sealed_pages > 0 && pages_max > 0;
        let (mut order, unsealed): (Vec<_>, Vec<_>) = (0..rows.len()).partition(has_sealed);
        order.sort_by_key(|&index| (rows[index].key, rows[index].row));
        let WindowStart { key, row, page_index } = self.next_window;
        let is_before_window = |index: &usize| {
            let candidate = &rows[*index];
            let key_and_row = (candidate.key, candidate.row);
            key_and_row < (key, row)
                || (key_and_row == (key, row) && page_index >= candidate.sealed_pages)
        };
        let rows_before = order.partition_point(is_before_window);
        order.rotate_left(rows_before);
        let Some(&first) = order.first() else {
            return DigestPlan { order: unsealed, window: 0..0 };
        };
        let first = &rows[first];
        // The previous audit's window may have ended inside this row.
        let continues_row = (first.key, first.row) == (key, row) && page_index < first.sealed_pages;
        let start = if continues_row { page_index } else { 0 };
        let end = self.advance_window(order.iter().map(|&index| &rows[index]), start, pages_max);
        order.extend(unsealed);
        self.check_invariants();
        DigestPlan { order, window: start..end }
    }

    /// Returns where this window ends. `start` and the result count pages from the first of `rows`.
    fn advance_window<'a>(
        &mut self,
        rows: impl Iterator<Item = &'a DigestRow>,
        start: u32,
        pages_max: u32,
    ) -> u32 {
        let end_max = start.saturating_add(pages_max);
        let mut end = 0u32;
        for row in rows {
            let page_index = row.pages.min(end_max - end);
            end += page_index;
            self.next_window = WindowStart { key: row.key, row: row.row, page_index };
            if end == end_max {
                break;
            }
        }
        end
    }

    /// Also forgets the pages of each key that is not in `keys`.
    pub fn compare(
        &mut self,
        keys: &[u64],
        digested: impl IntoIterator<Item = DigestedPage>,
    ) -> (DigestCounts, Vec<ChangedPage>) {
        let live_keys: BTreeSet<u64> = keys.iter().copied().collect();
        self.remembered.retain(|(key, _), _| live_keys.contains(key));
        let remembered = &self.remembered;
        self.drop_order.retain(|key_and_page| remembered.contains_key(key_and_page));
        let mut handled_pairs = BTreeSet::new();
        let mut counts = DigestCounts::default();
        let mut changed = Vec::new();
        for DigestedPage { key, session, page, digest } in digested {
            let key_and_page = (key, page);
            if !handled_pairs.insert(key_and_page) {
                continue;
            }
            if let Some(first) = self.remembered.get_mut(&key_and_page) {
                counts.compared += 1;
                // Keep the first digest, so that later audits report the change again. One report
                // names only some of the changed pages.
                if first.digest != digest {
                    changed.push(ChangedPage { page, session });
                }
                let was_compared = std::mem::replace(&mut first.was_compared, true);
                if !was_compared {
                    self.drop_order.push_back(key_and_page);
                }
            } else if self.make_room() {
                counts.fresh += 1;
                let first = FirstDigest { digest, was_compared: false };
                self.remembered.insert(key_and_page, first);
            }
        }
        counts.remembered = self.remembered.len() as u64;
        self.check_invariants();
        (counts, changed)
    }

    /// Drops a compared page if the memory is full. Returns whether there is room.
    fn make_room(&mut self) -> bool {
        if self.remembered.len() >= self.remembered_max
            && let Some(key_and_page) = self.drop_order.pop_front()
        {
            self.remembered.remove(&key_and_page);
        }
        self.remembered.len() < self.remembered_max
    }

    pub fn check_invariants(&self) {
        if cfg!(debug_assertions) {
            assert!(self.remembered.len() <= self.remembered_max);
            let compared = self.remembered.values().filter(|first| first.was_compared).count();
            assert_eq!(self.drop_order.len(), compared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(key: u64, pages: u32) -> DigestRow {
        DigestRow { key, row: u32::try_from(key).unwrap(), pages: pages + 1, sealed_pages: pages }
    }

    /// Runs one audit of pages whose digests are given by `content`.
    fn audit(
        memory: &mut DigestMemory,
        rows: &[DigestRow],
        pages_max: u32,
        content: impl Fn(u64, u32) -> u64,
    ) -> (DigestCounts, Vec<ChangedPage>) {
        let layout = memory.plan(rows, pages_max);
        assert!(layout.window.len() <= pages_max as usize);
        let refs = layout.order.iter().flat_map(|&at| (0..rows[at].pages).map(move |i| (at, i)));
        let window = layout.window.start as usize..layout.window.end as usize;
        let digested: Vec<_> = refs
            .skip(window.start)
            .take(window.len())
            .filter(|&(at, i)| i < rows[at].sealed_pages)
            .map(|(at, i)| {
                let (key, page) = (rows[at].key, rows[at].row * 1000 + i);
                DigestedPage { key, session: rows[at].row, page, digest: content(key, page) }
            })
            .collect();
        let keys: Vec<u64> = rows.iter().map(|row| row.key).collect();
        memory.compare(&keys, digested)
    }

    #[test]
    fn every_page_is_looked_at_in_time() {
        let rows = [row(3, 7), row(1, 0), row(9, 5), row(4, 11)];
        let mut memory = DigestMemory::new(100);
        let fresh: u64 =
            (0..6).map(|_| audit(&mut memory, &rows, 5, |_, p| p.into()).0.fresh).sum();
        assert_eq!(fresh, 23);
        let (mut compared, mut changed) = (0, vec![]);
        for _ in 0..6 {
            let (digests, found) =
                audit(&mut memory, &rows, 5, |_, p| u64::from(p) + u64::from(p == 4006));
            compared += digests.compared;
            changed.extend(found);
        }
        assert!(compared >= 23, "{compared}");
        changed.dedup();
        assert_eq!(
            changed,
            [ChangedPage { page: 4006, session: 4 }],
            "a change is told whenever it is looked at"
        );
    }

    #[test]
    fn a_pool_larger_than_the_memory_is_covered_part_by_part() {
        let rows: Vec<_> = (1..=10).map(|key| row(key, 10)).collect();
        for changed_page in [1003, 5005, 10009] {
            let mut memory = DigestMemory::new(25);
            let mut found = vec![];
            // Each round through the pool compares the 25 pages that the round before remembered.
            for round in 0..40 {
                let content = |_, p| u64::from(p) + if p == changed_page { round } else { 0 };
                let (digests, changed) = audit(&mut memory, &rows, 110, content);
                assert!(digests.remembered <= 25);
                found.extend(changed);
            }
            assert!(found.iter().all(|found| found.page == changed_page), "{found:?}");
            assert!(!found.is_empty(), "page {changed_page} was never compared");
        }
    }

    #[test]
    fn a_new_key_forgets() {
        let mut memory = DigestMemory::new(100);
        audit(&mut memory, &[row(1, 3), row(2, 3)], 100, |_, _| 7);
        // Key 5 replaces key 1 in the same row; its pages have the same numbers and other content.
        let mut again = row(1, 3);
        again.key = 5;
        let (digests, changed) = audit(&mut memory, &[again, row(2, 3)], 100, |_, _| 7);
        assert_eq!((digests.compared, digests.fresh, digests.remembered), (3, 3, 6));
        assert_eq!(changed, []);
    }

    #[test]
    fn random_rows_keep_the_window_in_bounds() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut memory = DigestMemory::new(random.usize(0..40));
            for _ in 0..20 {
                let rows: Vec<_> = (0..random.usize(0..8))
                    .map(|at| {
                        let pages = random.u32(0..9);
                        DigestRow {
                            key: random.u64(0..5),
                            row: u32::try_from(at).unwrap(),
                            pages,
                            sealed_pages: random.u32(0..=pages),
                        }
                    })
                    .collect();
                let pages_max = random.u32(0..20);
                let layout = memory.plan(&rows, pages_max);
                let total: u32 = rows.iter().map(|row| row.pages).sum();
                let Range { start, end } = layout.window;
                assert!(start <= end && end <= total && end - start <= pages_max, "seed {seed}");
                let mut order = layout.order.clone();
                order.sort_unstable();
                assert!(order.into_iter().eq(0..rows.len()), "seed {seed}: each row once");
            }
        }
    }
}

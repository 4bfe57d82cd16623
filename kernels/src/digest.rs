//! Selects the sealed pages that an audit digests, and compares their digests. Pure and bounded.
//!
//! A sealed page must keep its bytes while its session keeps its key. Each audit digests a window
//! of the sealed pages. The window rotates, so every page is digested in time. Digests are
//! remembered by (key, page) until the key is gone. If the memory is full, a page that was compared
//! gives up its entry to a page that never was, so pools larger than the memory are covered part by
//! part.

use crate::report::Digests;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
};

/// Default number of remembered pages: 65,536 entries of about 60 bytes are 4 MiB.
pub const REMEMBERED_MAX: usize = 1 << 16;

/// The parts of a row that matter for digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedRow {
    pub key: u64,
    pub row: u32,
    /// Number of the row's pages, and how many of them, from the front, are sealed.
    pub pages: u32,
    pub sealed: u32,
}

/// The order of rows in the copy, chosen so that the window is one contiguous range of page
/// references.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DigestPlan {
    /// Indexes of the given rows.
    pub order: Vec<usize>,
    /// The page references to digest, counted over the rows in `order`.
    pub window: Range<u32>,
}

/// One digested page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digested {
    pub key: u64,
    pub session: u32,
    pub page: u32,
    pub digest: u64,
}

#[derive(Clone, Copy, Debug)]
struct Remembered {
    digest: u64,
    compared: bool,
}

/// The digests of earlier audits.
#[derive(Clone, Debug)]
pub struct DigestMemory {
    remembered: BTreeMap<(u64, u32), Remembered>,
    remembered_max: usize,
    /// Keys of `remembered` that were compared, oldest comparison first; the first gives up its
    /// entry first.
    compared: VecDeque<(u64, u32)>,
    /// Where the next window begins: key, row, page within the row.
    next: (u64, u32, u32),
}

impl DigestMemory {
    /// Makes a memory for up to `remembered_max` pages.
    pub fn new(remembered_max: usize) -> Self {
        Self {
            remembered: BTreeMap::new(),
            remembered_max,
            compared: VecDeque::new(),
            next: (0, 0, 0),
        }
    }

    /// Lays out the rows, those of the next window first, and moves the window on.
    pub fn plan(&mut self, rows: &[SealedRow], pages_max: u32) -> DigestPlan {
        let sealed = |&at: &usize| rows[at].sealed > 0 && pages_max > 0;
        let (mut order, rest): (Vec<_>, Vec<_>) = (0..rows.len()).partition(sealed);
        order.sort_by_key(|&at| (rows[at].key, rows[at].row));
        let (key, row, page) = self.next;
        let begun = |at: &usize| {
            let r = &rows[*at];
            let past = (r.key, r.row) == (key, row) && page >= r.sealed;
            (r.key, r.row) < (key, row) || past
        };
        let turn = order.partition_point(begun);
        order.rotate_left(turn);
        let Some(&first) = order.first() else {
            return DigestPlan { order: rest, window: 0..0 };
        };
        let here = (rows[first].key, rows[first].row) == (key, row) && page < rows[first].sealed;
        let start = if here { page } else { 0 };
        let end = self.advance(order.iter().map(|&at| &rows[at]), start, pages_max);
        order.extend(rest);
        let layout = DigestPlan { order, window: start..end };
        self.check_invariants();
        layout
    }

    /// Sets where the next window begins, and returns where this window ends.
    fn advance<'a>(
        &mut self,
        rows: impl Iterator<Item = &'a SealedRow>,
        start: u32,
        pages_max: u32,
    ) -> u32 {
        let end_max = start.saturating_add(pages_max);
        let mut end = 0u32;
        for row in rows {
            let taken = row.pages.min(end_max - end);
            end += taken;
            self.next = (row.key, row.row, taken);
            if end == end_max {
                break;
            }
        }
        end
    }

    /// Compares new digests with the remembered ones, and forgets sessions whose key is not in
    /// `keys`. Also returns each changed page with its session.
    pub fn compare(
        &mut self,
        keys: &[u64],
        digested: impl IntoIterator<Item = Digested>,
    ) -> (Digests, Vec<(u32, u32)>) {
        let live: BTreeSet<u64> = keys.iter().copied().collect();
        self.remembered.retain(|(key, _), _| live.contains(key));
        let remembered = &self.remembered;
        self.compared.retain(|id| remembered.contains_key(id));
        let mut seen = BTreeSet::new();
        let mut sum = Digests::default();
        let mut changed = Vec::new();
        for Digested { key, session, page, digest } in digested {
            let id = (key, page);
            if !seen.insert(id) {
                continue;
            }
            if let Some(known) = self.remembered.get_mut(&id) {
                sum.compared += 1;
                if known.digest != digest {
                    changed.push((page, session));
                }
                // The first digest stays: a change is reported until its session is gone, because
                // one report can't name all changes.
                let again = std::mem::replace(&mut known.compared, true);
                if !again {
                    self.compared.push_back(id);
                }
            } else if self.make_room() {
                sum.fresh += 1;
                self.remembered.insert(id, Remembered { digest, compared: false });
            }
        }
        sum.remembered = self.remembered.len() as u64;
        self.check_invariants();
        (sum, changed)
    }

    fn make_room(&mut self) -> bool {
        if self.remembered.len() >= self.remembered_max
            && let Some(id) = self.compared.pop_front()
        {
            self.remembered.remove(&id);
        }
        self.remembered.len() < self.remembered_max
    }

    /// Panics if the memory exceeds its bound, or the queue differs from the compared entries.
    pub fn check_invariants(&self) {
        if cfg!(debug_assertions) {
            assert!(self.remembered.len() <= self.remembered_max);
            let compared = self.remembered.values().filter(|known| known.compared).count();
            assert_eq!(self.compared.len(), compared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(key: u64, pages: u32) -> SealedRow {
        SealedRow { key, row: u32::try_from(key).unwrap(), pages: pages + 1, sealed: pages }
    }

    /// Runs one audit of pages whose digests are given by `content`.
    fn audit(
        memory: &mut DigestMemory,
        rows: &[SealedRow],
        pages_max: u32,
        content: impl Fn(u64, u32) -> u64,
    ) -> (Digests, Vec<(u32, u32)>) {
        let layout = memory.plan(rows, pages_max);
        assert!(layout.window.len() <= pages_max as usize);
        let refs = layout.order.iter().flat_map(|&at| (0..rows[at].pages).map(move |i| (at, i)));
        let window = layout.window.start as usize..layout.window.end as usize;
        let digested: Vec<_> = refs
            .skip(window.start)
            .take(window.len())
            .filter(|&(at, i)| i < rows[at].sealed)
            .map(|(at, i)| {
                let (key, page) = (rows[at].key, rows[at].row * 1000 + i);
                Digested { key, session: rows[at].row, page, digest: content(key, page) }
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
        assert_eq!(changed, [(4006, 4)], "a change is told whenever it is looked at");
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
            assert!(found.iter().all(|&(page, _)| page == changed_page), "{found:?}");
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
                        SealedRow {
                            key: random.u64(0..5),
                            row: u32::try_from(at).unwrap(),
                            pages,
                            sealed: random.u32(0..=pages),
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

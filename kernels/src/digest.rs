//! Which sealed pages an audit digests, and what their digests say: pure, bounded, no reading.
//!
//! A sealed page must keep its bytes as long as its session keeps its key. An audit looks at a
//! window of them; the window goes round, so that every page is looked at in time. Digests are
//! remembered by (key, page) until the key is gone. When there is no more place, a page that was
//! compared gives its place to one that never was: also pools larger than the memory are covered,
//! part by part.

use crate::report::Digests;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
};

/// Pages remembered by default: 65,536 entries of about 60 bytes are 4 MiB.
pub const REMEMBERED_MAX: usize = 1 << 16;

/// A row, as far as digests care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedRow {
    pub key: u64,
    pub row: u32,
    /// All its pages, and how many of them, from the front, are sealed.
    pub pages: u32,
    pub sealed: u32,
}

/// The order in which rows are laid out, so that the window is one stretch of page references.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Indexes of the rows given.
    pub order: Vec<usize>,
    /// The references to digest, counted over the rows in that order.
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
struct Known {
    digest: u64,
    compared: bool,
}

/// The digests of earlier audits.
#[derive(Clone, Debug)]
pub struct Memory {
    known: BTreeMap<(u64, u32), Known>,
    known_max: usize,
    /// Those of `known` that were compared, in the order of it: the first gives its place first.
    compared: VecDeque<(u64, u32)>,
    /// Where the next window begins: key, row, page of the row.
    next: (u64, u32, u32),
}

impl Memory {
    /// Remembers up to `known_max` pages.
    pub fn new(known_max: usize) -> Self {
        Self { known: BTreeMap::new(), known_max, compared: VecDeque::new(), next: (0, 0, 0) }
    }

    /// Lays the rows out, those of the next window first, and moves on by that window.
    pub fn plan(&mut self, rows: &[SealedRow], pages_max: u32) -> Layout {
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
            return Layout { order: rest, window: 0..0 };
        };
        let here = (rows[first].key, rows[first].row) == (key, row) && page < rows[first].sealed;
        let start = if here { page } else { 0 };
        let end = self.advance(order.iter().map(|&at| &rows[at]), start, pages_max);
        order.extend(rest);
        let layout = Layout { order, window: start..end };
        self.check_invariants();
        layout
    }

    /// Sets where the next window begins, and returns where this one ends.
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

    /// Compares what was digested with what is remembered, and forgets sessions without a key
    /// among `keys`. The second value names the pages that changed, and their sessions.
    pub fn settle(
        &mut self,
        keys: &[u64],
        digested: impl IntoIterator<Item = Digested>,
    ) -> (Digests, Vec<(u32, u32)>) {
        let live: BTreeSet<u64> = keys.iter().copied().collect();
        self.known.retain(|(key, _), _| live.contains(key));
        let known = &self.known;
        self.compared.retain(|id| known.contains_key(id));
        let mut seen = BTreeSet::new();
        let mut sum = Digests::default();
        let mut changed = Vec::new();
        for Digested { key, session, page, digest } in digested {
            let id = (key, page);
            if !seen.insert(id) {
                continue;
            }
            if let Some(known) = self.known.get_mut(&id) {
                sum.compared += 1;
                if known.digest != digest {
                    changed.push((page, session));
                }
                // What was first seen stays: a change is told until its session is gone, since not
                // all can be named at once.
                let again = std::mem::replace(&mut known.compared, true);
                if !again {
                    self.compared.push_back(id);
                }
            } else if self.make_place() {
                sum.fresh += 1;
                self.known.insert(id, Known { digest, compared: false });
            }
        }
        sum.remembered = self.known.len() as u64;
        self.check_invariants();
        (sum, changed)
    }

    fn make_place(&mut self) -> bool {
        if self.known.len() >= self.known_max
            && let Some(id) = self.compared.pop_front()
        {
            self.known.remove(&id);
        }
        self.known.len() < self.known_max
    }

    /// Panics unless it is within its bound, and the queue holds just what was compared.
    pub fn check_invariants(&self) {
        if cfg!(debug_assertions) {
            assert!(self.known.len() <= self.known_max);
            let compared = self.known.values().filter(|known| known.compared).count();
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

    /// Plays one audit of pages whose digest `content` tells.
    fn audit(
        memory: &mut Memory,
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
        memory.settle(&keys, digested)
    }

    #[test]
    fn every_page_is_looked_at_in_time() {
        let rows = [row(3, 7), row(1, 0), row(9, 5), row(4, 11)];
        let mut memory = Memory::new(100);
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
            let mut memory = Memory::new(25);
            let mut found = vec![];
            // Each round through the pool compares the 25 pages that the round before took up.
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
        let mut memory = Memory::new(100);
        audit(&mut memory, &[row(1, 3), row(2, 3)], 100, |_, _| 7);
        // The row of key 1 was made anew, as key 5; the page numbers differ in content.
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
            let mut memory = Memory::new(random.usize(0..40));
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

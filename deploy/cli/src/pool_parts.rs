//! A worker's KV pool by who holds it. Pure.

use contract::{api::Worker, load::Figure};

/// A KV pool by who holds it, in tokens. The parts add up to the whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolParts {
    pub pinned: u64,
    /// Prefixes of the radix tree that turns or sessions use, by the last page audit.
    pub locked: u64,
    /// KV of running turns; with the locked prefixes, if no audit is known.
    pub running: u64,
    /// Cached KV that eviction can free.
    pub evictable: u64,
    pub free: u64,
}

impl PoolParts {
    /// `None` if the pool's size or use is unknown.
    #[must_use]
    pub fn read(worker: &Worker) -> Option<Self> {
        let load = worker.load.as_ref()?;
        let value = |figure: Option<Figure>| figure.map(|figure| figure.value);
        let total = value(load.pool_total_tokens)?;
        // The figures are of different moments. Each part takes at most what the others left.
        let mut rest = total;
        let mut take = |wanted: u64| {
            let part = wanted.min(rest);
            rest -= part;
            part
        };
        let used = value(load.pool_used_tokens)?;
        let pinned = take(value(load.pinned_tokens).unwrap_or(0));
        let in_use = take(used.saturating_sub(pinned));
        let evictable = take(value(load.pool_evictable_tokens).unwrap_or(0));
        let classes = load.pages.as_ref().and_then(|pages| pages.classes);
        let locked_pages = classes.map_or(0, |classes| classes.cached_in_use);
        let page_tokens = u64::from(worker.engine.page_tokens.max(1));
        let locked = locked_pages.saturating_mul(page_tokens).min(in_use);
        Some(Self { pinned, locked, running: in_use - locked, evictable, free: rest })
    }

    #[must_use]
    pub fn total(&self) -> u64 {
        self.pinned + self.locked + self.running + self.evictable + self.free
    }
}

#[cfg(test)]
mod tests {
    use contract::load::{EngineFacts, PageAudit, PageClasses, RankLoad};
    use proptest::prelude::*;

    use super::*;

    fn figure(value: u64) -> Option<Figure> {
        Some(Figure { value, ..Figure::default() })
    }

    fn worker(total: u64, used: u64, pinned: u64, evictable: u64, locked_pages: u64) -> Worker {
        let classes = Some(PageClasses { cached_in_use: locked_pages, ..PageClasses::default() });
        let load = RankLoad {
            pool_total_tokens: figure(total),
            pool_used_tokens: figure(used),
            pinned_tokens: figure(pinned),
            pool_evictable_tokens: figure(evictable),
            pages: Some(PageAudit { classes, ..PageAudit::default() }),
            ..RankLoad::default()
        };
        let engine = EngineFacts { page_tokens: 16, ..EngineFacts::default() };
        Worker { load: Some(load), engine, ..Worker::default() }
    }

    #[test]
    fn the_pool_is_split_by_who_holds_it() {
        let parts = PoolParts::read(&worker(1000, 500, 300, 200, 5)).unwrap();
        let expected =
            PoolParts { pinned: 300, locked: 80, running: 120, evictable: 200, free: 300 };
        assert_eq!(parts, expected);
        assert_eq!(PoolParts::read(&Worker::default()), None, "nothing is known");
    }

    proptest! {
        #[test]
        fn the_parts_are_never_more_than_the_pool(
            total: u64, used: u64, pinned: u64, evictable: u64, locked: u64
        ) {
            let parts = PoolParts::read(&worker(total, used, pinned, evictable, locked)).unwrap();
            prop_assert_eq!(parts.total(), total);
        }
    }
}

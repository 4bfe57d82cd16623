//! One worker's KV pool as blocks: which are resident or held, and the order of eviction.
//!
//! Turns and pins hold blocks; the others are idle. Idle blocks are evicted least recently used
//! first and deepest first, as a radix tree evicts its leaves; tagged blocks follow after all
//! others. A clairvoyant pool uses future use times instead. The module is pure, and every
//! operation takes a few array accesses per block.
//!
//! A *host tier* gets a copy of each block when the block is stored, as SGLang's `write_through`
//! does. Its own eviction takes only blocks that are not on the device, in the same order.

use std::{collections::BTreeSet, time::Duration};

/// The end of a linked list.
const NONE: u32 = u32::MAX;

/// The eviction class of an idle block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Evicted first.
    Plain,
    /// Evicted when no plain block is left.
    Tagged,
}

/// A change of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The block is on the device from now on.
    Stored(u32),
    /// The block has left the device.
    Removed(u32),
    /// The host has a copy of the block from now on.
    StoredOnHost(u32),
    /// The host's copy is gone.
    RemovedFromHost(u32),
}

/// The leading blocks of a chain that need not be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matched {
    /// On either tier.
    pub blocks: u32,
    /// The part of `blocks` that has to be loaded from the host.
    pub host_blocks: u32,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    previous: u32,
    next: u32,
    holds: u32,
    resident: bool,
    on_host: bool,
    class: Class,
}

const ABSENT: Block = Block {
    previous: NONE,
    next: NONE,
    holds: 0,
    resident: false,
    on_host: false,
    class: Class::Plain,
};

/// The idle blocks by the time of their next use; the last entry is evicted first.
#[derive(Debug, Clone, Default)]
struct NextUses {
    next_use: Vec<Duration>,
    idle: BTreeSet<(Duration, u32)>,
}

#[derive(Debug, Clone, Copy)]
struct List {
    first: u32,
    last: u32,
}

const EMPTY: List = List { first: NONE, last: NONE };

/// The host's copies.
#[derive(Debug, Clone)]
struct HostTier {
    capacity: u64,
    used: u64,
    /// Of the blocks that are not on the device.
    idle: [List; 2],
}

/// The KV pool of one worker.
#[derive(Debug, Clone)]
pub struct BlockPool {
    capacity: u64,
    blocks: Vec<Block>,
    idle: [List; 2],
    next_uses: Option<NextUses>,
    host: HostTier,
    resident: u64,
    held: u64,
    transient: u64,
    changes: Vec<Change>,
}

impl BlockPool {
    /// Creates an empty pool of `capacity` blocks.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            blocks: Vec::new(),
            idle: [EMPTY; 2],
            next_uses: None,
            host: HostTier { capacity: 0, used: 0, idle: [EMPTY; 2] },
            resident: 0,
            held: 0,
            transient: 0,
            changes: Vec::new(),
        }
    }

    /// Adds a host tier of `capacity` blocks.
    #[must_use]
    pub fn with_host(mut self, capacity: u64) -> Self {
        self.host.capacity = capacity;
        self
    }

    /// Creates a pool that evicts the block whose next use, given by [`Self::set_next_use`], is the
    /// latest.
    #[must_use]
    pub fn clairvoyant(capacity: u64) -> Self {
        Self { next_uses: Some(NextUses::default()), ..Self::new(capacity) }
    }

    /// Records when a held block will be used next.
    pub fn set_next_use(&mut self, block: u32, next_use: Duration) {
        if let Some(next_uses) = &mut self.next_uses {
            let at = block as usize;
            if at >= next_uses.next_use.len() {
                next_uses.next_use.resize(at + 1, Duration::ZERO);
            }
            next_uses.next_use[at] = next_use;
        }
    }

    /// Returns the number of blocks that the pool can hold.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the number of blocks that can be matched.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.resident
    }

    /// Returns the number of blocks that can't be evicted.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.held + self.transient
    }

    /// Returns the number of blocks that are free without eviction.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.capacity - self.resident - self.transient
    }

    /// Whether the block can be matched.
    #[must_use]
    pub fn is_resident(&self, block: u32) -> bool {
        self.blocks.get(block as usize).is_some_and(|block| block.resident)
    }

    /// Returns the number of blocks that the host has a copy of.
    #[must_use]
    pub fn on_host(&self) -> u64 {
        self.host.used
    }

    /// Returns how many leading blocks of the chain are on the device or the host.
    pub fn matched(&self, chain: impl Iterator<Item = u32>) -> Matched {
        let mut matched = Matched { blocks: 0, host_blocks: 0 };
        for block in chain {
            let Some(entry) = self.blocks.get(block as usize) else { break };
            if !entry.resident && !entry.on_host {
                break;
            }
            matched.blocks += 1;
            matched.host_blocks += u32::from(!entry.resident);
        }
        matched
    }

    /// Holds all blocks of the chain and `transient` unnamed blocks, and evicts idle blocks as
    /// needed. Blocks of the chain become resident. Returns false and changes nothing if there is
    /// no room.
    pub fn admit(&mut self, chain: &[u32], transient: u64) -> bool {
        let (mut missing, mut idle) = (0, 0);
        for &block in chain {
            match self.blocks.get(block as usize) {
                Some(entry) if entry.resident => idle += u64::from(entry.holds == 0),
                _ => missing += 1,
            }
        }
        // The chain's own idle blocks can't be evicted to make room for the rest.
        let evictable = self.resident - self.held - idle;
        let needed = missing + transient;
        if needed > self.free() + evictable {
            return false;
        }
        for &block in chain {
            if self.is_resident(block) {
                self.hold_block(block);
            } else if self.is_on_host(block) {
                // It can't give way to the others' copies any more.
                self.unlink_on_host(block);
            }
        }
        for _ in self.free()..needed {
            self.evict();
        }
        for &block in chain {
            if !self.is_resident(block) {
                self.store(block);
            }
        }
        self.transient += transient;
        true
    }

    /// Releases what `admit` held; the chain's blocks become idle with `class`.
    pub fn release(&mut self, chain: &[u32], transient: u64, class: Class) {
        for &block in chain.iter().rev() {
            self.release_block(block, class);
        }
        self.transient -= transient;
    }

    /// Holds the chain's blocks once more, as a pin.
    pub fn pin(&mut self, chain: &[u32]) {
        for &block in chain {
            assert!(self.is_resident(block), "only what a turn has just held is pinned");
            self.hold_block(block);
        }
    }

    /// Frees the block on both tiers unless it is held.
    pub fn discard(&mut self, block: u32) {
        if self.is_resident(block) {
            if self.blocks[block as usize].holds > 0 {
                return;
            }
            self.unlink(block);
            self.remove(block);
        }
        if self.is_on_host(block) {
            self.unlink_on_host(block);
            self.remove_from_host(block);
        }
    }

    /// Forgets everything, as a restarting engine does.
    pub fn clear(&mut self) {
        let next_uses = self.next_uses.as_ref().map(|_| NextUses::default());
        *self = Self { next_uses, ..Self::new(self.capacity).with_host(self.host.capacity) };
    }

    /// Takes the changes since the last call, in order.
    pub fn take_changes(&mut self) -> std::vec::Drain<'_, Change> {
        self.changes.drain(..)
    }

    fn store(&mut self, block: u32) {
        let at = block as usize;
        if at >= self.blocks.len() {
            self.blocks.resize(at + 1, ABSENT);
        }
        let on_host = self.blocks[at].on_host;
        self.blocks[at] = Block { holds: 1, resident: true, on_host, ..ABSENT };
        self.resident += 1;
        self.held += 1;
        self.changes.push(Change::Stored(block));
        if !on_host {
            self.copy_to_host(block);
        }
    }

    /// A host that is full of copies of blocks that are on the device gets none.
    fn copy_to_host(&mut self, block: u32) {
        if self.host.used >= self.host.capacity {
            let Some(oldest) = self.host.idle.iter().find(|list| list.first != NONE) else {
                return;
            };
            let oldest = oldest.first;
            self.unlink_on_host(oldest);
            self.remove_from_host(oldest);
        }
        self.blocks[block as usize].on_host = true;
        self.host.used += 1;
        self.changes.push(Change::StoredOnHost(block));
    }

    fn remove_from_host(&mut self, block: u32) {
        self.blocks[block as usize].on_host = false;
        self.host.used -= 1;
        self.changes.push(Change::RemovedFromHost(block));
    }

    fn is_on_host(&self, block: u32) -> bool {
        self.blocks.get(block as usize).is_some_and(|block| block.on_host)
    }

    fn hold_block(&mut self, block: u32) {
        if self.blocks[block as usize].holds == 0 {
            self.unlink(block);
            self.held += 1;
        }
        self.blocks[block as usize].holds += 1;
    }

    fn release_block(&mut self, block: u32, class: Class) {
        let entry = &mut self.blocks[block as usize];
        assert!(entry.holds > 0, "a block was released twice");
        entry.holds -= 1;
        entry.class = class;
        if entry.holds == 0 {
            self.held -= 1;
            self.link(block);
        }
    }

    fn evict(&mut self) {
        if let Some(next_uses) = &self.next_uses {
            let &(_, block) = next_uses.idle.last().expect("the caller counted what can go");
            self.unlink(block);
            self.remove(block);
            return;
        }
        let list = self.idle.iter().find(|list| list.first != NONE);
        let block = list.expect("the caller counted what can go").first;
        self.unlink(block);
        self.remove(block);
    }

    /// The host's copy stays.
    fn remove(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        entry.resident = false;
        let (on_host, class) = (entry.on_host, entry.class);
        self.resident -= 1;
        self.changes.push(Change::Removed(block));
        if on_host {
            append(&mut self.blocks, &mut self.host.idle[class as usize], block);
        }
    }

    /// Puts the block at the end of its idle list, as the most recently used.
    fn link(&mut self, block: u32) {
        if let Some(NextUses { next_use, idle }) = &mut self.next_uses {
            let at = next_use.get(block as usize).copied().unwrap_or_default();
            idle.insert((at, block));
            return;
        }
        let class = self.blocks[block as usize].class;
        append(&mut self.blocks, &mut self.idle[class as usize], block);
    }

    fn unlink(&mut self, block: u32) {
        if let Some(NextUses { next_use, idle }) = &mut self.next_uses {
            let at = next_use.get(block as usize).copied().unwrap_or_default();
            idle.remove(&(at, block));
            return;
        }
        let class = self.blocks[block as usize].class;
        cut_out(&mut self.blocks, &mut self.idle[class as usize], block);
    }

    fn unlink_on_host(&mut self, block: u32) {
        let class = self.blocks[block as usize].class;
        cut_out(&mut self.blocks, &mut self.host.idle[class as usize], block);
    }

    /// Panics if the pool is inconsistent.
    pub fn check_invariants(&self) {
        assert!(self.resident + self.transient <= self.capacity, "over capacity");
        let count = |is_counted: fn(&Block) -> bool| {
            self.blocks.iter().filter(|block| block.resident && is_counted(block)).count() as u64
        };
        assert_eq!(count(|_| true), self.resident);
        assert_eq!(count(|block| block.holds > 0), self.held);
        let mut idle = self.next_uses.as_ref().map_or(0, |next_uses| next_uses.idle.len() as u64);
        for (class, list) in self.idle.iter().enumerate() {
            idle += self.check_list(*list, |block| {
                block.resident && block.holds == 0 && block.class as usize == class
            });
        }
        assert_eq!(idle, self.resident - self.held, "idle blocks outside the lists");
        let on_host = self.blocks.iter().filter(|block| block.on_host);
        assert_eq!(on_host.clone().count() as u64, self.host.used);
        assert!(self.host.used <= self.host.capacity, "more copies than the host has room for");
        let on_host_only = on_host.filter(|block| !block.resident).count() as u64;
        let lists = self.host.idle.iter();
        let listed = lists.map(|list| self.check_list(*list, |one| one.on_host && !one.resident));
        assert_eq!(listed.sum::<u64>(), on_host_only, "copies outside the lists");
    }

    fn check_list(&self, list: List, may_be_in: impl Fn(&Block) -> bool) -> u64 {
        let (mut at, mut previous, mut count) = (list.first, NONE, 0);
        while at != NONE {
            let block = &self.blocks[at as usize];
            assert!(may_be_in(block), "a block in the wrong list");
            assert_eq!(block.previous, previous, "a broken list");
            count += 1;
            (previous, at) = (at, block.next);
        }
        assert_eq!(list.last, previous, "a wrong end of a list");
        count
    }
}

fn append(blocks: &mut [Block], list: &mut List, block: u32) {
    let previous = std::mem::replace(&mut list.last, block);
    match previous {
        NONE => list.first = block,
        previous => blocks[previous as usize].next = block,
    }
    let entry = &mut blocks[block as usize];
    (entry.previous, entry.next) = (previous, NONE);
}

fn cut_out(blocks: &mut [Block], list: &mut List, block: u32) {
    let Block { previous, next, .. } = blocks[block as usize];
    match previous {
        NONE => list.first = next,
        previous => blocks[previous as usize].next = next,
    }
    match next {
        NONE => list.last = previous,
        next => blocks[next as usize].previous = previous,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_recently_used_chain_is_evicted_first_and_from_its_end() {
        let mut pool = BlockPool::new(4);
        assert!(pool.admit(&[0, 1], 1));
        pool.release(&[0, 1], 1, Class::Plain);
        assert!(pool.admit(&[2, 3], 0));
        pool.release(&[2, 3], 0, Class::Plain);
        assert!(pool.admit(&[4], 0));
        assert!(pool.is_resident(0) && !pool.is_resident(1), "the leaf of the older chain went");
        assert_eq!(pool.matched([0, 1].into_iter()), Matched { blocks: 1, host_blocks: 0 });
    }

    #[test]
    fn tagged_blocks_go_after_plain_ones() {
        let mut pool = BlockPool::new(3);
        for (block, class) in [(0, Class::Tagged), (1, Class::Plain), (2, Class::Tagged)] {
            assert!(pool.admit(&[block], 0));
            pool.release(&[block], 0, class);
        }
        assert!(pool.admit(&[3], 0));
        assert!(pool.is_resident(0) && !pool.is_resident(1) && pool.is_resident(2));
    }

    #[test]
    fn a_clairvoyant_pool_evicts_the_block_with_the_latest_next_use() {
        let mut pool = BlockPool::clairvoyant(4);
        let seconds = Duration::from_secs;
        assert!(pool.admit(&[0, 1], 0) && pool.admit(&[2, 3], 0));
        for (block, next_use) in [(0, 9), (1, 9), (2, 5), (3, 700)] {
            pool.set_next_use(block, seconds(next_use));
        }
        pool.release(&[2, 3], 0, Class::Plain);
        pool.release(&[0, 1], 0, Class::Plain);
        pool.check_invariants();
        assert!(pool.admit(&[4, 5], 0));
        assert!(
            !pool.is_resident(3) && !pool.is_resident(1),
            "the block with the latest next use, then the leaf of the next"
        );
        assert!(pool.is_resident(0) && pool.is_resident(2));
        pool.check_invariants();
    }

    #[test]
    fn a_block_that_leaves_the_device_stays_on_the_host_until_its_room_is_needed() {
        let mut pool = BlockPool::new(2).with_host(3);
        let matched = |pool: &BlockPool, chain: [u32; 2]| {
            let Matched { blocks, host_blocks } = pool.matched(chain.into_iter());
            (blocks, host_blocks)
        };
        for chain in [[0, 1], [2, 3]] {
            assert!(pool.admit(&chain, 0));
            pool.release(&chain, 0, Class::Plain);
            pool.check_invariants();
        }
        assert_eq!(matched(&pool, [2, 3]), (2, 0));
        assert_eq!(matched(&pool, [0, 1]), (1, 1), "the deepest copy made room");
        pool.take_changes();
        assert!(pool.admit(&[0], 0));
        pool.check_invariants();
        let changes: Vec<Change> = pool.take_changes().collect();
        assert_eq!(changes, [Change::Removed(3), Change::Stored(0)], "it was loaded, not copied");
    }

    #[test]
    fn held_blocks_are_never_evicted_and_a_refused_turn_changes_nothing() {
        let mut pool = BlockPool::new(3);
        assert!(pool.admit(&[0, 1], 0));
        assert!(!pool.admit(&[0, 2, 3], 0));
        assert!(!pool.is_resident(2) && pool.used() == 2);
        pool.release(&[0, 1], 0, Class::Plain);
        assert!(pool.admit(&[0, 2, 3], 0));
        pool.discard(2);
        assert!(pool.is_resident(2), "a turn holds it");
        pool.release(&[0, 2, 3], 0, Class::Plain);
        pool.discard(2);
        assert!(!pool.is_resident(2) && pool.free() == 1);
    }

    proptest! {
        #[test]
        fn invariants_hold_whatever_happens(
            ops in prop::collection::vec((0..4_u8, 0..30_u32, 1..8_u32, 0..3_u64), 0..80),
        ) {
            let mut pool = BlockPool::new(16).with_host(20);
            let mut running: Vec<(Vec<u32>, u64)> = vec![];
            let mut known = std::collections::BTreeSet::new();
            let mut copies = std::collections::BTreeSet::new();
            for (op, first, count, transient) in ops {
                let chain: Vec<u32> = (first..first + count).collect();
                match op {
                    0 | 1 => {
                        let fits = u64::from(count) + transient;
                        if pool.admit(&chain, transient) {
                            prop_assert!(chain.iter().all(|&block| pool.is_resident(block)));
                            running.push((chain, transient));
                        } else {
                            prop_assert!(!running.is_empty() || fits > 16, "an idle pool has room");
                        }
                    }
                    2 if !running.is_empty() => {
                        let (chain, transient) = running.remove(first as usize % running.len());
                        let class = if count % 2 == 0 { Class::Tagged } else { Class::Plain };
                        pool.release(&chain, transient, class);
                    }
                    _ => pool.discard(first),
                }
                pool.check_invariants();
                for change in pool.take_changes() {
                    match change {
                        Change::Stored(block) => prop_assert!(known.insert(block)),
                        Change::Removed(block) => prop_assert!(known.remove(&block)),
                        Change::StoredOnHost(block) => prop_assert!(copies.insert(block)),
                        Change::RemovedFromHost(block) => prop_assert!(copies.remove(&block)),
                    }
                }
                prop_assert_eq!(known.len() as u64, pool.resident());
                prop_assert_eq!(copies.len() as u64, pool.on_host());
            }
        }
    }
}

//! The radix cache: maps token prefixes to the pages that hold their KV.
//!
//! The tree is page-granular and path-compressed. Locks cover a whole path. Eviction takes unlocked
//! leaves, in the order of a policy; nodes tagged by open sessions are evicted after untagged
//! nodes, and later the more tags they have. The tree owns its pages but never touches the pools:
//! it returns evicted pages, and the copies to make, to the caller. If KV events are enabled, the
//! tree records what it stores and evicts.
//!
//! With a host tier, a node's KV is on the device, on the host, or on both. What lies below a node
//! that is not on the device isn't either.

use self::{host::Host, order::EvictionOrder};
use super::{
    kv::{
        event::{KvEvent, Medium, Recorder},
        hash::{self, BlockDigest},
    },
    request::Space,
};
use std::collections::{BTreeMap, BTreeSet};

mod host;
pub(super) mod order;

pub use host::{HostFacts, WritePolicy};

pub(super) type NodeId = usize;
pub(super) const ROOT: NodeId = 0;

type Key = (Space, Vec<u32>);

/// What is evicted first comes first: by tags, the policy's class, use and age.
type Rank = (usize, i64, u64, NodeId);

#[derive(Clone, Debug, Default)]
struct Node {
    parent: NodeId,
    tokens: Vec<u32>,
    /// On the device; empty if the KV is only on the host.
    pages: Vec<u32>,
    /// On the host; empty without a copy.
    host_pages: Vec<u32>,
    /// A load needs the copy.
    is_held: bool,
    /// How many requests have inserted the node's tokens.
    hits: u32,
    space: Space,
    /// The digest of each page; empty if events are disabled.
    digests: Vec<BlockDigest>,
    /// The children, keyed by the tokens of the child's first page.
    children: BTreeMap<Key, NodeId>,
    locks: u32,
    last_use: u64,
    tags: BTreeSet<String>,
    /// The greatest priority of a request that has inserted the node.
    priority: i64,
    /// The tokens of the longest conversation through the node so far.
    history: usize,
}

/// The radix tree of one rank.
#[derive(Debug)]
pub(super) struct Radix {
    page_size: usize,
    nodes: BTreeMap<NodeId, Node>,
    next_id: NodeId,
    uses: u64,
    locked_pages: usize,
    pages: usize,
    events: Option<Recorder>,
    host: Option<Host>,
    order: EvictionOrder,
}

/// A prefix, in whole pages, with the pages that hold its KV.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefix<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) pages: &'a [u32],
    pub(super) space: &'a Space,
    /// The session whose tag protects the prefix.
    pub(super) tag: Option<&'a str>,
    /// The session that KV events name.
    pub(super) session_id: Option<&'a str>,
    /// The priority of its request.
    pub(super) priority: i64,
    /// Leading tokens that the same request has inserted before.
    pub(super) inserted: usize,
    /// Copies the prefix to the host without waiting for its second use.
    pub(super) is_wanted_again: bool,
}

/// The device's pages that hold a prefix, the node at which they end, and what follows on the host.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Match {
    pub(super) pages: Vec<u32>,
    pub(super) node: NodeId,
    /// The nodes after `node` whose KV is only on the host.
    pub(super) on_host: Vec<NodeId>,
    pub(super) host_pages: usize,
}

impl Radix {
    pub(super) fn new(page_size: usize, events: bool) -> Radix {
        let nodes = BTreeMap::from([(ROOT, Node::default())]);
        let events = events.then(Recorder::new);
        let (next_id, uses, locked_pages, pages, host) = (1, 0, 0, 0, None);
        let order = EvictionOrder::default();
        Radix { page_size, nodes, next_id, uses, locked_pages, pages, events, host, order }
    }

    /// Takes the events recorded since the last call.
    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.as_mut().map(Recorder::take_events).unwrap_or_default()
    }

    /// Returns the number of locked pages, which eviction can't free.
    pub(super) fn protected_pages(&self) -> usize {
        self.locked_pages
    }

    pub(super) fn evictable_pages(&self) -> usize {
        self.pages - self.locked_pages
    }

    /// Returns every page of the device in the tree.
    pub(super) fn all_pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.values().flat_map(|n| n.pages.iter().copied())
    }

    /// Returns the longest cached prefixes, which are those of all leaves.
    pub(super) fn chains(&self) -> Vec<(Space, Vec<u32>)> {
        let leaf = |(id, node): &(&NodeId, &Node)| **id != ROOT && node.children.is_empty();
        let chain = |(_, leaf): (&NodeId, &Node)| {
            let path = std::iter::successors(Some(leaf), |node| self.nodes.get(&node.parent));
            let mut parts: Vec<&[u32]> =
                path.take_while(|node| !node.tokens.is_empty()).map(|n| &n.tokens[..]).collect();
            parts.reverse();
            (leaf.space.clone(), parts.concat())
        };
        self.nodes.iter().filter(leaf).map(chain).collect()
    }

    /// Returns the longest cached prefix of `tokens` in full pages, and marks its path as used now.
    pub(super) fn find(&mut self, space: &Space, tokens: &[u32]) -> Match {
        let mut found = Match { pages: Vec::new(), node: ROOT, on_host: Vec::new(), host_pages: 0 };
        self.uses += 1;
        let (mut end, mut pages) = (ROOT, 0);
        loop {
            let rest = &tokens[pages * self.page_size..];
            self.node_mut(end).last_use = self.uses;
            let Some(child) = self.child_of(end, space, rest) else { return found };
            let same = self.common_pages(child, rest);
            let whole = same == self.pages_of(child);
            end = if whole { child } else { self.split(child, same) };
            self.node_mut(end).last_use = self.uses;
            pages += same;
            let node = &self.nodes[&end];
            if node.pages.is_empty() {
                found.on_host.push(end);
                found.host_pages += same;
            } else {
                found.pages.extend_from_slice(&node.pages);
                found.node = end;
            }
            if !whole {
                return found;
            }
        }
    }

    /// Inserts a prefix whose KV is in `pages`. Where the tree already has a page for the tokens,
    /// the tree keeps its own page and the caller keeps the duplicate.
    pub(super) fn insert(&mut self, prefix: Prefix<'_>) -> Match {
        let Prefix { tokens, pages, space, tag, session_id, .. } = prefix;
        assert_eq!(tokens.len(), pages.len() * self.page_size, "only full pages are cached");
        let mut found = self.find(space, tokens);
        // The device has again what only the host had.
        found.host_pages = 0;
        for node in std::mem::take(&mut found.on_host) {
            let at = found.pages.len();
            let fresh = &pages[at..at + self.pages_of(node)];
            self.put_on_device(node, fresh, session_id);
            found.pages.extend_from_slice(fresh);
            found.node = node;
        }
        if found.pages.len() < pages.len() {
            let rest = &pages[found.pages.len()..];
            let tokens = &tokens[found.pages.len() * self.page_size..];
            let digests = self.record_stored(found.node, tokens, space, session_id);
            let key = (space.clone(), tokens[..self.page_size].to_vec());
            let id = self.next_id;
            self.next_id += 1;
            let node = Node {
                parent: found.node,
                tokens: tokens.to_vec(),
                pages: rest.to_vec(),
                space: space.clone(),
                digests,
                last_use: self.uses,
                priority: prefix.priority,
                ..Node::default()
            };
            self.nodes.insert(id, node);
            self.node_mut(found.node).children.insert(key, id);
            self.pages += rest.len();
            found.pages.extend_from_slice(rest);
            found.node = id;
            self.raise_history(id);
        }
        let raise = |node: &mut Node| node.priority = node.priority.max(prefix.priority);
        self.each_to_root(found.node, raise);
        self.count_hits(found.node, prefix.inserted, prefix.is_wanted_again);
        if let Some(tag) = tag {
            self.each_to_root(found.node, |node| {
                node.tags.insert(tag.to_owned());
            });
        }
        found
    }

    pub(super) fn lock(&mut self, node: NodeId) {
        let mut gained = 0;
        self.each_to_root(node, |n| {
            gained += if n.locks == 0 { n.pages.len() } else { 0 };
            n.locks += 1;
        });
        self.locked_pages += gained;
    }

    pub(super) fn unlock(&mut self, node: NodeId) {
        let mut lost = 0;
        self.each_to_root(node, |n| {
            n.locks = n.locks.checked_sub(1).expect("every unlock has had its lock");
            lost += if n.locks == 0 { n.pages.len() } else { 0 };
        });
        self.locked_pages -= lost;
    }

    /// Evicts whole unlocked leaves of the device until at least `pages` pages are free or no leaf
    /// is left. Their KV may stay on the host.
    pub(super) fn evict(&mut self, pages: usize) -> Vec<u32> {
        let mut leaves: BTreeSet<Rank> = self
            .nodes
            .keys()
            .filter(|id| self.is_device_leaf(**id))
            .map(|id| self.rank(*id))
            .collect();
        let mut freed = Vec::new();
        while freed.len() < pages
            && let Some((.., id)) = leaves.pop_first()
        {
            let parent = self.nodes[&id].parent;
            if self.keep_on_host(id) {
                let evicted = std::mem::take(&mut self.node_mut(id).pages);
                self.pages -= evicted.len();
                self.record_removed(id, Medium::Device);
                freed.extend(evicted);
            } else if self.below(id).iter().all(|below| !self.nodes[below].is_held) {
                for below in self.below(id) {
                    self.drop_from_host(below);
                    self.remove(below);
                }
                self.record_removed(id, Medium::Device);
                freed.extend(self.remove(id).pages);
            }
            if self.is_device_leaf(parent) {
                leaves.insert(self.rank(parent));
            }
        }
        freed
    }

    /// Removes a node without children.
    fn remove(&mut self, id: NodeId) -> Node {
        let node = self.nodes.remove(&id).expect("the node is in the tree");
        self.pages -= node.pages.len();
        let key = (node.space.clone(), node.tokens[..self.page_size].to_vec());
        self.node_mut(node.parent).children.remove(&key);
        node
    }

    fn is_device_leaf(&self, id: NodeId) -> bool {
        let node = &self.nodes[&id];
        let has_device = |child: &NodeId| !self.nodes[child].pages.is_empty();
        !node.pages.is_empty() && node.locks == 0 && !node.children.values().any(has_device)
    }

    fn rank(&self, id: NodeId) -> Rank {
        let node = &self.nodes[&id];
        (node.tags.len(), self.class(id), node.last_use, id)
    }

    fn pages_of(&self, id: NodeId) -> usize {
        self.nodes[&id].tokens.len() / self.page_size
    }

    fn record_removed(&mut self, id: NodeId, medium: Medium) {
        let node = &self.nodes[&id];
        if let Some(events) = &mut self.events {
            events.removed(&node.digests, &node.space, medium);
        }
    }

    /// Removes a session's tag, so that pages tagged by no other session are evicted first.
    pub(super) fn untag(&mut self, tag: &str) {
        for node in self.nodes.values_mut() {
            node.tags.remove(tag);
        }
    }

    /// Returns the tokens that carry a session's tag, to the end that was used last, and whether
    /// the device has them.
    pub(super) fn tagged_prefix(&self, tag: &str) -> Option<(Space, Vec<u32>, bool)> {
        let tagged = self.nodes.iter().filter(|(_, node)| node.tags.contains(tag));
        // A prefix is used with what follows it, so the deepest of the newest is its end.
        let (&end, node) =
            tagged.max_by_key(|(id, node)| (node.last_use, self.path(**id).len()))?;
        let tokens = self.path(end).into_iter().flat_map(|id| self.nodes[&id].tokens.clone());
        Some((node.space.clone(), tokens.collect(), !node.pages.is_empty()))
    }

    /// Returns the number of tokens under each session's tag.
    pub(super) fn tagged_tokens(&self) -> BTreeMap<String, usize> {
        let mut by_tag = BTreeMap::new();
        for node in self.nodes.values() {
            for tag in &node.tags {
                *by_tag.entry(tag.clone()).or_default() += node.tokens.len();
            }
        }
        by_tag
    }

    /// Empties the tree and returns its pages. Panics if a page is locked.
    pub(super) fn clear(&mut self) -> Vec<u32> {
        assert_eq!(self.locked_pages, 0, "a locked tree is not cleared");
        let pages = self.all_pages().collect();
        let mut events = self.events.take();
        if let Some(events) = &mut events {
            events.cleared();
        }
        let empty = Radix::new(self.page_size, false).with_order(self.order);
        let host = self.host.take().map(Host::emptied);
        *self = Radix { uses: self.uses, next_id: self.next_id, events, host, ..empty };
        pages
    }

    /// Panics unless links, counters and locks agree.
    pub(super) fn check_invariants(&self) {
        let (mut pages, mut locked) = (0, 0);
        for (&id, node) in &self.nodes {
            pages += node.pages.len();
            locked += if node.locks > 0 { node.pages.len() } else { 0 };
            let own_pages = node.tokens.len() / self.page_size;
            for held in [node.pages.len(), node.host_pages.len()] {
                assert!(held == 0 || held == own_pages, "a node is in a tier as a whole");
            }
            let is_held = id == ROOT || !node.pages.is_empty() || !node.host_pages.is_empty();
            assert!(is_held, "a node is in a tier");
            assert!(node.locks == 0 || !node.pages.is_empty(), "locked KV is on the device");
            let digests = if self.events.is_some() { own_pages } else { 0 };
            assert_eq!(node.digests.len(), digests, "digests of pages");
            for ((space, tokens), child) in &node.children {
                let child = &self.nodes[child];
                assert_eq!((child.parent, &child.tokens[..self.page_size]), (id, &tokens[..]));
                assert!(child.space == *space && (id == ROOT || node.space == *space));
                assert!(id == ROOT || child.locks <= node.locks, "a lock covers its whole path");
                let is_reached = id == ROOT || !node.pages.is_empty() || child.pages.is_empty();
                assert!(is_reached, "KV on the device follows KV that is only on the host");
            }
        }
        assert_eq!((pages, locked), (self.pages, self.locked_pages), "radix page counters");
        self.check_host_invariants();
    }

    /// Records the pages stored below `parent` as an event and returns their digests; returns none
    /// if events are disabled.
    fn record_stored(
        &mut self,
        parent: NodeId,
        tokens: &[u32],
        space: &Space,
        session_id: Option<&str>,
    ) -> Vec<BlockDigest> {
        let Some(events) = &mut self.events else { return Vec::new() };
        let parent = self.nodes[&parent].digests.last();
        let seed = parent.copied().or_else(|| hash::seed(space));
        let digests = hash::chain(seed, tokens, self.page_size);
        events.stored(parent, &digests, tokens, space, session_id, Medium::Device);
        digests
    }

    fn child_of(&self, node: NodeId, space: &Space, rest: &[u32]) -> Option<NodeId> {
        let key = (space.clone(), rest.get(..self.page_size)?.to_vec());
        self.nodes[&node].children.get(&key).copied()
    }

    fn common_pages(&self, node: NodeId, rest: &[u32]) -> usize {
        let own = self.nodes[&node].tokens.chunks_exact(self.page_size);
        own.zip(rest.chunks_exact(self.page_size)).take_while(|(a, b)| a == b).count()
    }

    /// Splits a node after `keep` pages and returns the new upper node.
    fn split(&mut self, id: NodeId, keep: usize) -> NodeId {
        let upper_id = self.next_id;
        self.next_id += 1;
        let page_size = self.page_size;
        let at = keep * page_size;
        let lower = self.node_mut(id);
        let tokens = lower.tokens.split_off(at);
        let split_pages = |pages: &mut Vec<u32>| {
            let rest = pages.split_off(keep.min(pages.len()));
            std::mem::replace(pages, rest)
        };
        let upper_pages = split_pages(&mut lower.pages);
        let upper_host_pages = split_pages(&mut lower.host_pages);
        let at = if lower.digests.is_empty() { 0 } else { keep };
        let digests = lower.digests.split_off(at);
        let upper_tokens = std::mem::replace(&mut lower.tokens, tokens);
        let parent = std::mem::replace(&mut lower.parent, upper_id);
        let upper = Node {
            parent,
            locks: lower.locks,
            last_use: lower.last_use,
            tags: lower.tags.clone(),
            space: lower.space.clone(),
            digests: std::mem::replace(&mut lower.digests, digests),
            tokens: upper_tokens,
            pages: upper_pages,
            host_pages: upper_host_pages,
            is_held: lower.is_held,
            hits: lower.hits,
            priority: lower.priority,
            history: lower.history,
            children: BTreeMap::new(),
        };
        let lower_key = (lower.space.clone(), lower.tokens[..page_size].to_vec());
        let upper_key = (upper.space.clone(), upper.tokens[..page_size].to_vec());
        self.nodes.insert(upper_id, upper);
        self.node_mut(upper_id).children.insert(lower_key, id);
        self.node_mut(parent).children.insert(upper_key, upper_id);
        self.split_write(id, upper_id);
        upper_id
    }

    fn each_to_root(&mut self, from: NodeId, mut act: impl FnMut(&mut Node)) {
        let mut id = from;
        while id != ROOT {
            let node = self.node_mut(id);
            act(node);
            id = node.parent;
        }
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).expect("a node id in use is in the tree")
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(super) const PREFIX: Prefix<'_> = Prefix {
        tokens: &[],
        pages: &[],
        space: &Space { cache_salt: None, extra_key: None },
        tag: None,
        session_id: None,
        priority: 0,
        inserted: 0,
        is_wanted_again: false,
    };

    fn find(tree: &mut Radix, tokens: &[u32]) -> Match {
        tree.find(&Space::default(), tokens)
    }

    fn insert(tree: &mut Radix, tokens: &[u32], pages: &[u32], tag: Option<&str>) -> Match {
        let space = &Space::default();
        tree.insert(Prefix { tokens, pages, space, tag, ..PREFIX })
    }

    #[test]
    fn matches_whole_pages_and_splits() {
        let mut tree = Radix::new(2, true);
        insert(&mut tree, &[1, 2, 3, 4, 5, 6], &[1, 2, 3], None);
        assert_eq!(find(&mut tree, &[1, 2, 3, 4, 9, 9]).pages, [1, 2]);
        assert_eq!(find(&mut tree, &[1, 2, 3]).pages, [1]);
        let again = insert(&mut tree, &[1, 2, 3, 4, 9, 9], &[7, 8, 9], None);
        assert_eq!(again.pages, [1, 2, 9]);
        tree.check_invariants();
        assert_eq!(tree.evictable_pages(), 4);
    }

    #[test]
    fn evicts_untagged_then_oldest_and_never_locked() {
        let mut tree = Radix::new(1, false);
        insert(&mut tree, &[1], &[1], Some("a"));
        let locked = insert(&mut tree, &[2], &[2], None);
        tree.lock(locked.node);
        insert(&mut tree, &[3], &[3], None);
        insert(&mut tree, &[4], &[4], None);
        find(&mut tree, &[3]);
        assert_eq!(tree.evict(1), [4]);
        assert_eq!(tree.evict(9), [3, 1]);
        assert_eq!((tree.protected_pages(), tree.evictable_pages()), (1, 0));
        tree.unlock(locked.node);
        assert_eq!(tree.clear(), [2]);
        tree.check_invariants();
    }

    #[test]
    fn closed_tags_protect_no_longer() {
        let mut tree = Radix::new(1, false);
        insert(&mut tree, &[1], &[1], Some("a"));
        insert(&mut tree, &[2], &[2], Some("b"));
        assert_eq!(tree.tagged_tokens()["b"], 1);
        tree.untag("b");
        assert_eq!(tree.evict(1), [2]);
    }

    #[test]
    fn equal_prefixes_of_two_spaces_share_nothing() {
        let mut tree = Radix::new(1, true);
        let salted = Space { cache_salt: Some("s".to_owned()), extra_key: None };
        insert(&mut tree, &[1, 2], &[1, 2], None);
        assert!(tree.find(&salted, &[1, 2]).pages.is_empty());
        let prefix = Prefix { tokens: &[1, 2], pages: &[3, 4], space: &salted, ..PREFIX };
        assert_eq!(tree.insert(prefix).pages, [3, 4]);
        assert_eq!(find(&mut tree, &[1, 2, 9]).pages, [1, 2]);
        tree.check_invariants();
    }

    /// Checks that a split renames no page, and that an evicted page has the name it was stored
    /// with.
    #[test]
    fn events_follow_the_pages() {
        let mut tree = Radix::new(2, true);
        insert(&mut tree, &[1, 2, 3, 4, 5, 6], &[1, 2, 3], None);
        insert(&mut tree, &[1, 2, 3, 4, 9, 9], &[7, 8, 9], None);
        tree.evict(9);
        tree.clear();
        let digests =
            |tokens: &[u32]| hash::chain(None, tokens, 2).iter().map(hash::name).collect();
        let (one, other): (Vec<_>, Vec<_>) =
            (digests(&[1, 2, 3, 4, 5, 6]), digests(&[1, 2, 3, 4, 9, 9]));
        let seen: Vec<(Option<i64>, Vec<i64>)> = tree
            .take_events()
            .into_iter()
            .map(|event| match event {
                KvEvent::Stored(stored) => (stored.parent, stored.hashes),
                KvEvent::Removed { hashes, .. } => (None, hashes),
                KvEvent::Cleared => (None, vec![]),
            })
            .collect();
        let removed = vec![one[2], other[2], one[0], one[1]];
        let expected = [
            (None, vec![]),
            (None, one.clone()),
            (Some(one[1]), other[2..].to_vec()),
            (None, removed),
            (None, vec![]),
        ];
        assert_eq!(seen, expected);
    }
}

//! The radix cache: maps token prefixes to the pages that hold their KV.
//!
//! The tree is page-granular and path-compressed. Locks cover a whole path. Eviction takes unlocked
//! leaves, least recently used first; nodes tagged by open sessions are evicted after untagged
//! nodes, and later the more tags they have. The tree owns its pages but never touches the pool: it
//! returns evicted pages to the caller. If KV events are enabled, the tree records what it stores
//! and evicts.

use super::{
    kv::{
        event::{KvEvent, Recorder},
        hash::{self, BlockDigest},
    },
    request::Space,
};
use std::collections::{BTreeMap, BTreeSet};

pub(super) type NodeId = usize;
pub(super) const ROOT: NodeId = 0;

type Key = (Space, Vec<u32>);

#[derive(Clone, Debug, Default)]
struct Node {
    parent: NodeId,
    tokens: Vec<u32>,
    pages: Vec<u32>,
    space: Space,
    /// The digest of each page; empty if events are disabled.
    digests: Vec<BlockDigest>,
    /// The children, keyed by the tokens of the child's first page.
    children: BTreeMap<Key, NodeId>,
    locks: u32,
    last_use: u64,
    tags: BTreeSet<String>,
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
}

/// The pages that hold a prefix, and the node at which the prefix ends.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Match {
    pub(super) pages: Vec<u32>,
    pub(super) node: NodeId,
}

impl Radix {
    pub(super) fn new(page_size: usize, events: bool) -> Radix {
        let nodes = BTreeMap::from([(ROOT, Node::default())]);
        let events = events.then(Recorder::new);
        Radix { page_size, nodes, next_id: 1, uses: 0, locked_pages: 0, pages: 0, events }
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

    /// Returns every page in the tree.
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
        let mut found = Match { pages: Vec::new(), node: ROOT };
        self.uses += 1;
        loop {
            let rest = &tokens[found.pages.len() * self.page_size..];
            self.node_mut(found.node).last_use = self.uses;
            let Some(child) = self.child_of(found.node, space, rest) else { return found };
            let same = self.common_pages(child, rest);
            let whole = same == self.nodes[&child].pages.len();
            let node = if whole { child } else { self.split(child, same) };
            self.node_mut(node).last_use = self.uses;
            found.pages.extend_from_slice(&self.nodes[&node].pages);
            found.node = node;
            if !whole {
                return found;
            }
        }
    }

    /// Inserts a prefix whose KV is in `pages`. Where the tree already has a page for the tokens,
    /// the tree keeps its own page and the caller keeps the duplicate.
    pub(super) fn insert(&mut self, prefix: Prefix<'_>) -> Match {
        let Prefix { tokens, pages, space, tag, session_id } = prefix;
        assert_eq!(tokens.len(), pages.len() * self.page_size, "only full pages are cached");
        let mut found = self.find(space, tokens);
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
                ..Node::default()
            };
            self.nodes.insert(id, node);
            self.node_mut(found.node).children.insert(key, id);
            self.pages += rest.len();
            found.pages.extend_from_slice(rest);
            found.node = id;
        }
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

    /// Evicts whole unlocked leaves until at least `pages` pages are free or no leaf is left.
    pub(super) fn evict(&mut self, pages: usize) -> Vec<u32> {
        let rank = |id: NodeId, n: &Node| (n.tags.len(), n.last_use, id);
        let free = |id: NodeId, n: &Node| id != ROOT && n.locks == 0 && n.children.is_empty();
        let mut leaves: BTreeSet<(usize, u64, NodeId)> =
            self.nodes.iter().filter(|(id, n)| free(**id, n)).map(|(&id, n)| rank(id, n)).collect();
        let mut freed = Vec::new();
        while freed.len() < pages
            && let Some((_, _, id)) = leaves.pop_first()
        {
            let node = self.nodes.remove(&id).expect("a candidate is in the tree");
            self.pages -= node.pages.len();
            if let Some(events) = &mut self.events {
                events.removed(&node.digests, &node.space);
            }
            let key = (node.space, node.tokens[..self.page_size].to_vec());
            self.node_mut(node.parent).children.remove(&key);
            freed.extend(node.pages);
            let parent = &self.nodes[&node.parent];
            if free(node.parent, parent) {
                leaves.insert(rank(node.parent, parent));
            }
        }
        freed
    }

    /// Removes a session's tag, so that pages tagged by no other session are evicted first.
    pub(super) fn untag(&mut self, tag: &str) {
        for node in self.nodes.values_mut() {
            node.tags.remove(tag);
        }
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
        let empty = Radix::new(self.page_size, false);
        *self = Radix { uses: self.uses, next_id: self.next_id, events, ..empty };
        pages
    }

    /// Panics unless links, counters and locks agree.
    pub(super) fn check_invariants(&self) {
        let (mut pages, mut locked) = (0, 0);
        for (&id, node) in &self.nodes {
            pages += node.pages.len();
            locked += if node.locks > 0 { node.pages.len() } else { 0 };
            assert_eq!(node.tokens.len(), node.pages.len() * self.page_size);
            let digests = if self.events.is_some() { node.pages.len() } else { 0 };
            assert_eq!(node.digests.len(), digests, "digests of pages");
            for ((space, tokens), child) in &node.children {
                let child = &self.nodes[child];
                assert_eq!((child.parent, &child.tokens[..self.page_size]), (id, &tokens[..]));
                assert!(child.space == *space && (id == ROOT || node.space == *space));
                assert!(id == ROOT || child.locks <= node.locks, "a lock covers its whole path");
            }
        }
        assert_eq!((pages, locked), (self.pages, self.locked_pages), "radix page counters");
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
        events.stored(parent, &digests, tokens, space, session_id);
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
        let pages = lower.pages.split_off(keep);
        let at = if lower.digests.is_empty() { 0 } else { keep };
        let digests = lower.digests.split_off(at);
        let (upper_tokens, upper_pages) = (
            std::mem::replace(&mut lower.tokens, tokens),
            std::mem::replace(&mut lower.pages, pages),
        );
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
            children: BTreeMap::new(),
        };
        let lower_key = (lower.space.clone(), lower.tokens[..page_size].to_vec());
        let upper_key = (upper.space.clone(), upper.tokens[..page_size].to_vec());
        self.nodes.insert(upper_id, upper);
        self.node_mut(upper_id).children.insert(lower_key, id);
        self.node_mut(parent).children.insert(upper_key, upper_id);
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
mod tests {
    use super::*;

    fn find(tree: &mut Radix, tokens: &[u32]) -> Match {
        tree.find(&Space::default(), tokens)
    }

    fn insert(tree: &mut Radix, tokens: &[u32], pages: &[u32], tag: Option<&str>) -> Match {
        tree.insert(Prefix { tokens, pages, space: &Space::default(), tag, session_id: None })
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
        let prefix =
            Prefix { tokens: &[1, 2], pages: &[3, 4], space: &salted, tag: None, session_id: None };
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

//! The host tier: copies of the tree's KV in the host's memory, by SGLang's three write policies.
//!
//! A copy is made at once, but SGLang notices its end one step later: until then the node is locked
//! on the device, and its event is not recorded.

use super::{super::kv::event::Medium, BTreeSet, NodeId, ROOT, Radix, Rank};

/// Copies fewer tokens than this are not worth to SGLang (`load_back_threshold`).
const LOAD_TOKENS_MIN: usize = 10;

/// When the engine copies KV to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum WritePolicy {
    /// When it is computed.
    WriteThrough,
    /// When a second request uses it.
    WriteThroughSelective,
    /// When the device evicts it.
    WriteBack,
}

impl WritePolicy {
    /// Returns SGLang's name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::WriteThrough => "write_through",
            Self::WriteThroughSelective => "write_through_selective",
            Self::WriteBack => "write_back",
        }
    }
}

/// The tier's figures, as the shim reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    pub total: usize,
    pub used: usize,
    pub evictable: usize,
    pub loaded: usize,
    /// The time of all loads.
    pub load_us: u64,
}

/// Pages to copy between the tiers: where from, where to.
pub(in super::super) type Copies = Vec<(u32, u32)>;

#[derive(Debug)]
pub(super) struct Host {
    policy: WritePolicy,
    pages: usize,
    free: Vec<u32>,
    /// Copies whose end the engine hasn't noticed: the locked node, and the nodes that it is now.
    unnoticed: Vec<(NodeId, Vec<NodeId>)>,
    /// For the caller to make, before it uses evicted pages again.
    copies: Copies,
}

impl Host {
    fn new(policy: WritePolicy, pages: u32) -> Self {
        let free = (0..pages).rev().collect();
        Self { policy, pages: pages as usize, free, unnoticed: vec![], copies: vec![] }
    }

    pub(super) fn emptied(self) -> Self {
        let pages = u32::try_from(self.pages).expect("it was made from such a number");
        Self::new(self.policy, pages)
    }
}

impl Radix {
    pub(in super::super) fn with_host(mut self, policy: WritePolicy, pages: u32) -> Self {
        self.host = Some(Host::new(policy, pages));
        self
    }

    /// Takes the copies to the host, from pages of the device.
    pub(in super::super) fn take_copies(&mut self) -> Copies {
        self.host.as_mut().map(|host| std::mem::take(&mut host.copies)).unwrap_or_default()
    }

    /// Notices that copies have ended. The engine does this at the begin of each step.
    pub(in super::super) fn end_copies(&mut self) {
        let Some(host) = &mut self.host else { return };
        for (locked, nodes) in std::mem::take(&mut host.unnoticed) {
            for node in nodes {
                self.record_stored_again(node, None, Medium::Host);
            }
            self.unlock(locked);
        }
    }

    /// The tokens on the host in use, those that eviction can free at least, and all.
    pub(in super::super) fn host_facts(&self) -> Option<HostFacts> {
        let host = self.host.as_ref()?;
        let used = host.pages - host.free.len();
        let kept = if host.policy == WritePolicy::WriteBack { 0 } else { self.pages };
        let tokens = |pages: usize| pages * self.page_size;
        Some(HostFacts {
            total: tokens(host.pages),
            used: tokens(used),
            evictable: tokens(used.saturating_sub(kept)),
            ..HostFacts::default()
        })
    }

    /// Whether a load of so many pages is worth it.
    pub(in super::super) fn is_loaded(&self, pages: usize) -> bool {
        pages * self.page_size >= LOAD_TOKENS_MIN
    }

    /// Keeps a node's copy while the caller makes room on the device for its load.
    pub(in super::super) fn hold(&mut self, id: NodeId, is_held: bool) {
        self.node_mut(id).is_held = is_held;
    }

    /// Loads nodes that follow each other into the device's `pages`. Returns the copies to make.
    pub(in super::super) fn load(&mut self, nodes: &[NodeId], pages: &[u32]) -> Copies {
        let mut rest = pages;
        let mut copies = vec![];
        for &id in nodes {
            let (own, more) = rest.split_at(self.pages_of(id));
            rest = more;
            copies.extend(self.nodes[&id].host_pages.iter().copied().zip(own.iter().copied()));
            self.put_on_device(id, own, None);
        }
        assert!(rest.is_empty(), "a load fills its pages");
        copies
    }

    /// Gives a node that only the host has these pages of the device.
    pub(super) fn put_on_device(&mut self, id: NodeId, pages: &[u32], session_id: Option<&str>) {
        self.pages += pages.len();
        self.node_mut(id).pages = pages.to_vec();
        self.record_stored_again(id, session_id, Medium::Device);
    }

    /// Counts a use of each node that the request hasn't inserted before, and copies what was used
    /// often enough.
    pub(super) fn count_hits(&mut self, end: NodeId, inserted: usize, is_wanted_again: bool) {
        let Some(host) = &self.host else { return };
        let uses_min = match host.policy {
            WritePolicy::WriteBack => return,
            WritePolicy::WriteThroughSelective if !is_wanted_again => 2,
            WritePolicy::WriteThrough | WritePolicy::WriteThroughSelective => 1,
        };
        let path = self.path(end);
        let mut tokens = 0;
        for (at, &id) in path.iter().enumerate() {
            tokens += self.nodes[&id].tokens.len();
            if tokens <= inserted {
                continue;
            }
            self.node_mut(id).hits += 1;
            if self.nodes[&id].hits >= uses_min && self.nodes[&id].host_pages.is_empty() {
                // A copy's ancestors must be copied too.
                let chain = path[..=at].iter().filter(|id| self.nodes[id].host_pages.is_empty());
                for node in chain.copied().collect::<Vec<_>>() {
                    if !self.write(node) {
                        break;
                    }
                    self.lock(node);
                    let host = self.host.as_mut().expect("looked at above");
                    host.unnoticed.push((node, vec![node]));
                }
            }
        }
    }

    /// Returns the nodes from the root's child down to `end`.
    pub(super) fn path(&self, end: NodeId) -> Vec<NodeId> {
        let up = std::iter::successors(Some(end), |id| Some(self.nodes[id].parent));
        let mut path: Vec<NodeId> = up.take_while(|id| *id != ROOT).collect();
        path.reverse();
        path
    }

    /// Copies a node to the host. Returns false without room there.
    fn write(&mut self, id: NodeId) -> bool {
        let wanted = self.pages_of(id);
        self.make_host_room(wanted);
        let host = self.host.as_mut().expect("only a tree with a host tier writes");
        if host.free.len() < wanted {
            return false;
        }
        let host_pages = host.free.split_off(host.free.len() - wanted);
        let node = self.nodes.get_mut(&id).expect("a node id in use is in the tree");
        host.copies.extend(node.pages.iter().copied().zip(host_pages.iter().copied()));
        node.host_pages = host_pages;
        true
    }

    /// Whether the host has a node's KV, which the device is about to evict; copies it if the
    /// policy says so.
    pub(super) fn keep_on_host(&mut self, id: NodeId) -> bool {
        if !self.nodes[&id].host_pages.is_empty() {
            return true;
        }
        let writes_back = self.host.as_ref().is_some_and(|h| h.policy == WritePolicy::WriteBack);
        let is_kept = writes_back && self.write(id);
        if is_kept {
            self.record_stored_again(id, None, Medium::Host);
        }
        is_kept
    }

    fn make_host_room(&mut self, wanted: usize) {
        let is_short = |tree: &Self| tree.host.as_ref().is_some_and(|h| h.free.len() < wanted);
        if !is_short(self) {
            return;
        }
        let writes_back = self.host.as_ref().is_some_and(|h| h.policy == WritePolicy::WriteBack);
        if writes_back {
            self.drop_duplicates(wanted);
        }
        let is_leaf = |tree: &Self, id: NodeId| {
            let node = &tree.nodes[&id];
            id != ROOT && node.pages.is_empty() && node.children.is_empty() && !node.is_held
        };
        let mut leaves: BTreeSet<Rank> =
            self.nodes.keys().filter(|id| is_leaf(self, **id)).map(|id| self.rank(*id)).collect();
        while is_short(self)
            && let Some((.., id)) = leaves.pop_first()
        {
            let parent = self.nodes[&id].parent;
            self.drop_from_host(id);
            self.remove(id);
            if is_leaf(self, parent) {
                leaves.insert(self.rank(parent));
            }
        }
    }

    /// Frees copies of what the device has too; first of what it won't evict next.
    fn drop_duplicates(&mut self, wanted: usize) {
        for spares_leaves in [true, false] {
            let both = |node: &&NodeId| {
                let held = &self.nodes[*node];
                !held.pages.is_empty() && !held.host_pages.is_empty()
            };
            for id in self.nodes.keys().filter(both).copied().collect::<Vec<_>>() {
                let host = self.host.as_ref().expect("only a tree with a host tier writes");
                if host.free.len() >= wanted {
                    return;
                }
                if !(spares_leaves && self.is_device_leaf(id)) {
                    self.drop_from_host(id);
                }
            }
        }
    }

    pub(super) fn drop_from_host(&mut self, id: NodeId) {
        let freed = std::mem::take(&mut self.node_mut(id).host_pages);
        self.record_removed(id, Medium::Host);
        self.host.as_mut().expect("the node has pages of it").free.extend(freed);
    }

    /// Returns what lies below a node, deepest first.
    pub(super) fn below(&self, id: NodeId) -> Vec<NodeId> {
        let mut found: Vec<NodeId> = self.nodes[&id].children.values().copied().collect();
        let mut at = 0;
        while at < found.len() {
            found.extend(self.nodes[&found[at]].children.values());
            at += 1;
        }
        found.reverse();
        found
    }

    /// Records that a node whose pages have names is in one more tier.
    fn record_stored_again(&mut self, id: NodeId, session_id: Option<&str>, medium: Medium) {
        let node = &self.nodes[&id];
        let parent = self.nodes[&node.parent].digests.last();
        if let Some(events) = &mut self.events {
            events.stored(parent, &node.digests, &node.tokens, &node.space, session_id, medium);
        }
    }

    /// A node whose copy's end wasn't noticed is two nodes now.
    pub(super) fn split_write(&mut self, lower: NodeId, upper: NodeId) {
        for (_, nodes) in self.host.iter_mut().flat_map(|host| &mut host.unnoticed) {
            if let Some(at) = nodes.iter().position(|id| *id == lower) {
                nodes.insert(at, upper);
            }
        }
    }

    pub(super) fn check_host_invariants(&self) {
        let mut copied: Vec<u32> =
            self.nodes.values().flat_map(|node| node.host_pages.iter().copied()).collect();
        let Some(host) = &self.host else {
            assert!(copied.is_empty(), "copies without a host tier");
            return;
        };
        assert!(host.copies.is_empty(), "a copy was not made");
        copied.extend(&host.free);
        copied.sort_unstable();
        let all = 0..u32::try_from(host.pages).expect("it was made from such a number");
        assert!(copied.iter().copied().eq(all), "each page of the host is free or one node's");
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{super::kv::event::KvEvent, Prefix, tests::PREFIX},
        *,
    };

    fn tree(policy: WritePolicy) -> Radix {
        Radix::new(2, true).with_host(policy, 4)
    }

    /// Inserts a prompt of a new request. Returns the copies that it causes.
    fn insert(tree: &mut Radix, tokens: &[u32], first_page: u32) -> usize {
        let pages: Vec<u32> = (first_page..).take(tokens.len() / 2).collect();
        tree.insert(Prefix { tokens, pages: &pages, ..PREFIX });
        let copies = tree.take_copies().len();
        tree.end_copies();
        tree.check_invariants();
        copies
    }

    fn evict(tree: &mut Radix, pages: usize) -> (usize, usize) {
        let freed = tree.evict(pages).len();
        let copies = tree.take_copies().len();
        tree.check_invariants();
        (freed, copies)
    }

    fn found(tree: &mut Radix, tokens: &[u32]) -> (usize, usize) {
        let found = tree.find(PREFIX.space, tokens);
        (found.pages.len(), found.host_pages)
    }

    #[test]
    fn each_policy_copies_at_its_moment() {
        for (policy, at_first, at_second, at_eviction) in [
            (WritePolicy::WriteThrough, 2, 0, 0),
            (WritePolicy::WriteThroughSelective, 0, 2, 0),
            (WritePolicy::WriteBack, 0, 0, 2),
        ] {
            let mut tree = tree(policy);
            assert_eq!(insert(&mut tree, &[1, 2, 3, 4], 1), at_first, "{policy:?}");
            assert_eq!(insert(&mut tree, &[1, 2, 3, 4], 1), at_second, "{policy:?}");
            assert_eq!(evict(&mut tree, 2), (2, at_eviction), "{policy:?}");
            assert_eq!(found(&mut tree, &[1, 2, 3, 4, 5, 6]), (0, 2), "{policy:?}");
        }
    }

    #[test]
    fn kv_that_was_not_copied_is_gone() {
        let mut tree = tree(WritePolicy::WriteThroughSelective);
        insert(&mut tree, &[1, 2, 3, 4], 1);
        evict(&mut tree, 1);
        assert_eq!(found(&mut tree, &[1, 2, 3, 4]), (0, 0));
    }

    #[test]
    fn what_will_be_wanted_again_is_copied_at_its_first_use() {
        let mut tree = tree(WritePolicy::WriteThroughSelective);
        let again = Prefix { tokens: &[1, 2], pages: &[1], is_wanted_again: true, ..PREFIX };
        tree.insert(again);
        assert_eq!(tree.take_copies().len(), 1);
    }

    #[test]
    fn the_host_evicts_the_oldest_and_never_what_the_device_has_before() {
        let mut tree = tree(WritePolicy::WriteThrough);
        insert(&mut tree, &[1, 1, 1, 1], 1);
        insert(&mut tree, &[2, 2], 3);
        evict(&mut tree, 9);
        // Its two pages take the place of the oldest two.
        insert(&mut tree, &[3, 3, 3, 3], 1);
        assert_eq!(found(&mut tree, &[1, 1, 1, 1]), (0, 0));
        assert_eq!(found(&mut tree, &[2, 2]), (0, 1));
        assert_eq!(insert(&mut tree, &[4, 4, 4, 4, 4, 4], 3), 0, "no room beside the device's");
    }

    #[test]
    fn a_load_brings_back_the_pages_and_keeps_the_copy() {
        let mut tree = tree(WritePolicy::WriteThrough);
        insert(&mut tree, &[1, 2, 3, 4], 1);
        evict(&mut tree, 2);
        tree.take_events();
        let hit = tree.find(PREFIX.space, &[1, 2, 9, 9]);
        let copies = tree.load(&hit.on_host, &[7]);
        assert_eq!((copies.len(), copies[0].1), (1, 7));
        tree.check_invariants();
        assert_eq!(found(&mut tree, &[1, 2, 3, 4]), (1, 1), "the rest is still on the host");
        let [KvEvent::Stored(stored)] = &tree.take_events()[..] else { panic!("one event") };
        assert_eq!((stored.medium, stored.hashes.len()), (Medium::Device, 1));
        assert_eq!(evict(&mut tree, 1), (1, 0), "it is copied already");
    }

    #[test]
    fn a_copy_is_locked_until_its_end_was_noticed() {
        let mut tree = tree(WritePolicy::WriteThrough);
        tree.insert(Prefix { tokens: &[1, 2, 3, 4], pages: &[1, 2], ..PREFIX });
        tree.take_copies();
        assert_eq!(tree.protected_pages(), 2);
        // Another prompt splits it meanwhile.
        tree.find(PREFIX.space, &[1, 2, 9, 9]);
        tree.take_events();
        tree.end_copies();
        assert_eq!(tree.protected_pages(), 0);
        let [KvEvent::Stored(stored)] = &tree.take_events()[..] else { panic!("one event") };
        assert_eq!((stored.medium, stored.hashes.len(), stored.parent), (Medium::Host, 2, None));
    }

    #[test]
    fn write_back_drops_copies_of_what_the_device_has_first() {
        let mut tree = tree(WritePolicy::WriteBack);
        insert(&mut tree, &[1, 1, 1, 1], 1);
        insert(&mut tree, &[2, 2, 2, 2], 3);
        evict(&mut tree, 4);
        let hit = tree.find(PREFIX.space, &[2, 2, 2, 2]);
        tree.load(&hit.on_host, &[1, 2]);
        insert(&mut tree, &[3, 3, 3, 3], 3);
        // The oldest on the device, whose copy is one of two there.
        assert_eq!(evict(&mut tree, 2).0, 2);
        assert_eq!(found(&mut tree, &[1, 1, 1, 1]), (0, 2));
    }
}

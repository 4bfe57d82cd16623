//! In which order the device's KV is evicted: by SGLang's `--radix-eviction-policy`.
//!
//! Tags of sessions come before any policy. A node's priority is the greatest of the requests that
//! have inserted it.

use serde::Deserialize;

use super::{Node, NodeId, ROOT, Radix};

/// What is evicted first among KV with the same tags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EvictionPolicy {
    /// What was used longest ago.
    #[default]
    Lru,
    /// What has the lowest priority, and of that what was used longest ago.
    Priority,
    /// The ends of conversations that remain short to compute without them, then as `Lru`.
    Tlru,
}

impl EvictionPolicy {
    /// Returns SGLang's name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Priority => "priority",
            Self::Tlru => "tlru",
        }
    }
}

/// How much of a conversation's end `tlru` gives away, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlruConfig {
    /// What may be computed before a next turn's first token.
    pub threshold: usize,
    /// What the next turn is expected to add.
    pub next_prompt_estimate: usize,
}

/// A policy with its settings.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct EvictionOrder {
    pub(in super::super) policy: EvictionPolicy,
    pub(in super::super) tlru: TlruConfig,
}

impl Radix {
    pub(in super::super) fn with_order(mut self, order: EvictionOrder) -> Self {
        self.order = order;
        self
    }

    /// Returns what comes before the time of the last use: the smallest is evicted first.
    pub(super) fn class(&self, id: NodeId) -> i64 {
        let node = &self.nodes[&id];
        match self.order.policy {
            EvictionPolicy::Lru => 0,
            EvictionPolicy::Priority => node.priority,
            EvictionPolicy::Tlru => {
                let TlruConfig { threshold, next_prompt_estimate } = self.order.tlru;
                let needed = (node.history + next_prompt_estimate).saturating_sub(threshold);
                if self.depth(node.parent) >= needed { -1 } else { 0 }
            }
        }
    }

    /// Returns the tokens from the root to a node's end.
    fn depth(&self, id: NodeId) -> usize {
        let node = &self.nodes[&id];
        if id == ROOT { 0 } else { self.depth(node.parent) + node.tokens.len() }
    }

    /// Notes how long the conversation of a new node is. It stays that long when its end is
    /// evicted.
    pub(super) fn raise_history(&mut self, id: NodeId) {
        let depth = self.depth(id);
        let raise = |node: &mut Node| node.history = node.history.max(depth);
        self.each_to_root(id, raise);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Prefix, tests::PREFIX},
        *,
    };

    fn insert(tree: &mut Radix, tokens: &[u32], first_page: u32, priority: i64) {
        let pages: Vec<u32> = (first_page..).take(tokens.len()).collect();
        tree.insert(Prefix { tokens, pages: &pages, priority, ..PREFIX });
    }

    #[test]
    fn the_lowest_priority_goes_first_and_a_prefix_has_the_greatest_of_its_users() {
        let order = EvictionOrder { policy: EvictionPolicy::Priority, ..EvictionOrder::default() };
        let mut tree = Radix::new(1, false).with_order(order);
        insert(&mut tree, &[1, 2], 10, -1);
        insert(&mut tree, &[3], 20, 0);
        insert(&mut tree, &[1, 4], 30, 5);
        assert_eq!(tree.evict(1), [11], "the end of the first, which nobody else has");
        assert_eq!(tree.evict(1), [20]);
        assert_eq!(tree.evict(2), [31, 10]);
    }

    #[test]
    fn ends_go_first_but_no_more_of_them_than_may_be_computed() {
        let tlru = TlruConfig { threshold: 2, next_prompt_estimate: 1 };
        let order = EvictionOrder { policy: EvictionPolicy::Tlru, tlru };
        let mut tree = Radix::new(1, false).with_order(order);
        insert(&mut tree, &[9, 9, 9], 10, 0);
        insert(&mut tree, &[1, 2, 3], 20, 0);
        insert(&mut tree, &[1, 2, 3, 4], 20, 0);
        assert_eq!(tree.evict(1), [23], "a token of the newest, whose end is a node of its own");
        assert_eq!(tree.evict(1), [10, 11, 12], "then the oldest");
    }
}

//! Which request of a trace without sessions continues which: told by its blocks.
//!
//! A request continues the latest earlier one whose last block, or last but one, lies in the part
//! of its prompt that was seen before; deepest first.

use std::collections::{HashMap, HashSet};

use crate::replay::trace::Conversation;

/// For each request the first of its conversation, itself where it begins one.
pub(super) fn sessions(requests: &[&Conversation]) -> Vec<usize> {
    // Block -> the latest request that ended there or one block further.
    let mut ends: HashMap<u64, usize> = HashMap::new();
    let mut seen: HashSet<u64> = HashSet::new();
    let mut firsts: Vec<usize> = Vec::with_capacity(requests.len());
    for (at, request) in requests.iter().enumerate() {
        let ids: Vec<u64> = request.turns[0].blocks.ids().collect();
        let known = ids.iter().take_while(|id| seen.contains(id)).count();
        let before = ids[..known].iter().rev().find_map(|id| ends.get(id));
        firsts.push(before.map_or(at, |&before| firsts[before]));
        // All requests have the first block: it tells nothing.
        for &id in ids.iter().skip(1).rev().take(2) {
            ends.insert(id, at);
        }
        seen.extend(ids);
    }
    firsts
}

//! Infers from blocks which request continues which, for traces without sessions.
//!
//! The known prefix of a request is the part whose blocks appeared in earlier requests. The request
//! continues the latest earlier request that has its last or last but one block in this prefix; the
//! deepest such block decides.

use std::collections::{HashMap, HashSet};

use replay::trace::Conversation;

/// Returns, for each request, the first request of its conversation (the request itself if it
/// starts one).
pub(super) fn sessions(requests: &[&Conversation]) -> Vec<usize> {
    // Maps a block to the latest request that has it as its last or last but one block.
    let mut ends: HashMap<u64, usize> = HashMap::new();
    let mut seen: HashSet<u64> = HashSet::new();
    let mut firsts: Vec<usize> = Vec::with_capacity(requests.len());
    for (at, request) in requests.iter().enumerate() {
        let ids: Vec<u64> = request.turns[0].blocks.ids().collect();
        let known = ids.iter().take_while(|id| seen.contains(id)).count();
        let before = ids[..known].iter().rev().find_map(|id| ends.get(id));
        firsts.push(before.map_or(at, |&before| firsts[before]));
        // The first block is skipped, because all requests share it.
        for &id in ids.iter().skip(1).rev().take(2) {
            ends.insert(id, at);
        }
        seen.extend(ids);
    }
    firsts
}

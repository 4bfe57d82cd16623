//! Estimates what KV a turn evicts that would have been used again. Pure.

use std::time::Instant;

use contract::load::RankLoad;

use super::{WHOLE_MILLI, share_milli};
use crate::{
    fleet::{
        reuse_forecast::{IDLE_CLASSES, IdleClass, ReuseDemand},
        worker::WorkerRef,
    },
    placement::PlacementRequest,
};

/// The KV that belongs to no known session or conversation, divided by this number, is assumed to
/// be evicted before theirs, because eviction takes the oldest KV first, and half of the unknown KV
/// is assumed to be older.
const SESSIONLESS_DIVISOR: u64 = 2;

/// The KV on a worker of idle sessions, and of idle conversations without a name.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdleKv {
    /// By class of idle time, the shortest first. At least what would be evicted first.
    classes: [IdleClass; IDLE_CLASSES],
    tokens: u64,
    /// The part of `tokens` of which eviction may have taken some already.
    reported_tokens: u64,
}

impl IdleKv {
    /// The conversations' table is newer than the forecast `demand`, so that each turn sees what
    /// the one before it has left.
    pub(super) fn new(
        request: &PlacementRequest<'_>,
        worker: WorkerRef,
        demand: &ReuseDemand,
        new_tokens: u64,
        now: Instant,
    ) -> Self {
        let sum = |classes: &[IdleClass]| {
            classes.iter().map(|class| class.tokens).fold(0, u64::saturating_add)
        };
        let (unnamed_classes, unnamed_tokens) = match request.conversations {
            Some(conversations) => conversations.evicted_first(worker, 2 * new_tokens, now),
            None => (demand.unnamed_idle_classes, sum(&demand.unnamed_idle_classes)),
        };
        let session_tokens = sum(&demand.idle_classes);
        let tokens = session_tokens.saturating_add(unnamed_tokens);
        // The table of conversations has no evicted ones.
        let reported_tokens = if request.conversations.is_some() { session_tokens } else { tokens };
        let mut classes = demand.idle_classes;
        for (class, unnamed) in classes.iter_mut().zip(unnamed_classes) {
            *class = class.plus(unnamed);
        }
        Self { classes, tokens, reported_tokens }
    }
}

/// Each evicted token counts with the probability that its session returns. `None` if the pool's
/// use is unknown. The new tokens first fill the free room, then they evict half of the KV without
/// a session, and then the KV of sessions, the longest idle first.
pub(super) fn displaced_tokens(
    load: &RankLoad,
    idle: &IdleKv,
    pool_tokens: u64,
    new_tokens: u64,
) -> Option<u64> {
    let used_tokens = load.pool_used_tokens?.value;
    let evictable_tokens = match (load.pool_evictable_tokens, load.pool_available_tokens) {
        (Some(evictable), _) => evictable.value,
        // Assumes that the pool is full, as it is after the first hour.
        (None, available) => pool_tokens
            .saturating_sub(used_tokens)
            .saturating_sub(available.map_or(0, |free| free.value)),
    };
    let free_tokens = pool_tokens.saturating_sub(used_tokens).saturating_sub(evictable_tokens);
    let sessionless_tokens = evictable_tokens.saturating_sub(idle.tokens) / SESSIONLESS_DIVISOR;
    let mut missing_tokens =
        new_tokens.saturating_sub(free_tokens).saturating_sub(sessionless_tokens);
    // An agent reports the tokens that each session had when its last turn ended. What they have
    // together beyond what can be evicted now was evicted already.
    let mut evicted_tokens = idle.reported_tokens.saturating_sub(evictable_tokens);
    let mut reused_sum = 0;
    for IdleClass { tokens, wanted_tokens } in idle.classes.iter().rev() {
        if missing_tokens == 0 {
            break;
        }
        let taken_tokens = missing_tokens.min(tokens.saturating_sub(evicted_tokens));
        evicted_tokens = evicted_tokens.saturating_sub(*tokens);
        if taken_tokens > 0 {
            let reused_tokens =
                share_milli(*wanted_tokens, *tokens).saturating_mul(taken_tokens) / WHOLE_MILLI;
            reused_sum = reused_tokens.saturating_add(reused_sum);
        }
        missing_tokens -= taken_tokens;
    }
    Some(reused_sum)
}

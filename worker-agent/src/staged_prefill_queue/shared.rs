//! The queues of all ranks, shared by the prompts that wait in them and by load reports.

use std::{collections::BTreeMap, time::Duration};

use parking_lot::Mutex;
use proto::{
    load::{RankLoad, StagedPrefill},
    staged_prefill::{PREFILL_TOKENS_PER_S_ASSUMED, stage_tokens},
};
use tokio::sync::Notify;

use super::{Queue, Ticket};

/// The prompts in staged prefill, on all ranks. Load reports read them too.
#[derive(Debug)]
pub struct Queues {
    prefill_stage_ms: u64,
    ranks: Mutex<BTreeMap<u32, Queue>>,
    /// Notified when another prompt may be next.
    moved: Notify,
}

impl Queues {
    /// Creates empty queues. A stage takes the engine about `prefill_stage_ms` milliseconds.
    #[must_use]
    pub fn new(prefill_stage_ms: u64) -> Self {
        Self { prefill_stage_ms, ranks: Mutex::default(), moved: Notify::new() }
    }

    /// Returns what waits on a rank. `rank` gives the prefill rate, which sets the size of a stage.
    #[must_use]
    pub fn load(&self, rank: &RankLoad) -> StagedPrefill {
        let (tokens, prompts) = self.ranks.lock().get(&rank.dp_rank).map_or((0, 0), Queue::load);
        let stage_tokens = self.stage_tokens(prefill_tokens_per_s(rank));
        StagedPrefill { tokens, prompts: u32::try_from(prompts).unwrap_or(u32::MAX), stage_tokens }
    }

    /// Returns the size of a stage at a prefill rate of `tokens_per_s`.
    #[must_use]
    pub fn stage_tokens(&self, tokens_per_s: u64) -> u64 {
        stage_tokens(self.prefill_stage_ms, tokens_per_s)
    }

    /// Sets a rank's measured prefill rate, in tokens per second.
    pub fn measured(&self, dp_rank: u32, tokens_per_s: u64) {
        self.with(dp_rank, |queue| queue.measured(tokens_per_s));
    }

    /// Adds a prompt with `left_tokens` to compute to a rank's queue, and sets the rank's measured
    /// prefill rate. `now` is a time of any monotonic clock. Returns `None` if the queue is full.
    pub fn enter(
        &self,
        dp_rank: u32,
        left_tokens: u64,
        tokens_per_s: u64,
        now: Duration,
    ) -> Option<Place<'_>> {
        let ticket = self.with(dp_rank, |queue| {
            queue.measured(tokens_per_s);
            queue.enter(left_tokens, now)
        })?;
        Some(Place { queues: self, dp_rank, ticket })
    }

    fn with<T>(&self, dp_rank: u32, change: impl FnOnce(&mut Queue) -> T) -> T {
        let mut ranks = self.ranks.lock();
        let queue = ranks.entry(dp_rank).or_default();
        let changed = change(queue);
        if cfg!(debug_assertions) {
            queue.check_invariants();
        }
        drop(ranks);
        self.moved.notify_waiters();
        changed
    }
}

/// One prompt's place in its rank's queue. Dropping it leaves the queue.
#[derive(Debug)]
pub struct Place<'a> {
    queues: &'a Queues,
    dp_rank: u32,
    ticket: Ticket,
}

impl Place<'_> {
    /// Waits until this prompt is next, and begins the stage that `stage` returns. Returns `None`
    /// if `stage` returns `None`.
    pub async fn next<T>(&self, stage: impl Fn() -> Option<(u64, T)>) -> Option<T> {
        loop {
            let mut moved = std::pin::pin!(self.queues.moved.notified());
            // From here on no notification is missed.
            moved.as_mut().enable();
            {
                let mut ranks = self.queues.ranks.lock();
                let queue = ranks.entry(self.dp_rank).or_default();
                if queue.first() == Some(self.ticket) {
                    let (tokens, stage) = stage()?;
                    queue.begin(self.ticket, tokens);
                    return Some(stage);
                }
            }
            moved.await;
        }
    }

    /// Ends this prompt's stage. `left_tokens` of the prompt are left.
    pub fn computed(&self, left_tokens: u64) {
        self.queues.with(self.dp_rank, |queue| queue.computed(self.ticket, left_tokens));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queues.with(self.dp_rank, |queue| queue.leave(self.ticket));
    }
}

/// Returns a rank's measured prefill rate in tokens per second, or the assumed rate without one.
#[must_use]
pub fn prefill_tokens_per_s(rank: &RankLoad) -> u64 {
    rank.prefill_tokens_per_s.map_or(PREFILL_TOKENS_PER_S_ASSUMED, |figure| figure.value)
}

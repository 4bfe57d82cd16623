//! Shares the staged-prefill queues of all ranks between waiting prompts and load reports.
//!
//! Staged prefill computes a long prompt in stages before its turn (the request it belongs to).
//! [`Queues`] holds one [`Queue`] per rank behind a lock, and wakes waiting prompts when a queue
//! changes. The order of the prompts is decided in [`Queue`].

use std::{collections::BTreeMap, time::Duration};

use parking_lot::Mutex;
use proto::{
    load::{RankLoad, StagedPrefill},
    staged_prefill::{PREFILL_TOKENS_PER_S_ASSUMED, stage_tokens},
};
use tokio::sync::Notify;

use super::{Queue, Ticket};

/// The queues of all ranks. A task waits in them for each prompt, and load reports read them.
#[derive(Debug)]
pub struct Queues {
    prefill_stage_ms: u64,
    /// The queue of each rank, by DP rank.
    queues_by_rank: Mutex<BTreeMap<u32, Queue>>,
    /// Notified after every change of a queue, because another prompt may now be first.
    changed: Notify,
}

impl Queues {
    /// Creates empty queues. A stage takes the engine about `prefill_stage_ms` milliseconds.
    #[must_use]
    pub fn new(prefill_stage_ms: u64) -> Self {
        Self { prefill_stage_ms, queues_by_rank: Mutex::default(), changed: Notify::new() }
    }

    /// Returns what waits on a rank: tokens and prompts. The rank's prefill rate determines the
    /// size of a stage, which is returned too.
    #[must_use]
    pub fn load(&self, rank: &RankLoad) -> StagedPrefill {
        let (tokens, prompts) =
            self.queues_by_rank.lock().get(&rank.dp_rank).map_or((0, 0), Queue::load);
        let stage_tokens = self.stage_tokens(prefill_tokens_per_s(rank));
        StagedPrefill { tokens, prompts: u32::try_from(prompts).unwrap_or(u32::MAX), stage_tokens }
    }

    /// Returns the size of a stage at a prefill rate of `tokens_per_s`.
    #[must_use]
    pub fn stage_tokens(&self, tokens_per_s: u64) -> u64 {
        stage_tokens(self.prefill_stage_ms, tokens_per_s)
    }

    /// Sets a rank's measured prefill rate, in tokens per second.
    pub fn set_prefill_rate(&self, dp_rank: u32, tokens_per_s: u64) {
        self.change_queue(dp_rank, |queue| queue.set_prefill_rate(tokens_per_s));
    }

    /// Adds a prompt with `left_tokens` to compute to a rank's queue, and sets the rank's measured
    /// prefill rate. `now` is the time since a fixed moment, the same for all calls. Returns `None`
    /// if the queue is full.
    pub fn enter(
        &self,
        dp_rank: u32,
        left_tokens: u64,
        tokens_per_s: u64,
        now: Duration,
    ) -> Option<Place<'_>> {
        let ticket = self.change_queue(dp_rank, |queue| {
            queue.set_prefill_rate(tokens_per_s);
            queue.enter(left_tokens, now)
        })?;
        Some(Place { queues: self, dp_rank, ticket })
    }

    /// Changes a rank's queue, and wakes the waiting prompts. Returns what `change` returns.
    fn change_queue<T>(&self, dp_rank: u32, change: impl FnOnce(&mut Queue) -> T) -> T {
        let mut queues_by_rank = self.queues_by_rank.lock();
        let queue = queues_by_rank.entry(dp_rank).or_default();
        let result = change(queue);
        if cfg!(debug_assertions) {
            queue.check_invariants();
        }
        drop(queues_by_rank);
        self.changed.notify_waiters();
        result
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
    /// Waits until this prompt is the first, and begins the stage that `choose_stage` returns.
    ///
    /// `choose_stage` returns the stage's tokens, and a value that this function returns. If
    /// `choose_stage` returns `None`, no stage begins, and this function returns `None`.
    pub async fn begin_stage<T>(&self, choose_stage: impl Fn() -> Option<(u64, T)>) -> Option<T> {
        loop {
            let mut changed = std::pin::pin!(self.queues.changed.notified());
            // Without `enable`, a change between the check below and `await` would be missed.
            changed.as_mut().enable();
            {
                let mut queues_by_rank = self.queues.queues_by_rank.lock();
                let queue = queues_by_rank.entry(self.dp_rank).or_default();
                if queue.first() == Some(self.ticket) {
                    let (stage_tokens, value) = choose_stage()?;
                    queue.begin_stage(self.ticket, stage_tokens);
                    return Some(value);
                }
            }
            changed.await;
        }
    }

    /// Ends this prompt's stage. `left_tokens` of the prompt are left.
    pub fn end_stage(&self, left_tokens: u64) {
        self.queues.change_queue(self.dp_rank, |queue| queue.end_stage(self.ticket, left_tokens));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queues.change_queue(self.dp_rank, |queue| queue.leave(self.ticket));
    }
}

/// Returns a rank's measured prefill rate in tokens per second, or the assumed rate without one.
#[must_use]
pub fn prefill_tokens_per_s(rank: &RankLoad) -> u64 {
    rank.prefill_tokens_per_s.map_or(PREFILL_TOKENS_PER_S_ASSUMED, |figure| figure.value)
}

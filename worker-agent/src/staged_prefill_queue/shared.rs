//! Shares the staged-prefill queues of all ranks between waiting prompts and load reports.
//!
//! Staged prefill computes a long prompt in stages before its turn (the request that the prompt
//! belongs to). [`StagedPrefillQueues`] holds one [`RankQueue`] per rank behind a lock, and wakes
//! the tasks of waiting prompts when a queue changes. `staged_prefill` waits here for each stage of
//! a prompt, and the owner task reads the queues' load for its reports. [`RankQueue`] decides the
//! order, and `staged_prefill` sends the stages.

use std::{collections::BTreeMap, time::Duration};

use parking_lot::Mutex;
use proto::{
    load::{RankLoad, StagedPrefill},
    staged_prefill::{PREFILL_TOKENS_PER_S_ASSUMED, stage_tokens},
};
use tokio::sync::Notify;

use super::{PromptTicket, RankQueue};

/// The queues of all ranks. For each prompt, one task waits in its rank's queue.
#[derive(Debug)]
pub struct StagedPrefillQueues {
    prefill_stage_ms: u64,
    /// The queue of each rank, by DP rank.
    queues_by_rank: Mutex<BTreeMap<u32, RankQueue>>,
    /// Notified after every change of a queue, because another prompt may now be first.
    queue_changed: Notify,
}

impl StagedPrefillQueues {
    /// Creates empty queues. A stage takes the engine about `prefill_stage_ms` milliseconds.
    #[must_use]
    pub fn new(prefill_stage_ms: u64) -> Self {
        Self { prefill_stage_ms, queues_by_rank: Mutex::default(), queue_changed: Notify::new() }
    }

    /// Returns the tokens and prompts that wait on a rank, and the size of the rank's stages.
    #[must_use]
    pub fn load(&self, rank: &RankLoad) -> StagedPrefill {
        let (tokens, prompts) =
            self.queues_by_rank.lock().get(&rank.dp_rank).map_or((0, 0), RankQueue::load);
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
    ) -> Option<QueuePlace<'_>> {
        let ticket = self.change_queue(dp_rank, |queue| {
            queue.set_prefill_rate(tokens_per_s);
            queue.enter(left_tokens, now)
        })?;
        Some(QueuePlace { queues: self, dp_rank, ticket })
    }

    /// Changes a rank's queue, and wakes the waiting prompts. Returns what `change` returns.
    fn change_queue<T>(&self, dp_rank: u32, change: impl FnOnce(&mut RankQueue) -> T) -> T {
        let mut queues_by_rank = self.queues_by_rank.lock();
        let queue = queues_by_rank.entry(dp_rank).or_default();
        let result = change(queue);
        if cfg!(debug_assertions) {
            queue.check_invariants();
        }
        drop(queues_by_rank);
        self.queue_changed.notify_waiters();
        result
    }
}

/// One prompt's place in its rank's queue. Dropping it leaves the queue.
#[derive(Debug)]
pub struct QueuePlace<'a> {
    queues: &'a StagedPrefillQueues,
    dp_rank: u32,
    ticket: PromptTicket,
}

impl QueuePlace<'_> {
    /// Waits until this prompt is next in its queue, and begins the stage that `choose_stage`
    /// chooses.
    ///
    /// `choose_stage` returns the stage's size in tokens, and a value that this function passes on
    /// to its caller. If `choose_stage` returns `None`, no stage begins, and this function returns
    /// `None`.
    pub async fn begin_stage<T>(&self, choose_stage: impl Fn() -> Option<(u64, T)>) -> Option<T> {
        loop {
            let mut changed = std::pin::pin!(self.queues.queue_changed.notified());
            // Without `enable`, a change between the check below and `await` would be missed.
            changed.as_mut().enable();
            {
                let mut queues_by_rank = self.queues.queues_by_rank.lock();
                let queue = queues_by_rank.entry(self.dp_rank).or_default();
                if queue.next_prompt() == Some(self.ticket) {
                    let (stage_tokens, value) = choose_stage()?;
                    queue.begin_stage(self.ticket, stage_tokens);
                    return Some(value);
                }
            }
            changed.await;
        }
    }

    /// Ends this prompt's stage. `left_tokens` of the prompt remain to be computed.
    pub fn end_stage(&self, left_tokens: u64) {
        self.queues.change_queue(self.dp_rank, |queue| queue.end_stage(self.ticket, left_tokens));
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.queues.change_queue(self.dp_rank, |queue| queue.leave(self.ticket));
    }
}

/// Returns a rank's measured prefill rate in tokens per second, or the assumed rate without one.
#[must_use]
pub fn prefill_tokens_per_s(rank: &RankLoad) -> u64 {
    rank.prefill_tokens_per_s.map_or(PREFILL_TOKENS_PER_S_ASSUMED, |figure| figure.value)
}

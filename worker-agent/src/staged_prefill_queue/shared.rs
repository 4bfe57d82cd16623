//! Shares the staged-prefill queues of all ranks between waiting prompts and load reports.

use std::{collections::BTreeMap, time::Duration};

use contract::{
    load::{RankLoad, StagedPrefill},
    staged_prefill::{PREFILL_TOKENS_PER_S_ASSUMED, stage_tokens},
};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{PromptTicket, RankQueue};

#[derive(Debug)]
pub struct StagedPrefillQueues {
    prefill_stage_ms: u64,
    queues_by_rank: Mutex<BTreeMap<u32, RankQueue>>,
    /// Notified after every change of a queue, because another prompt may now be first.
    queue_changed: Notify,
}

impl StagedPrefillQueues {
    #[must_use]
    pub fn new(prefill_stage_ms: u64) -> Self {
        Self { prefill_stage_ms, queues_by_rank: Mutex::default(), queue_changed: Notify::new() }
    }

    #[must_use]
    pub fn load(&self, rank: &RankLoad) -> StagedPrefill {
        let (tokens, prompts) =
            self.queues_by_rank.lock().get(&rank.dp_rank).map_or((0, 0), RankQueue::load);
        let stage_tokens = self.stage_tokens(prefill_tokens_per_s(rank));
        StagedPrefill { tokens, prompts: u32::try_from(prompts).unwrap_or(u32::MAX), stage_tokens }
    }

    #[must_use]
    pub fn stage_tokens(&self, tokens_per_s: u64) -> u64 {
        stage_tokens(self.prefill_stage_ms, tokens_per_s)
    }

    pub fn set_prefill_rate(&self, dp_rank: u32, tokens_per_s: u64) {
        self.change_queue(dp_rank, |queue| queue.set_prefill_rate(tokens_per_s));
    }

    /// `now` counts from a fixed moment, the same for all calls. `None` if the queue is full.
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

/// Dropping the place leaves the queue.
#[derive(Debug)]
pub struct QueuePlace<'a> {
    queues: &'a StagedPrefillQueues,
    dp_rank: u32,
    ticket: PromptTicket,
}

impl QueuePlace<'_> {
    /// Waits until this prompt is next. `choose_stage` returns the stage's size in tokens, and a
    /// value for the caller. If it returns `None`, no stage begins.
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

    pub fn end_stage(&self, left_tokens: u64) {
        self.queues.change_queue(self.dp_rank, |queue| queue.end_stage(self.ticket, left_tokens));
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.queues.change_queue(self.dp_rank, |queue| queue.leave(self.ticket));
    }
}

/// The assumed rate if none was measured.
#[must_use]
pub fn prefill_tokens_per_s(rank: &RankLoad) -> u64 {
    rank.prefill_tokens_per_s.map_or(PREFILL_TOKENS_PER_S_ASSUMED, |figure| figure.value)
}

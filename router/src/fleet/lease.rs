//! Counts what this router has in flight on each worker, by one lease per turn.
//!
//! A lease only counts; nothing is refused here. The response body keeps the lease, so the counts
//! go down however the turn ends. A lease can't be cloned, so no turn is counted twice.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// All snapshots of the fleet share these counts. They fill one cache line, because a placement may
/// read those of a thousand workers.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct InFlight {
    turns: AtomicU32,
    open_requests: AtomicU32,
    unanswered_tokens: AtomicU64,
    incoming_tokens: AtomicU64,
    staged_prefill_tokens: AtomicU64,
    staged_prefill_prompts: AtomicU32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InFlightCounts {
    pub turns: u32,
    /// Sessions that this router has asked the worker to open since the router started. Wraps
    /// around.
    pub open_requests: u32,
    /// Prompt tokens to be computed for turns whose answer has no first part yet.
    pub unanswered_tokens: u64,
    /// KV that the turns in flight will add. The agents' session tables show it only after the
    /// turns end.
    pub incoming_tokens: u64,
    pub staged_prefill_tokens: u64,
    pub staged_prefill_prompts: u32,
}

impl InFlight {
    pub fn turns(&self) -> u32 {
        self.turns.load(Ordering::Relaxed)
    }

    pub fn open_requests(&self) -> u32 {
        self.open_requests.load(Ordering::Relaxed)
    }

    pub fn unanswered_tokens(&self) -> u64 {
        self.unanswered_tokens.load(Ordering::Relaxed)
    }

    pub fn incoming_tokens(&self) -> u64 {
        self.incoming_tokens.load(Ordering::Relaxed)
    }

    pub fn counts(&self) -> InFlightCounts {
        InFlightCounts {
            turns: self.turns(),
            open_requests: self.open_requests(),
            unanswered_tokens: self.unanswered_tokens(),
            incoming_tokens: self.incoming_tokens(),
            staged_prefill_tokens: self.staged_prefill_tokens.load(Ordering::Relaxed),
            staged_prefill_prompts: self.staged_prefill_prompts.load(Ordering::Relaxed),
        }
    }

    pub fn count_open_request(&self) {
        self.open_requests.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub struct LoadLease {
    in_flight: Arc<InFlight>,
    /// Prompt tokens that the worker was expected to compute when the turn was placed.
    tokens: u64,
    prompt_state: PromptState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PromptState {
    InStagedPrefill,
    /// The engine has this many prompt tokens to compute.
    Sent(u64),
    Answered,
}

impl LoadLease {
    #[must_use]
    pub fn acquire(in_flight: &Arc<InFlight>, tokens: u64) -> Self {
        in_flight.turns.fetch_add(1, Ordering::Relaxed);
        in_flight.unanswered_tokens.fetch_add(tokens, Ordering::Relaxed);
        in_flight.incoming_tokens.fetch_add(tokens, Ordering::Relaxed);
        Self { in_flight: Arc::clone(in_flight), tokens, prompt_state: PromptState::Sent(tokens) }
    }

    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn begin_staged_prefill(&mut self) {
        self.set_prompt_state(PromptState::InStagedPrefill);
    }

    /// At most `tokens_max` of the prompt tokens are left to compute.
    pub fn end_staged_prefill(&mut self, tokens_max: u64) {
        self.set_prompt_state(PromptState::Sent(self.tokens.min(tokens_max)));
    }

    pub fn record_first_part(&mut self) {
        self.set_prompt_state(PromptState::Answered);
    }

    fn set_prompt_state(&mut self, new_state: PromptState) {
        let Self { in_flight, tokens, .. } = &*self;
        match new_state {
            PromptState::InStagedPrefill => {
                in_flight.staged_prefill_tokens.fetch_add(*tokens, Ordering::Relaxed);
                in_flight.staged_prefill_prompts.fetch_add(1, Ordering::Relaxed);
            }
            PromptState::Sent(tokens_left) => {
                in_flight.unanswered_tokens.fetch_add(tokens_left, Ordering::Relaxed);
            }
            PromptState::Answered => {}
        }
        match std::mem::replace(&mut self.prompt_state, new_state) {
            PromptState::InStagedPrefill => {
                self.in_flight.staged_prefill_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
                self.in_flight.staged_prefill_prompts.fetch_sub(1, Ordering::Relaxed);
            }
            PromptState::Sent(tokens_left) => {
                self.in_flight.unanswered_tokens.fetch_sub(tokens_left, Ordering::Relaxed);
            }
            PromptState::Answered => {}
        }
    }
}

impl Drop for LoadLease {
    fn drop(&mut self) {
        self.record_first_part();
        self.in_flight.incoming_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        let turns_before = self.in_flight.turns.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(turns_before > 0, "a lease was dropped twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_until_it_is_dropped() {
        let in_flight = Arc::new(InFlight::default());
        let first = LoadLease::acquire(&in_flight, 0);
        let second = LoadLease::acquire(&in_flight, 0);
        assert_eq!(in_flight.turns(), 2);
        drop(first);
        assert_eq!(in_flight.turns(), 1);
        drop(second);
        assert_eq!(in_flight.counts(), InFlightCounts::default());
    }

    #[test]
    fn a_prompt_is_computed_when_its_answer_begins_and_its_kv_comes_until_the_end() {
        let in_flight = Arc::new(InFlight::default());
        let mut lease = LoadLease::acquire(&in_flight, 700);
        let _never_answered = LoadLease::acquire(&in_flight, 50);
        lease.record_first_part();
        lease.record_first_part();
        assert_eq!(
            (in_flight.counts().unanswered_tokens, in_flight.counts().incoming_tokens),
            (50, 750)
        );
        drop(lease);
        assert_eq!(
            (in_flight.counts().unanswered_tokens, in_flight.counts().incoming_tokens),
            (50, 50)
        );
    }

    #[test]
    fn a_prompt_in_staged_prefill_delays_no_other_turn_until_its_turn_is_sent() {
        let in_flight = Arc::new(InFlight::default());
        let mut lease = LoadLease::acquire(&in_flight, 700);
        lease.begin_staged_prefill();
        let there = in_flight.counts();
        assert_eq!((there.unanswered_tokens, there.incoming_tokens), (0, 700));
        assert_eq!((there.staged_prefill_tokens, there.staged_prefill_prompts), (700, 1));
        lease.end_staged_prefill(40);
        let sent = in_flight.counts();
        assert_eq!(
            (sent.unanswered_tokens, sent.staged_prefill_tokens, sent.staged_prefill_prompts),
            (40, 0, 0)
        );
        let mut given_up = LoadLease::acquire(&in_flight, 9);
        given_up.begin_staged_prefill();
        drop((lease, given_up));
        assert_eq!(in_flight.counts(), InFlightCounts::default());
    }
}

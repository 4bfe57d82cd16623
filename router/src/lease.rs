//! A turn's claim on a worker's capacity: counts that go up when the lease is made and down when it
//! is dropped, whatever ends the turn. It is not Clone and rides in the response body.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// What this router has begun on one worker; the same counts in every snapshot of the view. A cache
/// line of its own: a decision reads those of a thousand workers.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct InFlight {
    turns: AtomicU32,
    opens: AtomicU32,
    unanswered_tokens: AtomicU64,
    coming_tokens: AtomicU64,
    lane_tokens: AtomicU64,
    lane_prompts: AtomicU32,
}

/// The counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Turns in flight.
    pub turns: u32,
    /// Sessions it has asked the worker to open, ever; wraps.
    pub opens: u32,
    /// Prompt tokens to be computed for turns whose answer has not begun.
    pub unanswered_tokens: u64,
    /// KV that the turns in flight bring: no session table knows of it before they end.
    pub coming_tokens: u64,
    /// Prompt tokens to be computed in the slow lane, and for how many turns.
    pub lane_tokens: u64,
    pub lane_prompts: u32,
}

impl InFlight {
    /// Turns in flight.
    pub fn turns(&self) -> u32 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Sessions it has asked the worker to open, ever; wraps.
    pub fn opens(&self) -> u32 {
        self.opens.load(Ordering::Relaxed)
    }

    /// Prompt tokens to be computed for turns whose answer has not begun.
    pub fn unanswered_tokens(&self) -> u64 {
        self.unanswered_tokens.load(Ordering::Relaxed)
    }

    /// KV that the turns in flight bring.
    pub fn coming_tokens(&self) -> u64 {
        self.coming_tokens.load(Ordering::Relaxed)
    }

    /// All counts.
    pub fn counts(&self) -> Counts {
        Counts {
            turns: self.turns(),
            opens: self.opens(),
            unanswered_tokens: self.unanswered_tokens(),
            coming_tokens: self.coming_tokens(),
            lane_tokens: self.lane_tokens.load(Ordering::Relaxed),
            lane_prompts: self.lane_prompts.load(Ordering::Relaxed),
        }
    }

    /// Counts one more.
    pub fn note_open(&self) {
        self.opens.fetch_add(1, Ordering::Relaxed);
    }
}

/// One turn in flight.
#[derive(Debug)]
pub struct Lease {
    count: Arc<InFlight>,
    /// As they were expected when the turn was placed.
    tokens: u64,
    prompt: Prompt,
}

/// Where a turn's prompt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prompt {
    /// In the slow lane: the turn itself isn't sent yet.
    InLane,
    /// Sent, with so many tokens to compute.
    Sent(u64),
    /// Computed.
    Answered,
}

impl Lease {
    /// Counts one turn until it is dropped, with the prompt tokens that the worker has to compute
    /// for it, as far as they are known.
    #[must_use]
    pub fn acquire(count: &Arc<InFlight>, tokens: u64) -> Self {
        count.turns.fetch_add(1, Ordering::Relaxed);
        count.unanswered_tokens.fetch_add(tokens, Ordering::Relaxed);
        count.coming_tokens.fetch_add(tokens, Ordering::Relaxed);
        Self { count: Arc::clone(count), tokens, prompt: Prompt::Sent(tokens) }
    }

    /// Prompt tokens that the worker had to compute when the turn was placed.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Its prompt is computed in the slow lane before it is sent.
    pub fn enter_lane(&mut self) {
        self.set(Prompt::InLane);
    }

    /// It is sent now, with no more tokens to compute than so many.
    pub fn leave_lane(&mut self, tokens_max: u64) {
        self.set(Prompt::Sent(self.tokens.min(tokens_max)));
    }

    /// The answer has begun: its prompt is computed.
    pub fn answered(&mut self) {
        self.set(Prompt::Answered);
    }

    fn set(&mut self, prompt: Prompt) {
        let Self { count, tokens, .. } = &*self;
        match prompt {
            Prompt::InLane => {
                count.lane_tokens.fetch_add(*tokens, Ordering::Relaxed);
                count.lane_prompts.fetch_add(1, Ordering::Relaxed);
            }
            Prompt::Sent(left) => {
                count.unanswered_tokens.fetch_add(left, Ordering::Relaxed);
            }
            Prompt::Answered => {}
        }
        match std::mem::replace(&mut self.prompt, prompt) {
            Prompt::InLane => {
                self.count.lane_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
                self.count.lane_prompts.fetch_sub(1, Ordering::Relaxed);
            }
            Prompt::Sent(left) => {
                self.count.unanswered_tokens.fetch_sub(left, Ordering::Relaxed);
            }
            Prompt::Answered => {}
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.answered();
        self.count.coming_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        let before = self.count.turns.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a lease was given back twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_until_it_is_dropped() {
        let count = Arc::new(InFlight::default());
        let first = Lease::acquire(&count, 0);
        let second = Lease::acquire(&count, 0);
        assert_eq!(count.turns(), 2);
        drop(first);
        assert_eq!(count.turns(), 1);
        drop(second);
        assert_eq!(count.counts(), Counts::default());
    }

    #[test]
    fn a_prompt_is_computed_when_its_answer_begins_and_its_kv_comes_until_the_end() {
        let count = Arc::new(InFlight::default());
        let mut lease = Lease::acquire(&count, 700);
        let _never_answered = Lease::acquire(&count, 50);
        lease.answered();
        lease.answered();
        assert_eq!((count.counts().unanswered_tokens, count.counts().coming_tokens), (50, 750));
        drop(lease);
        assert_eq!((count.counts().unanswered_tokens, count.counts().coming_tokens), (50, 50));
    }

    #[test]
    fn a_prompt_in_the_slow_lane_is_in_nobodys_way_until_its_turn_is_sent() {
        let count = Arc::new(InFlight::default());
        let mut lease = Lease::acquire(&count, 700);
        lease.enter_lane();
        let there = count.counts();
        assert_eq!((there.unanswered_tokens, there.coming_tokens), (0, 700));
        assert_eq!((there.lane_tokens, there.lane_prompts), (700, 1));
        lease.leave_lane(40);
        let sent = count.counts();
        assert_eq!((sent.unanswered_tokens, sent.lane_tokens, sent.lane_prompts), (40, 0, 0));
        let mut given_up = Lease::acquire(&count, 9);
        given_up.enter_lane();
        drop((lease, given_up));
        assert_eq!(count.counts(), Counts::default());
    }
}

//! Decides which long prompt of a rank computes its next stage.
//!
//! At most one stage per rank is in the engine. If the shortest prompt always came first, the sum
//! of all waits would be smallest, but long prompts could wait forever. So the smallest remaining
//! computing time minus half of the waiting time comes first: a prompt that has waited for twice
//! its remaining time is passed by no new prompt. [`RankQueue`] does no I/O and reads no clock.

mod shared;

use std::time::Duration;

pub use self::shared::{QueuePlace, StagedPrefillQueues, prefill_tokens_per_s};

/// Per rank. A router's request is open for each prompt.
pub const PROMPTS_MAX: usize = 256;

/// A prompt that entered earlier has a smaller ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PromptTicket(u64);

#[derive(Debug, Clone, Default)]
pub struct RankQueue {
    /// One rate for all prompts: with different rates, the order could have cycles.
    tokens_per_s: u64,
    prompts: Vec<Prompt>,
    running_stage: Option<RunningStage>,
    next_ticket: u64,
}

#[derive(Debug, Clone, Copy)]
struct Prompt {
    ticket: PromptTicket,
    entered_at: Duration,
    /// Set when the prompt enters and after each stage.
    left_tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RunningStage {
    ticket: PromptTicket,
    stage_tokens: u64,
}

impl RankQueue {
    pub fn set_prefill_rate(&mut self, tokens_per_s: u64) {
        self.tokens_per_s = tokens_per_s;
    }

    /// `now` is the time since a fixed moment, the same for all calls. `None` if the queue is full.
    pub fn enter(&mut self, left_tokens: u64, now: Duration) -> Option<PromptTicket> {
        if self.prompts.len() == PROMPTS_MAX {
            return None;
        }
        let ticket = PromptTicket(self.next_ticket);
        self.next_ticket += 1;
        self.prompts.push(Prompt { ticket, entered_at: now, left_tokens });
        Some(ticket)
    }

    /// `None` while a stage is in the engine.
    #[must_use]
    pub fn next_prompt(&self) -> Option<PromptTicket> {
        if self.running_stage.is_some() {
            return None;
        }
        // The smallest `left_us - (now_us - entered_us) / 2` comes first. `now_us` is the same for
        // all prompts, so the key leaves it out. The key is doubled to avoid fractions.
        let sort_key_us = |prompt: &Prompt| {
            let left_us =
                u128::from(prompt.left_tokens) * 1_000_000 / u128::from(self.tokens_per_s.max(1));
            2 * left_us + prompt.entered_at.as_micros()
        };
        self.prompts
            .iter()
            .min_by_key(|prompt| (sort_key_us(prompt), prompt.ticket))
            .map(|prompt| prompt.ticket)
    }

    pub fn begin_stage(&mut self, ticket: PromptTicket, stage_tokens: u64) {
        assert_eq!(self.running_stage, None, "one stage at a time");
        self.running_stage = Some(RunningStage { ticket, stage_tokens });
    }

    pub fn end_stage(&mut self, ticket: PromptTicket, left_tokens: u64) {
        self.running_stage = self.running_stage.filter(|stage| stage.ticket != ticket);
        if let Some(prompt) = self.prompts.iter_mut().find(|prompt| prompt.ticket == ticket) {
            prompt.left_tokens = left_tokens;
        }
    }

    pub fn leave(&mut self, ticket: PromptTicket) {
        self.running_stage = self.running_stage.filter(|stage| stage.ticket != ticket);
        self.prompts.retain(|prompt| prompt.ticket != ticket);
    }

    /// The tokens that are neither computed nor in the engine, and the number of prompts.
    #[must_use]
    pub fn load(&self) -> (u64, usize) {
        let left_tokens =
            self.prompts.iter().map(|prompt| prompt.left_tokens).fold(0, u64::saturating_add);
        let running_stage_tokens = self.running_stage.map_or(0, |stage| stage.stage_tokens);
        (left_tokens.saturating_sub(running_stage_tokens), self.prompts.len())
    }

    pub fn check_invariants(&self) {
        assert!(self.prompts.len() <= PROMPTS_MAX);
        assert!(self.prompts.is_sorted_by(|earlier, later| earlier.ticket < later.ticket));
        if let Some(RunningStage { ticket, .. }) = self.running_stage {
            assert!(
                self.prompts.iter().any(|prompt| prompt.ticket == ticket),
                "the stage's prompt is in the queue"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RATE: u64 = 1_000;
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_shorter_prompt_goes_first_between_two_stages_of_a_longer_one() {
        let mut queue = RankQueue { tokens_per_s: RATE, ..RankQueue::default() };
        let long = queue.enter(10_000, MS).unwrap();
        assert_eq!(queue.next_prompt(), Some(long));
        queue.begin_stage(long, 400);
        let short = queue.enter(1_000, 2 * MS).unwrap();
        assert_eq!(queue.next_prompt(), None, "a running stage is not disturbed");
        assert_eq!(queue.load(), (10_600, 2));
        queue.end_stage(long, 9_600);
        assert_eq!(queue.next_prompt(), Some(short));
        queue.begin_stage(short, 400);
        queue.leave(short);
        assert_eq!((queue.next_prompt(), queue.load()), (Some(long), (9_600, 1)));
    }

    #[test]
    fn who_has_waited_twice_its_own_time_goes_before_newcomers() {
        let mut queue = RankQueue { tokens_per_s: RATE, ..RankQueue::default() };
        let long = queue.enter(1_000, Duration::ZERO).unwrap();
        let _newcomer = queue.enter(1, 2_000 * MS).unwrap();
        assert_eq!(queue.next_prompt(), Some(long));
        queue.leave(long);
        let long = queue.enter(1_000, Duration::ZERO).unwrap();
        queue.leave(long);
        let long = queue.enter(1_010, Duration::ZERO).unwrap();
        assert_ne!(queue.next_prompt(), Some(long), "not before that");
    }

    #[test]
    fn a_full_queue_takes_no_more() {
        let mut queue = RankQueue { tokens_per_s: RATE, ..RankQueue::default() };
        let tickets: Vec<_> = (0..PROMPTS_MAX).map(|_| queue.enter(1, MS).unwrap()).collect();
        assert_eq!(queue.enter(1, MS), None);
        queue.leave(tickets[7]);
        assert!(queue.enter(1, MS).is_some());
    }

    proptest! {
        /// After any sequence of events, a prompt is next if there are any and no stage is in the
        /// engine.
        #[test]
        fn somebody_is_next(does in prop::collection::vec((0..5_u8, 0..9_usize, 0..5_000_u64), 1..80)) {
            let (mut queue, mut inside) = (RankQueue::default(), Vec::new());
            queue.set_prefill_rate(RATE);
            for (at, (what, which, tokens)) in does.into_iter().enumerate() {
                let now = MS * u32::try_from(at).unwrap();
                match what {
                    0 | 1 => inside.extend(queue.enter(tokens, now)),
                    2 => if let Some(next) = queue.next_prompt() {
                        queue.begin_stage(next, tokens);
                    },
                    3 if which < inside.len() => queue.end_stage(inside[which], tokens),
                    4 if which < inside.len() => queue.leave(inside.remove(which)),
                    _ => {}
                }
                queue.check_invariants();
                let free = queue.running_stage.is_none() && !inside.is_empty();
                prop_assert_eq!(queue.next_prompt().is_some(), free);
                prop_assert_eq!(queue.load().1, inside.len());
            }
        }
    }
}

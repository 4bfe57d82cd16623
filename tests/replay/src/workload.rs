//! The source of conversations: a trace in shuffled order, or synthetic conversations (pure).

use crate::generate;
use crate::shape::{Fit, Shape};
use crate::synth::Salt;
use crate::trace::{Conversation, Form, Trace};
use std::sync::Arc;
use std::time::Duration;

/// What a replay sends.
#[derive(Debug, Clone)]
pub enum Workload {
    /// The conversations of a trace.
    Trace(Trace),
    /// Synthetic conversations.
    Synthetic {
        /// The number of conversations.
        conversations: u64,
    },
}

/// What the size limits removed from the workload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Losses {
    /// Conversations shortened because a prompt exceeded the context.
    pub shortened: u64,
    /// Turns lost by the shortening.
    pub turns: u64,
    /// Conversations of which not even the first turn fits.
    pub dropped: u64,
}

/// A conversation to run, with the salt that separates its contents from those of its copies.
#[derive(Debug, Clone)]
pub struct NextConversation {
    /// The conversation.
    pub conversation: Arc<Conversation>,
    /// The seed and the pass.
    pub salt: Salt,
    /// The position among all conversations returned so far, from 0.
    pub number: u64,
}

/// Returns conversations one by one.
#[derive(Debug)]
pub struct Source {
    supply: Supply,
    shape: Shape,
    seed: u64,
    recycle: bool,
    returned: u64,
    position: u64,
    pass: u64,
    losses: Losses,
}

#[derive(Debug)]
enum Supply {
    Ready { form: Form, conversations: Vec<Arc<Conversation>> },
    Synthetic { conversations: u64 },
}

impl Source {
    /// Shapes a workload. Orders it randomly by `seed`, or by time if `timed` and the trace has
    /// times.
    pub fn new(workload: Workload, shape: Shape, seed: u64, recycle: bool, timed: bool) -> Self {
        let mut losses = Losses::default();
        let supply = match workload {
            Workload::Synthetic { conversations } => Supply::Synthetic { conversations },
            Workload::Trace(trace) => {
                let fitted = trace.conversations.into_iter();
                let mut ready: Vec<_> =
                    fitted.filter_map(|one| fit(&shape, one, &mut losses)).collect();
                if timed && trace.form == Form::Requests {
                    ready.sort_by_key(|one| one.turns[0].at);
                } else {
                    fastrand::Rng::with_seed(seed).shuffle(&mut ready);
                }
                Supply::Ready { form: trace.form, conversations: ready }
            }
        };
        Self { supply, shape, seed, recycle, returned: 0, position: 0, pass: 0, losses }
    }

    /// Returns what the size limits removed from the conversations seen so far.
    pub fn losses(&self) -> Losses {
        self.losses
    }

    /// Whether the workload has a start time for each conversation.
    pub fn is_timed(&self) -> bool {
        matches!(self.supply, Supply::Ready { form: Form::Requests, .. })
    }

    /// Returns the duration of one pass through a timed workload.
    pub fn span(&self) -> Duration {
        match &self.supply {
            Supply::Ready { conversations, .. } => {
                conversations.last().map_or(Duration::ZERO, |last| last.turns[0].at)
            }
            Supply::Synthetic { .. } => Duration::ZERO,
        }
    }

    /// Returns the next conversation, or `None` at the workload's end.
    pub fn next_conversation(&mut self) -> Option<NextConversation> {
        let mut unusable = 0;
        loop {
            if self.position >= self.size() {
                // After a pass without a usable conversation, further passes would loop forever.
                if !self.recycle || unusable >= self.size() {
                    return None;
                }
                self.position = 0;
                self.pass += 1;
            }
            let found = self.conversation_at(self.position);
            self.position += 1;
            let Some(conversation) = found else {
                unusable += 1;
                continue;
            };
            let number = self.returned;
            self.returned += 1;
            let salt = Salt { seed: self.seed, pass: self.pass };
            return Some(NextConversation { conversation, salt, number });
        }
    }

    fn size(&self) -> u64 {
        match &self.supply {
            Supply::Ready { conversations, .. } => conversations.len() as u64,
            Supply::Synthetic { conversations } => *conversations,
        }
    }

    fn conversation_at(&mut self, position: u64) -> Option<Arc<Conversation>> {
        match &self.supply {
            Supply::Ready { conversations, .. } => {
                conversations.get(usize::try_from(position).ok()?).map(Arc::clone)
            }
            Supply::Synthetic { .. } => {
                let made = generate::conversation(self.seed, position);
                fit(&self.shape, made, &mut self.losses)
            }
        }
    }
}

fn fit(shape: &Shape, one: Conversation, losses: &mut Losses) -> Option<Arc<Conversation>> {
    match shape.fit(one) {
        Fit::Complete(conversation) => Some(Arc::new(conversation)),
        Fit::Shortened { conversation, turns } => {
            losses.shortened += 1;
            losses.turns += turns;
            Some(Arc::new(conversation))
        }
        Fit::Dropped => {
            losses.dropped += 1;
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(seed: u64, recycle: bool, count: usize) -> Vec<(String, u64)> {
        let conversations = (0..5).map(|index| generate::conversation(0, index)).collect();
        let trace = Trace { form: Form::Conversations, conversations, duplicates: 0 };
        let shape = Shape::default();
        let mut source = Source::new(Workload::Trace(trace), shape, seed, recycle, false);
        let taken = std::iter::from_fn(|| source.next_conversation()).take(count);
        taken.map(|next| (next.conversation.id.clone(), next.salt.pass)).collect()
    }

    #[test]
    fn order_follows_from_the_seed() {
        assert_eq!(ids(1, false, 9), ids(1, false, 9));
        assert_ne!(ids(1, false, 9), ids(2, false, 9));
        let mut sorted = ids(1, false, 9);
        sorted.sort();
        assert_eq!(sorted.len(), 5);
        sorted.dedup();
        assert_eq!(sorted.len(), 5);
    }

    #[test]
    fn recycling_begins_another_pass() {
        let twice = ids(1, true, 10);
        assert_eq!(twice.iter().filter(|(_, pass)| *pass == 1).count(), 5);
        assert_eq!(twice[0].0, twice[5].0);
    }

    #[test]
    fn a_workload_that_fits_nowhere_ends() {
        let shape = Shape { context_tokens_max: Some(2), ..Shape::default() };
        let workload = Workload::Synthetic { conversations: 3 };
        let mut source = Source::new(workload, shape, 0, true, false);
        assert!(source.next_conversation().is_none());
        assert!(source.losses().dropped >= 3);
    }
}

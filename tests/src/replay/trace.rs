//! The model of a trace: conversations of turns, whose prompts are named by block ids, and have
//! words where the trace has. Pure.
//!
//! Invariant: a turn's runs cover its whole prompt (`wire` completes a tail the trace leaves
//! unnamed), so a prompt is fully determined by (conversation scope, runs, length).

use std::time::Duration;

/// A run of consecutive block ids: `first, first + 1, …`, `count` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// The first id.
    pub first: u64,
    /// How many ids; at least 1.
    pub count: u64,
}

/// The block ids of a prompt, run-length coded: traces name millions of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Blocks {
    runs: Vec<Run>,
}

impl Blocks {
    /// Builds the run-length form of a plain list.
    pub fn from_ids(ids: &[u64]) -> Self {
        let mut blocks = Self::default();
        for &id in ids {
            blocks.push_run(Run { first: id, count: 1 });
        }
        blocks
    }

    /// Appends a run, merged with the last one where it continues it.
    pub fn push_run(&mut self, run: Run) {
        if run.count == 0 {
            return;
        }
        match self.runs.last_mut() {
            Some(last) if last.first.checked_add(last.count) == Some(run.first) => {
                last.count += run.count;
            }
            _ => self.runs.push(run),
        }
    }

    /// How many ids there are.
    pub fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// Whether there is no id.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The ids, in prompt order.
    pub fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().flat_map(|run| run.first..run.first + run.count)
    }

    /// The runs, in prompt order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The id at `index`.
    pub fn get(&self, index: u64) -> Option<u64> {
        let mut left = index;
        for run in &self.runs {
            if left < run.count {
                return Some(run.first + left);
            }
            left -= run.count;
        }
        None
    }

    /// How many leading ids both have in common.
    pub fn common(&self, other: &Self) -> u64 {
        let (mut ours, mut theirs) = (self.runs.iter(), other.runs.iter());
        let (mut a, mut b) = (ours.next().copied(), theirs.next().copied());
        let mut total = 0;
        while let (Some(left), Some(right)) = (a, b) {
            if left.first != right.first {
                break;
            }
            let both = left.count.min(right.count);
            total += both;
            a = rest(left, both).or_else(|| ours.next().copied());
            b = rest(right, both).or_else(|| theirs.next().copied());
        }
        total
    }

    /// The list cut to its first `count` ids.
    pub fn truncated(&self, count: u64) -> Self {
        let mut left = count;
        let mut cut = Self::default();
        for run in &self.runs {
            cut.push_run(Run { first: run.first, count: run.count.min(left) });
            left -= run.count.min(left);
        }
        cut
    }

    /// The list without its first `count` ids.
    pub fn after(&self, count: u64) -> Self {
        let mut skip = count;
        let mut left = Self::default();
        for run in &self.runs {
            let skipped = skip.min(run.count);
            skip -= skipped;
            left.push_run(Run { first: run.first + skipped, count: run.count - skipped });
        }
        left
    }
}

/// What is left of `run` after its first `taken` ids.
fn rest(run: Run, taken: u64) -> Option<Run> {
    (taken < run.count).then(|| Run { first: run.first + taken, count: run.count - taken })
}

/// One request of the trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// When it was sent: since the conversation's start, or the trace's for single requests.
    pub at: Duration,
    /// How long the client waited before sending it, after the answer before.
    pub think: Duration,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u64,
    /// Tokens of the answer; at least 1.
    pub output_tokens: u64,
    /// The prompt's blocks; they cover all `prompt_tokens`.
    pub blocks: Blocks,
}

/// How a turn's history follows from that of the turn before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follows {
    /// It goes on with the answer and what the user says.
    On,
    /// It is the same: the last answer is asked for again.
    Again,
    /// It is another one, which the user says as a whole.
    Anew,
}

/// A turn in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// What becomes of the history before it.
    pub follows: Follows,
    /// What the user says.
    pub text: String,
    /// What was answered.
    pub answer: String,
}

/// Text that all conversations of a client have in front: system prompt and tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shared {
    /// Which text; main conversations have 0, each kind of subagent one of its own.
    pub stream: u64,
    /// How many leading tokens of it.
    pub tokens: u64,
}

/// A list of turns that share a growing prefix.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    /// Its name in the trace; unique within it by position, not by this.
    pub id: String,
    /// Tokens a block stands for.
    pub block_tokens: u64,
    /// Namespace of the block ids; `None` when they are global to the trace.
    pub scope: Option<u64>,
    /// The shared front of its prompts.
    pub shared: Shared,
    /// Its requests in order; at least one.
    pub turns: Vec<Turn>,
    /// The same in words, as far as the trace has them: nothing, or at least one for each turn.
    pub said: Vec<Said>,
    /// Conversations that its turns start.
    pub children: Vec<Child>,
}

/// A subagent's conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Child {
    /// Index of the parent's turn it starts beside.
    pub beside_turn: usize,
    /// Whether the parent's next turn waits for its end.
    pub awaited: bool,
    /// What the subagent sends; has no children itself.
    pub conversation: Conversation,
}

/// Which form a trace has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// kv-cache-tester: conversations with local ids.
    Conversations,
    /// Mooncake: single requests with global ids and timestamps.
    Requests,
    /// LMCache: the requests of conversations, each with its whole prompt in words.
    Prompts,
}

/// A trace read and checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Its form.
    pub form: Form,
    /// Its conversations; a single request is a conversation of one turn.
    pub conversations: Vec<Conversation>,
    /// Conversations left out because another has the same turns.
    pub duplicates: u64,
}

impl Trace {
    /// Turns in all conversations and their subagents.
    pub fn turns(&self) -> u64 {
        self.conversations.iter().map(Conversation::turns_total).sum()
    }

    /// Turns whose history isn't the one before, continued; known where the trace has words.
    pub fn edits(&self) -> u64 {
        self.conversations.iter().map(Conversation::edits).sum()
    }
}

impl Conversation {
    /// Its own turns and its subagents'.
    pub fn turns_total(&self) -> u64 {
        let children: usize = self.children.iter().map(|c| c.conversation.turns.len()).sum();
        (self.turns.len() + children) as u64
    }

    /// The same of this one.
    pub fn edits(&self) -> u64 {
        let edited = |said: &&Said| said.follows != Follows::On;
        self.said.iter().skip(1).filter(edited).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn run_length_form_equals_the_ids(ids in prop::collection::vec(0u64..6, 0..40)) {
            let blocks = Blocks::from_ids(&ids);
            prop_assert_eq!(blocks.len(), ids.len() as u64);
            prop_assert_eq!(blocks.ids().collect::<Vec<_>>(), ids.clone());
            for (index, id) in ids.iter().enumerate() {
                prop_assert_eq!(blocks.get(index as u64), Some(*id));
            }
            prop_assert_eq!(blocks.get(ids.len() as u64), None);
        }

        #[test]
        fn common_prefix_equals_the_ids(
            a in prop::collection::vec(0u64..3, 0..20),
            b in prop::collection::vec(0u64..3, 0..20),
            cut in 0u64..25,
        ) {
            let expected = a.iter().zip(&b).take_while(|(x, y)| x == y).count() as u64;
            let (left, right) = (Blocks::from_ids(&a), Blocks::from_ids(&b));
            prop_assert_eq!(left.common(&right), expected);
            prop_assert_eq!(left.common(&left), left.len());
            let kept = usize::try_from(cut).unwrap().min(a.len());
            prop_assert_eq!(left.truncated(cut), Blocks::from_ids(&a[..kept]));
            prop_assert_eq!(left.after(cut), Blocks::from_ids(&a[kept..]));
        }
    }
}

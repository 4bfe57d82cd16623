//! The model of a trace: conversations, and turns whose prompts are lists of block ids.
//!
//! A pure module. Turns also have words, if the trace has them. Invariant: a turn's runs cover its
//! whole prompt (`wire` adds ids for a tail that the trace leaves unnamed), so the conversation's
//! scope, the runs and the length determine a prompt.

use std::time::Duration;

/// A run of `count` consecutive block ids: `first, first + 1, …`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// The first id.
    pub first: u64,
    /// The number of ids; at least 1.
    pub count: u64,
}

/// The block ids of a prompt, run-length encoded, because traces name millions of ids.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Blocks {
    runs: Vec<Run>,
}

impl Blocks {
    /// Encodes a plain list of ids.
    pub fn from_ids(ids: &[u64]) -> Self {
        let mut blocks = Self::default();
        for &id in ids {
            blocks.push_run(Run { first: id, count: 1 });
        }
        blocks
    }

    /// Appends a run and merges it with the last run if it continues that run.
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

    /// Returns the number of ids.
    pub fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// Whether there is no id.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Iterates over the ids in prompt order.
    pub fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().flat_map(|run| run.first..run.first + run.count)
    }

    /// Returns the runs in prompt order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the id at `index`.
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

    /// Returns how many leading ids both lists have in common.
    pub fn common_prefix(&self, other: &Self) -> u64 {
        let (mut ours, mut theirs) = (self.runs.iter(), other.runs.iter());
        let (mut a, mut b) = (ours.next().copied(), theirs.next().copied());
        let mut total = 0;
        while let (Some(left), Some(right)) = (a, b) {
            if left.first != right.first {
                break;
            }
            let both = left.count.min(right.count);
            total += both;
            a = remaining_run(left, both).or_else(|| ours.next().copied());
            b = remaining_run(right, both).or_else(|| theirs.next().copied());
        }
        total
    }

    /// Returns the first `count` ids.
    pub fn truncated(&self, count: u64) -> Self {
        let mut left = count;
        let mut cut = Self::default();
        for run in &self.runs {
            cut.push_run(Run { first: run.first, count: run.count.min(left) });
            left -= run.count.min(left);
        }
        cut
    }

    /// Returns the list without its first `count` ids.
    pub fn without_first(&self, count: u64) -> Self {
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

/// Returns what is left of `run` after its first `taken` ids.
fn remaining_run(run: Run, taken: u64) -> Option<Run> {
    (taken < run.count).then(|| Run { first: run.first + taken, count: run.count - taken })
}

/// One request of the trace.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TraceTurn {
    /// The sending time since the conversation's start; for single requests, since the trace's
    /// start.
    pub at: Duration,
    /// The client's pause between the previous answer and this request.
    pub think: Duration,
    /// The tokens of the full prompt.
    pub prompt_tokens: u64,
    /// The tokens of the answer; at least 1.
    pub output_tokens: u64,
    /// The prompt's blocks, which cover all `prompt_tokens`.
    pub blocks: Blocks,
}

/// How a turn's history follows from the previous turn's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HistoryChange {
    /// The history continues with the answer and the user's message.
    Extended,
    /// The history is the same: the client asks for the last answer again.
    Repeated,
    /// A new history, sent as one user message.
    Replaced,
}

/// A turn in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnWords {
    /// How the history follows from the previous turn.
    pub history: HistoryChange,
    /// The user's message.
    pub text: String,
    /// The answer.
    pub answer: String,
}

/// The text at the start of all conversations of a client: system prompt and tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shared {
    /// The number of the text: 0 for main conversations, another number for each kind of subagent.
    pub stream: u64,
    /// The number of its leading tokens that are shared.
    pub tokens: u64,
}

/// A list of turns that share a growing prefix.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// The name in the trace; conversations are told apart by position, not by name.
    pub id: String,
    /// The tokens of a block.
    pub block_tokens: u64,
    /// The namespace of the block ids; `None` if ids are global to the trace.
    pub scope: Option<u64>,
    /// The shared prefix of the prompts.
    pub shared: Shared,
    /// The requests in order; at least one.
    pub turns: Vec<TraceTurn>,
    /// The turns in words: empty if the trace has no words, else at least one entry per turn.
    pub words: Vec<TurnWords>,
    /// The conversations of subagents that the turns start.
    pub children: Vec<Subagent>,
}

/// A subagent's conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Subagent {
    /// The index of the parent's turn that starts the subagent.
    pub beside_turn: usize,
    /// Whether the parent's next turn waits for the subagent's end.
    pub awaited: bool,
    /// The subagent's conversation, which has no children itself.
    pub conversation: Conversation,
}

/// The form of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// kv-cache-tester: conversations with local ids.
    Conversations,
    /// Mooncake: single requests with global ids and timestamps.
    Requests,
    /// LMCache: the requests of conversations, each with its full prompt in words.
    Prompts,
}

/// A trace that was read and checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// The trace's form.
    pub form: Form,
    /// The conversations; a single request is a conversation of one turn.
    pub conversations: Vec<Conversation>,
    /// The number of conversations left out because another one has the same turns.
    pub duplicates: u64,
}

impl Trace {
    /// Returns the number of turns in all conversations and their subagents.
    pub fn turns(&self) -> u64 {
        self.conversations.iter().map(Conversation::turns_total).sum()
    }

    /// Returns the number of turns that don't simply continue the previous history; 0 unless the
    /// trace has words.
    pub fn edits(&self) -> u64 {
        self.conversations.iter().map(Conversation::edits).sum()
    }
}

impl Conversation {
    /// Returns the number of turns of the conversation and its subagents.
    pub fn turns_total(&self) -> u64 {
        let children: usize = self.children.iter().map(|c| c.conversation.turns.len()).sum();
        (self.turns.len() + children) as u64
    }

    /// Returns the number of turns that don't simply continue the previous history.
    pub fn edits(&self) -> u64 {
        let edited = |words: &&TurnWords| words.history != HistoryChange::Extended;
        self.words.iter().skip(1).filter(edited).count() as u64
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
            prop_assert_eq!(left.common_prefix(&right), expected);
            prop_assert_eq!(left.common_prefix(&left), left.len());
            let kept = usize::try_from(cut).unwrap().min(a.len());
            prop_assert_eq!(left.truncated(cut), Blocks::from_ids(&a[..kept]));
            prop_assert_eq!(left.without_first(cut), Blocks::from_ids(&a[kept..]));
        }
    }
}

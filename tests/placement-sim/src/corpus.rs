//! A trace in the simulator's form: sessions of turns, whose blocks have dense numbers.
//!
//! Dense numbers let a pool be an array; two prompts share a prefix exactly where their numbers
//! agree. A corpus is read-only after it is built, and all runs of all policies share one. It has
//! no clock and no randomness: `schedule` decides which session is played when.

mod infer;

use std::{collections::HashMap, ops::Range, time::Duration};

use replay::{
    synth::mix,
    trace::{self, Conversation, Form, Trace},
};

/// The parent of first blocks, which have no parent.
const ROOT: u32 = u32::MAX;
/// The salt of the blocks that all conversations of a client share.
const SHARED: u64 = 0x5348_4152_4544;

/// A range of consecutive block numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first number.
    pub first: u32,
    /// The number of blocks.
    pub count: u32,
}

/// A prompt's blocks in order. A session's blocks are numbered consecutively, so there are few
/// spans.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    spans: Vec<Span>,
    len: u32,
}

impl Chain {
    /// Appends one block.
    pub fn push(&mut self, block: u32) {
        self.len += 1;
        match self.spans.last_mut() {
            Some(last) if last.first + last.count == block => last.count += 1,
            _ => self.spans.push(Span { first: block, count: 1 }),
        }
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Iterates over the blocks in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.spans.iter().flat_map(|span| span.first..span.first + span.count)
    }
}

/// One turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimTurn {
    /// The sending time since the trace's start; used only if the corpus is `timed`.
    pub at: Duration,
    /// The time between the previous answer and this turn.
    pub think: Duration,
    /// The tokens of the prompt.
    pub input_tokens: u64,
    /// The tokens of the answer.
    pub output_tokens: u64,
    /// The prompt's blocks that a later prompt can match.
    pub chain: Chain,
}

/// A session that is started by a turn of another session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScriptChild {
    /// The parent's turn after which the child starts.
    pub after_turn: usize,
    /// Whether the parent's next turn waits for the child's end.
    pub awaited: bool,
    /// The index of the child's session in `scripts`.
    pub script: usize,
}

/// One session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Script {
    /// The turns; at least one.
    pub turns: Vec<SimTurn>,
    /// The sessions that this session starts.
    pub children: Vec<ScriptChild>,
    /// The blocks that appeared first in this session and belong to no other session but its
    /// children.
    pub own_blocks: Range<u32>,
    /// The first request of the conversation that this single request was inferred to continue; set
    /// only if the trace names no sessions.
    pub continues: Option<usize>,
}

/// The workload of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    /// The tokens of a block.
    pub block_tokens: u64,
    /// All sessions, those of subagents included.
    pub scripts: Vec<Script>,
    /// The sessions that users start, not other sessions.
    pub roots: Vec<usize>,
    /// Whether turns are sent at the trace's times instead of after the previous answer.
    pub timed: bool,
    /// Blocks below this number are shared by many sessions; every other block belongs to one
    /// session.
    pub common_blocks: u32,
    /// The number of blocks.
    pub blocks: u32,
}

/// Selects the conversations of a trace to play.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConversationFilter {
    /// The longest allowed prompt; sessions with a longer prompt are left out.
    pub context_tokens_max: Option<u64>,
    /// Which half of the conversations to use, by position.
    pub half: Option<Half>,
}

/// Half of a trace: constants are tuned on one half and evaluated on the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Half {
    /// The conversations at even positions.
    Tune,
    /// The conversations at odd positions.
    Holdout,
}

impl Corpus {
    /// Numbers the blocks of a trace. `block_tokens` is a multiple or a divisor of the trace's
    /// block size.
    #[must_use]
    pub fn new(trace: &Trace, block_tokens: u64, choice: ConversationFilter) -> Self {
        let all = select_half(trace, choice.half);
        let chosen: Vec<&Conversation> =
            all.filter(|conversation| fits(conversation, choice.context_tokens_max)).collect();
        match trace.form {
            Form::Requests => Self::from_requests(&chosen, block_tokens),
            Form::Conversations | Form::Prompts => {
                Self::from_conversations(&chosen, block_tokens, choice.context_tokens_max)
            }
        }
    }

    /// Returns the number of conversations that would be played without a limit on prompts.
    #[must_use]
    pub fn root_count(trace: &Trace, half: Option<Half>) -> usize {
        select_half(trace, half).count()
    }

    /// Builds a corpus of single requests. Their ids are global, so no session has blocks of its
    /// own.
    fn from_requests(chosen: &[&Conversation], block_tokens: u64) -> Self {
        let mut numbers = Numbers::default();
        let mut scripts: Vec<Script> =
            chosen.iter().map(|one| build_script(one, block_tokens, true, &mut numbers)).collect();
        for (script, first) in scripts.iter_mut().zip(infer::sessions(chosen)) {
            script.continues = Some(first);
            script.own_blocks = 0..0;
        }
        let blocks = numbers.next;
        let roots = (0..scripts.len()).collect();
        Self { block_tokens, scripts, roots, timed: true, common_blocks: blocks, blocks }
    }

    fn from_conversations(
        chosen: &[&Conversation],
        block_tokens: u64,
        context_tokens_max: Option<u64>,
    ) -> Self {
        let mut numbers = Numbers::default();
        for conversation in chosen {
            for one in with_children(conversation, context_tokens_max) {
                number_shared_blocks(one, block_tokens, &mut numbers);
            }
        }
        let common_blocks = numbers.next;
        let (mut scripts, mut roots) = (Vec::new(), Vec::new());
        for conversation in chosen {
            let root = scripts.len();
            roots.push(root);
            scripts.push(build_script(conversation, block_tokens, false, &mut numbers));
            for child in &conversation.children {
                if !fits(&child.conversation, context_tokens_max) {
                    continue;
                }
                let number = scripts.len();
                scripts.push(build_script(&child.conversation, block_tokens, false, &mut numbers));
                scripts[root].children.push(ScriptChild {
                    after_turn: child.beside_turn,
                    awaited: child.awaited,
                    script: number,
                });
            }
        }
        let blocks = numbers.next;
        Self { block_tokens, scripts, roots, timed: false, common_blocks, blocks }
    }

    /// Returns the number of turns in all sessions.
    #[must_use]
    pub fn turns(&self) -> usize {
        self.scripts.iter().map(|script| script.turns.len()).sum()
    }

    /// Returns the number of `block` in the `pass`-th play of its session. Common blocks keep their
    /// number; a session's own blocks get new numbers in each pass.
    #[must_use]
    pub fn block_number(&self, block: u32, pass: u32) -> u32 {
        if block < self.common_blocks {
            block
        } else {
            block + pass * (self.blocks - self.common_blocks)
        }
    }
}

fn select_half(trace: &Trace, half: Option<Half>) -> impl Iterator<Item = &Conversation> {
    let wanted =
        move |at: usize| half.is_none_or(|half| at.is_multiple_of(2) == (half == Half::Tune));
    let all = trace.conversations.iter().enumerate();
    all.filter(move |(at, _)| wanted(*at)).map(|(_, conversation)| conversation)
}

fn with_children(
    conversation: &Conversation,
    context_tokens_max: Option<u64>,
) -> impl Iterator<Item = &Conversation> {
    let children = conversation.children.iter().map(|child| &child.conversation);
    std::iter::once(conversation).chain(children.filter(move |one| fits(one, context_tokens_max)))
}

fn fits(conversation: &Conversation, context_tokens_max: Option<u64>) -> bool {
    let longest = conversation.turns.iter().map(|turn| turn.prompt_tokens).max().unwrap_or(0);
    context_tokens_max.is_none_or(|max| longest <= max)
}

/// Gives each pair of previous block and content its own number, in order of appearance.
#[derive(Debug, Default)]
struct Numbers {
    known: HashMap<(u32, u64), u32>,
    next: u32,
}

impl Numbers {
    fn number(&mut self, parent: u32, content: u64) -> u32 {
        *self.known.entry((parent, content)).or_insert_with(|| {
            self.next += 1;
            self.next - 1
        })
    }
}

fn shared_content(conversation: &Conversation) -> u64 {
    mix(SHARED, conversation.shared.stream)
}

fn number_shared_blocks(conversation: &Conversation, block_tokens: u64, numbers: &mut Numbers) {
    let longest = conversation.turns.iter().map(|turn| turn.prompt_tokens).max().unwrap_or(0);
    let mut parent = ROOT;
    for _ in 0..conversation.shared.tokens.min(longest) / block_tokens {
        parent = numbers.number(parent, shared_content(conversation));
    }
}

fn build_script(
    conversation: &Conversation,
    block_tokens: u64,
    keep_tail: bool,
    numbers: &mut Numbers,
) -> Script {
    let first = numbers.next;
    let turn = |turn: &trace::TraceTurn| SimTurn {
        at: turn.at,
        think: turn.think,
        input_tokens: turn.prompt_tokens,
        output_tokens: turn.output_tokens,
        chain: build_chain(conversation, turn, block_tokens, keep_tail, numbers),
    };
    let turns = conversation.turns.iter().map(turn).collect();
    Script { turns, children: Vec::new(), own_blocks: first..numbers.next, continues: None }
}

/// Returns the turn's blocks. A partial last block can't be matched again, so it is left out unless
/// `keep_tail` is set because the trace itself names it.
fn build_chain(
    conversation: &Conversation,
    turn: &trace::TraceTurn,
    block_tokens: u64,
    keep_tail: bool,
    numbers: &mut Numbers,
) -> Chain {
    let ids: Vec<u64> = turn.blocks.ids().collect();
    let scope = conversation.scope.map_or(0, |scope| mix(scope, 1));
    let full = turn.prompt_tokens / block_tokens;
    let shared = conversation.shared.tokens / block_tokens;
    let count = if keep_tail { turn.prompt_tokens.div_ceil(block_tokens) } else { full };
    let mut chain = Chain::default();
    let mut parent = ROOT;
    for at in 0..count {
        let (start, end) = (at * block_tokens, ((at + 1) * block_tokens).min(turn.prompt_tokens));
        let content = if at < shared {
            shared_content(conversation)
        } else {
            let (first, last) =
                (start / conversation.block_tokens, end.div_ceil(conversation.block_tokens));
            let within = mix(scope, start % conversation.block_tokens);
            ids[index(first)..index(last)].iter().fold(within, |all, &id| mix(all, id))
        };
        parent = numbers.number(parent, content);
        chain.push(parent);
    }
    chain
}

fn index(position: u64) -> usize {
    usize::try_from(position).expect("prompts are below 2^26 tokens")
}

#[cfg(test)]
mod tests {
    use super::*;
    use replay::trace::{Blocks, Shared};

    fn conversation(scope: u64, shared_tokens: u64, turns: &[(u64, &[u64])]) -> Conversation {
        let turn = |&(tokens, ids): &(u64, &[u64])| trace::TraceTurn {
            prompt_tokens: tokens,
            output_tokens: 1,
            blocks: Blocks::from_ids(ids),
            ..trace::TraceTurn::default()
        };
        Conversation {
            id: String::new(),
            block_tokens: 64,
            scope: Some(scope),
            shared: Shared { stream: 0, tokens: shared_tokens },
            turns: turns.iter().map(turn).collect(),
            ..Conversation::default()
        }
    }

    fn corpus(conversations: Vec<Conversation>, block_tokens: u64) -> Corpus {
        let trace = Trace { form: Form::Conversations, conversations, duplicates: 0 };
        Corpus::new(
            &trace,
            block_tokens,
            ConversationFilter { context_tokens_max: None, half: None },
        )
    }

    fn blocks(corpus: &Corpus, script: usize, turn: usize) -> Vec<u32> {
        corpus.scripts[script].turns[turn].chain.iter().collect()
    }

    #[test]
    fn prompts_share_numbers_as_long_as_they_share_tokens() {
        let ids: &[u64] = &[1, 2, 3, 4];
        let one = conversation(1, 100, &[(192, &ids[..3]), (256, ids), (250, &[1, 9, 3, 4])]);
        let two = conversation(2, 100, &[(256, ids)]);
        let corpus = corpus(vec![one, two], 64);
        assert_eq!(corpus.common_blocks, 1, "100 shared tokens are one whole block");
        assert_eq!(blocks(&corpus, 0, 0), [0, 1, 2]);
        assert_eq!(blocks(&corpus, 0, 1), [0, 1, 2, 3]);
        assert_eq!(blocks(&corpus, 0, 2), [0, 4, 5], "another second block, and no tail");
        assert_eq!(blocks(&corpus, 1, 0), [0, 6, 7, 8]);
        assert_eq!((corpus.block_number(0, 2), corpus.block_number(1, 2)), (0, 1 + 2 * 8));
    }

    #[test]
    fn wide_blocks_are_as_many_narrow_ones() {
        let ids: Vec<u64> = (1..=8).collect();
        let corpus = corpus(vec![conversation(1, 0, &[(512, &ids), (511, &ids)])], 256);
        assert_eq!(blocks(&corpus, 0, 0), [0, 1]);
        assert_eq!(blocks(&corpus, 0, 1), [0], "the second is not full");
    }

    #[test]
    fn sessions_with_too_long_a_prompt_are_left_out() {
        let trace = Trace {
            form: Form::Conversations,
            conversations: (0..4)
                .map(|scope| conversation(scope, 0, &[(64 * (scope + 1), &[1, 2, 3, 4])]))
                .collect(),
            duplicates: 0,
        };
        let count = |context_tokens_max, half| {
            Corpus::new(&trace, 64, ConversationFilter { context_tokens_max, half }).scripts.len()
        };
        assert_eq!(count(Some(192), None), 3);
        assert_eq!(count(None, Some(Half::Tune)), 2);
        assert_eq!(count(Some(192), Some(Half::Holdout)), 1);
    }
}

//! The workloads: agents with subagents, whose turns are planned before the run (a pure module).
//!
//! All sizes follow from the engine's pool, so that the same pressure is made on engines of any
//! size. Prompts are token ids at random: no agent shares KV with another one.

use std::time::Duration;

use replay::trace::Conversation;
use serde::{Deserialize, Serialize};

/// The token ids of prompts are below this. Every tokenizer has as many.
const VOCABULARY: u32 = 256;
/// Tokens of an answer.
const ANSWER_TOKENS: u32 = 16;
/// The longest pause between an answer and the next turn, for a tool.
const TOOL_MS_MAX: u64 = 100;
/// The subagents of a main agent, after its first turn and after its second.
const SUBAGENTS: [usize; 2] = [2, 3];
/// Turns of a subagent.
const SUBAGENT_TURNS: std::ops::RangeInclusive<u32> = 9..=15;
/// Sessions of KVP-3: those that are used again and again, and those that are used once.
const HOT: usize = 50;
const COLD: usize = 25;
/// Turns of a hot session.
const HOT_TURNS: u32 = 5;

/// What is played.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Scenario {
    /// Main agents of three turns, and between them five subagents each, of 9 to 15 turns.
    Trees {
        /// The tokens of all subagents together, as a multiple of the pool.
        ratio: f64,
        /// Main agents at once.
        trees: usize,
    },
    /// Conversations of a trace, so many at once. Their sizes are scaled so that the longest that
    /// may be at once need twice the pool, and one no more than three quarters of it.
    Conversations {
        /// Conversations at once.
        at_once: usize,
    },
    /// Sessions that nobody closes, all at once: twice the pool in all.
    NeverClosed,
}

impl std::fmt::Display for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Trees { ratio, trees: 1 } => {
                write!(f, "KVP-1: a main agent, subagents of {ratio} × the pool")
            }
            Self::Trees { ratio, trees } => {
                write!(f, "KVP-1: {trees} main agents, subagents of {ratio} × the pool")
            }
            Self::Conversations { at_once: 1 } => {
                f.write_str("KVP-2: a coding agent at a time, of at most 0.75 × the pool")
            }
            Self::Conversations { at_once } => {
                write!(f, "KVP-2: {at_once} coding agents at once, of at most 2 × the pool")
            }
            Self::NeverClosed => {
                write!(
                    f,
                    "KVP-3: {HOT} hot and {COLD} cold sessions, never closed, of 2 × the pool"
                )
            }
        }
    }
}

/// A turn as it is planned.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnPlan {
    /// The pause before it.
    pub think: Duration,
    /// What it adds to the prompt.
    pub new: Vec<u32>,
    /// The length of its answer.
    pub answer_tokens: u32,
}

/// An agent: turns, each after the answer to the one before.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentPlan {
    /// The turns.
    pub turns: Vec<TurnPlan>,
    /// Whether it closes its session at its end.
    pub closes: bool,
}

/// An agent that starts others, and waits for them.
#[derive(Debug, Clone, PartialEq)]
pub struct TreePlan {
    /// The agent that starts others.
    pub main: AgentPlan,
    /// Those that run at once after the main agent's first turn, after its second, and so on.
    pub subagents: Vec<Vec<AgentPlan>>,
}

/// A whole run.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The trees, in the order in which they start.
    pub trees: Vec<TreePlan>,
    /// The most that run at once.
    pub at_once: usize,
}

impl Plan {
    /// Plans a scenario for a pool of so many tokens. `conversations` are a trace's; no other
    /// scenario needs them.
    #[must_use]
    pub fn new(
        scenario: Scenario,
        pool_tokens: u64,
        conversations: &[Conversation],
        seed: u64,
    ) -> Self {
        let mut maker = Maker { random: fastrand::Rng::with_seed(seed) };
        match scenario {
            Scenario::Trees { ratio, trees } => {
                let subagents = SUBAGENTS.iter().sum::<usize>() * trees;
                let of_subagent = share(pool_tokens, ratio / subagents as f64);
                let of_main = pool_tokens / (4 + 4 * trees as u64);
                let trees =
                    (0..trees).map(|_| maker.tree(of_main, of_subagent)).collect::<Vec<_>>();
                Self { at_once: trees.len(), trees }
            }
            Scenario::Conversations { at_once } => {
                let scale = scale(conversations, at_once, pool_tokens);
                let trees =
                    conversations.iter().map(|one| maker.conversation(one, scale)).collect();
                Self { trees, at_once }
            }
            Scenario::NeverClosed => {
                let tokens = share(pool_tokens, 2.0 / (HOT + COLD) as f64);
                let hot = (0..HOT).map(|_| maker.agent(tokens, 0.4, HOT_TURNS, false));
                let mut agents: Vec<_> = hot.collect();
                agents.extend((0..COLD).map(|_| maker.agent(tokens, 1.0, 1, false)));
                maker.random.shuffle(&mut agents);
                let trees = agents.into_iter().map(|main| TreePlan { main, subagents: vec![] });
                Self { trees: trees.collect(), at_once: HOT + COLD }
            }
        }
    }

    /// Returns the number of turns.
    #[must_use]
    pub fn turns(&self) -> usize {
        let of_tree = |tree: &TreePlan| {
            let subagents = tree.subagents.iter().flatten().map(|agent| agent.turns.len());
            tree.main.turns.len() + subagents.sum::<usize>()
        };
        self.trees.iter().map(of_tree).sum()
    }
}

/// Returns what each turn adds to the prompt, and its answer, in tokens. A prompt that got shorter
/// goes on from where it is: sessions only grow.
fn growth(conversation: &Conversation) -> impl Iterator<Item = (u64, u64)> {
    let mut before = 0;
    conversation.turns.iter().map(move |turn| {
        let new = turn.prompt_tokens.saturating_sub(before);
        before = turn.prompt_tokens + turn.output_tokens;
        (new, turn.output_tokens)
    })
}

/// Returns the factor at which the longest conversations that run at once need twice the pool. One
/// alone fits into it.
fn scale(conversations: &[Conversation], at_once: usize, pool_tokens: u64) -> f64 {
    let size = |one| growth(one).map(|(new, answer)| new + answer).sum::<u64>();
    let mut sizes: Vec<u64> = conversations.iter().map(size).collect();
    sizes.sort_unstable_by(|one, other| other.cmp(one));
    let longest = sizes.first().copied().unwrap_or(1).max(1);
    let together: u64 = sizes.into_iter().take(at_once).sum();
    let pool = pool_tokens as f64;
    (2.0 * pool / together.max(1) as f64).min(0.75 * pool / longest as f64)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "pools are below 2^52 tokens and factors are positive"
)]
fn share(tokens: u64, factor: f64) -> u64 {
    (tokens as f64 * factor) as u64
}

struct Maker {
    random: fastrand::Rng,
}

impl Maker {
    fn tree(&mut self, of_main: u64, of_subagent: u64) -> TreePlan {
        let turns = u32::try_from(SUBAGENTS.len()).expect("few") + 1;
        let main = self.agent(of_main, 0.8, turns, true);
        let subagents = SUBAGENTS.map(|count| {
            let turns: Vec<u32> = (0..count).map(|_| self.random.u32(SUBAGENT_TURNS)).collect();
            let agents = turns.into_iter();
            agents.map(|turns| self.agent(of_subagent, 0.33, turns, true)).collect()
        });
        TreePlan { main, subagents: subagents.into() }
    }

    /// Plans an agent whose context grows to `tokens`. Its first prompt is such a part of them, or
    /// all if it has only one turn.
    fn agent(&mut self, tokens: u64, first: f64, turns: u32, closes: bool) -> AgentPlan {
        let first = if turns == 1 { tokens } else { share(tokens, first) };
        let later = (tokens - first) / u64::from(turns.max(2) - 1);
        let prompts = (0..turns).map(|index| {
            let all = if index == 0 { first } else { later };
            self.turn(all.saturating_sub(u64::from(ANSWER_TOKENS)), ANSWER_TOKENS)
        });
        AgentPlan { turns: prompts.collect(), closes }
    }

    fn conversation(&mut self, conversation: &Conversation, scale: f64) -> TreePlan {
        let turns = growth(conversation).map(|(new, answer)| {
            let answer = share(answer, scale).clamp(1, u64::from(ANSWER_TOKENS));
            self.turn(share(new, scale), u32::try_from(answer).unwrap_or(ANSWER_TOKENS))
        });
        TreePlan { main: AgentPlan { turns: turns.collect(), closes: true }, subagents: vec![] }
    }

    fn turn(&mut self, new: u64, answer_tokens: u32) -> TurnPlan {
        let think = Duration::from_millis(self.random.u64(..=TOOL_MS_MAX));
        // An engine refuses a turn that adds nothing.
        let new = (0..new.max(1)).map(|_| self.random.u32(..VOCABULARY)).collect();
        TurnPlan { think, new, answer_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(agent: &AgentPlan) -> usize {
        agent.turns.iter().map(|turn| turn.new.len() + turn.answer_tokens as usize).sum()
    }

    #[test]
    fn subagents_need_as_much_as_the_scenario_says() {
        for (ratio, trees) in [(0.5, 1), (2.0, 1), (4.0, 1), (2.0, 4)] {
            let plan = Plan::new(Scenario::Trees { ratio, trees }, 16_384, &[], 1);
            let subagents = plan.trees.iter().flat_map(|tree| tree.subagents.iter().flatten());
            let tokens: usize = subagents.clone().map(context).sum();
            let wanted = 16_384.0 * ratio;
            assert!((tokens as f64 - wanted).abs() < wanted * 0.05, "{tokens} of {wanted}");
            assert_eq!((plan.trees.len(), subagents.count()), (trees, 5 * trees));
            assert!(plan.trees.iter().all(|tree| tree.main.turns.len() == 3));
        }
    }

    #[test]
    fn the_same_seed_plans_the_same() {
        let plan = |seed| Plan::new(Scenario::NeverClosed, 4096, &[], seed);
        assert_eq!(plan(1), plan(1));
        assert_ne!(plan(1), plan(2));
        assert_eq!(plan(1).turns(), HOT * HOT_TURNS as usize + COLD);
        assert!(plan(1).trees.iter().all(|tree| !tree.main.closes));
    }

    #[test]
    fn a_trace_s_conversations_keep_their_shape() {
        let conversation = replay::generate::conversation(1, 1);
        let turns = conversation.turns.len();
        let plan = Plan::new(Scenario::Conversations { at_once: 4 }, 16_384, &[conversation], 1);
        assert_eq!((plan.trees[0].main.turns.len(), plan.at_once), (turns, 4));
        assert!(context(&plan.trees[0].main) < 16_384);
    }
}

//! Synthetic workloads: a herd, giants among small sessions, a light load, agents side by side.
//!
//! Each is the same in every run.

use std::time::Duration;

use super::options::SimOptions;
use replay::trace::{Blocks, Conversation, Form, Run, Shared, Subagent, Trace, TraceTurn};

/// The choice of a synthetic workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SyntheticWorkload {
    /// W4: 64 sessions within 10 s, all with one system prompt, whose KV the first session creates
    /// on its worker.
    Herd,
    /// W8: one session of 150,000 tokens per worker, and many small sessions.
    Skew,
    /// Users who think for a minute, so that nearly all workers are idle at any time. The KV of all
    /// sessions fits into the pools if each worker has its share.
    Light,
    /// Three agents for two workers, which never pause and start subagents.
    SideBySide,
}

/// The tokens of a synthetic block.
const BLOCK_TOKENS: u64 = 64;
/// The tokens of the herd's system prompt.
const HERD_PROMPT_TOKENS: u64 = 15_000;
/// The number of sessions in the herd.
const HERD_SESSIONS: u32 = 64;
/// The number of sessions per worker, one of them a giant.
const SKEW_SESSIONS_EACH: u32 = 9;
/// The number of sessions per worker under light load: 83 % of a pool of 1,000,000 tokens.
const LIGHT_SESSIONS_EACH: u32 = 11;
/// The tokens of each pool beside agents side by side.
const SIDE_BY_SIDE_POOL_TOKENS: u64 = 200_000;

impl SyntheticWorkload {
    /// Returns the workload as a trace.
    #[must_use]
    pub fn trace(self, workers: usize) -> Trace {
        let conversations = match self {
            Self::Herd => herd(),
            Self::Skew => skew(workers as u64),
            Self::Light => light(workers as u64),
            Self::SideBySide => side_by_side(agents_side_by_side(workers) as u64),
        };
        Trace { form: Form::Conversations, conversations, duplicates: 0 }
    }

    /// Returns the options that play each session once, each by its own user.
    #[must_use]
    pub fn options(self, base: SimOptions) -> SimOptions {
        let seconds = Duration::from_secs;
        match self {
            Self::Herd => SimOptions {
                users: HERD_SESSIONS as usize,
                ramp: seconds(10),
                horizon: seconds(120),
                ..base
            },
            Self::Skew => SimOptions {
                users: base.workers * SKEW_SESSIONS_EACH as usize,
                ramp: seconds(60),
                horizon: seconds(600),
                ..base
            },
            Self::Light => SimOptions {
                users: base.workers * LIGHT_SESSIONS_EACH as usize,
                ramp: seconds(300),
                horizon: seconds(900),
                ..base
            },
            Self::SideBySide => SimOptions {
                users: agents_side_by_side(base.workers),
                ramp: seconds(2),
                horizon: seconds(180),
                pool_tokens: Some(SIDE_BY_SIDE_POOL_TOKENS),
                ..base
            },
        }
    }
}

/// Returns sessions of five turns: 2,000 to 6,000 own tokens after the shared prompt, then 300 to
/// 1,500 new tokens per turn.
fn herd() -> Vec<Conversation> {
    let sizes = |session: u64| {
        let own = 2_000 + session * 937 % 4_000;
        let grown = (0..5).map(move |turn| turn * (300 + session * 331 % 1_200));
        grown.map(move |more| HERD_PROMPT_TOKENS + own + more).collect::<Vec<_>>()
    };
    (0..u64::from(HERD_SESSIONS))
        .map(|session| conversation(session, HERD_PROMPT_TOKENS, &sizes(session)))
        .collect()
}

/// Returns one giant session per eight small ones; all grow.
fn skew(workers: u64) -> Vec<Conversation> {
    let one = |session: u64| {
        let giant = session.is_multiple_of(u64::from(SKEW_SESSIONS_EACH));
        let (first, more) = if giant { (150_000, 1_000) } else { (3_000 + session % 7 * 500, 400) };
        let sizes: Vec<u64> = (0..30).map(|turn| first + turn * more).collect();
        conversation(session, 1_024, &sizes)
    };
    (0..workers * u64::from(SKEW_SESSIONS_EACH)).map(one).collect()
}

/// Returns sessions of 40,000 to 80,000 tokens that grow by 1,000 tokens in each of 15 turns.
fn light(workers: u64) -> Vec<Conversation> {
    let one = |session: u64| {
        let first = 40_000 + session * 7_919 % 40_000;
        let sizes: Vec<u64> = (0..15).map(|turn| first + turn * 1_000).collect();
        let mut one = conversation(session, 1_024, &sizes);
        for (turn, number) in one.turns.iter_mut().zip(0..) {
            turn.think = Duration::from_secs(30 + (session * 7 + number * 13) % 60);
        }
        one
    };
    (0..workers * u64::from(LIGHT_SESSIONS_EACH)).map(one).collect()
}

/// Returns the number of agents side by side: three for two workers.
fn agents_side_by_side(workers: usize) -> usize {
    (workers * 3 / 2).max(1)
}

/// Returns agents that begin with 15,000 tokens and grow by 1,000 in each of 40 turns. Beside every
/// fifth turn run two subagents of three turns, for which the agent waits.
fn side_by_side(agents: u64) -> Vec<Conversation> {
    let quick = |id: u64, sizes: &[u64]| {
        let mut one = conversation(id, 1_024, sizes);
        one.turns.iter_mut().for_each(|turn| turn.think = Duration::from_millis(500));
        one
    };
    let one = |agent: u64| {
        let sizes: Vec<u64> = (0..40).map(|turn| 15_000 + turn * 1_000).collect();
        let first_child = agents + agent * 80;
        let child = |number: usize| Subagent {
            beside_turn: number / 2 * 5,
            awaited: true,
            conversation: quick(first_child + number as u64, &[4_000, 4_500, 5_000]),
        };
        Conversation { children: (0..16).map(child).collect(), ..quick(agent, &sizes) }
    };
    (0..agents).map(one).collect()
}

fn conversation(session: u64, shared_tokens: u64, sizes: &[u64]) -> Conversation {
    let turn = |(number, &prompt_tokens): (u64, &u64)| {
        let mut blocks = Blocks::default();
        blocks.push_run(Run { first: 0, count: prompt_tokens.div_ceil(BLOCK_TOKENS) });
        TraceTurn {
            at: Duration::ZERO,
            think: Duration::from_secs(5 + (session * 7 + number * 13) % 30),
            prompt_tokens,
            output_tokens: 200,
            blocks,
        }
    };
    Conversation {
        id: session.to_string(),
        block_tokens: BLOCK_TOKENS,
        scope: Some(session),
        shared: Shared { stream: 0, tokens: shared_tokens },
        turns: (0..).zip(sizes).map(turn).collect(),
        ..Conversation::default()
    }
}

//! Workloads that no trace has: a herd behind one system prompt, and a few giants among many small
//! sessions. The same every time.

use std::time::Duration;

use super::options::Options;
use crate::replay::trace::{Blocks, Conversation, Form, Run, Shared, Trace, Turn};

/// Which one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Made {
    /// W4: 64 sessions within 10 s, all with one system prompt; the first to come takes it to its
    /// worker.
    Herd,
    /// W8: a session of 150,000 tokens for each worker, and many small ones.
    Skew,
}

/// Tokens of a made block.
const BLOCK_TOKENS: u64 = 64;
/// The herd's system prompt.
const HERD_PROMPT_TOKENS: u64 = 15_000;
/// The herd.
const HERD_SESSIONS: u32 = 64;
/// Sessions for each worker, a giant among them.
const SKEW_SESSIONS_EACH: u32 = 9;

impl Made {
    /// The workload, as a trace.
    #[must_use]
    pub fn trace(self, workers: usize) -> Trace {
        let conversations = match self {
            Self::Herd => herd(),
            Self::Skew => skew(workers as u64),
        };
        Trace { form: Form::Conversations, conversations, duplicates: 0 }
    }

    /// The load that plays it: each session once, by a user of its own.
    #[must_use]
    pub fn load(self, base: Options) -> Options {
        let seconds = Duration::from_secs;
        match self {
            Self::Herd => Options {
                users: HERD_SESSIONS as usize,
                ramp: seconds(10),
                horizon: seconds(120),
                ..base
            },
            Self::Skew => Options {
                users: base.workers * SKEW_SESSIONS_EACH as usize,
                ramp: seconds(60),
                horizon: seconds(600),
                ..base
            },
        }
    }
}

/// Sessions of five turns: a prompt of their own of 2,000 to 6,000 tokens behind the shared one,
/// then 300 to 1,500 new tokens a turn.
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

/// One giant to eight small ones; all grow.
fn skew(workers: u64) -> Vec<Conversation> {
    let one = |session: u64| {
        let giant = session.is_multiple_of(u64::from(SKEW_SESSIONS_EACH));
        let (first, more) = if giant { (150_000, 1_000) } else { (3_000 + session % 7 * 500, 400) };
        let sizes: Vec<u64> = (0..30).map(|turn| first + turn * more).collect();
        conversation(session, 1_024, &sizes)
    };
    (0..workers * u64::from(SKEW_SESSIONS_EACH)).map(one).collect()
}

fn conversation(session: u64, shared_tokens: u64, sizes: &[u64]) -> Conversation {
    let turn = |(number, &prompt_tokens): (u64, &u64)| {
        let mut blocks = Blocks::default();
        blocks.push_run(Run { first: 0, count: prompt_tokens.div_ceil(BLOCK_TOKENS) });
        Turn {
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
        said: Vec::new(),
        children: Vec::new(),
    }
}

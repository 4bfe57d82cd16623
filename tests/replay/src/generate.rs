//! Makes agent conversations from published statistics, for replays without a trace.
//!
//! The module is pure. Sizes and times are drawn from quantiles, log-linear between the published
//! points. Contexts only grow, until they are compacted at the context limit. A conversation
//! depends only on the seed and its `index`, not on the conversations made before it.

use crate::synth::mix;
use crate::trace::{Blocks, Conversation, Run, Shared, TraceTurn};
use std::time::Duration;

/// The tokens of a synthetic block id, as in the corpus.
const BLOCK_TOKENS: u64 = 64;
/// The size at which a conversation is compacted: the context of most models in the corpus.
const CONTEXT_TOKENS_MAX: u64 = 200_000;
/// The shared prefix. System prompt and tools have a median of 15k tokens in the corpus; this model
/// takes 75 % of them as common to all conversations.
const SHARED_TOKENS: u64 = 11_250;

/// New prompt tokens of a turn: p10/25/50/75/90/99 = 192/320/704/1,728/4,352/58k.
///
/// All quantiles here are from the Claude Code corpus (kv-cache-tester, 692 distinct conversations,
/// 46,218 requests). The values at 0 and 1 are ours if only inner quantiles are published.
const NEW_TOKENS: &[(f64, f64)] = &[
    (0.0, 64.0),
    (0.10, 192.0),
    (0.25, 320.0),
    (0.50, 704.0),
    (0.75, 1_728.0),
    (0.90, 4_352.0),
    (0.99, 58_000.0),
    (1.0, 58_000.0),
];
/// Tokens of an answer: p50/90/99 = 218/893/3,710.
const OUTPUT_TOKENS: &[(f64, f64)] =
    &[(0.0, 20.0), (0.50, 218.0), (0.90, 893.0), (0.99, 3_710.0), (1.0, 8_000.0)];
/// Seconds before a turn: p10/25/50/75/90/99 = 4/5/10/34/163/2,947.
const THINK_SECONDS: &[(f64, f64)] = &[
    (0.0, 1.0),
    (0.10, 4.0),
    (0.25, 5.0),
    (0.50, 10.0),
    (0.75, 34.0),
    (0.90, 163.0),
    (0.99, 2_947.0),
    (1.0, 3_600.0),
];
/// Turns of a conversation: p10/50/90/max = 7/44/148/514.
const TURNS: &[(f64, f64)] = &[(0.0, 1.0), (0.10, 7.0), (0.50, 44.0), (0.90, 148.0), (1.0, 514.0)];
/// Tokens of the first prompt, and of the first prompt after a compaction. The corpus doesn't
/// publish them; they are chosen so that the inputs of all turns match the published quantiles
/// (p10/50/90 = 41.8k/100k/209k).
const FIRST_TOKENS: &[(f64, f64)] =
    &[(0.0, 16_000.0), (0.10, 20_000.0), (0.50, 45_000.0), (0.90, 110_000.0), (1.0, 160_000.0)];
/// The seconds that an engine is assumed to need for a turn, for the recorded times (corpus: p50
/// 6.1 s).
const API_SECONDS: f64 = 6.1;

/// Makes conversation `index` of `seed`.
pub fn conversation(seed: u64, index: u64) -> Conversation {
    let mut rng = fastrand::Rng::with_seed(mix(mix(seed, 0x6265_7274), index));
    let turns = draw(&mut rng, TURNS);
    let mut prompt_tokens = draw(&mut rng, FIRST_TOKENS);
    let mut first_block = 0;
    let mut at = Duration::ZERO;
    let mut made: Vec<TraceTurn> = Vec::new();
    for position in 0..turns {
        let mut think = Duration::ZERO;
        if let Some(before) = made.last() {
            think = Duration::from_secs(draw(&mut rng, THINK_SECONDS));
            at += think + Duration::from_secs_f64(API_SECONDS);
            prompt_tokens += before.output_tokens + draw(&mut rng, NEW_TOKENS);
            if prompt_tokens > CONTEXT_TOKENS_MAX {
                // A compaction: new text follows the shared prefix.
                first_block = position << 24;
                prompt_tokens = draw(&mut rng, FIRST_TOKENS);
            }
        }
        let mut blocks = Blocks::default();
        blocks.push_run(Run { first: first_block, count: prompt_tokens.div_ceil(BLOCK_TOKENS) });
        let output_tokens = draw(&mut rng, OUTPUT_TOKENS);
        made.push(TraceTurn { at, think, prompt_tokens, output_tokens, blocks });
    }
    Conversation {
        id: format!("made-{index}"),
        block_tokens: BLOCK_TOKENS,
        scope: Some(index),
        shared: Shared { stream: 0, tokens: SHARED_TOKENS },
        turns: made,
        ..Conversation::default()
    }
}

/// Draws from quantile points, interpolating the logarithm; the result is at least 1.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "all quantiles above are positive and below 2^24"
)]
fn draw(rng: &mut fastrand::Rng, points: &[(f64, f64)]) -> u64 {
    let u = rng.f64();
    let pair = points.windows(2).find(|pair| u < pair[1].0);
    let Some([(p0, v0), (p1, v1)]) = pair else { return 1 };
    let share = (u - p0) / (p1 - p0);
    (v0.ln() + share * (v1.ln() - v0.ln())).exp().round().max(1.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(values: &mut [u64], percent: usize, expected: f64, within: f64) {
        values.sort_unstable();
        let found = values[values.len() * percent / 100] as f64;
        let off = (found / expected - 1.0).abs();
        assert!(off < within, "p{percent}: {found}, published {expected}");
    }

    #[test]
    fn statistics_are_the_published_ones() {
        let conversations: Vec<_> = (0..1500).map(|index| conversation(1, index)).collect();
        let turns: Vec<&TraceTurn> = conversations.iter().flat_map(|c| &c.turns).collect();
        let mut lengths: Vec<u64> = conversations.iter().map(|c| c.turns.len() as u64).collect();
        near(&mut lengths, 50, 44.0, 0.15);
        near(&mut lengths, 90, 148.0, 0.15);
        let mut inputs: Vec<u64> = turns.iter().map(|t| t.prompt_tokens).collect();
        near(&mut inputs, 50, 100_000.0, 0.2);
        near(&mut inputs, 10, 41_800.0, 0.3);
        let mut outputs: Vec<u64> = turns.iter().map(|t| t.output_tokens).collect();
        near(&mut outputs, 50, 218.0, 0.05);
        near(&mut outputs, 90, 893.0, 0.05);
        let later = conversations.iter().flat_map(|c| c.turns.iter().skip(1));
        let mut thinks: Vec<u64> = later.map(|t| t.think.as_secs()).collect();
        near(&mut thinks, 50, 10.0, 0.11);
        near(&mut thinks, 90, 163.0, 0.1);
    }

    #[test]
    fn made_conversations_are_deterministic_and_covered() {
        assert_eq!(conversation(3, 5), conversation(3, 5));
        assert_ne!(conversation(3, 5), conversation(3, 6));
        assert_ne!(conversation(3, 5), conversation(4, 5));
        for turn in (0..50).flat_map(|index| conversation(0, index).turns) {
            assert_eq!(turn.blocks.len(), turn.prompt_tokens.div_ceil(BLOCK_TOKENS));
            assert!(turn.prompt_tokens <= CONTEXT_TOKENS_MAX);
        }
    }
}

//! Converts block ids to tokens and text (a pure module).
//!
//! Invariant: the content at a position depends only on the seed, the pass, the namespace of the
//! block's id, the id, and the offset inside the block. So prompts share exactly the prefix that
//! their block ids share, and local ids of different conversations never collide.

use crate::shape::Shape;
use crate::trace::{Conversation, TraceTurn};

/// Namespace numbers that differ from those of conversations, which are their index.
const GLOBAL: u64 = u64::MAX;
const SHARED: u64 = u64::MAX - 1;

/// The letters of text: one byte each, and no letter that JSON escapes.
const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz012345";

/// The values that make the contents of two replays differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Salt {
    /// The replay's seed.
    pub seed: u64,
    /// How often the trace was started again. A recycled conversation must not find its own old KV.
    pub pass: u64,
}

/// Returns a prompt as one random number per token, to be read as token ids or as text.
pub fn symbols(
    conversation: &Conversation,
    turn: &TraceTurn,
    shape: &Shape,
    salt: Salt,
) -> Vec<u32> {
    let length = shape.prompt_tokens(turn);
    let mut symbols = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    let front = shape.tokens(conversation.shared.tokens).min(length);
    let shared = mix(mix(salt.seed, SHARED), conversation.shared.stream);
    symbols.extend((0..front).map(|position| symbol(shared, position)));
    let scope = conversation.scope.unwrap_or(GLOBAL);
    let local = mix(mix(mix(salt.seed, scope), salt.pass), 0);
    let mut index = 0;
    for run in turn.blocks.runs() {
        for id in run.first..run.first + run.count {
            let start = shape.tokens(index * conversation.block_tokens);
            index += 1;
            let end = shape.tokens(index * conversation.block_tokens).min(length);
            let block = mix(local, id);
            for position in start.max(front)..end {
                symbols.push(symbol(block, position - start));
            }
        }
    }
    // A prompt whose scaled length is below one token still has one token.
    symbols.resize(usize::try_from(length).unwrap_or(usize::MAX), 0);
    symbols
}

/// Returns how many leading tokens two turns of a conversation have in common.
pub fn shared_prefix(
    conversation: &Conversation,
    a: &TraceTurn,
    b: &TraceTurn,
    shape: &Shape,
) -> u64 {
    let shorter = shape.prompt_tokens(a).min(shape.prompt_tokens(b));
    // Blocks inside the shared prefix have the prefix's content, whatever their ids are.
    let hidden = conversation.shared.tokens / conversation.block_tokens;
    let blocks =
        hidden + a.blocks.without_first(hidden).common_prefix(&b.blocks.without_first(hidden));
    let named = blocks * conversation.block_tokens;
    shape.tokens(named.max(conversation.shared.tokens)).min(shorter)
}

/// Converts a symbol to a token id below `vocab`.
pub fn token(symbol: u32, vocab: u32) -> u32 {
    let scaled = (u64::from(symbol) * u64::from(vocab)) >> 32;
    u32::try_from(scaled).expect("the product of two u32 shifted by 32 fits")
}

/// Converts each symbol to `bytes_per_token` bytes of text: a word that ends in a space, or a
/// single letter.
pub fn text(symbols: &[u32], bytes_per_token: usize) -> String {
    let mut text = String::with_capacity(symbols.len() * bytes_per_token);
    for &symbol in symbols {
        let mut left = u64::from(symbol) << 3 | u64::from(symbol >> 29);
        for _ in 1..bytes_per_token {
            text.push(letter(left));
            left = mix(left, 1);
        }
        text.push(if bytes_per_token == 1 { letter(left >> 3) } else { ' ' });
    }
    text
}

fn letter(bits: u64) -> char {
    char::from(LETTERS[usize::try_from(bits % 32).expect("a remainder of 32 fits")])
}

fn symbol(block: u64, offset: u64) -> u32 {
    u32::try_from(mix(block, offset) >> 32).expect("the upper half of a u64 fits")
}

/// Mixes two words into one (the finalizer of SplitMix64 over their combination).
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Blocks, Shared};
    use proptest::prelude::*;

    fn turn(ids: &[u64], tokens: u64) -> TraceTurn {
        TraceTurn {
            prompt_tokens: tokens,
            output_tokens: 1,
            blocks: Blocks::from_ids(ids),
            ..TraceTurn::default()
        }
    }

    fn conversation(scope: Option<u64>, shared_tokens: u64) -> Conversation {
        Conversation {
            id: "c".to_owned(),
            block_tokens: 64,
            scope,
            shared: Shared { stream: 0, tokens: shared_tokens },
            turns: Vec::new(),
            ..Conversation::default()
        }
    }

    fn common(a: &[u32], b: &[u32]) -> u64 {
        a.iter().zip(b).take_while(|(x, y)| x == y).count() as u64
    }

    proptest! {
        #[test]
        fn prompts_share_what_their_ids_share(
            a in prop::collection::vec(0u64..4, 1..12),
            b in prop::collection::vec(0u64..4, 1..12),
            scale in prop::sample::select(vec![1.0, 0.5, 0.13]),
            front in prop::sample::select(vec![0u64, 100]),
        ) {
            let shape = Shape { scale, ..Shape::default() };
            let conversation = conversation(Some(7), front);
            let (left, right) = (turn(&a, a.len() as u64 * 64), turn(&b, b.len() as u64 * 64 - 9));
            let salt = Salt::default();
            let ours = symbols(&conversation, &left, &shape, salt);
            let theirs = symbols(&conversation, &right, &shape, salt);
            prop_assert_eq!(ours.len() as u64, shape.prompt_tokens(&left));
            let expected = shared_prefix(&conversation, &left, &right, &shape);
            prop_assert_eq!(common(&ours, &theirs), expected);
        }
    }

    #[test]
    fn conversations_share_the_front_and_nothing_else() {
        let (shape, salt) = (Shape::default(), Salt::default());
        let turn = turn(&[1, 2, 3, 4], 256);
        let of = |scope, salt| symbols(&conversation(scope, 100), &turn, &shape, salt);
        assert_eq!(common(&of(Some(1), salt), &of(Some(2), salt)), 100);
        assert_eq!(common(&of(None, salt), &of(None, salt)), 256);
        let recycled = Salt { pass: 1, ..salt };
        assert_eq!(common(&of(Some(1), salt), &of(Some(1), recycled)), 100);
        assert_eq!(common(&of(Some(1), salt), &of(Some(1), Salt { seed: 1, pass: 0 })), 0);
    }

    #[test]
    fn tokens_and_text_keep_their_bounds() {
        assert_eq!((token(0, 256), token(u32::MAX, 256)), (0, 255));
        assert_eq!(token(u32::MAX, 128_256), 128_255);
        let symbols: Vec<u32> = (0..1000u32).map(|n| n.wrapping_mul(2_654_435_761)).collect();
        for bytes in [1, 2, 4] {
            let text = text(&symbols, bytes);
            assert_eq!(text.len(), symbols.len() * bytes);
            assert_eq!(serde_json::to_string(&text).unwrap().len(), text.len() + 2);
        }
    }
}

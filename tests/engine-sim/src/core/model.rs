//! The simulated model: the next token is a function of the context alone.
//!
//! An answer therefore shows which context it was computed from.

use super::super::{
    pool,
    tokenizer::{self, EOS},
};

/// Returns the token that follows a context with this digest and this last token.
pub(super) fn next_token(digest: u64, last: u32, eos_per_mille: u32) -> u32 {
    let lead = tokenizer::byte_id(0xc3);
    if last == lead {
        // The second byte of a letter from à to ÿ.
        return tokenizer::byte_id(0xa0 + u8::try_from(digest % 32).expect("below 32"));
    }
    if digest % 1000 < u64::from(eos_per_mille) {
        return EOS;
    }
    let letters = b"etaoin shrdlu cmfwyp vbgkqjxz.,";
    let pick = usize::try_from((digest >> 20) % 32).expect("below 32");
    letters.get(pick).map_or(lead, |&byte| tokenizer::byte_id(byte))
}

/// Whether `answer` is the beginning of a greedy answer to `context`.
pub fn is_model_answer(context: &[u32], answer: &[u32], eos_per_mille: u32) -> bool {
    let mut digest = pool::TokenDigest::default();
    context.iter().for_each(|&token| digest.push(token));
    let mut last = context.last().copied();
    answer.iter().all(|&token| {
        let right =
            last.is_some_and(|last| next_token(digest.value(), last, eos_per_mille) == token);
        digest.push(token);
        last = Some(token);
        right
    })
}

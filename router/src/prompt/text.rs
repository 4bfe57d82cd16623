//! Stands in for the tokens of a text: each four bytes of JSON count as one token.
//!
//! That is about what a tokenizer makes of prose and code. A growing conversation keeps the bytes
//! before an addition, so its leading blocks stay the same. The JSON was validated before and isn't
//! parsed here.

use proto::block::{BlockHash, Chain};
use xxhash_rust::xxh3::xxh3_64;

const TOKEN_BYTES: usize = 4;
/// Number of tokens passed to the chain at once.
const BATCH: usize = 256;
/// The beginning of an image or a file embedded in a message.
const DATA: &str = "\"data:";

/// Appends the texts to the chain, up to `tokens_max` tokens, and ignores the rest. The last text
/// may grow later.
pub(super) fn push_texts(
    texts: &[&str],
    tokens_max: u64,
    chain: &mut Chain,
    hashes: &mut Vec<BlockHash>,
) {
    let Some((last, before)) = texts.split_last() else { return };
    for text in before {
        push_text(text, tokens_max, chain, hashes);
        // The digest keeps the end of one text from being taken for the beginning of the next.
        push_bytes(&xxh3_64(text.as_bytes()).to_le_bytes(), tokens_max, chain, hashes);
    }
    // The trailing characters are left out, as further messages or text replace them.
    let grows = last.trim_end_matches([']', '"', ' ', '\t', '\n', '\r']);
    push_text(grows, tokens_max, chain, hashes);
}

fn push_text(mut text: &str, tokens_max: u64, chain: &mut Chain, hashes: &mut Vec<BlockHash>) {
    while let Some(at) = text.find(DATA) {
        push_bytes(&text.as_bytes()[..at], tokens_max, chain, hashes);
        let data = &text[at + 1..];
        // A data URL contains no escaped quotes. An unclosed one ends the text.
        let end = data.find('"').unwrap_or(data.len());
        let digest = xxh3_64(&data.as_bytes()[..end]).to_le_bytes();
        push_bytes(&digest, tokens_max, chain, hashes);
        text = &data[end..];
    }
    push_bytes(text.as_bytes(), tokens_max, chain, hashes);
}

/// Appends whole tokens only. The last bytes are left out, as they change when the text grows.
fn push_bytes(bytes: &[u8], tokens_max: u64, chain: &mut Chain, hashes: &mut Vec<BlockHash>) {
    let left = usize::try_from(tokens_max.saturating_sub(chain.tokens())).unwrap_or(usize::MAX);
    let (tokens, _) = bytes.as_chunks::<TOKEN_BYTES>();
    for some in tokens[..left.min(tokens.len())].chunks(BATCH) {
        let mut batch = [0; BATCH];
        for (token, bytes) in batch.iter_mut().zip(some) {
            *token = u32::from_le_bytes(*bytes);
        }
        chain.push(&batch[..some.len()], hashes);
    }
}

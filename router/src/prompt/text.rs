//! Text that stands for itself: four bytes of JSON as one token, which is about what a tokenizer
//! makes of prose and code. A conversation that grows has its bytes before what was added, so its
//! leading blocks stay what they were. It parses nothing: the JSON was checked before.

use proto::block::{BlockHash, Chain};
use xxhash_rust::xxh3::xxh3_64;

const TOKEN_BYTES: usize = 4;
/// Tokens handed to the chain at once.
const BATCH: usize = 256;
/// What begins an image or a file written into a message.
const DATA: &str = "\"data:";

/// Appends texts, of which the last may grow, up to `tokens_max` tokens; what is beyond doesn't
/// count.
pub(super) fn push(
    texts: &[&str],
    tokens_max: u64,
    chain: &mut Chain,
    hashes: &mut Vec<BlockHash>,
) {
    let Some((last, before)) = texts.split_last() else { return };
    for text in before {
        push_one(text, tokens_max, chain, hashes);
        // So that no end of one text can be the beginning of the next.
        push_bytes(&xxh3_64(text.as_bytes()).to_le_bytes(), tokens_max, chain, hashes);
    }
    // More messages, or more text, take the place of what ends it.
    let grows = last.trim_end_matches([']', '"', ' ', '\t', '\n', '\r']);
    push_one(grows, tokens_max, chain, hashes);
}

fn push_one(mut text: &str, tokens_max: u64, chain: &mut Chain, hashes: &mut Vec<BlockHash>) {
    while let Some(at) = text.find(DATA) {
        push_bytes(&text.as_bytes()[..at], tokens_max, chain, hashes);
        let data = &text[at + 1..];
        // No quote is escaped in a data URL; one that isn't closed ends the text.
        let end = data.find('"').unwrap_or(data.len());
        let digest = xxh3_64(&data.as_bytes()[..end]).to_le_bytes();
        push_bytes(&digest, tokens_max, chain, hashes);
        text = &data[end..];
    }
    push_bytes(text.as_bytes(), tokens_max, chain, hashes);
}

/// Bytes beyond the last whole token are left out: a text that grows has others there.
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

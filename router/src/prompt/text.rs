//! Hashes a prompt's text into routing blocks without a tokenizer: four bytes count as one token.
//!
//! Four bytes per token is about what a tokenizer makes of prose and code. A growing conversation
//! keeps the bytes that it has, so its leading blocks stay the same. The parent module has
//! validated the JSON, and keeps these blocks apart from blocks of real tokens, because no engine
//! has them.

use blocks::block::{BlockHash, Chain};
use xxhash_rust::xxh3::xxh3_64;

const TOKEN_BYTES: usize = 4;
const BATCH_TOKENS: usize = 256;
const DATA_URL_START: &str = "\"data:";

/// Appends JSON texts until the chain has `tokens_max` tokens, and ignores the rest. A later
/// request of the same conversation may have a longer last text.
pub(super) fn push_texts(
    texts: &[&str],
    tokens_max: u64,
    chain: &mut Chain,
    hashes: &mut Vec<BlockHash>,
) {
    let Some((last_text, earlier_texts)) = texts.split_last() else { return };
    for text in earlier_texts {
        push_text(text, tokens_max, chain, hashes);
        // The digest marks where the text ends. Without it, two texts would have the same blocks as
        // one text that joins them.
        push_bytes(&xxh3_64(text.as_bytes()).to_le_bytes(), tokens_max, chain, hashes);
    }
    // When the last text grows, new messages or characters replace its closing brackets and quotes.
    let stable_text = last_text.trim_end_matches([']', '"', ' ', '\t', '\n', '\r']);
    push_text(stable_text, tokens_max, chain, hashes);
}

/// Puts a digest in the place of each data URL: an image costs far fewer tokens than its bytes.
fn push_text(mut text: &str, tokens_max: u64, chain: &mut Chain, hashes: &mut Vec<BlockHash>) {
    while let Some(quote_index) = text.find(DATA_URL_START) {
        push_bytes(&text.as_bytes()[..quote_index], tokens_max, chain, hashes);
        let after_quote = &text[quote_index + 1..];
        // A data URL contains no quotes. Without a closing quote it goes on to the end of the text.
        let url_bytes = after_quote.find('"').unwrap_or(after_quote.len());
        let digest = xxh3_64(&after_quote.as_bytes()[..url_bytes]).to_le_bytes();
        push_bytes(&digest, tokens_max, chain, hashes);
        text = &after_quote[url_bytes..];
    }
    push_bytes(text.as_bytes(), tokens_max, chain, hashes);
}

/// Leaves out up to three bytes at the end that don't fill a token: the token would change when the
/// text grows.
fn push_bytes(bytes: &[u8], tokens_max: u64, chain: &mut Chain, hashes: &mut Vec<BlockHash>) {
    let tokens_left =
        usize::try_from(tokens_max.saturating_sub(chain.tokens())).unwrap_or(usize::MAX);
    let (tokens, _) = bytes.as_chunks::<TOKEN_BYTES>();
    for part in tokens[..tokens_left.min(tokens.len())].chunks(BATCH_TOKENS) {
        let mut batch = [0; BATCH_TOKENS];
        for (token, bytes) in batch.iter_mut().zip(part) {
            *token = u32::from_le_bytes(*bytes);
        }
        chain.push(&batch[..part.len()], hashes);
    }
}

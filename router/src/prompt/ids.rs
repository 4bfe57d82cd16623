//! Reads token ids from a JSON array straight into a chain, without a list of them.
//!
//! It accepts nothing but a flat array of token ids, and gives no details about other input.

use proto::block::{BlockHash, Chain};

/// Number of ids passed to the chain at once: four blocks, on the stack.
const BATCH: usize = 256;

/// The input is not an array of at most `tokens_max` token ids. The chain and the hashes are
/// invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotIds;

/// Appends an array's ids to a chain, at most `tokens_max` of them.
pub(super) fn push_ids(
    json: &str,
    tokens_max: u64,
    chain: &mut Chain,
    hashes: &mut Vec<BlockHash>,
) -> Result<(), NotIds> {
    let inner = json.trim_ascii();
    let inner = inner.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).ok_or(NotIds)?;
    let bytes = inner.trim_ascii().as_bytes();
    let (mut batch, mut filled, mut left) = ([0; BATCH], 0, tokens_max);
    let mut at = 0;
    while at < bytes.len() {
        let (id, end) = parse_id(bytes, at).ok_or(NotIds)?;
        left = left.checked_sub(1).ok_or(NotIds)?;
        batch[filled] = id;
        filled += 1;
        if filled == BATCH {
            chain.push(&batch, hashes);
            filled = 0;
        }
        at = skip_comma(bytes, end).ok_or(NotIds)?;
    }
    chain.push(&batch[..filled], hashes);
    Ok(())
}

/// Reads a token id. Returns it and where it ends. The text is valid JSON, so signs and leading
/// zeros are not checked for.
fn parse_id(bytes: &[u8], mut at: usize) -> Option<(u32, usize)> {
    let start = at;
    let mut id = 0_u64;
    while let Some(digit) = bytes.get(at).map(|byte| byte.wrapping_sub(b'0')).filter(|&d| d < 10) {
        id = id * 10 + u64::from(digit);
        at += 1;
        // Longer than any u32: return before the number can overflow.
        if at - start > 10 {
            return None;
        }
    }
    if at == start { None } else { Some((u32::try_from(id).ok()?, at)) }
}

/// Returns where the next id begins, or the end of the text.
fn skip_comma(bytes: &[u8], mut at: usize) -> Option<usize> {
    let skip = |mut at: usize| {
        while bytes.get(at).is_some_and(u8::is_ascii_whitespace) {
            at += 1;
        }
        at
    };
    at = skip(at);
    match bytes.get(at) {
        None => Some(at),
        Some(b',') => Some(skip(at + 1)),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::block::{BlockTokens, Scheme};

    use super::*;

    fn hashed(json: &str, tokens_max: u64) -> Option<(u64, Vec<BlockHash>)> {
        let scheme = Scheme::plain(BlockTokens::for_page(1).unwrap());
        let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
        push_ids(json, tokens_max, &mut chain, &mut hashes).ok()?;
        Some((chain.tokens(), hashes))
    }

    #[test]
    fn only_a_flat_array_of_ids_within_the_bound_is_taken() {
        assert_eq!(hashed("[]", 0), Some((0, vec![])));
        assert_eq!(hashed(" [ 1 ,\n2,4294967295 ] ", 3).map(|(tokens, _)| tokens), Some(3));
        let refused =
            ["[1,2,3,4]", "[[1]]", "[-1]", "[1.0]", "[1e2]", "[4294967296]", "[\"1\"]", "7", "{}"];
        for json in refused {
            assert_eq!(hashed(json, 3), None, "{json}");
        }
        assert_eq!(hashed("[123456789012345678901234567890]", 3), None);
    }

    proptest! {
        #[test]
        fn it_is_what_a_parser_reads(
            ids in prop::collection::vec(any::<u32>(), 0..700),
            comma in "[ \n\t]{0,2},[ \n\t]{0,2}",
        ) {
            let text: Vec<String> = ids.iter().map(u32::to_string).collect();
            let json = format!("[{}]", text.join(&comma));
            prop_assert_eq!(&serde_json::from_str::<Vec<u32>>(&json).unwrap(), &ids);
            let scheme = Scheme::plain(BlockTokens::for_page(1).unwrap());
            let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
            chain.push(&ids, &mut hashes);
            prop_assert_eq!(hashed(&json, 700), Some((ids.len() as u64, hashes)));
        }

        #[test]
        fn nothing_panics(json in "\\PC{0,40}", digits in "[\\[\\]0-9, ]{0,60}") {
            let _ = hashed(&json, 100);
            let _ = hashed(&digits, 100);
        }
    }
}

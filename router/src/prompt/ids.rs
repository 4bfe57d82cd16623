//! Hashes a JSON array of token ids into routing blocks, without making a list of the ids.

use blocks::block::{BlockHash, Chain};

/// Four blocks of 64 tokens. They are on the stack.
const BATCH_IDS: usize = 256;

/// The input is not an array of at most `tokens_max` token ids. The chain and the hashes passed in
/// may have been extended, and must not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotIds;

/// `json` must be valid JSON. So leading zeros and a trailing comma need no check.
pub(super) fn push_ids(
    json: &str,
    tokens_max: u64,
    chain: &mut Chain,
    hashes: &mut Vec<BlockHash>,
) -> Result<(), NotIds> {
    let inner = json.trim_ascii();
    let inner = inner.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).ok_or(NotIds)?;
    let bytes = inner.trim_ascii().as_bytes();
    let (mut batch, mut filled, mut ids_left) = ([0; BATCH_IDS], 0, tokens_max);
    let mut offset = 0;
    while offset < bytes.len() {
        let (id, id_end) = parse_id(bytes, offset).ok_or(NotIds)?;
        ids_left = ids_left.checked_sub(1).ok_or(NotIds)?;
        batch[filled] = id;
        filled += 1;
        if filled == BATCH_IDS {
            chain.push(&batch, hashes);
            filled = 0;
        }
        offset = skip_comma(bytes, id_end).ok_or(NotIds)?;
    }
    chain.push(&batch[..filled], hashes);
    Ok(())
}

/// Returns the id at `start` and the offset of its end. `None` if no digit is there, as for a
/// negative number, or if the number doesn't fit in a `u32`.
fn parse_id(bytes: &[u8], start: usize) -> Option<(u32, usize)> {
    let mut end = start;
    let mut id = 0_u64;
    while let Some(digit) = bytes.get(end).map(|byte| byte.wrapping_sub(b'0')).filter(|&d| d < 10) {
        id = id * 10 + u64::from(digit);
        end += 1;
        // No u32 has more than 10 digits. Return before the u64 overflows.
        if end - start > 10 {
            return None;
        }
    }
    if end == start { None } else { Some((u32::try_from(id).ok()?, end)) }
}

/// Returns the offset of the next id or the text's end; `None` if anything but a comma follows.
fn skip_comma(bytes: &[u8], id_end: usize) -> Option<usize> {
    let skip_whitespace = |mut offset: usize| {
        while bytes.get(offset).is_some_and(u8::is_ascii_whitespace) {
            offset += 1;
        }
        offset
    };
    let offset = skip_whitespace(id_end);
    match bytes.get(offset) {
        None => Some(offset),
        Some(b',') => Some(skip_whitespace(offset + 1)),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use blocks::block::{BlockTokens, Scheme};
    use proptest::prelude::*;

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

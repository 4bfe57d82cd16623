//! The toy tokenizer: one byte is one token, plus four special tokens.
//!
//! As in a byte-level BPE without merges, the id of a byte is its rank in the sorted byte-level
//! alphabet, not its value. The tokenizer adds no BOS, so prompt lengths are exactly predictable.

/// The vocabulary size; a token id at or above it kills the engine.
pub const VOCAB_SIZE: u32 = 320;
pub const BOS: u32 = 256;
pub const EOS: u32 = 257;
const IM_START: u32 = 258;
const IM_END: u32 = 259;

const SPECIALS: [(&str, u32); 4] =
    [("<|bos|>", BOS), ("<|eos|>", EOS), ("<|im_start|>", IM_START), ("<|im_end|>", IM_END)];

/// Returns the id of a byte.
pub fn byte_id(byte: u8) -> u32 {
    let byte = u32::from(byte);
    match byte {
        33..=126 => byte - 33,
        161..=172 => byte - 161 + 94,
        174..=255 => byte - 174 + 106,
        0..=32 => byte + 188,
        127..=160 => byte - 127 + 221,
        _ => 255,
    }
}

/// Returns the byte of an id. Ids of the padded vocabulary decode as `!`, as in the real model.
fn id_byte(id: u32) -> u8 {
    let byte = match id {
        0..=93 => id + 33,
        94..=105 => id - 94 + 161,
        106..=187 => id - 106 + 174,
        188..=220 => id - 188,
        221..=254 => id - 221 + 127,
        255 => 173,
        _ => u32::from(b'!'),
    };
    u8::try_from(byte).expect("every arm is below 256")
}

/// Returns the token ids of a text; the name of a special token is encoded as its id.
pub fn encode(text: &str) -> Vec<u32> {
    let mut ids = Vec::with_capacity(text.len());
    let mut rest = text;
    'outer: while !rest.is_empty() {
        for (name, id) in SPECIALS {
            if let Some(after) = rest.strip_prefix(name) {
                ids.push(id);
                rest = after;
                continue 'outer;
            }
        }
        let first = rest.chars().next().map_or(1, char::len_utf8);
        let next = rest[first..].find("<|").map_or(rest.len(), |i| i + first);
        ids.extend(rest[..next].bytes().map(byte_id));
        rest = &rest[next..];
    }
    ids
}

/// Decodes token ids, without special tokens. While `last` is false, an incomplete UTF-8 sequence
/// at the end is held back; the engine shows it once it is complete or the turn ends.
pub fn decode(ids: &[u32], last: bool) -> String {
    let special = |id: u32| (BOS..=IM_END).contains(&id);
    let mut bytes: Vec<u8> =
        ids.iter().filter(|&&id| !special(id)).map(|&id| id_byte(id)).collect();
    if !last {
        bytes.truncate(bytes.len() - unfinished_tail(&bytes));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn unfinished_tail(bytes: &[u8]) -> usize {
    let tail = bytes.utf8_chunks().last().map_or(&[][..], |c| c.invalid());
    // `error_len` is `None` exactly when the input ends inside a sequence.
    let cut_short = std::str::from_utf8(tail).is_err_and(|e| e.error_len().is_none());
    if cut_short { tail.len() } else { 0 }
}

/// Returns the ids of a conversation in the model's ChatML-like template, up to the start of the
/// answer.
pub fn chat<'a>(messages: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<u32> {
    let mut text = String::new();
    for (role, content) in messages {
        text.push_str(&format!("<|im_start|>{role}\n{content}<|im_end|>\n"));
    }
    text.push_str("<|im_start|>assistant\n");
    encode(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_ids_are_ranks() {
        assert_eq!((byte_id(b'!'), byte_id(b'0'), byte_id(b'h')), (0, 15, 71));
        for byte in 0..=255u8 {
            assert_eq!(id_byte(byte_id(byte)), byte);
        }
    }

    #[test]
    fn text_survives() {
        let text = "naïve <|x> 漢字 <|im_start|>user";
        let ids = encode(text);
        assert_eq!(ids.iter().filter(|&&id| id == IM_START).count(), 1);
        assert_eq!(decode(&ids, true), "naïve <|x> 漢字 user");
        assert_eq!(encode("漢").len(), 3);
    }

    #[test]
    fn unfinished_utf8_is_held_back() {
        let ids = encode("aé");
        assert_eq!(decode(&ids[..2], false), "a");
        assert_eq!(decode(&ids[..2], true), "a\u{fffd}");
        assert_eq!(decode(&ids, false), "aé");
    }
}

//! Recognizes the known volatile preambles at the beginning of a JSON string.
//!
//! A volatile preamble is a text that a client puts before its system prompt and changes with each
//! request. The text stands in a JSON string of the request body, where a client may write any
//! character as an escape. This module decodes the string character by character while it matches.
//! So it knows the length of the preamble in bytes of the body. It reads at most [`CHARS_MAX`]
//! characters. The parent module passes in the string, and removes the preamble.

use super::PreamblePlace;

/// Maximum number of decoded characters in a preamble. Known preambles have about 100.
const CHARS_MAX: usize = 4096;
/// Maximum number of characters in a key. Known keys have up to 13.
const KEY_CHARS_MAX: usize = 64;
/// Maximum number of characters in a value. Known values have up to 20.
const VALUE_CHARS_MAX: usize = 256;
/// Maximum number of line breaks that are removed after a preamble. Gateways put one line break or
/// an empty line (two line breaks) there.
const LINE_BREAKS_MAX: usize = 2;

/// A volatile preamble that a client is known to write.
struct KnownPreamble {
    /// The client's name as a label in metrics.
    client: &'static str,
    /// Where the client or a gateway puts the preamble.
    places: &'static [PreamblePlace],
    pattern: Pattern,
}

/// The form of a preamble.
enum Pattern {
    /// `name`, then pairs like ` key=value;`. The first pair has the key `first_key`. Every pair
    /// must end in `;`. Keys are small letters, digits and `_`. Values are visible ASCII.
    Pairs { name: &'static str, first_key: &'static str },
}

/// All known volatile preambles.
const KNOWN_PREAMBLES: [KnownPreamble; 1] = [
    // The preamble is the first block of `system`. The value of `cch` and a part of `cc_version`
    // change with each request: anthropics/claude-code#68900 (2026-06-16). Some gateways put it
    // into a chat message or `instructions`: sgl-project/sglang#35129, CaddyGlow/ccproxy-api#61
    // (2026-04-30).
    KnownPreamble {
        client: "claude_code",
        places: &[PreamblePlace::System, PreamblePlace::FirstMessage, PreamblePlace::Instructions],
        pattern: Pattern::Pairs { name: "x-anthropic-billing-header:", first_key: "cc_version" },
    },
];

/// A preamble at the beginning of a text.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreambleMatch {
    pub(super) client: &'static str,
    /// The length of the preamble in bytes of the body, with the line breaks after it.
    pub(super) raw_bytes: usize,
    /// Whether the text holds only the preamble.
    pub(super) is_whole_text: bool,
}

/// Returns the known preamble at the beginning of a JSON string. `string_content` is the string as
/// it stands in the body, without its quotes.
pub(super) fn find(place: PreamblePlace, string_content: &str) -> Option<PreambleMatch> {
    KNOWN_PREAMBLES.iter().filter(|known_preamble| known_preamble.places.contains(&place)).find_map(
        |known_preamble| {
            let mut text = UnreadText { rest: string_content, chars_left: CHARS_MAX };
            match known_preamble.pattern {
                Pattern::Pairs { name, first_key } => text.take_pairs(name, first_key)?,
            }
            text.take_line_breaks();
            let raw_bytes = string_content.len() - text.rest.len();
            Some(PreambleMatch {
                client: known_preamble.client,
                raw_bytes,
                is_whole_text: text.rest.is_empty(),
            })
        },
    )
}

/// The part of a text that is not read yet.
#[derive(Clone, Copy)]
struct UnreadText<'a> {
    /// The unread part of the JSON string, with its escapes.
    rest: &'a str,
    /// The number of characters that may still be read.
    chars_left: usize,
}

/// The result of reading a pair like ` key=value;`.
enum Pair {
    Complete,
    /// The text has a key and `=`, but no valid value that ends in `;`. Or [`CHARS_MAX`] was
    /// reached.
    Broken,
    /// The text doesn't begin with a space, a key and `=`.
    Absent,
}

impl UnreadText<'_> {
    /// Reads a preamble of the form [`Pattern::Pairs`]. Returns `None` if the text doesn't begin
    /// with a complete one.
    fn take_pairs(&mut self, name: &str, first_key: &str) -> Option<()> {
        self.take(name)?;
        // This only checks the first key, on a copy. The loop below reads the whole first pair.
        let mut lookahead = *self;
        lookahead
            .take(" ")
            .and_then(|()| lookahead.take(first_key))
            .and_then(|()| lookahead.take("="))?;
        loop {
            match self.take_pair() {
                Pair::Complete => {}
                Pair::Broken => return None,
                Pair::Absent => return Some(()),
            }
        }
    }

    /// Reads a pair if it is complete. Otherwise reads nothing.
    fn take_pair(&mut self) -> Pair {
        let mut lookahead = *self;
        if lookahead.take(" ").is_none() || lookahead.take_key().is_none() {
            // At the maximum length, it is unknown whether the preamble goes on.
            return if lookahead.chars_left == 0 { Pair::Broken } else { Pair::Absent };
        }
        for _ in 0..=VALUE_CHARS_MAX {
            match lookahead.next_char() {
                Some(';') => {
                    *self = lookahead;
                    return Pair::Complete;
                }
                Some(char) if char.is_ascii_graphic() => {}
                _ => break,
            }
        }
        Pair::Broken
    }

    /// Reads a key and the `=` after it.
    fn take_key(&mut self) -> Option<()> {
        self.next_char().filter(char::is_ascii_lowercase)?;
        for _ in 0..KEY_CHARS_MAX {
            match self.next_char()? {
                '=' => return Some(()),
                'a'..='z' | '0'..='9' | '_' => {}
                _ => break,
            }
        }
        None
    }

    /// Reads up to [`LINE_BREAKS_MAX`] line breaks.
    fn take_line_breaks(&mut self) {
        for _ in 0..LINE_BREAKS_MAX {
            let mut lookahead = *self;
            if lookahead.take("\r\n").is_none() {
                lookahead = *self;
                if lookahead.take("\n").is_none() {
                    return;
                }
            }
            *self = lookahead;
        }
    }

    /// Reads the characters of `wanted`. Returns `None` at the first character that differs.
    fn take(&mut self, wanted: &str) -> Option<()> {
        wanted.chars().try_for_each(|char| (self.next_char() == Some(char)).then_some(()))
    }

    /// Reads the next decoded character. Returns `None` at the end of the text, and when
    /// [`CHARS_MAX`] characters were read.
    fn next_char(&mut self) -> Option<char> {
        self.chars_left = self.chars_left.checked_sub(1)?;
        let mut raw_chars = self.rest.chars();
        let mut char = raw_chars.next()?;
        if char == '\\' {
            char = match raw_chars.next()? {
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'u' => {
                    let digits = raw_chars.as_str().get(..4)?;
                    raw_chars = raw_chars.as_str()[4..].chars();
                    // An escape for half of a surrogate pair becomes a character that no known
                    // preamble contains, so the text doesn't match.
                    let code = u32::from_str_radix(digits, 16).ok()?;
                    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
                }
                escaped => escaped,
            };
        }
        self.rest = raw_chars.as_str();
        Some(char)
    }
}

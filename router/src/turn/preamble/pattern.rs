//! Recognizes the known volatile preambles at the beginning of a JSON string.
//!
//! A client may write any character of a JSON string as an escape. So the string is decoded
//! character by character while it is matched, which gives the preamble's length in bytes of the
//! body.

use super::PreamblePlace;

/// Counts decoded characters. Known preambles have about 100.
const CHARS_MAX: usize = 4096;
/// Known keys have up to 13.
const KEY_CHARS_MAX: usize = 64;
/// Known values have up to 20.
const VALUE_CHARS_MAX: usize = 256;
/// Gateways put one line break or an empty line (two line breaks) after a preamble.
const LINE_BREAKS_MAX: usize = 2;

struct KnownPreamble {
    /// The client's name as a label in metrics.
    client: &'static str,
    /// Where the client or a gateway puts the preamble.
    places: &'static [PreamblePlace],
    pattern: Pattern,
}

enum Pattern {
    /// `name`, then pairs like ` key=value;`, the first with `first_key`. Every pair must end in
    /// `;`. Keys are small letters, digits and `_`. Values are visible ASCII.
    Pairs { name: &'static str, first_key: &'static str },
}

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

#[derive(Debug, Clone, Copy)]
pub(super) struct PreambleMatch {
    pub(super) client: &'static str,
    /// In bytes of the body, with the line breaks after the preamble.
    pub(super) raw_bytes: usize,
    pub(super) is_whole_text: bool,
}

/// `string_content` is the string as it stands in the body, without its quotes.
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

#[derive(Clone, Copy)]
struct UnreadText<'a> {
    /// The unread part of the JSON string, with its escapes.
    rest: &'a str,
    chars_left: usize,
}

enum Pair {
    Complete,
    /// A key and `=`, but no valid value that ends in `;`, or [`CHARS_MAX`] was reached.
    Broken,
    Absent,
}

impl UnreadText<'_> {
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

    /// Reads nothing if the pair isn't complete.
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

    fn take(&mut self, wanted: &str) -> Option<()> {
        wanted.chars().try_for_each(|char| (self.next_char() == Some(char)).then_some(()))
    }

    /// `None` also when [`CHARS_MAX`] characters were read.
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

//! The forms of known volatile preambles, and the check whether a text begins with a preamble.
//!
//! The check decodes the JSON string escape by escape while it matches, so the length of the match
//! is known in bytes of the body, whichever escapes the client uses. It reads at most
//! [`TEXT_BYTES_MAX`] characters, once.

use super::Place;

/// The most decoded characters of a preamble. Known preambles have about 100.
const TEXT_BYTES_MAX: usize = 4096;
/// The most characters of a key. Known keys have up to 13.
const KEY_BYTES_MAX: usize = 64;
/// The most characters of a value. Known values have up to 20.
const VALUE_BYTES_MAX: usize = 256;
/// The most line breaks that are removed after a preamble: one line break, or an empty line.
const LINE_BREAKS_MAX: usize = 2;

/// A volatile preamble that a client is known to write.
struct KnownPreamble {
    /// The value of the metric's label.
    client: &'static str,
    places: &'static [Place],
    pattern: Pattern,
}

/// The form of a preamble.
enum Pattern {
    /// `name`, then pairs like ` key=value;`. The first pair has the key `first_key`, and every
    /// pair must end in `;`. Keys are small letters, digits and `_`; values are visible ASCII.
    Pairs { name: &'static str, first_key: &'static str },
}

/// All known volatile preambles.
const KNOWN_PREAMBLES: [KnownPreamble; 1] = [
    // anthropics/claude-code#68900 (2026-06-16): the preamble is the first block of `system`; `cch`
    // and a part of `cc_version` change with each request. Gateways that turn it into a chat
    // message or `instructions`: sgl-project/sglang#35129, CaddyGlow/ccproxy-api#61 (2026-04-30).
    KnownPreamble {
        client: "claude_code",
        places: &[Place::System, Place::FirstMessage, Place::Instructions],
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

/// Returns the known preamble at the beginning of `inside`, the content of a valid JSON string
/// without its quotes.
pub(super) fn find(place: Place, inside: &str) -> Option<PreambleMatch> {
    KNOWN_PREAMBLES.iter().filter(|known| known.places.contains(&place)).find_map(|known| {
        let mut text = Text { rest: inside, left: TEXT_BYTES_MAX };
        match known.pattern {
            Pattern::Pairs { name, first_key } => text.take_pairs(name, first_key)?,
        }
        text.take_line_breaks();
        let raw_bytes = inside.len() - text.rest.len();
        Some(PreambleMatch { client: known.client, raw_bytes, is_whole_text: text.rest.is_empty() })
    })
}

/// The part of a text that is not read yet.
#[derive(Clone, Copy)]
struct Text<'a> {
    /// The rest, with the escapes of the JSON string.
    rest: &'a str,
    /// The number of characters that may still be read.
    left: usize,
}

/// The result of reading a pair.
enum Pair {
    Complete,
    /// A key and `=` without a value that ends in `;`, or a text that reaches the bound.
    Broken,
    Absent,
}

impl Text<'_> {
    fn take_pairs(&mut self, name: &str, first_key: &str) -> Option<()> {
        self.take(name)?;
        let mut first = *self;
        first.take(" ").and_then(|()| first.take(first_key)).and_then(|()| first.take("="))?;
        loop {
            match self.take_pair() {
                Pair::Complete => {}
                Pair::Broken => return None,
                Pair::Absent => return Some(()),
            }
        }
    }

    fn take_pair(&mut self) -> Pair {
        let mut ahead = *self;
        if ahead.take(" ").is_none() || ahead.take_key().is_none() {
            // At the bound it is unknown whether the preamble is complete.
            return if ahead.left == 0 { Pair::Broken } else { Pair::Absent };
        }
        for _ in 0..=VALUE_BYTES_MAX {
            match ahead.next() {
                Some(';') => {
                    *self = ahead;
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
        self.next().filter(char::is_ascii_lowercase)?;
        for _ in 0..KEY_BYTES_MAX {
            match self.next()? {
                '=' => return Some(()),
                'a'..='z' | '0'..='9' | '_' => {}
                _ => break,
            }
        }
        None
    }

    fn take_line_breaks(&mut self) {
        for _ in 0..LINE_BREAKS_MAX {
            let mut ahead = *self;
            if ahead.take("\r\n").is_none() {
                ahead = *self;
                if ahead.take("\n").is_none() {
                    return;
                }
            }
            *self = ahead;
        }
    }

    fn take(&mut self, wanted: &str) -> Option<()> {
        wanted.chars().try_for_each(|char| (self.next() == Some(char)).then_some(()))
    }

    /// Reads the next character. Returns None at the end of the text and at the bound.
    fn next(&mut self) -> Option<char> {
        self.left = self.left.checked_sub(1)?;
        let mut raw = self.rest.chars();
        let mut char = raw.next()?;
        if char == '\\' {
            char = match raw.next()? {
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'u' => {
                    let digits = raw.as_str().get(..4)?;
                    raw = raw.as_str()[4..].chars();
                    // Half of a surrogate pair matches nothing: no preamble has such a character.
                    let code = u32::from_str_radix(digits, 16).ok()?;
                    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
                }
                quoted => quoted,
            };
        }
        self.rest = raw.as_str();
        Some(char)
    }
}

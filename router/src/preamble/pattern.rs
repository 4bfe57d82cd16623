//! What known volatile preambles look like, and whether a text begins with one. A text is matched
//! as its JSON string is decoded, escape by escape, so that however a client writes it, the match
//! is known in bytes of the body. Matching takes one pass over at most [`TEXT_BYTES_MAX`].

use super::Place;

/// How far into a text a preamble may reach, in decoded bytes. Known ones have about 100.
const TEXT_BYTES_MAX: usize = 4096;
/// Of a key. Known ones have up to 13 bytes.
const KEY_BYTES_MAX: usize = 64;
/// Of a value. Known ones have up to 20 bytes.
const VALUE_BYTES_MAX: usize = 256;
/// Line breaks behind a preamble that go with it: one, or an empty line.
const LINE_BREAKS_MAX: usize = 2;

/// A volatile preamble that a client is known to write.
struct Known {
    /// The value of the metric's label.
    client: &'static str,
    places: &'static [Place],
    pattern: Pattern,
}

/// The form of a preamble.
enum Pattern {
    /// `name`, then pairs like ` key=value;`, of which the first has `first_key`. Every pair has
    /// to be terminated. Keys are small letters, digits and `_`; values are visible ASCII.
    Pairs { name: &'static str, first_key: &'static str },
}

/// All known volatile preambles.
const KNOWN: [Known; 1] = [
    // anthropics/claude-code#68900 (2026-06-16): the first block of `system`; `cch`, and a part of
    // `cc_version`, change with each request. Gateways that make chats or `instructions` of it:
    // sgl-project/sglang#35129, CaddyGlow/ccproxy-api#61 (2026-04-30).
    Known {
        client: "claude_code",
        places: &[Place::System, Place::FirstMessage, Place::Instructions],
        pattern: Pattern::Pairs { name: "x-anthropic-billing-header:", first_key: "cc_version" },
    },
];

/// A preamble at the beginning of a text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Match {
    pub(super) client: &'static str,
    /// Its bytes in the body, with the line breaks behind it.
    pub(super) raw_bytes: usize,
    /// Whether the text has nothing else.
    pub(super) is_all: bool,
}

/// Matches the inside of a valid JSON string, without its quotes.
pub(super) fn find(place: Place, inside: &str) -> Option<Match> {
    KNOWN.iter().filter(|known| known.places.contains(&place)).find_map(|known| {
        let mut text = Text { rest: inside, left: TEXT_BYTES_MAX };
        match known.pattern {
            Pattern::Pairs { name, first_key } => text.take_pairs(name, first_key)?,
        }
        text.take_line_breaks();
        let raw_bytes = inside.len() - text.rest.len();
        Some(Match { client: known.client, raw_bytes, is_all: text.rest.is_empty() })
    })
}

/// What is left of a text.
#[derive(Clone, Copy)]
struct Text<'a> {
    /// As the JSON string has it.
    rest: &'a str,
    /// Characters that may still be read.
    left: usize,
}

/// What a text goes on with.
enum Pair {
    Complete,
    /// Its key and `=`, and then no value that ends.
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
            // What can't be read to its end isn't known to be complete.
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

    /// A key and the `=` behind it.
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

    /// The next character; None at the end, or where the bound is reached.
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
                    // Halves of a pair stand for nothing that a preamble has.
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

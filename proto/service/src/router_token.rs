//! The shared token by which routers and agents recognize each other, where TLS is done elsewhere.
//!
//! A file has one token per line. Both sides accept a proof by each of them, and make their own
//! proofs (see [`crate::proof`]) by the first. So a token is rotated without a failed turn: agents
//! accept the new one beside the old, then routers, then both make it their first, then both forget
//! the old one. A token never leaves its process.

use std::path::PathBuf;

use ring::hmac;
use subtle::ConstantTimeEq as _;

use crate::reload::Source;

/// The shortest token, in characters. 128 random bits have 32 hex digits.
const TOKEN_CHARS_MIN: usize = 32;
const TOKEN_CHARS_MAX: usize = 1024;
/// The most tokens in a file. A rotation needs two.
const TOKENS_MAX: usize = 8;
pub(crate) const TOKEN_ID_BYTES: usize = 8;

/// The tokens of a file: at least one.
pub struct Tokens(Vec<Token>);

/// One token, of which only the key of its HMACs is kept.
pub(crate) struct Token {
    id: [u8; TOKEN_ID_BYTES],
    key: hmac::Key,
}

/// An HMAC-SHA256 of parts, each of which counts with its length.
pub(crate) struct Mac(hmac::Context);

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokens({})", self.0.len())
    }
}

impl Mac {
    pub(crate) fn add(&mut self, part: &[u8]) {
        self.0.update(&(part.len() as u64).to_le_bytes());
        self.0.update(part);
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        let tag = self.0.sign();
        tag.as_ref().try_into().expect("an HMAC-SHA256 has 32 bytes")
    }

    /// Whether the HMAC of all parts is `mac`. Takes the same time for every `mac` of 32 bytes.
    pub(crate) fn is(self, mac: &[u8]) -> bool {
        self.finish().ct_eq(mac).into()
    }
}

impl Token {
    fn new(token: &str) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, token.as_bytes());
        let mut token = Self { id: [0; TOKEN_ID_BYTES], key };
        let digest = token.mac("berth token id").finish();
        token.id.copy_from_slice(&digest[..TOKEN_ID_BYTES]);
        token
    }

    /// Returns the id by which the other side finds the token in its file.
    pub(crate) fn id(&self) -> &[u8; TOKEN_ID_BYTES] {
        &self.id
    }

    /// Begins an HMAC for this purpose. No proof for one purpose is one for another.
    pub(crate) fn mac(&self, purpose: &str) -> Mac {
        let mut mac = Mac(hmac::Context::with_key(&self.key));
        mac.add(purpose.as_bytes());
        mac
    }
}

impl Tokens {
    #[must_use]
    pub fn source(path: PathBuf) -> Source<Self> {
        let shown = path.display().to_string();
        Source::new("router_token", vec![path], move |contents| Self::parse(&shown, &contents[0]))
    }

    /// Reads tokens: one per line; empty lines and lines that begin with `#` are skipped.
    pub(crate) fn parse(path: &str, content: &[u8]) -> Result<Self, String> {
        let text = str::from_utf8(content).map_err(|_| format!("{path} is not text"))?;
        let lines = text.lines().map(str::trim);
        let tokens: Vec<&str> =
            lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
        let is_legal = |token: &&str| {
            (TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&token.len())
                && token.bytes().all(|byte| byte.is_ascii_graphic())
        };
        if tokens.is_empty() {
            return Err(format!("{path} has no token; make one: openssl rand -hex 32"));
        }
        if tokens.len() > TOKENS_MAX {
            return Err(format!("{path} has more than {TOKENS_MAX} tokens; remove old ones"));
        }
        if !tokens.iter().all(is_legal) {
            return Err(format!(
                "{path} has a token that is not {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} visible \
                 ASCII characters; make one: openssl rand -hex 32"
            ));
        }
        Ok(Self(tokens.into_iter().map(Token::new).collect()))
    }

    /// Returns the token by which this process makes its proofs.
    pub(crate) fn first(&self) -> &Token {
        self.0.first().expect("a file has a token")
    }

    pub(crate) fn find(&self, id: &[u8]) -> Option<&Token> {
        self.0.iter().find(|token| token.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Result<Tokens, String> {
        Tokens::parse("tokens", text.as_bytes())
    }

    #[test]
    fn each_token_of_the_file_is_known_and_the_first_is_used() {
        let (new, old) = ("n".repeat(32), "o".repeat(64));
        let both = tokens(&format!("# comment\n{new}\n\n  {old}  \n")).unwrap();
        let (only_new, only_old) = (tokens(&new).unwrap(), tokens(&old).unwrap());
        assert_eq!(both.first().id(), only_new.first().id());
        for known in [&only_new, &only_old] {
            let found = both.find(known.first().id()).unwrap();
            assert!(found.mac("purpose").is(&known.first().mac("purpose").finish()));
            assert!(!found.mac("purpose").is(&known.first().mac("another").finish()));
        }
        assert!(only_new.find(only_old.first().id()).is_none());
        assert!(!format!("{both:?}").contains(&new));
    }

    #[test]
    fn parts_of_an_hmac_have_borders() {
        let tokens = tokens(&"t".repeat(32)).unwrap();
        let of = |parts: [&[u8]; 2]| {
            let mut mac = tokens.first().mac("purpose");
            parts.iter().for_each(|part| mac.add(part));
            mac.finish()
        };
        assert_ne!(of([b"ab", b"c"]), of([b"a", b"bc"]));
    }

    #[test]
    fn a_file_without_a_usable_token_is_refused() {
        let short = "x".repeat(31);
        let spaced = format!("{} {}", "x".repeat(20), "y".repeat(20));
        let many = format!("{}\n", "z".repeat(40)).repeat(9);
        for bad in ["", "\n# only a comment\n", &short, &spaced, &many] {
            assert!(tokens(bad).unwrap_err().starts_with("tokens"), "{bad:?}");
        }
    }
}

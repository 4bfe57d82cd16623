//! The shared token by which an agent recognizes its routers, where TLS is done elsewhere.
//!
//! A file has one token per line. An agent accepts each of them, and a router sends the first. So
//! a token is rotated without a failed turn: agents accept the new one beside the old, then routers
//! send the new one, then agents forget the old one. The token is in the header
//! [`TOKEN`](proto::claim::TOKEN) of each request to the data port and each call of the control
//! port.

use std::path::PathBuf;

use http::HeaderValue;
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use crate::reload::Source;

/// The shortest token, in characters. 128 random bits have 32 hex digits.
const TOKEN_CHARS_MIN: usize = 32;
/// The longest token, in characters.
const TOKEN_CHARS_MAX: usize = 1024;
/// The most tokens in a file. A rotation needs two.
const TOKENS_MAX: usize = 8;

/// The tokens of a file: at least one.
pub struct Tokens {
    /// SHA-256 of each token. Digests are compared, so that the time tells nothing of a length.
    digests: Vec<[u8; 32]>,
    first: HeaderValue,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokens({})", self.digests.len())
    }
}

impl Tokens {
    /// Describes the tokens in a file, which are read again when the file changes.
    #[must_use]
    pub fn source(path: PathBuf) -> Source<Self> {
        let shown = path.display().to_string();
        Source::new("router_token", vec![path], move |contents| Self::parse(&shown, &contents[0]))
    }

    /// Reads tokens: one per line; empty lines and lines that begin with `#` are skipped.
    fn parse(path: &str, content: &[u8]) -> Result<Self, String> {
        let text = str::from_utf8(content).map_err(|_| format!("{path} is not text"))?;
        let lines = text.lines().map(str::trim);
        let tokens: Vec<&str> =
            lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
        let is_legal = |token: &&str| {
            (TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&token.len())
                && token.bytes().all(|byte| byte.is_ascii_graphic())
        };
        let [first, ..] = tokens[..] else {
            return Err(format!("{path} has no token; make one: openssl rand -hex 32"));
        };
        if tokens.len() > TOKENS_MAX {
            return Err(format!("{path} has more than {TOKENS_MAX} tokens; remove old ones"));
        }
        if !tokens.iter().all(is_legal) {
            return Err(format!(
                "{path} has a token that is not {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} visible \
                 ASCII characters; make one: openssl rand -hex 32"
            ));
        }
        let digests = tokens.iter().map(|token| Sha256::digest(token).into()).collect();
        let mut first = HeaderValue::from_str(first).map_err(|error| error.to_string())?;
        first.set_sensitive(true);
        Ok(Self { digests, first })
    }

    /// Returns the value of the header [`TOKEN`](proto::claim::TOKEN) that a router sends.
    #[must_use]
    pub fn to_header(&self) -> HeaderValue {
        self.first.clone()
    }

    /// Whether a request's token is one of these. `token` is the value of the header
    /// [`TOKEN`](proto::claim::TOKEN). Takes the same time for every token.
    #[must_use]
    pub fn accept(&self, token: Option<&[u8]>) -> bool {
        let digest: [u8; 32] = Sha256::digest(token.unwrap_or_default()).into();
        let compared = self.digests.iter().map(|known| known.ct_eq(&digest));
        compared.fold(Choice::from(0), |any, equal| any | equal).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Result<Tokens, String> {
        Tokens::parse("tokens", text.as_bytes())
    }

    #[test]
    fn each_token_of_the_file_is_accepted_and_the_first_is_sent() {
        let (new, old) = ("n".repeat(32), "o".repeat(64));
        let both = tokens(&format!("# comment\n{new}\n\n  {old}  \n")).unwrap();
        assert!(both.accept(Some(new.as_bytes())) && both.accept(Some(old.as_bytes())));
        assert_eq!(both.to_header(), new.as_str());
        for wrong in [&b""[..], b"n", &[b'n'; 33], &[b'n'; 31], b"# comment"] {
            assert!(!both.accept(Some(wrong)), "{wrong:?} was accepted");
        }
        assert!(!both.accept(None));
        assert!(!format!("{both:?} {:?}", both.to_header()).contains(&new));
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

//! The identities of sessions, clients and workers, checked once where they enter a process.
//!
//! A *principal* stands for a client everywhere behind the router, because the client's credential
//! doesn't leave the router. This module checks lengths; it doesn't check that a session or a
//! worker exists.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_64;

pub const SESSION_ID_BYTES_MAX: usize = 256;

pub const PRINCIPAL_BYTES_MAX: usize = 128;

/// The principal of every request, if the router needs no credential.
pub const ANONYMOUS: &str = "anonymous";

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("a session id has 1 to {SESSION_ID_BYTES_MAX} bytes, this one has {0}")]
    SessionIdLength(usize),
    #[error("an agent id or principal has 1 to 128 bytes, this one has {0}")]
    NameLength(usize),
}

/// Equal ids under different principals are different sessions. Clones share their text, because
/// several tables of a process have the same keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionKey {
    principal: Arc<str>,
    id: Arc<str>,
}

impl SessionKey {
    pub fn new(principal: impl Into<Arc<str>>, id: impl Into<Arc<str>>) -> Result<Self, Error> {
        let (principal, id) = (principal.into(), id.into());
        check_principal(&principal)?;
        if id.is_empty() || id.len() > SESSION_ID_BYTES_MAX {
            return Err(Error::SessionIdLength(id.len()));
        }
        Ok(Self { principal, id })
    }

    #[must_use]
    pub fn principal(&self) -> &str {
        &self.principal
    }

    /// Returns the id exactly as the client wrote it.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Every process computes the same, because placement breaks ties by it. Logs show it, because
    /// a client's id may be a secret.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut bytes = Vec::with_capacity(self.principal.len() + self.id.len() + 1);
        bytes.extend_from_slice(self.principal.as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(self.id.as_bytes());
        Digest(xxh3_64(&bytes))
    }
}

pub fn check_principal(principal: &str) -> Result<(), Error> {
    let is_valid = (1..=PRINCIPAL_BYTES_MAX).contains(&principal.len());
    if is_valid { Ok(()) } else { Err(Error::NameLength(principal.len())) }
}

/// Shown as 16 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub u64);

impl Digest {
    /// Reads 16 lower-case hex digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        read_hex(text).map(Self)
    }
}

/// A router's id of one turn, new for each. Shown as 16 hex digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct TurnId(pub u64);

impl From<TurnId> for String {
    fn from(turn: TurnId) -> Self {
        turn.to_string()
    }
}

impl TryFrom<String> for TurnId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        read_hex(&text).map(Self).ok_or("a turn id has 16 lower-case hex digits")
    }
}

impl fmt::Display for TurnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

fn read_hex(text: &str) -> Option<u64> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_number = text.len() == 16 && text.bytes().all(is_digit);
    is_number.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or("a digest has 16 lower-case hex digits")
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns 128 bits in hex. The bytes can't be found from them.
#[must_use]
pub fn short_sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Turns are placed on workers: on one DP rank of one agent's engine.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId {
    /// Unique in the fleet.
    pub agent: String,
    pub dp_rank: u32,
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.agent, self.dp_rank)
    }
}

impl TryFrom<crate::v1::SessionKey> for SessionKey {
    type Error = Error;

    fn try_from(wire: crate::v1::SessionKey) -> Result<Self, Error> {
        Self::new(wire.principal, wire.id)
    }
}

impl From<&SessionKey> for crate::v1::SessionKey {
    fn from(key: &SessionKey) -> Self {
        Self { principal: key.principal().to_owned(), id: key.id().to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_bounded_in_bytes_not_characters() {
        assert!(SessionKey::new(ANONYMOUS, "").is_err());
        assert!(SessionKey::new(ANONYMOUS, "é".repeat(128)).is_ok());
        assert_eq!(
            SessionKey::new(ANONYMOUS, "é".repeat(129)),
            Err(Error::SessionIdLength(258)),
            "258 bytes in 129 characters"
        );
        assert!(SessionKey::new("", "a").is_err());
    }

    #[test]
    fn principals_keep_equal_ids_apart() {
        let (a, b) = (SessionKey::new("p", "s").unwrap(), SessionKey::new("q", "s").unwrap());
        assert_ne!(a, b);
        assert_ne!(a.digest(), b.digest());
        let joined = SessionKey::new("ps", "x").unwrap().digest();
        assert_ne!(SessionKey::new("p", "sx").unwrap().digest(), joined);
    }
}

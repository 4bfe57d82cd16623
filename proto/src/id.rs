//! The identities of sessions, clients and workers, checked once where they enter a process.
//!
//! A *principal* is the name of a client, which the router derives from the client's credential. It
//! stands for the client everywhere behind the router; the credential doesn't leave the router. A
//! *session* is named by the principal and by an id that the client chose. A *worker* is one
//! data-parallel (DP) rank of one agent's engine. The router makes these values from requests and
//! the agent from headers and messages. This module checks lengths; it doesn't check that a session
//! or a worker exists.

use std::{fmt, sync::Arc};

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_64;

/// Longest session id a client may choose, in bytes.
pub const SESSION_ID_BYTES_MAX: usize = 256;

/// Longest principal, in bytes.
pub const PRINCIPAL_BYTES_MAX: usize = 128;

/// The principal of every request, if the router needs no credential.
pub const ANONYMOUS: &str = "anonymous";

/// Why an identifier was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A session id that is empty or longer than [`SESSION_ID_BYTES_MAX`].
    #[error("a session id has 1 to {SESSION_ID_BYTES_MAX} bytes, this one has {0}")]
    SessionIdLength(usize),
    /// A principal that is empty or longer than 128 bytes.
    #[error("an agent id or principal has 1 to 128 bytes, this one has {0}")]
    NameLength(usize),
}

/// The identity of a session: the principal of its client, and the id that the client chose.
///
/// Equal ids under different principals are different sessions. Clones share their text, because
/// several tables of a process have the same keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionKey {
    principal: Arc<str>,
    id: Arc<str>,
}

impl SessionKey {
    /// Makes a key from a principal (1–128 bytes) and a client's id (1–256 bytes).
    ///
    /// # Errors
    /// When either length is out of bounds.
    pub fn new(principal: impl Into<Arc<str>>, id: impl Into<Arc<str>>) -> Result<Self, Error> {
        let (principal, id) = (principal.into(), id.into());
        if principal.is_empty() || principal.len() > PRINCIPAL_BYTES_MAX {
            return Err(Error::NameLength(principal.len()));
        }
        if id.is_empty() || id.len() > SESSION_ID_BYTES_MAX {
            return Err(Error::SessionIdLength(id.len()));
        }
        Ok(Self { principal, id })
    }

    /// Returns the client's principal, or [`ANONYMOUS`].
    #[must_use]
    pub fn principal(&self) -> &str {
        &self.principal
    }

    /// Returns the id exactly as the client wrote it.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns a hash of the key that is the same in every process.
    ///
    /// Logs show this hash, because a client's id may be a secret. Placement uses it to choose
    /// among workers of equal cost.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut bytes = Vec::with_capacity(self.principal.len() + self.id.len() + 1);
        bytes.extend_from_slice(self.principal.as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(self.id.as_bytes());
        Digest(xxh3_64(&bytes))
    }
}

/// A 64-bit digest, shown as 16 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub u64);

impl Digest {
    /// Returns the digest that a text of 16 lower-case hex digits shows.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let is_digest = text.len() == 16 && text.bytes().all(is_digit);
        is_digest.then(|| u64::from_str_radix(text, 16).ok()).flatten().map(Self)
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

/// Returns 128 bits of the SHA-256 of `bytes`, in hex. The bytes can't be found from it.
#[must_use]
pub fn short_sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A worker: one DP rank of one agent's engine. Turns are placed on workers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId {
    /// The agent's name, unique in the fleet.
    pub agent: String,
    /// The engine's data-parallel rank.
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

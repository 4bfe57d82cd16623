//! Finds out who sends a request: its *caller*, by the credential in its headers.
//!
//! `http` asks [`Authenticator::resolve`] once for each request, before anything else. Then it
//! removes the credential, so that no later step and no agent can see it, and hands on the
//! [`Caller`]. A caller's *principal* names its sessions and its share of the fleet. It is the name
//! of the caller's key, so a new secret for the same name keeps the sessions.
//!
//! This module doesn't know which route needs which right: `http` does.

use std::{net::IpAddr, sync::Arc};

use http::HeaderMap;
use proto::id;
use service::auth::{
    credential, gate,
    key_file::KeyFile,
    keys::{Key, KeyLimits},
};

/// Who sends a request, and what the sender may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The name under which the caller has its sessions: 1 to 128 bytes.
    pub principal: Arc<str>,
    /// Whether the caller may use the admin routes.
    pub is_admin: bool,
    /// The caller's limits.
    pub limits: Arc<KeyLimits>,
}

/// Why the caller of a request isn't known. The text completes the refusal's message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The request has no credential.
    #[error("the request has no key")]
    NoCredential,
    /// The credential can't be read.
    #[error(transparent)]
    Credential(#[from] credential::Error),
    /// No key has this credential.
    #[error("the key is unknown")]
    Unknown,
    /// The key is for monitoring only.
    #[error("the key is for monitoring, on the admin port alone; send the key of a client")]
    ScrapeKey,
}

/// Resolves the callers of requests.
#[derive(Debug)]
pub struct Authenticator {
    keys: Option<Arc<KeyFile>>,
    /// The caller of every request, if no credential is needed.
    anonymous: Option<Caller>,
}

impl Authenticator {
    /// Makes an authenticator that needs one of `keys`.
    #[must_use]
    pub fn with_keys(keys: Arc<KeyFile>) -> Self {
        Self { keys: Some(keys), anonymous: None }
    }

    /// Makes an authenticator that checks nothing, for a data port that is bound to `address`.
    ///
    /// All requests have the same caller. It may use the admin routes only if nobody but this host
    /// reaches the port: on a laptop, there is no other operator to protect.
    #[must_use]
    pub fn without_keys(address: IpAddr) -> Self {
        let anonymous = Caller {
            principal: id::ANONYMOUS.into(),
            is_admin: gate::is_local(address),
            limits: Arc::default(),
        };
        Self { keys: None, anonymous: Some(anonymous) }
    }

    /// Returns the caller of a request with these headers.
    ///
    /// # Errors
    /// When a credential is needed, and the request has none that is valid.
    pub fn resolve(&self, headers: &HeaderMap) -> Result<Caller, Error> {
        if let Some(anonymous) = &self.anonymous {
            return Ok(anonymous.clone());
        }
        let credential = credential::find(headers)?.ok_or(Error::NoCredential)?;
        let keys = self.keys.as_ref().map(|keys| keys.keys());
        let key = keys.as_ref().and_then(|keys| keys.find(credential)).ok_or(Error::Unknown)?;
        if key.is_scrape { Err(Error::ScrapeKey) } else { Ok(key.as_ref().into()) }
    }
}

impl From<&Key> for Caller {
    fn from(key: &Key) -> Self {
        Self {
            principal: Arc::clone(&key.name),
            is_admin: key.is_admin,
            limits: Arc::clone(&key.limits),
        }
    }
}

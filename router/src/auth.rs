//! Finds out who sends a request: its *caller*, by the credential in its headers.
//!
//! `http` asks [`Authenticator::resolve`] once for each request, before anything else. Then it
//! removes the credential that it has checked, so that no later step and no agent can see it, and
//! hands on the [`Caller`]. A caller's *principal* names its sessions and its share of the fleet.
//! It is the name of the caller's key, so a new secret for the same name keeps the sessions.
//!
//! - [`jwt`]: checks tokens of an identity provider. Pure.
//! - [`jwks`]: gets the identity provider's public keys.
//!
//! This module doesn't know which route needs which right: `http` does.

pub mod jwks;
pub mod jwt;

use std::{net::IpAddr, sync::Arc};

use http::HeaderMap;
use proto::id;
use service::{
    auth::{
        announce::AnnounceRight,
        credential, gate,
        keys::{Key, KeyLimits, KeySet},
    },
    reload::Reloaded,
};

use self::{jwks::JwksStore, jwt::TokenChecker};
use crate::config::jwt::JwtTable;

/// Who sends a request, and what the sender may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The name under which the caller has its sessions: 1 to 128 bytes.
    pub principal: Arc<str>,
    /// Whether the caller may use the admin routes.
    pub is_admin: bool,
    /// The caller's limits.
    pub limits: Arc<KeyLimits>,
    /// The agents that the caller may announce.
    pub announce: Arc<AnnounceRight>,
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
    /// The credential is a token that isn't valid.
    #[error(transparent)]
    Token(#[from] jwt::Error),
    /// The identity provider's keys are not there yet.
    #[error("tokens can't be checked yet; try again")]
    TokenKeysAbsent,
    /// The key is for monitoring only.
    #[error("the key is for monitoring, on the admin port alone; send the key of a client")]
    ScrapeKey,
}

/// Resolves the callers of requests.
#[derive(Debug)]
pub struct Authenticator {
    keys: Option<Reloaded<KeySet>>,
    tokens: Option<(TokenChecker, JwksStore)>,
    /// The caller of every request, if no credential is needed.
    anonymous: Option<Caller>,
    /// Whether the router proves itself to agents, which then add the engine's key to its turns.
    is_known_to_agents: bool,
}

impl Authenticator {
    /// Makes an authenticator that needs one of `keys`, or a token by the settings `jwt`. The
    /// store has the keys of tokens.
    ///
    /// Without both it checks nothing, for a data port that is bound to `address`. All requests
    /// have the same caller. It may use the admin routes only if nobody but this host reaches the
    /// port: on a laptop, there is no other operator to protect.
    ///
    /// `is_known_to_agents`: whether the router proves itself to agents.
    #[must_use]
    pub fn new(
        keys: Option<Reloaded<KeySet>>,
        tokens: Option<(JwtTable, JwksStore)>,
        address: IpAddr,
        is_known_to_agents: bool,
    ) -> Self {
        let anonymous = (keys.is_none() && tokens.is_none()).then(|| Caller {
            principal: id::ANONYMOUS.into(),
            is_admin: gate::is_local(address),
            limits: Arc::default(),
            announce: Arc::default(),
        });
        let tokens = tokens.map(|(settings, store)| (TokenChecker::new(settings), store));
        Self { keys, tokens, anonymous, is_known_to_agents }
    }

    /// Whether no credential is needed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.anonymous.is_some()
    }

    /// Whether the credential of a request goes on to an agent on the router's host: nobody but the
    /// engine can want it.
    #[must_use]
    pub fn passes_credentials(&self) -> bool {
        self.is_open() && !self.is_known_to_agents
    }

    /// Returns the caller of a request with these headers.
    ///
    /// # Errors
    /// When a credential is needed, and the request has none that is valid.
    pub async fn resolve(&self, headers: &HeaderMap) -> Result<Caller, Error> {
        if let Some(anonymous) = &self.anonymous {
            return Ok(anonymous.clone());
        }
        let credential = credential::find(headers)?.ok_or(Error::NoCredential)?;
        if let Some(caller) = self.find_key(credential)? {
            return Ok(caller);
        }
        let Some((checker, store)) = &self.tokens else { return Err(Error::Unknown) };
        if !TokenChecker::is_token(credential) {
            return Err(Error::Unknown);
        }
        match check_token(checker, store, credential) {
            // The provider may have a new key.
            Err(Error::Token(jwt::Error::UnknownKey) | Error::TokenKeysAbsent)
                if store.refresh().await =>
            {
                check_token(checker, store, credential)
            }
            result => result,
        }
    }

    /// Returns the caller whose key the credential is.
    fn find_key(&self, credential: &[u8]) -> Result<Option<Caller>, Error> {
        let Some(keys) = &self.keys else { return Ok(None) };
        let keys = keys.load();
        match keys.find(credential) {
            Some(key) if key.is_scrape => Err(Error::ScrapeKey),
            key => Ok(key.map(|key| key.as_ref().into())),
        }
    }
}

fn check_token(
    checker: &TokenChecker,
    store: &JwksStore,
    credential: &[u8],
) -> Result<Caller, Error> {
    let issuer_keys = store.keys().ok_or(Error::TokenKeysAbsent)?;
    Ok(checker.check(credential, &issuer_keys)?)
}

impl From<&Key> for Caller {
    fn from(key: &Key) -> Self {
        Self {
            principal: Arc::clone(&key.name),
            is_admin: key.is_admin,
            limits: Arc::clone(&key.limits),
            announce: Arc::clone(&key.announce),
        }
    }
}

//! Finds out who sends a request: its *caller*, by the credential in its headers.
//!
//! A caller's *principal* names its sessions and its share of the fleet. It is the name of the
//! caller's key, so a new secret for the same name keeps the sessions. Which route needs which
//! right, `http` knows.

pub mod jwks;
pub mod jwt;

use std::{net::IpAddr, sync::Arc};

use contract::id;
use http::HeaderMap;
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Has 1 to 128 bytes.
    pub principal: Arc<str>,
    pub is_admin: bool,
    pub limits: Arc<KeyLimits>,
    pub announce: Arc<AnnounceRight>,
}

/// Why the caller isn't known. The text completes the refusal's message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the request has no key")]
    NoCredential,
    #[error(transparent)]
    Credential(#[from] credential::Error),
    #[error("the key is unknown")]
    Unknown,
    #[error(transparent)]
    Token(#[from] jwt::Error),
    #[error("tokens can't be checked yet; try again")]
    TokenKeysAbsent,
    #[error("the key is for monitoring, on the admin port alone; send the key of a client")]
    ScrapeKey,
}

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
    /// Without keys and tokens it checks nothing, and all requests have the same caller. It may use
    /// the admin routes only if nobody but this host reaches the data port at `address`: on a
    /// laptop, there is no other operator to protect.
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

    #[must_use]
    pub fn is_open(&self) -> bool {
        self.anonymous.is_some()
    }

    /// Whether a request's credential goes on to an agent on the router's host: nobody but the
    /// engine can want it.
    #[must_use]
    pub fn passes_credentials(&self) -> bool {
        self.is_open() && !self.is_known_to_agents
    }

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

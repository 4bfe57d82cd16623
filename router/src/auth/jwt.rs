//! Checks tokens (JWT) of an identity provider, and makes callers of their claims. No I/O.
//!
//! The library `jsonwebtoken` checks signature and times; this module chooses the key, limits the
//! algorithms, and reads the claims.

mod ring_provider;

use std::{str::FromStr as _, sync::Arc};

use jsonwebtoken::{
    Algorithm, DecodingKey, Validation, decode, decode_header,
    errors::ErrorKind,
    jwk::{Jwk, PublicKeyUse},
};
use serde_json::{Map, Value};
use service::auth::keys::KeyLimits;

use super::Caller;
use crate::config::jwt::{JwtAlgorithm, JwtTable};

/// Issuers have two or three, and a few more while they change them.
const KEYS_MAX: usize = 64;
/// The beginning of a token's principal. No name of a key has a colon, so it can't be one.
const PRINCIPAL_PREFIX: &str = "jwt:";
/// A principal has at most 128 bytes.
const NAME_BYTES_MAX: usize = 124;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the token is malformed")]
    Malformed,
    #[error("the token's signing key is unknown")]
    UnknownKey,
    /// The algorithm isn't accepted, or doesn't fit the key.
    #[error("the token's algorithm is not accepted")]
    Algorithm,
    #[error("the token's signature is wrong")]
    Signature,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet")]
    NotYetValid,
    #[error("the token is of another issuer or for another audience")]
    Foreign,
    #[error("the token's claim {0} is absent or has a wrong form")]
    Claim(String),
}

#[derive(Debug)]
pub struct Jwks {
    keys: Vec<IssuerKey>,
}

#[derive(Debug)]
struct IssuerKey {
    id: Option<String>,
    key: DecodingKey,
    /// `None` allows any of the key's family.
    algorithm: Option<Algorithm>,
}

impl Jwks {
    /// Leaves out keys that can't verify signatures.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        #[derive(serde::Deserialize)]
        struct Document {
            keys: Vec<Value>,
        }
        let document: Document =
            serde_json::from_slice(json).map_err(|error| format!("not a JWKS: {error}"))?;
        if document.keys.len() > KEYS_MAX {
            return Err(format!("more than {KEYS_MAX} keys"));
        }
        let keys: Vec<IssuerKey> = document.keys.into_iter().filter_map(IssuerKey::read).collect();
        if keys.is_empty() { Err("no key that can be used".to_owned()) } else { Ok(Self { keys }) }
    }

    /// A token without an id is only clear if there is one key.
    fn find(&self, id: Option<&str>) -> Option<&IssuerKey> {
        match id {
            Some(id) => self.keys.iter().find(|key| key.id.as_deref() == Some(id)),
            None => self.keys.first().filter(|_| self.keys.len() == 1),
        }
    }
}

impl IssuerKey {
    fn read(value: Value) -> Option<Self> {
        let jwk: Jwk = serde_json::from_value(value).ok()?;
        if !matches!(jwk.common.public_key_use, None | Some(PublicKeyUse::Signature)) {
            return None;
        }
        let algorithm = match jwk.common.key_algorithm {
            None => None,
            // A key for an algorithm that isn't known here is of no use.
            Some(name) => Some(Algorithm::from_str(&name.to_string()).ok()?),
        };
        let key = DecodingKey::from_jwk(&jwk).ok()?;
        // A shared secret has no place among public keys.
        let is_public = key.family() != jsonwebtoken::AlgorithmFamily::Hmac;
        is_public.then_some(Self { id: jwk.common.key_id, key, algorithm })
    }
}

#[derive(Debug)]
pub struct TokenChecker {
    settings: JwtTable,
    algorithms: Vec<Algorithm>,
}

impl TokenChecker {
    /// The settings must be valid.
    #[must_use]
    pub fn new(settings: JwtTable) -> Self {
        ring_provider::install();
        let algorithms = settings.algorithms.iter().copied().map(Into::into).collect();
        Self { settings, algorithms }
    }

    /// A token has three parts with dots between them.
    #[must_use]
    pub fn is_token(credential: &[u8]) -> bool {
        credential.iter().filter(|byte| **byte == b'.').count() == 2
    }

    pub fn check(&self, token: &[u8], issuer_keys: &Jwks) -> Result<Caller, Error> {
        let header = decode_header(token).map_err(|_| Error::Malformed)?;
        // A critical extension must be understood, and none is.
        if header.crit.is_some() {
            return Err(Error::Malformed);
        }
        let key = issuer_keys.find(header.kid.as_deref()).ok_or(Error::UnknownKey)?;
        let is_accepted = |algorithm: &Algorithm| {
            key.key.family().algorithms().contains(algorithm)
                && key.algorithm.is_none_or(|only| only == *algorithm)
        };
        let mut validation = Validation::new(header.alg);
        validation.algorithms = self.algorithms.iter().copied().filter(is_accepted).collect();
        if !validation.algorithms.contains(&header.alg) {
            return Err(Error::Algorithm);
        }
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        validation.set_issuer(&[&self.settings.issuer]);
        validation.set_audience(&[&self.settings.audience]);
        validation.validate_nbf = true;
        validation.leeway = self.settings.leeway_s;
        let token = decode::<Map<String, Value>>(token, &key.key, &validation);
        let token = token.map_err(|error| Error::from(error.into_kind()))?;
        self.caller(&token.claims)
    }

    fn caller(&self, claims: &Map<String, Value>) -> Result<Caller, Error> {
        let settings = &self.settings;
        let wrong_claim = |name: &str| Error::Claim(name.to_owned());
        let name = match claim(claims, &settings.principal_claim) {
            Some(Value::String(name)) => name.clone(),
            Some(Value::Number(number)) => number.to_string(),
            _ => return Err(wrong_claim(&settings.principal_claim)),
        };
        let is_usable =
            (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control);
        if !is_usable {
            return Err(wrong_claim(&settings.principal_claim));
        }
        // A claim that can't be read must not become "no limits".
        let limits = match claim(claims, &settings.limits_claim) {
            None => KeyLimits::default(),
            Some(limits) => serde_json::from_value(limits.clone())
                .map_err(|_| wrong_claim(&settings.limits_claim))?,
        };
        let is_admin_value = |value: &Value| value.as_str() == Some(&settings.admin_value);
        let is_admin = match claim(claims, &settings.admin_claim) {
            Some(Value::Array(values)) => values.iter().any(is_admin_value),
            Some(value) => is_admin_value(value),
            None => false,
        };
        Ok(Caller {
            principal: format!("{PRINCIPAL_PREFIX}{name}").into(),
            is_admin,
            limits: Arc::new(limits),
            announce: Arc::default(),
        })
    }
}

/// `name` is a claim's name, or its JSON pointer if it begins with a slash. An empty name is a
/// setting that is not set: no claim, although a token may have one with that name.
fn claim<'a>(claims: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    if name.is_empty() {
        return None;
    }
    let Some(pointer) = name.strip_prefix('/') else { return claims.get(name) };
    let (first, rest) = pointer.split_once('/').unwrap_or((pointer, ""));
    let value = claims.get(&first.replace("~1", "/").replace("~0", "~"))?;
    if rest.is_empty() { Some(value) } else { value.pointer(&format!("/{rest}")) }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::ExpiredSignature => Self::Expired,
            ErrorKind::ImmatureSignature => Self::NotYetValid,
            ErrorKind::InvalidIssuer | ErrorKind::InvalidAudience => Self::Foreign,
            ErrorKind::InvalidAlgorithm => Self::Algorithm,
            ErrorKind::InvalidSignature => Self::Signature,
            ErrorKind::MissingRequiredClaim(name) | ErrorKind::InvalidClaimFormat(name) => {
                Self::Claim(name)
            }
            _ => Self::Malformed,
        }
    }
}

impl From<JwtAlgorithm> for Algorithm {
    fn from(algorithm: JwtAlgorithm) -> Self {
        match algorithm {
            JwtAlgorithm::RS256 => Self::RS256,
            JwtAlgorithm::RS384 => Self::RS384,
            JwtAlgorithm::RS512 => Self::RS512,
            JwtAlgorithm::PS256 => Self::PS256,
            JwtAlgorithm::PS384 => Self::PS384,
            JwtAlgorithm::PS512 => Self::PS512,
            JwtAlgorithm::ES256 => Self::ES256,
            JwtAlgorithm::ES384 => Self::ES384,
            JwtAlgorithm::EdDSA => Self::EdDSA,
        }
    }
}

#[cfg(test)]
mod tests;

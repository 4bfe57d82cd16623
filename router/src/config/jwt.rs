//! The settings of `[auth.jwt]`: which tokens of an identity provider the router accepts.

use std::path::PathBuf;

use http::Uri;
use serde::de::IgnoredAny;
use service::reload::Source;

/// The longest JWKS of a URL, in bytes. A key takes about 2 KiB with its certificates.
pub(crate) const JWKS_BYTES_MAX: u64 = 256 * 1024;

service::settings! {
    /// A signature algorithm of tokens. Algorithms with shared secrets are not among them: whoever
    /// can check such a token can also make one.
    pub enum JwtAlgorithm {
        /// RSA (PKCS #1) with SHA-256.
        RS256 = "RS256",
        /// RSA (PKCS #1) with SHA-384.
        RS384 = "RS384",
        /// RSA (PKCS #1) with SHA-512.
        RS512 = "RS512",
        /// RSA (PSS) with SHA-256.
        PS256 = "PS256",
        /// RSA (PSS) with SHA-384.
        PS384 = "PS384",
        /// RSA (PSS) with SHA-512.
        PS512 = "PS512",
        /// ECDSA with P-256 and SHA-256.
        ES256 = "ES256",
        /// ECDSA with P-384 and SHA-384.
        ES384 = "ES384",
        /// Ed25519.
        EdDSA = "EdDSA",
    }
}

service::settings! {
    /// Which tokens of an identity provider are accepted, besides keys.
    ///
    /// Tokens are accepted if `jwks` is set.
    pub struct JwtTable {
        /// The issuer (`iss`) of accepted tokens.
        issuer: String;
        /// The audience (`aud`) of accepted tokens: the router's name at the issuer.
        audience: String;
        /// The issuer's public keys (JWKS): a path, or an `http://` or `https://` URL. Empty: no
        /// tokens are accepted.
        jwks: String;
        /// The CA certificates (PEM) of the URL's server. Empty: the system's.
        ca_file: PathBuf;
        /// The accepted algorithms. The defaults are what identity providers use.
        algorithms: Vec<JwtAlgorithm> =
            vec![JwtAlgorithm::RS256, JwtAlgorithm::ES256, JwtAlgorithm::EdDSA];
        /// The claim with the client's name. The default is the subject, which every token has.
        principal_claim: String = "sub".to_owned();
        /// The claim with the client's limits, in the form of `limits` in a key file. Empty, as by
        /// default: tokens have no limits of their own.
        limits_claim: String;
        /// The claim that makes its client an admin if it is, or contains, `admin_value`. Empty, as
        /// by default: no token does.
        admin_claim: String;
        /// See `admin_claim`.
        admin_value: String;
        /// How many seconds the clocks of issuer and router may differ.
        ///
        /// Servers with NTP differ by less than a second; a minute covers those that lost it.
        leeway_s: u64 = 60;
    }
}

/// Where the issuer's keys are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JwksSource {
    /// In a file, which may change.
    File(PathBuf),
    /// At an `http` or `https` URL.
    Url(Uri),
}

impl JwtTable {
    /// Whether tokens are accepted.
    #[must_use]
    pub fn is_on(&self) -> bool {
        !self.jwks.is_empty()
    }

    /// Returns where the issuer's keys are. `None` if the setting is a URL that can't be used.
    #[must_use]
    pub fn source(&self) -> Option<JwksSource> {
        if !self.jwks.contains("://") {
            return Some(JwksSource::File(PathBuf::from(&self.jwks)));
        }
        let uri: Uri = self.jwks.parse().ok()?;
        let is_usable = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
        is_usable.then_some(JwksSource::Url(uri))
    }

    /// Returns what is wrong with the file of the issuer's keys, if the settings name one.
    pub(super) fn file_problem(&self) -> Option<String> {
        let Some(JwksSource::File(path)) = self.source().filter(|_| self.is_on()) else {
            return None;
        };
        let parse = |contents: &[Vec<u8>]| {
            serde_json::from_slice::<IgnoredAny>(&contents[0]).map_err(|error| error.to_string())
        };
        let error = Source::new("jwks", vec![path.clone()], parse).read().err()?;
        Some(format!("auth.jwt.jwks: {} can't be used: {error}; name a JWKS", path.display()))
    }

    /// Returns the problems of these settings.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = vec![];
        if !self.is_on() {
            if *self != Self::default() {
                problems.push("auth.jwt.jwks: must be set with the other keys".to_owned());
            }
            return problems;
        }
        if self.source().is_none() {
            problems.push("auth.jwt.jwks: must be a path or an http(s) URL".to_owned());
        }
        let required = [
            ("issuer", &self.issuer),
            ("audience", &self.audience),
            ("principal_claim", &self.principal_claim),
        ];
        for (key, _) in required.into_iter().filter(|(_, value)| value.is_empty()) {
            problems.push(format!("auth.jwt.{key}: must be set"));
        }
        if self.algorithms.is_empty() {
            problems.push("auth.jwt.algorithms: must name one at least".to_owned());
        }
        if self.admin_claim.is_empty() != self.admin_value.is_empty() {
            problems.push("auth.jwt.admin_claim and admin_value: must be set together".to_owned());
        }
        if self.leeway_s > 600 {
            problems.push("auth.jwt.leeway_s: must be 0 to 600".to_owned());
        }
        problems
    }
}

//! Lets `jsonwebtoken` verify signatures with `ring`, the library that TLS uses, too.
//!
//! The router makes no tokens, so signing fails. Symmetric algorithms fail, too.

use jsonwebtoken::{
    Algorithm, DecodingKey, DecodingKeyKind, EncodingKey,
    crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils},
    errors::{Error, ErrorKind, new_error},
};
use ring::signature::{
    self as algorithms, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey,
    VerificationAlgorithm,
};
use signature::Verifier;

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: refuse_to_sign,
    verifier_factory: make_verifier,
    key_utils: KeyUtils::new_unimplemented(),
};

/// Holds for the whole process.
pub(super) fn install() {
    // Fails only if it was installed before.
    let _ = PROVIDER.install_default();
}

struct RingVerifier {
    algorithm: Algorithm,
    key: DecodingKey,
}

impl JwtVerifier for RingVerifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

impl Verifier<Vec<u8>> for RingVerifier {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        let verified = match (scheme(self.algorithm), self.key.kind()) {
            (Some(Scheme::Plain(scheme)), DecodingKeyKind::SecretOrDer(key)) => {
                UnparsedPublicKey::new(scheme, key).verify(message, signature)
            }
            (Some(Scheme::Rsa(scheme)), DecodingKeyKind::RsaModulusExponent { n, e }) => {
                let key = RsaPublicKeyComponents { n: without_zeros(n), e: without_zeros(e) };
                key.verify(scheme, message, signature)
            }
            _ => return Err(signature::Error::new()),
        };
        verified.map_err(|_| signature::Error::new())
    }
}

enum Scheme {
    Plain(&'static dyn VerificationAlgorithm),
    /// For keys of at least 2,048 bits.
    Rsa(&'static RsaParameters),
}

fn scheme(algorithm: Algorithm) -> Option<Scheme> {
    Some(match algorithm {
        Algorithm::ES256 => Scheme::Plain(&algorithms::ECDSA_P256_SHA256_FIXED),
        Algorithm::ES384 => Scheme::Plain(&algorithms::ECDSA_P384_SHA384_FIXED),
        Algorithm::EdDSA => Scheme::Plain(&algorithms::ED25519),
        Algorithm::RS256 => Scheme::Rsa(&algorithms::RSA_PKCS1_2048_8192_SHA256),
        Algorithm::RS384 => Scheme::Rsa(&algorithms::RSA_PKCS1_2048_8192_SHA384),
        Algorithm::RS512 => Scheme::Rsa(&algorithms::RSA_PKCS1_2048_8192_SHA512),
        Algorithm::PS256 => Scheme::Rsa(&algorithms::RSA_PSS_2048_8192_SHA256),
        Algorithm::PS384 => Scheme::Rsa(&algorithms::RSA_PSS_2048_8192_SHA384),
        Algorithm::PS512 => Scheme::Rsa(&algorithms::RSA_PSS_2048_8192_SHA512),
        _ => return None,
    })
}

/// Some issuers write leading zeros, and `ring` refuses them.
fn without_zeros(number: &[u8]) -> &[u8] {
    let zeros = number.iter().take_while(|byte| **byte == 0).count();
    &number[zeros..]
}

fn make_verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>, Error> {
    if scheme(*algorithm).is_none() || key.family() != algorithm.family() {
        return Err(new_error(ErrorKind::InvalidAlgorithm));
    }
    Ok(Box::new(RingVerifier { algorithm: *algorithm, key: key.clone() }))
}

fn refuse_to_sign(_: &Algorithm, _: &EncodingKey) -> Result<Box<dyn JwtSigner>, Error> {
    Err(new_error(ErrorKind::UnsupportedAlgorithm))
}

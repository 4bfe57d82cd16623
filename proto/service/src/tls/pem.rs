//! Reads certificates and private keys from PEM files, and says what is wrong with a file.

use std::path::Path;

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

/// Returns the certificates in a file, in their order. There is at least one.
pub(super) fn certificates(
    path: &Path,
    content: &[u8],
) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(content).collect();
    let certificates =
        certificates.map_err(|error| format!("{} is not PEM: {error}", path.display()))?;
    if certificates.is_empty() {
        return Err(format!("{} has no certificate; write it as PEM", path.display()));
    }
    Ok(certificates)
}

/// Returns the first private key in a file.
pub(super) fn key(path: &Path, content: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(content).map_err(|error| {
        let path = path.display();
        format!("{path} has no usable private key: {error}; write it as PEM, unencrypted")
    })
}

/// Returns the certificates of a file as roots of trust.
pub(super) fn roots(path: &Path, content: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, content)? {
        roots.add(certificate).map_err(|error| {
            format!("{} has a certificate that can't be a CA's: {error}", path.display())
        })?;
    }
    Ok(roots)
}

//! Makes what handshakes need of PEM files, and says what is wrong with a file.

use std::{path::Path, sync::Arc};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    sign::{CertifiedKey, SingleCertAndKey},
};

use super::{Protocol, crypto};

#[derive(Debug)]
pub(super) struct ByProtocol<C> {
    http1: Arc<C>,
    http2: Arc<C>,
}

impl<C: Clone> ByProtocol<C> {
    /// Makes both of `config`. `alpn_protocols` returns the field with the protocols' names.
    pub(super) fn new(config: C, alpn_protocols: impl Fn(&mut C) -> &mut Vec<Vec<u8>>) -> Self {
        let for_protocol = |protocol: Protocol| {
            let mut config = config.clone();
            *alpn_protocols(&mut config) = protocol.alpn();
            Arc::new(config)
        };
        Self { http1: for_protocol(Protocol::Http1), http2: for_protocol(Protocol::Http2) }
    }

    pub(super) fn get(&self, protocol: Protocol) -> &Arc<C> {
        match protocol {
            Protocol::Http1 => &self.http1,
            Protocol::Http2 => &self.http2,
        }
    }
}

/// `contents` are those of `cert`, which may hold a chain, and of `key`.
pub(super) fn identity(
    cert: &Path,
    key: &Path,
    contents: [&[u8]; 2],
) -> Result<SingleCertAndKey, String> {
    let [cert_content, key_content] = contents;
    let (chain, private_key) = (certificates(cert, cert_content)?, private_key(key, key_content)?);
    let certified = CertifiedKey::from_der(chain, private_key, &crypto());
    certified.map(SingleCertAndKey::from).map_err(|error| {
        let (cert, key) = (cert.display(), key.display());
        format!("{cert} and {key} don't fit together: {error}")
    })
}

/// Returns at least one root of trust.
pub fn roots(path: &Path, content: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, content)? {
        roots.add(certificate).map_err(|error| {
            format!("{} has a certificate that can't be a CA's: {error}", path.display())
        })?;
    }
    Ok(roots)
}

/// Returns the certificates in a file, in their order. There is at least one.
fn certificates(path: &Path, content: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let path = path.display();
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(content).collect();
    let certificates = certificates.map_err(|error| format!("{path} is not PEM: {error}"))?;
    if certificates.is_empty() {
        return Err(format!("{path} has no certificate; write it as PEM"));
    }
    Ok(certificates)
}

fn private_key(path: &Path, content: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(content).map_err(|error| {
        let path = path.display();
        format!("{path} has no usable private key: {error}; write it as PEM, unencrypted")
    })
}

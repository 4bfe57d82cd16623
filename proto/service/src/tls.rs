//! TLS for the ports of both processes, with certificates from PEM files that may be replaced.
//!
//! A replaced file takes effect for new connections within two seconds; open ones go on. TLS is
//! rustls's, with ring's encryption: versions 1.2 and 1.3.

pub mod client;
mod handshake_error;
pub mod pem;
pub mod server;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
pub use rustls::pki_types::ServerName;

/// The protocol inside of TLS, which both sides agree on in the handshake (ALPN).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1: data ports.
    Http1,
    /// HTTP/2: control ports.
    Http2,
}

impl Protocol {
    fn alpn(self) -> Vec<Vec<u8>> {
        match self {
            Self::Http1 => vec![b"http/1.1".to_vec()],
            Self::Http2 => vec![b"h2".to_vec()],
        }
    }
}

/// Returns ring's encryption. It is named wherever it is used, because a process may link others.
fn crypto() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

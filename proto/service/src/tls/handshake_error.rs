//! Says why a handshake with a client failed, for the log and for the metric.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("the client did not end the handshake in time")]
    Late,
    /// The client's certificate is good, and of another client.
    #[error("the client's certificate has none of the names in client_names")]
    ClientName,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl HandshakeError {
    #[must_use]
    pub fn reason(&self) -> &'static str {
        let error = match self {
            Self::Late => return "late",
            Self::ClientName => return "client_name",
            Self::Io(error) => error,
        };
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(rustls::Error::NoCertificatesPresented | rustls::Error::InvalidCertificate(_)) => {
                "client_certificate"
            }
            // The client does not accept this server's certificate.
            Some(rustls::Error::AlertReceived(_)) => "refused_by_client",
            Some(rustls::Error::InvalidMessage(_)) => "not_tls",
            Some(_) => "protocol",
            None => "disconnected",
        }
    }
}

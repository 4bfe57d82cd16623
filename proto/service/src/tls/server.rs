//! The server's side of TLS: shows a certificate, and may demand one of the client.

use std::{
    io,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use rustls::{
    ServerConfig,
    client::verify_server_name,
    pki_types::ServerName,
    server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

pub use super::handshake_error::HandshakeError;
use super::{
    Protocol, crypto,
    pem::{self, ByProtocol},
};
use crate::{
    reload::{self, Reloaded, Source},
    tasks::Tasks,
};

/// Time limit of a handshake. It takes some milliseconds and two round trips.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerFiles {
    /// The server's certificate, followed by the intermediate ones.
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Whose certificates clients must have; `None` if clients need none.
    pub clients: Option<TrustedClients>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustedClients {
    pub ca: PathBuf,
    /// The DNS names or IP addresses of which a client's certificate must have one. Empty: every
    /// certificate of the authorities is accepted.
    pub names: Vec<ServerName<'static>>,
}

/// Accepts TLS connections with the certificates that are in the files now. Clones share them.
#[derive(Debug, Clone)]
pub struct ServerTls {
    configs: Reloaded<ByProtocol<ServerConfig>>,
    client_names: Arc<[ServerName<'static>]>,
    protocol: Protocol,
}

impl ServerFiles {
    /// Reads the files once, for a check of the settings.
    pub fn check(&self) -> Result<(), reload::Error> {
        self.source().read().map(drop)
    }

    /// Reads the files, and again whenever they change. Serves HTTP/1.1.
    pub fn start(
        &self,
        metrics: &reload::Metrics,
        tasks: &Tasks,
    ) -> Result<ServerTls, reload::Error> {
        let configs = reload::start(self.source(), metrics, tasks)?;
        let names = self.clients.as_ref().map(|clients| clients.names.clone());
        let client_names = names.unwrap_or_default().into();
        Ok(ServerTls { configs, client_names, protocol: Protocol::Http1 })
    }

    fn source(&self) -> Source<ByProtocol<ServerConfig>> {
        let mut paths = vec![self.cert.clone(), self.key.clone()];
        paths.extend(self.clients.as_ref().map(|clients| clients.ca.clone()));
        let files = self.clone();
        Source::new("server_tls", paths, move |contents| files.parse(contents))
    }

    fn parse(&self, contents: &[Vec<u8>]) -> Result<ByProtocol<ServerConfig>, String> {
        let builder = ServerConfig::builder_with_provider(crypto())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let builder = match &self.clients {
            None => builder.with_no_client_auth(),
            Some(clients) => {
                let roots = pem::roots(&clients.ca, &contents[2])?;
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), crypto())
                        .build()
                        .map_err(|error| format!("{}: {error}", clients.ca.display()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let identity = pem::identity(&self.cert, &self.key, [&contents[0], &contents[1]])?;
        let mut config = builder.with_cert_resolver(Arc::new(identity));
        if self.clients.is_some() {
            // Resuming skips the check of the certificate, so an expired one would pass.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(ByProtocol::new(config, |config| &mut config.alpn_protocols))
    }
}

impl ServerTls {
    #[must_use]
    pub fn for_protocol(&self, protocol: Protocol) -> Self {
        Self { protocol, ..self.clone() }
    }

    pub async fn accept<S>(&self, stream: S) -> Result<ServerStream<S>, HandshakeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let configs = self.configs.load();
        let config = Arc::clone(configs.get(self.protocol));
        let handshake = TlsAcceptor::from(config).accept(stream);
        let stream = tokio::time::timeout(HANDSHAKE_TIME_MAX, handshake)
            .await
            .map_err(|_| HandshakeError::Late)??;
        if !self.client_names.is_empty() && !self.has_client_name(&stream) {
            return Err(HandshakeError::ClientName);
        }
        Ok(ServerStream::Tls(Box::new(stream)))
    }

    fn has_client_name<S>(&self, stream: &TlsStream<S>) -> bool {
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let parsed = certificate.and_then(|der| ParsedCertificate::try_from(der).ok());
        parsed.is_some_and(|certificate| {
            self.client_names.iter().any(|name| verify_server_name(&certificate, name).is_ok())
        })
    }
}

/// Without `tls`, the connection is passed on as it is.
pub async fn accept<S>(
    tls: Option<&ServerTls>,
    stream: S,
) -> Result<ServerStream<S>, HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    match tls {
        None => Ok(ServerStream::Plain(stream)),
        Some(tls) => tls.accept(stream).await,
    }
}

#[derive(Debug)]
pub enum ServerStream<S> {
    Plain(S),
    Tls(Box<TlsStream<S>>),
}

impl<S> ServerStream<S> {
    pub(crate) fn get_ref(&self) -> &S {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for ServerStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ServerStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, buffer),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(context, buffers),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(context, buffers),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

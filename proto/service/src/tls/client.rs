//! The client's side of TLS: checks the server's certificate, and shows one of its own.

use std::{
    io,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{Uri, uri::Scheme};
use hyper_rustls::{
    DefaultServerNameResolver, FixedServerNameResolver, HttpsConnector, MaybeHttpsStream,
    ResolveServerName,
};
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use rustls::{AlertDescription, ClientConfig, pki_types::ServerName};
use tokio::net::TcpStream;
use tower_service::Service;

use super::{
    Protocol, crypto,
    pem::{self, ByProtocol},
};
use crate::{
    reload::{self, Reloaded, Source},
    tasks::Tasks,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFiles {
    pub ca: PathBuf,
    /// The client's certificate and its private key; `None` if servers demand none.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name that each server's certificate must have. `None`: the host of the server's URL.
    pub server_name: Option<ServerName<'static>>,
}

/// The certificates of a client. Clones share them.
#[derive(Debug, Clone)]
pub struct ClientTls {
    configs: Reloaded<ByProtocol<ClientConfig>>,
    server_name: Option<ServerName<'static>>,
}

impl ClientFiles {
    /// Reads the files once, for a check of the settings.
    pub fn check(&self) -> Result<(), reload::Error> {
        self.source().read().map(drop)
    }

    pub fn start(
        &self,
        metrics: &reload::Metrics,
        tasks: &Tasks,
    ) -> Result<ClientTls, reload::Error> {
        let configs = reload::start(self.source(), metrics, tasks)?;
        Ok(ClientTls { configs, server_name: self.server_name.clone() })
    }

    fn source(&self) -> Source<ByProtocol<ClientConfig>> {
        let mut paths = vec![self.ca.clone()];
        if let Some((cert, key)) = &self.identity {
            paths.extend([cert.clone(), key.clone()]);
        }
        let files = self.clone();
        Source::new("client_tls", paths, move |contents| files.parse(contents))
    }

    fn parse(&self, contents: &[Vec<u8>]) -> Result<ByProtocol<ClientConfig>, String> {
        let builder = ClientConfig::builder_with_provider(crypto())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(pem::roots(&self.ca, &contents[0])?);
        let config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let identity = pem::identity(cert, key, [&contents[1], &contents[2]])?;
                builder.with_client_cert_resolver(Arc::new(identity))
            }
        };
        Ok(ByProtocol::new(config, |config| &mut config.alpn_protocols))
    }
}

/// Connects to servers with TLS (`https`) or without (`http`).
#[derive(Debug, Clone)]
pub struct Connector {
    http: HttpConnector,
    tls: Option<ClientTls>,
    protocol: Protocol,
    /// The time limit of connecting, handshake included.
    connect_max: Duration,
}

impl Connector {
    /// Creates a connector. Without `tls`, an `https` URL is refused.
    #[must_use]
    pub fn new(
        mut http: HttpConnector,
        tls: Option<ClientTls>,
        protocol: Protocol,
        connect_max: Duration,
    ) -> Self {
        http.enforce_http(false);
        http.set_nodelay(true);
        Self { http, tls, protocol, connect_max }
    }

    fn current(&self, tls: &ClientTls) -> HttpsConnector<HttpConnector> {
        let configs = tls.configs.load();
        let config = configs.get(self.protocol);
        let resolver: Arc<dyn ResolveServerName + Send + Sync> = match &tls.server_name {
            Some(name) => Arc::new(FixedServerNameResolver::new(name.clone())),
            None => Arc::new(DefaultServerNameResolver::default()),
        };
        HttpsConnector::new(self.http.clone(), Arc::clone(config), true, resolver)
    }
}

/// Why no connection was made. The same type as in hyper and tonic.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.http.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connect_max = self.connect_max;
        if uri.scheme() != Some(&Scheme::HTTPS) {
            let connecting = self.http.call(uri);
            return Box::pin(async move {
                let connected = with_limit(connect_max, async { Ok(connecting.await?) }).await;
                connected.map(MaybeHttpsStream::Http)
            });
        }
        let Some(tls) = &self.tls else {
            let text = format!("{uri} speaks TLS; name the CA of its certificate in the settings");
            return Box::pin(async { Err(text.into()) });
        };
        let connecting = self.current(tls).call(uri);
        Box::pin(with_limit(connect_max, connecting))
    }
}

pub(crate) async fn with_limit<T>(
    limit: Duration,
    connecting: impl Future<Output = Result<T, BoxError>>,
) -> Result<T, BoxError> {
    tokio::time::timeout(limit, connecting).await.unwrap_or_else(|_| {
        let text = format!("no connection within {} ms", limit.as_millis());
        Err(io::Error::new(io::ErrorKind::TimedOut, text).into())
    })
}

/// Whether a server refused this client's certificate. With TLS 1.3 a client learns this only after
/// its handshake, from the connection's first read. The server has then read no request.
#[must_use]
pub fn is_certificate_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(rustls::Error::AlertReceived(alert)) = error.downcast_ref() {
            return matches!(
                alert,
                AlertDescription::AccessDenied
                    | AlertDescription::BadCertificate
                    | AlertDescription::CertificateExpired
                    | AlertDescription::CertificateRequired
                    | AlertDescription::CertificateRevoked
                    | AlertDescription::CertificateUnknown
                    | AlertDescription::DecryptError
                    | AlertDescription::HandshakeFailure
                    | AlertDescription::UnknownCA
                    | AlertDescription::UnsupportedCertificate
            );
        }
        // The source of an `io::Error` skips the error inside.
        let inside = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = match inside {
            Some(inside) => Some(inside),
            None => error.source(),
        };
    }
    false
}

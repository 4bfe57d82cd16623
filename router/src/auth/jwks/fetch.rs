//! Reads a token issuer's keys from a URL, within bounds of time and size.
//!
//! Redirects are not followed: the setting names the final address.

use std::{path::Path, time::Duration};

use bytes::Bytes;
use http::{StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::{ClientConfig, RootCertStore};
use service::tls::pem;

use crate::config::jwt::JWKS_BYTES_MAX;

/// Identity providers answer within a second.
pub(super) const FETCH_TIME_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Fetcher {
    url: Uri,
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
}

impl Fetcher {
    /// An empty `ca_file` stands for the system's certificates.
    pub(super) fn new(url: Uri, ca_file: &Path) -> Result<Self, String> {
        let roots = match url.scheme_str() {
            Some("https") => trusted_roots(ca_file)?,
            _ => RootCertStore::empty(),
        };
        let provider = rustls::crypto::ring::default_provider();
        let tls = ClientConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
        let client = Client::builder(TokioExecutor::new()).build(connector.build());
        Ok(Self { url, client })
    }

    pub(super) async fn fetch(&self) -> Result<Bytes, String> {
        let fetched = tokio::time::timeout(FETCH_TIME_MAX, self.fetch_all()).await;
        fetched.unwrap_or_else(|_| Err(format!("no whole answer within {FETCH_TIME_MAX:?}")))
    }

    async fn fetch_all(&self) -> Result<Bytes, String> {
        let answer = self.client.get(self.url.clone()).await;
        let answer = answer.map_err(|error| match std::error::Error::source(&error) {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        })?;
        if answer.status() != StatusCode::OK {
            return Err(format!("status {}", answer.status()));
        }
        let bytes_max = usize::try_from(JWKS_BYTES_MAX).expect("it is small");
        let body = Limited::new(answer.into_body(), bytes_max).collect().await;
        body.map(http_body_util::Collected::to_bytes).map_err(|error| error.to_string())
    }
}

fn trusted_roots(ca_file: &Path) -> Result<RootCertStore, String> {
    if !ca_file.as_os_str().is_empty() {
        let content = std::fs::read(ca_file)
            .map_err(|error| format!("ca_file {} can't be read: {error}", ca_file.display()))?;
        return pem::roots(ca_file, &content).map_err(|error| format!("ca_file: {error}"));
    }
    let mut roots = RootCertStore::empty();
    let certificates = rustls_native_certs::load_native_certs().certs;
    if roots.add_parsable_certificates(certificates).0 == 0 {
        return Err("no CA certificate to trust; set ca_file".to_owned());
    }
    Ok(roots)
}

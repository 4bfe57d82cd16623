//! Connects commands to routers and agents: with certificates, keys and tokens if need be.

pub mod agent;
pub mod router;

use std::{path::PathBuf, time::Duration};

use hyper_util::client::legacy::connect::HttpConnector;
use service::{
    reload,
    tasks::Tasks,
    tls::{
        Protocol, ServerName,
        client::{ClientFiles, Connector},
    },
};

use crate::{args::TargetArgs, error::Error};

/// Inside a data centre a connection takes less than 1 ms.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Systems keep their CAs here, if `SSL_CERT_FILE` names no other file.
const SYSTEM_CAS: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

fn connector(args: &TargetArgs, url: &str, protocol: Protocol) -> Result<Connector, Error> {
    let tls = if url.starts_with("https://") {
        let metrics = reload::Metrics::default();
        Some(client_files(args)?.start(&metrics, &Tasks::default())?)
    } else {
        None
    };
    Ok(Connector::new(HttpConnector::new(), tls, protocol, CONNECT_MAX))
}

fn client_files(args: &TargetArgs) -> Result<ClientFiles, Error> {
    let usage = |text: &str| Error::Usage(text.to_owned());
    let identity = match (args.cert.clone(), args.cert_key.clone()) {
        (None, None) => None,
        (Some(cert), Some(key)) => Some((cert, key)),
        _ => return Err(usage("--cert and --cert-key must be given together")),
    };
    let server_name = args.server_name.clone().map(ServerName::try_from).transpose();
    let server_name = server_name.map_err(|_| usage("--server-name is no DNS name or address"))?;
    let ca = args.ca.clone().or_else(system_cas);
    let ca = ca.ok_or_else(|| usage("this system has no file of CAs; name one with --ca"))?;
    Ok(ClientFiles { ca, identity, server_name })
}

fn system_cas() -> Option<PathBuf> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    named.into_iter().chain(SYSTEM_CAS.map(PathBuf::from)).find(|path| path.is_file())
}

/// The result has no slash at its end. `http://` may be left out.
pub(crate) fn normalize_url(flag: &str, text: &str) -> Result<String, Error> {
    let url = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url = url.strip_suffix('/').unwrap_or(&url).to_owned();
    let uri = url.parse::<http::Uri>().ok().filter(|uri| {
        let scheme = uri.scheme_str().unwrap_or_default();
        ["http", "https"].contains(&scheme) && uri.path() == "/" && uri.query().is_none()
    });
    let is_valid = uri.is_some_and(|uri| uri.host().is_some_and(|host| !host.is_empty()));
    let problem =
        || Error::Usage(format!("{flag} must be a URL like http://host:port, not {text:?}"));
    is_valid.then_some(url).ok_or_else(problem)
}

pub(crate) fn is_loopback(url: &str) -> bool {
    let uri = url.parse::<http::Uri>().ok();
    let host = uri.as_ref().and_then(http::Uri::host).unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_known_by_its_names() {
        for url in ["http://127.0.0.1:1", "http://localhost", "http://[::1]:1", "http://127.8.0.1"]
        {
            assert!(is_loopback(url), "{url}");
        }
        for url in ["http://10.0.0.1:1", "http://node-1:1", "http://[fd00::1]:1", ""] {
            assert!(!is_loopback(url), "{url}");
        }
    }

    #[test]
    fn addresses_become_urls() {
        for (given, url) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://router:8080/", "http://router:8080"),
            ("https://[::1]:443", "https://[::1]:443"),
            ("router", "http://router"),
        ] {
            assert_eq!(normalize_url("--router", given).unwrap(), url);
        }
        for wrong in ["", "ftp://a", "http://", "http://a/b", "http://a?b", "a b"] {
            let error = normalize_url("--router", wrong).unwrap_err();
            assert_eq!(error.exit_status(), 64, "{wrong}");
            assert!(error.to_string().contains("--router"), "{error}");
        }
    }
}

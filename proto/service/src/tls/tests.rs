//! Tests of handshakes between [`ServerTls`] and [`Connector`] over loopback.

use std::{net::SocketAddr, path::Path};

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tower_service::Service as _;

use super::{
    Protocol,
    client::{ClientFiles, Connector, is_certificate_refused},
    server::{ServerFiles, TrustedClients},
};
use crate::{reload, tasks::Tasks};

const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Issuer = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Issuer {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Writes `name.pem` and `name.key`.
fn issue(folder: &Path, issuer: &Issuer, name: &str, subject: &str, expired: bool) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![subject.to_owned()]).unwrap();
    if expired {
        params.not_after = date_time_ymd(2020, 1, 1);
    }
    let certificate = params.signed_by(&key, issuer).unwrap();
    std::fs::write(folder.join(format!("{name}.pem")), certificate.pem()).unwrap();
    std::fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
}

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        let (fleet, stranger) = (authority(), authority());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        std::fs::write(path.join("ca.pem"), fleet.pem()).unwrap();
        std::fs::write(path.join("strange-ca.pem"), stranger.pem()).unwrap();
        issue(path, &fleet, "server", "127.0.0.1", false);
        issue(path, &fleet, "named", "agent.fleet", false);
        issue(path, &fleet, "expired", "127.0.0.1", true);
        issue(path, &fleet, "router", "router.fleet", false);
        issue(path, &fleet, "other", "batch.fleet", false);
        issue(path, &fleet, "old-router", "router.fleet", true);
        issue(path, &stranger, "stranger", "router.fleet", false);
        Self(folder)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn server(&self, name: &str, client_names: Option<&[&'static str]>) -> ServerFiles {
        let names =
            |names: &[&'static str]| names.iter().map(|name| (*name).try_into().unwrap()).collect();
        ServerFiles {
            cert: self.path(&format!("{name}.pem")),
            key: self.path(&format!("{name}.key")),
            clients: client_names
                .map(|allowed| TrustedClients { ca: self.path("ca.pem"), names: names(allowed) }),
        }
    }

    fn client(&self, name: Option<&str>) -> ClientFiles {
        let identity =
            |name: &str| (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        ClientFiles { ca: self.path("ca.pem"), identity: name.map(identity), server_name: None }
    }
}

/// Echoes one byte over each connection.
async fn start_server(files: &ServerFiles, metrics: &reload::Metrics, tasks: &Tasks) -> SocketAddr {
    let tls = files.start(metrics, tasks).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tasks.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if let Ok(mut stream) = tls.accept(stream).await {
                let byte = stream.read_u8().await.unwrap_or(0);
                let _ = stream.write_u8(byte).await;
                let _ = stream.shutdown().await;
            }
        }
    });
    addr
}

/// Sends a byte and returns whether it came back, else the error of connecting or of reading.
async fn exchange(mut connector: Connector, uri: Uri) -> Result<(), BoxError> {
    let stream = connector.call(uri).await?;
    let mut stream = hyper_util::rt::TokioIo::new(stream);
    stream.write_u8(7).await?;
    assert_eq!(stream.read_u8().await?, 7);
    Ok(())
}

async fn connect(server: &ServerFiles, client: &ClientFiles) -> Result<(), String> {
    let (metrics, tasks) = (reload::Metrics::default(), Tasks::default());
    let addr = start_server(server, &metrics, &tasks).await;
    let tls = Some(client.start(&metrics, &tasks).unwrap());
    let connector = Connector::new(HttpConnector::new(), tls, Protocol::Http1, LIMIT);
    let ended = exchange(connector, format!("https://{addr}").parse().unwrap()).await;
    tasks.cancel();
    ended.map_err(|error| {
        let refused = if is_certificate_refused(&*error) { "refused: " } else { "" };
        format!("{refused}{error:?}")
    })
}

#[tokio::test]
async fn only_the_right_certificates_connect() {
    let files = Files::new();
    let (none, any) = (None, Some(&[][..]));
    let routers = Some(&["router.fleet"][..]);
    let table = [
        ("server", none, None, ""),
        ("server", none, Some("router"), ""),
        ("server", any, Some("router"), ""),
        ("server", any, Some("other"), ""),
        ("server", routers, Some("router"), ""),
        ("server", routers, Some("other"), "Eof"),
        ("server", any, None, "refused: "),
        ("server", any, Some("stranger"), "refused: "),
        ("server", any, Some("old-router"), "refused: "),
        ("expired", any, Some("router"), "Expired"),
        ("named", any, Some("router"), "NotValidForName"),
    ];
    for (server, clients, client, want) in table {
        let got = connect(&files.server(server, clients), &files.client(client)).await;
        let case = format!("{server} {clients:?} {client:?}: {got:?}");
        match got {
            Ok(()) => assert_eq!(want, "", "{case}"),
            Err(error) => assert!(!want.is_empty() && error.contains(want), "{case}"),
        }
    }
}

#[tokio::test]
async fn a_server_of_another_ca_or_name_is_trusted_only_if_the_settings_say_so() {
    let files = Files::new();
    let server = files.server("named", None);
    let mut client = files.client(None);
    client.server_name = Some("agent.fleet".try_into().unwrap());
    connect(&server, &client).await.unwrap();
    client.ca = files.path("strange-ca.pem");
    let error = connect(&server, &client).await.unwrap_err();
    assert!(error.contains("InvalidCertificate"), "{error}");
}

#[tokio::test]
async fn a_client_that_speaks_no_tls_is_closed() {
    let files = Files::new();
    let (metrics, tasks) = (reload::Metrics::default(), Tasks::default());
    let addr = start_server(&files.server("server", None), &metrics, &tasks).await;
    let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = vec![];
    let _ = stream.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    tasks.cancel();
}

#[test]
fn wrong_files_are_named() {
    let files = Files::new();
    let message = |files: &ServerFiles| files.check().unwrap_err().to_string();
    let mut mixed = files.server("server", None);
    mixed.key = files.path("named.key");
    assert!(message(&mixed).contains("don't fit together"), "{}", message(&mixed));
    mixed.key = files.path("server.pem");
    assert!(message(&mixed).contains("no usable private key"), "{}", message(&mixed));
    mixed.cert = files.path("server.key");
    assert!(message(&mixed).contains("no certificate"), "{}", message(&mixed));
}

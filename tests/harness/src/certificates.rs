//! Certificates and tokens of a test, in a folder that is removed with its [`Files`].
//!
//! The functions panic where a test can't go on: if a file can't be written or a certificate made.

use std::path::PathBuf;

use contract::v1::worker_agent_client::WorkerAgentClient;
use hyper_util::client::legacy::connect::HttpConnector;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd,
};
use service::{
    reload,
    tasks::Tasks,
    tls::{
        Protocol,
        client::{ClientFiles, ClientTls, Connector},
    },
};
use tonic::transport::{Channel, Endpoint};

use crate::{
    cluster::{ClusterSettings, PATIENCE},
    web::Web,
};

/// The name in the certificates of agents.
pub const AGENT: &str = "agent.test";
/// The name in the certificates of routers.
pub const ROUTER: &str = "router.test";

/// Why making a key or a certificate can't fail.
const KEY: &str = "the system has random bytes";
const CERTIFICATE: &str = "its parameters are a test's own";
const FOLDER: &str = "a folder of a test can be written to";

/// A certificate authority.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    /// Creates an authority with a key of its own.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect(KEY);
        Self(CertifiedIssuer::self_signed(params, key).expect(CERTIFICATE))
    }
}

/// A folder with certificates, keys and tokens.
#[derive(Debug)]
pub struct Files(tempfile::TempDir);

impl Files {
    /// Writes what a fleet needs: `ca.pem`, `agent`, `router`, `front` (for clients) and `tokens`.
    #[must_use]
    pub fn of_fleet(authority: &Authority) -> Self {
        let files = Self(tempfile::tempdir().expect(FOLDER));
        files.write_authorities("ca.pem", &[authority]);
        files.issue("agent", authority, AGENT);
        files.issue("router", authority, ROUTER);
        files.issue("front", authority, "127.0.0.1");
        files.write("tokens", &token('a'));
        files
    }

    /// Returns the path of a file.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Replaces a file at once, as tools that rotate secrets do.
    pub fn write(&self, name: &str, content: &str) {
        let new = self.path(&format!("{name}.new"));
        std::fs::write(&new, content).expect(FOLDER);
        std::fs::rename(new, self.path(name)).expect(FOLDER);
    }

    /// Writes a file with the certificates of these authorities.
    pub fn write_authorities(&self, name: &str, authorities: &[&Authority]) {
        let pem: String = authorities.iter().map(|authority| authority.0.pem()).collect();
        self.write(name, &pem);
    }

    /// Writes `name.pem` and `name.key`, for a host of this name.
    pub fn issue(&self, name: &str, authority: &Authority, host: &str) {
        self.issue_with(name, authority, host, |_| {});
    }

    /// Writes a certificate that has expired.
    pub fn issue_expired(&self, name: &str, authority: &Authority, host: &str) {
        self.issue_with(name, authority, host, |params| {
            params.not_after = date_time_ymd(2020, 1, 1);
        });
    }

    fn issue_with(
        &self,
        name: &str,
        authority: &Authority,
        host: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) {
        let key = KeyPair::generate().expect(KEY);
        let mut params = CertificateParams::new(vec![host.to_owned()]).expect(CERTIFICATE);
        change(&mut params);
        let certificate = params.signed_by(&key, &authority.0).expect(CERTIFICATE);
        self.write(&format!("{name}.pem"), &certificate.pem());
        self.write(&format!("{name}.key"), &key.serialize_pem());
    }

    /// Sets certificates and tokens for every port.
    pub fn secure(&self, settings: &mut ClusterSettings) {
        self.secure_agent(&mut settings.agent);
        if let Some(router) = &mut settings.router {
            self.secure_router(router, Some("router"), Some("tokens"));
            (router.tls.cert, router.tls.key) = (self.path("front.pem"), self.path("front.key"));
        }
    }

    /// Sets certificates and tokens for an agent.
    pub fn secure_agent(&self, agent: &mut worker_agent::config::Config) {
        let tls = &mut agent.tls;
        (tls.cert, tls.key) = (self.path("agent.pem"), self.path("agent.key"));
        tls.client_ca = self.path("ca.pem");
        tls.client_names = vec![ROUTER.to_owned()];
        agent.auth.token_file = self.path("tokens");
    }

    /// Sets the router's certificate and token for agents, where they are named.
    pub fn secure_router(
        &self,
        router: &mut router::config::Config,
        certificate: Option<&str>,
        tokens: Option<&str>,
    ) {
        let agents = &mut router.agents;
        agents.ca = self.path("ca.pem");
        agents.server_name = AGENT.to_owned();
        if let Some(name) = certificate {
            agents.cert = self.path(&format!("{name}.pem"));
            agents.key = self.path(&format!("{name}.key"));
        }
        agents.token_file = tokens.map(|name| self.path(name)).unwrap_or_default();
    }

    /// Connects to the control port of an agent with the router's certificate, but no token.
    pub async fn control_client(&self, url: String) -> WorkerAgentClient<Channel> {
        let tls = Some(self.client_tls(Some("router"), Some(AGENT)));
        let connector = Connector::new(HttpConnector::new(), tls, Protocol::Http2, PATIENCE);
        let endpoint = Endpoint::from_shared(url).expect("an agent's own URL");
        let connected = endpoint.connect_with_connector(connector).await;
        WorkerAgentClient::new(connected.expect("a connection"))
    }

    /// Returns a client that trusts `ca.pem`, and shows the named certificate.
    #[must_use]
    pub fn web(&self, certificate: Option<&str>, server_name: Option<&str>) -> Web {
        Web::with_tls(self.client_tls(certificate, server_name))
    }

    /// Returns what [`Files::web`] connects with.
    #[must_use]
    pub fn client_tls(&self, certificate: Option<&str>, server_name: Option<&str>) -> ClientTls {
        let path = |name: &str, ending| self.path(&format!("{name}.{ending}"));
        let files = ClientFiles {
            ca: self.path("ca.pem"),
            identity: certificate.map(|name| (path(name, "pem"), path(name, "key"))),
            server_name: server_name.map(|name| name.to_owned().try_into().expect("a host name")),
        };
        start(&files)
    }
}

fn start(files: &ClientFiles) -> ClientTls {
    let metrics = reload::Metrics::default();
    files.start(&metrics, &Tasks::default()).expect("the files are whole")
}

/// Returns a token of one letter.
#[must_use]
pub fn token(letter: char) -> String {
    letter.to_string().repeat(40)
}

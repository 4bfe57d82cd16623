//! Defines the table `[tls]`, and checks that open ports recognize routers.
//!
//! Whoever reaches the data or control port acts for every session. So a port that other hosts
//! reach must recognize routers, by a certificate (`tls.client_ca`) or by a shared token
//! (`auth.token_file`). The files are read when the agent starts and when they change.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use service::{
    router_token::Tokens,
    tls::{
        ServerName,
        server::{ServerFiles, TrustedClients},
    },
};

use super::{auth::AuthTable, path_if_set};

service::settings! {
    /// The certificates of the data and control port.
    ///
    /// All keys are empty by default: a laptop and a network with encryption of its own need none.
    pub struct TlsTable {
        /// The PEM file of the agent's certificate and the intermediate ones. Empty: no TLS.
        cert: PathBuf;
        /// The PEM file of the private key of `cert`.
        key: PathBuf;
        /// The PEM file of the CAs whose certificates routers must show. Empty: routers need no
        /// certificate.
        client_ca: PathBuf;
        /// The DNS names or IP addresses of which a router's certificate must have one. Empty:
        /// every certificate of `client_ca` is a router's.
        client_names: Vec<String>;
    }
}

impl TlsTable {
    /// Returns the server's files, or `None` without TLS. The settings must be valid.
    #[must_use]
    pub fn server_files(&self) -> Option<ServerFiles> {
        let names = self.client_names.iter().filter_map(|name| name.clone().try_into().ok());
        let clients =
            path_if_set(&self.client_ca).map(|ca| TrustedClients { ca, names: names.collect() });
        let (cert, key) = (path_if_set(&self.cert)?, path_if_set(&self.key)?);
        Some(ServerFiles { cert, key, clients })
    }

    /// Whether routers must show a certificate.
    #[must_use]
    pub fn demands_certificates(&self) -> bool {
        path_if_set(&self.client_ca).is_some()
    }

    fn check(&self, problems: &mut Vec<String>) {
        let is_set = |path: &Path| path_if_set(path).is_some();
        if is_set(&self.cert) != is_set(&self.key) {
            problems.push("tls.cert and tls.key must be set together".to_owned());
        }
        if is_set(&self.client_ca) && !is_set(&self.cert) {
            problems.push("tls.client_ca needs tls.cert and tls.key".to_owned());
        }
        if !self.client_names.is_empty() && !is_set(&self.client_ca) {
            problems.push("tls.client_names needs tls.client_ca".to_owned());
        }
        for name in &self.client_names {
            if ServerName::try_from(name.as_str()).is_err() {
                problems.push(format!("tls.client_names: {name:?} is no DNS name or IP address"));
            }
        }
    }
}

/// Adds the problems of both tables, and of addresses that are open without authentication.
pub(super) fn check(
    tls: &TlsTable,
    auth: &AuthTable,
    addresses: [(&str, SocketAddr); 2],
    problems: &mut Vec<String>,
) {
    tls.check(problems);
    if tls.demands_certificates() || path_if_set(&auth.token_file).is_some() {
        return;
    }
    for (key, address) in addresses {
        if !address.ip().to_canonical().is_loopback() {
            problems.push(format!(
                "{key} is {address}, which other hosts reach, and routers aren't authenticated: \
                 set tls.client_ca or auth.token_file, or listen on loopback"
            ));
        }
    }
}

/// Reads the files of both tables once. Returns what is wrong with them.
pub(super) fn file_problems(tls: &TlsTable, auth: &AuthTable) -> Vec<String> {
    let tls = tls.server_files().and_then(|files| files.check().err());
    let token_file = path_if_set(&auth.token_file);
    let tokens = token_file.and_then(|path| Tokens::source(path).read().err());
    let in_table = |table: &'static str| move |error| format!("[{table}]: {error}");
    tls.map(in_table("tls")).into_iter().chain(tokens.map(in_table("auth"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(tls: &TlsTable, auth: &AuthTable, data: &str, control: &str) -> Vec<String> {
        let mut problems = vec![];
        let addresses = [("data", data.parse().unwrap()), ("control", control.parse().unwrap())];
        check(tls, auth, addresses, &mut problems);
        problems
    }

    #[test]
    fn a_port_off_loopback_needs_authentication() {
        let (local, open) = ("127.0.0.9:1", "0.0.0.0:1");
        let token = AuthTable { token_file: "/t".into(), ..AuthTable::default() };
        let server = TlsTable { cert: "/c".into(), key: "/k".into(), ..TlsTable::default() };
        let mutual = TlsTable { client_ca: "/ca".into(), ..server.clone() };
        let count = |tls: &TlsTable, auth: &AuthTable, data, control| {
            problems(tls, auth, data, control).len()
        };
        let (no_tls, no_token) = (TlsTable::default(), AuthTable::default());
        for (local, open) in [(local, open), ("[::1]:1", "[::]:1"), ("[::ffff:127.0.0.1]:1", open)]
        {
            assert_eq!(count(&no_tls, &no_token, local, local), 0);
            assert_eq!(count(&no_tls, &no_token, open, local), 1);
            assert_eq!(count(&no_tls, &no_token, local, open), 1);
            assert_eq!(count(&no_tls, &no_token, open, open), 2);
            assert_eq!(count(&server, &no_token, open, open), 2, "encryption recognizes nobody");
            assert_eq!(count(&mutual, &no_token, open, open), 0);
            assert_eq!(count(&no_tls, &token, open, open), 0);
        }
    }

    #[test]
    fn half_a_table_is_a_problem() {
        let local = "127.0.0.1:1";
        let halves = [
            TlsTable { cert: "/c".into(), ..TlsTable::default() },
            TlsTable { key: "/k".into(), ..TlsTable::default() },
            TlsTable { client_ca: "/ca".into(), ..TlsTable::default() },
            TlsTable { client_names: vec!["a".into()], ..TlsTable::default() },
        ];
        for half in halves {
            let problems = problems(&half, &AuthTable::default(), local, local);
            assert_eq!(problems.len(), 1, "{half:?}: {problems:?}");
        }
    }
}

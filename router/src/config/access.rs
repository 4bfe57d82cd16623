//! Defines the tables `[tls]` and `[agents]`: the certificates and tokens of the router.
//!
//! `[tls]` is for the clients' side, `[agents]` for the agents' side. The files are read when the
//! router starts and when they change.

use std::path::{Path, PathBuf};

use service::{
    router_token::Tokens,
    tls::{ServerName, client::ClientFiles, server::ServerFiles},
};

service::settings! {
    /// The certificate that clients see.
    ///
    /// Both keys are empty by default: a laptop needs no TLS, and a load balancer in front may have
    /// it.
    pub struct TlsTable {
        /// The PEM file of the router's certificate and the intermediate ones. Empty: no TLS.
        cert: PathBuf;
        /// The PEM file of the private key of `cert`.
        key: PathBuf;
    }

    /// How the router proves itself to agents, and recognizes them.
    ///
    /// All keys are empty by default, for agents on the router's host.
    pub struct AgentsTable {
        /// The PEM file of the CAs that sign the agents' certificates. Needed for `https` workers.
        ca: PathBuf;
        /// The PEM file of the certificate that the router shows to agents. Empty: none.
        cert: PathBuf;
        /// The PEM file of the private key of `cert`.
        key: PathBuf;
        /// The name that the certificate of every agent must have. Empty: the agent's host, as in
        /// `workers`.
        server_name: String;
        /// The file of the tokens by which this router and its agents recognize each other. With
        /// it, only agents that hold its first token get prompts. Empty: none.
        token_file: PathBuf;
    }
}

/// Returns the path in a setting, or `None` if the setting is empty.
pub(super) fn path_if_set(setting: &Path) -> Option<PathBuf> {
    (!setting.as_os_str().is_empty()).then(|| setting.to_owned())
}

impl TlsTable {
    /// Returns the server's files, or `None` without TLS.
    #[must_use]
    pub fn server_files(&self) -> Option<ServerFiles> {
        let (cert, key) = (path_if_set(&self.cert)?, path_if_set(&self.key)?);
        Some(ServerFiles { cert, key, clients: None })
    }
}

impl AgentsTable {
    /// Returns the files for connections to agents, or `None` without TLS.
    #[must_use]
    pub fn client_files(&self) -> Option<ClientFiles> {
        Some(ClientFiles {
            ca: path_if_set(&self.ca)?,
            identity: path_if_set(&self.cert).zip(path_if_set(&self.key)),
            server_name: ServerName::try_from(self.server_name.clone()).ok(),
        })
    }

    /// Returns the file of the tokens, if there is one.
    #[must_use]
    pub fn token_file(&self) -> Option<PathBuf> {
        path_if_set(&self.token_file)
    }

    /// Whether the router proves to agents that it is one.
    #[must_use]
    pub fn proves_itself(&self) -> bool {
        path_if_set(&self.token_file).or(path_if_set(&self.cert)).is_some()
    }
}

/// Adds the problems of both tables.
pub(super) fn check(
    tls: &TlsTable,
    agents: &AgentsTable,
    workers: &[String],
    problems: &mut Vec<String>,
) {
    let is_set = |path: &Path| path_if_set(path).is_some();
    if is_set(&tls.cert) != is_set(&tls.key) {
        problems.push("tls.cert and tls.key must be set together".to_owned());
    }
    if is_set(&agents.cert) != is_set(&agents.key) {
        problems.push("agents.cert and agents.key must be set together".to_owned());
    }
    if is_set(&agents.cert) && !is_set(&agents.ca) {
        problems.push("agents.cert needs agents.ca".to_owned());
    }
    let name = &agents.server_name;
    if !name.is_empty() && ServerName::try_from(name.as_str()).is_err() {
        problems.push(format!("agents.server_name: {name:?} is no DNS name or IP address"));
    }
    if !is_set(&agents.ca) && workers.iter().any(|worker| worker.starts_with("https:")) {
        problems.push("agents.ca: https workers need the CA of their certificates".to_owned());
    }
}

/// Reads the files of both tables once. Returns what is wrong with them.
pub(super) fn file_problems(tls: &TlsTable, agents: &AgentsTable) -> Vec<String> {
    let server = tls.server_files().and_then(|files| files.check().err());
    let client = agents.client_files().and_then(|files| files.check().err());
    let tokens = agents.token_file().and_then(|path| Tokens::source(path).read().err());
    let in_table = |table: &'static str| move |error| format!("[{table}]: {error}");
    let of_agents = client.into_iter().chain(tokens).map(in_table("agents"));
    server.map(in_table("tls")).into_iter().chain(of_agents).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_table_is_a_problem() {
        let found = |tls: TlsTable, agents: AgentsTable, worker: &str| {
            let mut problems = vec![];
            check(&tls, &agents, &[worker.to_owned()], &mut problems);
            problems
        };
        let (no_tls, no_agents) = (TlsTable::default(), AgentsTable::default());
        assert!(found(no_tls.clone(), no_agents.clone(), "http://a:1").is_empty());
        let with_ca = AgentsTable { ca: "/ca".into(), ..no_agents.clone() };
        assert!(found(no_tls.clone(), with_ca.clone(), "https://a:1").is_empty());
        let wrong = [
            (TlsTable { cert: "/c".into(), ..no_tls.clone() }, no_agents.clone()),
            (TlsTable { key: "/k".into(), ..no_tls.clone() }, no_agents.clone()),
            (no_tls.clone(), AgentsTable { cert: "/c".into(), ..with_ca.clone() }),
            (no_tls.clone(), AgentsTable { server_name: "a b".into(), ..no_agents.clone() }),
        ];
        for (tls, agents) in wrong {
            let problems = found(tls.clone(), agents.clone(), "http://a:1");
            assert_eq!(problems.len(), 1, "{tls:?} {agents:?}: {problems:?}");
        }
        assert_eq!(found(no_tls, no_agents, "https://a:1").len(), 1);
    }
}

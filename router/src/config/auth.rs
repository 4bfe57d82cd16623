//! The settings of `[auth]`: who may send requests to the router.
//!
//! Clients need a credential as soon as a source of credentials is set. Without one, the router
//! serves only its own host, unless `mode = "none"` says that everybody may use it.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use service::auth::{MetricsAuth, gate, key_file};

use super::jwt::JwtTable;

service::settings! {
    /// What the router does without a source of credentials.
    pub enum AuthMode {
        /// Serves only its own host.
        Auto = "auto",
        /// Serves everybody who reaches it. Something before the router must check the clients.
        None = "none",
    }

    /// Which clients may share KV in the engines' caches.
    pub enum CacheIsolation {
        /// All: equal prompts of different clients are computed once.
        None = "none",
        /// Those of one principal.
        Principal = "principal",
    }
}

service::settings! {
    /// Who may send requests.
    pub struct AuthTable {
        /// Whether the router serves other hosts without checking credentials. The default doesn't:
        /// that is safe, and enough for a laptop.
        mode: AuthMode = AuthMode::Auto;
        /// The file of API keys. Empty: there are no keys.
        keys_file: PathBuf;
        /// Who may read `/metrics` on the admin port. The default needs a key, because figures show
        /// what others do. "none" is for scrapers that can't send a header.
        metrics_auth: MetricsAuth = MetricsAuth::Key;
        /// Which clients may share KV. The default shares all, because most fleets serve one
        /// organization, and a shared system prompt is computed once. "principal" is for clients
        /// that must not find out each other's prompts by guessing.
        cache_isolation: CacheIsolation = CacheIsolation::None;
        jwt: JwtTable;
    }
}

impl AuthTable {
    /// Returns the path of the key file, if there is one.
    #[must_use]
    pub fn keys_path(&self) -> Option<&Path> {
        (!self.keys_file.as_os_str().is_empty()).then_some(&self.keys_file)
    }

    /// Whether clients need a credential.
    #[must_use]
    pub fn needs_credential(&self) -> bool {
        self.keys_path().is_some() || self.jwt.is_on()
    }

    /// Returns what is wrong with the files that these settings name.
    pub(super) fn file_problems(&self) -> Vec<String> {
        let keys = self.keys_path().and_then(|path| key_file::source(path).read().err());
        let keys = keys.map(|error| format!("auth.keys_file: {error}"));
        keys.into_iter().chain(self.jwt.file_problem()).collect()
    }

    /// Returns the problems of these settings with the addresses of the data and the admin port.
    pub(super) fn problems(&self, data_addr: SocketAddr, admin_addr: SocketAddr) -> Vec<String> {
        let mut problems = self.jwt.problems();
        if self.needs_credential() && self.mode == AuthMode::None {
            problems.push(
                "auth.mode: is \"none\", but keys or tokens are set; remove one of them".to_owned(),
            );
        }
        if !self.needs_credential() && self.cache_isolation == CacheIsolation::Principal {
            problems.push(
                "auth.cache_isolation: without keys all clients are one principal; set \
                 auth.keys_file"
                    .to_owned(),
            );
        }
        if !self.needs_credential()
            && self.mode == AuthMode::Auto
            && !gate::is_local(data_addr.ip())
        {
            problems.push(format!(
                "listen.data_addr: {data_addr} is open to other hosts and nobody needs a key; set \
                 auth.keys_file, or a loopback address, or auth.mode = \"none\" to serve everybody"
            ));
        }
        if self.keys_path().is_none()
            && self.metrics_auth == MetricsAuth::Key
            && !gate::is_local(admin_addr.ip())
        {
            problems.push(format!(
                "listen.admin_addr: {admin_addr} is open to other hosts and there are no keys for \
                 it; set auth.keys_file, or a loopback address, or auth.metrics_auth = \"none\" to \
                 show /metrics to everybody"
            ));
        }
        problems
    }
}

//! The settings of `[auth]`: how the agent recognizes routers, and who may use its admin port.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use service::auth::{MetricsAuth, gate, key_file};

service::settings! {
    /// How the agent recognizes routers, and who may use the admin port.
    pub struct AuthTable {
        /// The file of the tokens by which this agent and its routers recognize each other. Empty,
        /// as by default: they need none, because `tls.client_ca` demands a certificate or no other
        /// host reaches the ports.
        token_file: PathBuf;
        /// The file of API keys for the admin port. Empty: there are no keys, and the port must be
        /// a loopback address.
        keys_file: PathBuf;
        /// Who may read `/metrics` on the admin port. The default needs a key, because figures show
        /// what users do. "none" is for scrapers that can't send a header.
        metrics_auth: MetricsAuth = MetricsAuth::Key;
    }
}

impl AuthTable {
    /// Returns the path of the key file, if there is one.
    #[must_use]
    pub fn keys_path(&self) -> Option<&Path> {
        (!self.keys_file.as_os_str().is_empty()).then_some(&self.keys_file)
    }

    /// Returns what is wrong with the key file.
    pub(super) fn file_problem(&self) -> Option<String> {
        let error = key_file::source(self.keys_path()?).read().err()?;
        Some(format!("auth.keys_file: {error}"))
    }

    /// Returns the problem of these settings with the address of the admin port.
    pub(super) fn problem(&self, admin_addr: SocketAddr) -> Option<String> {
        let is_guarded = self.keys_path().is_some()
            || self.metrics_auth == MetricsAuth::None
            || gate::is_local(admin_addr.ip());
        (!is_guarded).then(|| {
            format!(
                "listen.admin_addr {admin_addr} is open to other hosts and there are no keys for \
                 it: set auth.keys_file, or a loopback address, or auth.metrics_auth = \"none\" to \
                 show /metrics to everybody"
            )
        })
    }
}

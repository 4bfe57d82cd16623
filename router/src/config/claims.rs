//! The settings of `[claims]`: where routers agree on the workers of new sessions.
//!
//! `claims` reads them. Its documentation says what a claim is.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use contract::placement_claim::TTL_MAX;
use http::Uri;
use service::tls::client::ClientFiles;

use super::access::path_if_set;

/// The most members of an etcd cluster that the settings name. Clusters have three or five.
const ETCD_URLS_MAX: usize = 9;
/// The longest beginning of a store's keys.
const PREFIX_BYTES_MAX: usize = 64;

service::settings! {
    /// Where claims are held.
    pub enum StoreName {
        /// At the agents. Nothing else has to run.
        Agents = "agents",
        /// In this process, which must be the only router.
        Memory = "memory",
        /// In Redis, one server.
        Redis = "redis",
        /// In etcd, one member of a cluster at a time.
        Etcd = "etcd",
    }
}

service::settings! {
    /// How this router and others agree on the workers of new sessions.
    pub struct ClaimsTable {
        /// Where claims are held. All routers of a fleet must have the same setting.
        ///
        /// Nothing else has to run.
        store: StoreName = StoreName::Agents;
        /// How long the store or an agent that did not answer its last question may take for a
        /// claim. Then the next is asked.
        ///
        /// In one network a claim takes a millisecond; a first turn computes its whole prompt, so
        /// that it hardly notices 20 ms.
        deadline_ms: u64 = 20;
        /// How long the store or an agent that answered its last question may take.
        ///
        /// A long prompt that is computed on two workers takes seconds of a GPU, so a first turn
        /// had better wait for a place that is busy.
        patience_ms: u64 = 500;
        /// How long a claim holds, unless it is renewed.
        ///
        /// It must cover the time from a session's placement until its agent has reported it, which
        /// is milliseconds after the turn has reached the agent. Turns may wait for seconds before
        /// that, while their prompts are computed in stages.
        ttl_ms: u64 = 30_000;
        /// Where the store is: one URL of Redis (`redis://host:6379/0`, `rediss://` with TLS), or
        /// those of the members of an etcd cluster (`http://host:2379`, `https://` with TLS).
        urls: Vec<String>;
        /// What the keys in the store begin with. Fleets that share a store have different ones.
        ///
        /// Most fleets have a store of their own.
        prefix: String = "berth".to_owned();
        /// The user's name at the store. Empty: Redis' default user; no user of etcd.
        user: String;
        /// The file with the password. Empty: none.
        password_file: PathBuf;
        /// The PEM file of the CAs that sign the store's certificate. Needed with TLS.
        ca: PathBuf;
        /// The PEM file of the certificate that the router shows to the store. Empty: none.
        cert: PathBuf;
        /// The PEM file of the private key of `cert`.
        key: PathBuf;
    }
}

impl ClaimsTable {
    /// Returns the problems of these settings, a sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = vec![];
        if !(1..=10_000).contains(&self.deadline_ms) {
            problems.push("claims.deadline_ms: must be 1 to 10000 ms".to_owned());
        }
        if !(self.deadline_ms..=10_000).contains(&self.patience_ms) {
            problems.push("claims.patience_ms: must be claims.deadline_ms to 10000 ms".to_owned());
        }
        let ttl_ms_max = u64::try_from(TTL_MAX.as_millis()).unwrap_or(u64::MAX);
        if !(1_000..=ttl_ms_max).contains(&self.ttl_ms) {
            problems.push(format!("claims.ttl_ms: must be 1000 to {ttl_ms_max} ms"));
        }
        problems.extend(self.store_problems());
        problems
    }

    /// Returns the problems of the settings of a store outside.
    fn store_problems(&self) -> Vec<String> {
        let mut problems = vec![];
        let (schemes, urls_max) = match self.store {
            StoreName::Agents | StoreName::Memory => (["", ""], 0),
            StoreName::Redis => (["redis", "rediss"], 1),
            StoreName::Etcd => (["http", "https"], ETCD_URLS_MAX),
        };
        if self.urls.len() > urls_max || (urls_max > 0 && self.urls.is_empty()) {
            let count = self.urls.len();
            problems.push(format!(
                "claims.urls: {count} are named; redis needs 1, etcd 1 to {ETCD_URLS_MAX}, others 0"
            ));
            return problems;
        }
        if self.store == StoreName::Redis && !cfg!(feature = "redis") {
            problems.push(
                "claims.store: this router was built without the feature redis; build it with it"
                    .to_owned(),
            );
        }
        let mut has_tls = false;
        for url in &self.urls {
            let parsed: Option<Uri> = url.parse().ok();
            let authority = parsed.as_ref().and_then(Uri::authority);
            let scheme = parsed.as_ref().and_then(Uri::scheme_str).unwrap_or_default();
            if !schemes.contains(&scheme) || authority.is_none() {
                let [plain, tls] = schemes;
                problems.push(format!("claims.urls: write {plain}://host:port or {tls}://…"));
            }
            if authority.is_some_and(|authority| authority.as_str().contains('@')) {
                problems.push("claims.urls: put the password in claims.password_file".to_owned());
            }
            has_tls |= scheme.ends_with('s') && scheme != "redis";
        }
        let is_set = |path: &Path| path_if_set(path).is_some();
        if has_tls && !is_set(&self.ca) {
            problems.push("claims.ca: a store with TLS needs the CA of its certificate".to_owned());
        }
        if is_set(&self.cert) != is_set(&self.key) {
            problems.push("claims.cert and claims.key must be set together".to_owned());
        }
        if self.prefix.is_empty() || self.prefix.len() > PREFIX_BYTES_MAX {
            problems.push(format!("claims.prefix: must have 1 to {PREFIX_BYTES_MAX} bytes"));
        }
        problems
    }

    /// Returns the certificates for a store with TLS. `None` if no CA is named.
    #[must_use]
    pub fn client_files(&self) -> Option<ClientFiles> {
        Some(ClientFiles {
            ca: path_if_set(&self.ca)?,
            identity: path_if_set(&self.cert).zip(path_if_set(&self.key)),
            server_name: None,
        })
    }

    /// Reads the password.
    ///
    /// # Errors
    /// If the file can't be read.
    pub(crate) fn password(&self) -> io::Result<Option<String>> {
        let path = path_if_set(&self.password_file);
        path.map(|path| Ok(fs::read_to_string(path)?.trim_end().to_owned())).transpose()
    }

    /// Returns how long a place that answered its last question may take.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(self.patience_ms)
    }

    /// Returns how long a place that did not may take.
    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// Returns how long a claim holds.
    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(store: StoreName, urls: &[&str]) -> ClaimsTable {
        let urls = urls.iter().map(|url| (*url).to_owned()).collect();
        ClaimsTable { store, urls, ..ClaimsTable::default() }
    }

    #[test]
    fn a_store_needs_its_own_urls_and_no_password_in_them() {
        let right = [
            table(StoreName::Agents, &[]),
            table(StoreName::Redis, &["redis://r:6379/1"]),
            table(StoreName::Etcd, &["http://a:2379", "http://b:2379"]),
            ClaimsTable { ca: "/ca".into(), ..table(StoreName::Redis, &["rediss://r:6379"]) },
        ];
        for table in right {
            assert_eq!(table.problems(), Vec::<String>::new(), "{table:?}");
        }
        let wrong = [
            table(StoreName::Agents, &["redis://r:6379"]),
            table(StoreName::Redis, &[]),
            table(StoreName::Redis, &["redis://r:6379", "redis://s:6379"]),
            table(StoreName::Redis, &["http://r:6379"]),
            table(StoreName::Redis, &["redis://user:secret@r:6379"]),
            table(StoreName::Redis, &["rediss://r:6379"]),
            table(StoreName::Etcd, &["https://a:2379"]),
            ClaimsTable { cert: "/c".into(), ..table(StoreName::Etcd, &["http://a:2379"]) },
            ClaimsTable { prefix: String::new(), ..table(StoreName::Etcd, &["http://a:2379"]) },
            ClaimsTable { deadline_ms: 0, ..ClaimsTable::default() },
            ClaimsTable { patience_ms: 19, ..ClaimsTable::default() },
            ClaimsTable { ttl_ms: 999, ..ClaimsTable::default() },
        ];
        for table in wrong {
            assert_eq!(table.problems().len(), 1, "{table:?}: {:?}", table.problems());
        }
    }
}

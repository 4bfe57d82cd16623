//! Defines the table `[discovery]`: where the router learns of agents besides `workers`.
//!
//! Each source is off by default. `discovery` reads these settings, and `super` checks them.

use std::{net::SocketAddr, path::PathBuf};

use serde::Deserialize;
use service::reload::Source;

use super::{AGENTS_MAX, control_authority};

service::settings! {
    /// Where the router learns of further agents.
    pub struct DiscoveryTable {
        /// The file that lists agents (TOML or JSON). Empty: none.
        file: PathBuf;
        /// Whether agents may announce themselves, with keys that have the right `announce`.
        announce: bool = false;
        /// The most agents that one key may have announced at a time.
        ///
        /// With half of the places, no key can fill them alone.
        announced_per_key_max: usize = AGENTS_MAX / 2;
        dns: DnsTable;
        kubernetes: KubernetesTable;
    }

    /// Names of the Domain Name System.
    pub struct DnsTable {
        /// The names, each as the URL of a control port: `http://host:port` stands for all
        /// addresses of the host, and `srv+http://name` for all targets of its SRV records. Empty:
        /// none.
        names: Vec<String>;
        /// Shortest time between two look-ups.
        ///
        /// An answer with a shorter time to live would have the router ask all the time.
        ttl_ms_min: u64 = 1_000;
        /// Longest time between two look-ups.
        ///
        /// Names of agents change with every rolling update, and some servers give out times to
        /// live of hours.
        ttl_ms_max: u64 = 30_000;
        /// The servers to ask. Empty: those of the system.
        servers: Vec<SocketAddr>;
    }

    /// Endpoint slices of a Kubernetes cluster.
    pub struct KubernetesTable {
        /// The label selector of the slices, such as `kubernetes.io/service-name=berth-agents`.
        /// Empty: the cluster isn't asked.
        selector: String;
        /// The namespace of the slices. Empty: that of the router's own pod or kubeconfig.
        namespace: String;
        /// The name of the agents' control port in the slices.
        ///
        /// The name that the Helm chart gives to the port.
        port_name: String = "control".to_owned();
        /// Whether the control ports speak TLS.
        tls: bool = false;
        /// The kubeconfig file. Empty: the service account of the router's own pod.
        kubeconfig: PathBuf;
    }
}

impl DiscoveryTable {
    /// Whether a source is set.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.has_file() || self.announce || !self.dns.names.is_empty() || self.kubernetes.is_on()
    }

    /// Whether a file is set.
    #[must_use]
    pub fn has_file(&self) -> bool {
        !self.file.as_os_str().is_empty()
    }

    /// Reads the files once. Returns what is wrong with them.
    pub(super) fn file_problems(&self) -> Vec<String> {
        let file = self.has_file().then(|| workers_source(self.file.clone()).read().err());
        let file = file.flatten().map(|error| format!("discovery.file: {error}"));
        file.into_iter().chain(self.kubernetes.file_problem()).collect()
    }

    /// Adds the problems of these settings.
    pub(super) fn check(&self, has_keys: bool, problems: &mut Vec<String>) {
        for name in &self.dns.names {
            if let Err(problem) = DnsName::parse(name) {
                problems.push(format!(
                    "discovery.dns.names: {name:?} {problem}; write http://host:port or \
                     srv+http://name"
                ));
            }
        }
        let DnsTable { ttl_ms_min, ttl_ms_max, .. } = self.dns;
        if !(1..=ttl_ms_max).contains(&ttl_ms_min) || ttl_ms_max > 24 * 3600 * 1000 {
            problems.push(
                "discovery.dns: ttl_ms_min must be 1 to ttl_ms_max, and that at most a day"
                    .to_owned(),
            );
        }
        if !(1..=AGENTS_MAX).contains(&self.announced_per_key_max) {
            problems.push(format!("discovery.announced_per_key_max must be 1 to {AGENTS_MAX}"));
        }
        let not_built = [
            ("dns.names", "dns", cfg!(feature = "dns") || self.dns.names.is_empty()),
            ("kubernetes", "kubernetes", cfg!(feature = "kubernetes") || !self.kubernetes.is_on()),
        ];
        for (key, feature, _) in not_built.iter().filter(|(.., is_good)| !is_good) {
            problems.push(format!(
                "discovery.{key}: this router was built without the feature {feature}; build it \
                 with it"
            ));
        }
        if self.announce && !has_keys {
            problems.push(
                "discovery.announce needs auth.keys_file: keys say which agents may announce \
                 themselves"
                    .to_owned(),
            );
        }
    }
}

impl KubernetesTable {
    /// Reads the kubeconfig once. Returns what is wrong with it.
    fn file_problem(&self) -> Option<String> {
        if !self.is_on() || self.kubeconfig.as_os_str().is_empty() {
            return None;
        }
        #[cfg(feature = "kubernetes")]
        return kube::config::Kubeconfig::read_from(&self.kubeconfig).err().map(|error| {
            let why = service::log::describe_error(&error);
            format!("discovery.kubernetes.kubeconfig: {why}")
        });
        #[cfg(not(feature = "kubernetes"))]
        None
    }

    /// Whether the cluster is asked.
    #[must_use]
    pub fn is_on(&self) -> bool {
        !self.selector.is_empty()
    }
}

/// A name of the setting `discovery.dns.names`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DnsName {
    /// All addresses of a host, with this port.
    Host {
        /// `http` or `https`.
        scheme: String,
        /// The host's name.
        host: String,
        /// The port.
        port: u16,
    },
    /// All targets of the SRV records of a name.
    Service {
        /// `http` or `https`.
        scheme: String,
        /// The name, such as `_control._tcp.agents.example`.
        name: String,
    },
}

impl DnsName {
    /// Reads a name of the settings.
    ///
    /// # Errors
    /// When the text has another form. The error completes a sentence that begins with the text.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if let Some(service) = text.strip_prefix("srv+") {
            let (scheme, name) = service.split_once("://").ok_or("is no address")?;
            let is_name = !name.is_empty() && !name.contains(['/', ':', '@']);
            return match (scheme, is_name) {
                ("http" | "https", true) => {
                    Ok(Self::Service { scheme: scheme.to_owned(), name: name.to_owned() })
                }
                (_, false) => Err("has no name, or more than a name"),
                _ => Err("is neither http nor https"),
            };
        }
        let authority = control_authority(text)?;
        let scheme = if text.starts_with("https:") { "https" } else { "http" }.to_owned();
        let port = authority.port_u16().ok_or("has no port")?;
        Ok(Self::Host { scheme, host: authority.host().to_owned(), port })
    }
}

/// The form of a file that isn't a bare list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Workers {
    workers: Vec<String>,
}

/// Describes the file that lists agents. Its value is their URLs.
pub(crate) fn workers_source(path: PathBuf) -> Source<Vec<String>> {
    let shown = path.display().to_string();
    Source::new("workers", vec![path], move |contents| {
        parse_workers(&contents[0]).map_err(|why| format!("{shown}: {why}"))
    })
}

/// Reads the agents' URLs in the content of a file.
fn parse_workers(content: &[u8]) -> Result<Vec<String>, String> {
    let text = std::str::from_utf8(content).map_err(|_| "the file isn't UTF-8".to_owned())?;
    let urls = match text.trim_start().chars().next() {
        Some('[') => serde_json::from_str(text).map_err(|error| error.to_string())?,
        Some('{') => {
            let file: Workers = serde_json::from_str(text).map_err(|error| error.to_string())?;
            file.workers
        }
        _ => toml::from_str::<Workers>(text).map_err(|error| error.message().to_owned())?.workers,
    };
    if urls.len() > AGENTS_MAX {
        return Err(format!("the file has more than {AGENTS_MAX} workers"));
    }
    if let Some((url, problem)) =
        urls.iter().find_map(|url| Some((url, control_authority(url).err()?)))
    {
        return Err(format!("workers: {url:?} {problem}; write http://host:port"));
    }
    Ok(urls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_host_with_a_port_or_a_service() {
        let host = DnsName::Host { scheme: "https".into(), host: "a.b".into(), port: 7 };
        assert_eq!(DnsName::parse("https://a.b:7"), Ok(host));
        let name = "_control._tcp.a".to_owned();
        let service = DnsName::Service { scheme: "http".into(), name };
        assert_eq!(DnsName::parse("srv+http://_control._tcp.a"), Ok(service));
        for bad in ["a:1", "http://a", "srv+http://a:1", "srv+http://", "srv+ftp://a", "srv+a"] {
            assert!(DnsName::parse(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn wrong_sources_are_told() {
        let dns = DnsTable { names: vec!["a".into()], ttl_ms_min: 0, ..DnsTable::default() };
        let table = DiscoveryTable {
            announce: true,
            announced_per_key_max: 0,
            dns,
            ..DiscoveryTable::default()
        };
        let mut problems = vec![];
        table.check(false, &mut problems);
        assert_eq!(problems.len(), 4, "{problems:?}");
        assert!(table.is_on() && !DiscoveryTable::default().is_on());
    }

    #[test]
    fn a_list_is_toml_or_json() {
        let expected = ["http://a:1", "https://b:2"].map(str::to_owned).to_vec();
        for text in [
            "# all\nworkers = [\"http://a:1\", \"https://b:2\"]\n",
            " [\"http://a:1\", \"https://b:2\"]",
            "{\"workers\": [\"http://a:1\", \"https://b:2\"]}",
        ] {
            assert_eq!(parse_workers(text.as_bytes()), Ok(expected.clone()), "{text}");
        }
        assert_eq!(parse_workers(b"workers = []"), Ok(vec![]));
    }

    #[test]
    fn a_list_that_is_half_written_or_wrong_is_refused_whole() {
        for text in ["", "workers = [\"http://a:1\",", "[\"http://a:1\", 7]", "[\"a:1\"]", "{}"] {
            assert!(parse_workers(text.as_bytes()).is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn a_check_of_the_settings_names_files_that_are_missing_or_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers.toml");
        let mut table = DiscoveryTable { file: path.clone(), ..DiscoveryTable::default() };
        table.kubernetes.kubeconfig = folder.path().join("kubeconfig");
        let shown = path.display().to_string();
        let problems = table.file_problems();
        assert!(problems.len() == 1 && problems[0].contains(&shown), "{problems:?}");
        std::fs::write(&path, "workers = [\"http://a:1\", \"b:1\"]").unwrap();
        let problems = table.file_problems();
        assert!(problems.len() == 1 && problems[0].contains("\"b:1\""), "{problems:?}");
        std::fs::write(&path, "workers = [\"http://a:1\"]").unwrap();
        assert_eq!(table.file_problems(), [""; 0]);
        table.kubernetes.selector = "a=b".to_owned();
        let problems = table.file_problems();
        assert!(problems.len() == 1 && problems[0].contains("kubeconfig"), "{problems:?}");
    }
}

//! Defines the tables `[advertise]` and `[announce]`: how routers reach and find this agent.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use http::{HeaderValue, Uri};
use service::{reload::Source, tls::client::ClientFiles};

use super::path_if_set;

/// The most routers that an agent announces itself to. Each has a task and a connection.
const ROUTERS_MAX: usize = 64;

service::settings! {
    /// The addresses of the ports as routers see them.
    ///
    /// They differ from `[listen]` where ports are mapped, or where the agent listens on all
    /// addresses.
    pub struct AdvertiseTable {
        /// The host that routers connect to. Empty: the one in their own settings or sources.
        host: String;
        /// The port that is mapped to the data port. 0: the same.
        data_port: u16 = 0;
        /// The port that is mapped to the control port. 0: the same.
        control_port: u16 = 0;
    }

    /// The routers to which the agent announces itself.
    pub struct AnnounceTable {
        /// The routers' data ports, as `http://host:port` or `https://host:port`. Empty: none.
        routers: Vec<String>;
        /// The file whose first line is the key that has the right `announce` at the routers.
        key_file: PathBuf;
        /// The PEM file of the CAs that sign the routers' certificates. Needed for `https`.
        ca: PathBuf;
        /// The time between two announcements, from 1,000 to 100,000. Each holds for three times as
        /// long.
        ///
        /// A router that restarts learns the agent within this time. 1,000 agents then announce
        /// themselves 200 times a second, which is little beside the fleet's turns.
        interval_ms: u64 = 5_000;
    }
}

/// The addresses of the agent's ports as routers see them. Routers read them in the description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised {
    /// The port for turns.
    pub data_port: u16,
    /// The host and port for turns. `None`: the host is the one under which routers find the agent.
    pub data_address: Option<String>,
    /// The URL of the control port. `None`: the one under which routers find the agent.
    pub control_url: Option<String>,
}

impl AdvertiseTable {
    /// Returns the addresses of the ports that listen at `data` and `control`.
    #[must_use]
    pub fn resolve(&self, data: SocketAddr, control: SocketAddr, has_tls: bool) -> Advertised {
        let is_set = *self != Self::default();
        Advertised {
            data_port: mapped(self.data_port, data),
            data_address: self.data_address(data),
            control_url: is_set.then(|| self.control_url(control, has_tls)),
        }
    }

    /// Returns the host and data port as routers see them, or `None` if routers know the host.
    fn data_address(&self, data: SocketAddr) -> Option<String> {
        (!self.host.is_empty())
            .then(|| format!("{}:{}", self.url_host(), mapped(self.data_port, data)))
    }

    /// Returns the URL of the control port as routers see it.
    #[must_use]
    pub fn control_url(&self, control: SocketAddr, has_tls: bool) -> String {
        let scheme = if has_tls { "https" } else { "http" };
        let port = mapped(self.control_port, control);
        match self.host.as_str() {
            "" => format!("{scheme}://{}", SocketAddr::new(control.ip(), port)),
            _ => format!("{scheme}://{}:{port}", self.url_host()),
        }
    }

    /// Returns the host as it stands in a URL: an IPv6 address in brackets.
    fn url_host(&self) -> String {
        let is_bare_ipv6 = self.host.contains(':') && !self.host.starts_with('[');
        if is_bare_ipv6 { format!("[{}]", self.host) } else { self.host.clone() }
    }

    fn check(&self, problems: &mut Vec<String>) {
        let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        let address = self.host.trim_start_matches('[').trim_end_matches(']');
        let is_host = address.parse::<IpAddr>().is_ok() || self.host.bytes().all(is_name_byte);
        if !is_host {
            problems.push(format!(
                "advertise.host: {:?} must be a host name or an IP address, without a port",
                self.host
            ));
        }
    }
}

fn mapped(port: u16, listener: SocketAddr) -> u16 {
    if port == 0 { listener.port() } else { port }
}

impl AnnounceTable {
    /// Returns the files by which the agent recognizes routers, or `None` without TLS.
    #[must_use]
    pub fn client_files(&self) -> Option<ClientFiles> {
        Some(ClientFiles { ca: path_if_set(&self.ca)?, identity: None, server_name: None })
    }

    /// Describes the key, as a header, or returns `None` if there are no routers.
    #[must_use]
    pub fn key_source(&self) -> Option<Source<HeaderValue>> {
        let path = path_if_set(&self.key_file).filter(|_| !self.routers.is_empty())?;
        let shown = path.display().to_string();
        let parse = move |contents: &[Vec<u8>]| {
            parse_key(&contents[0]).map_err(|why| format!("{shown} {why}"))
        };
        Some(Source::new("announce_key", vec![path], parse))
    }

    /// Reads the files once. Returns what is wrong with them.
    pub(super) fn file_problems(&self) -> Vec<String> {
        let key = self.key_source().and_then(|source| source.read().err());
        let ca = self.client_files().and_then(|files| files.check().err());
        key.into_iter().chain(ca).map(|error| format!("[announce]: {error}")).collect()
    }

    /// Returns how long an announcement holds, in ms. Two in a row may be lost.
    #[must_use]
    pub fn ttl_ms(&self) -> u64 {
        3 * self.interval_ms
    }
}

/// Makes a header of the key in a file: its first line that isn't a comment.
fn parse_key(content: &[u8]) -> Result<HeaderValue, &'static str> {
    let text = str::from_utf8(content).map_err(|_| "is not text")?;
    let mut lines = text.lines().map(str::trim);
    let key = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    let key = key.ok_or("has no key; write the key that routers know in its first line")?;
    let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
        .map_err(|_| "has a key with characters that no header carries")?;
    value.set_sensitive(true);
    Ok(value)
}

/// Adds the problems of both tables. `control_addr` is the setting of the control port.
pub(super) fn check(
    advertise: &AdvertiseTable,
    announce: &AnnounceTable,
    control_addr: SocketAddr,
    problems: &mut Vec<String>,
) {
    advertise.check(problems);
    if announce.routers.is_empty() {
        return;
    }
    let is_set = |path: &Path| path_if_set(path).is_some();
    for router in &announce.routers {
        let uri: Option<Uri> = router.parse().ok();
        let uri = uri.filter(|uri| uri.authority().is_some() && uri.path() == "/");
        match uri.as_ref().and_then(Uri::scheme_str) {
            Some("http") => {}
            Some("https") if is_set(&announce.ca) => {}
            Some("https") => problems.push(format!(
                "announce.routers: {router:?} needs announce.ca, the CA of its certificate"
            )),
            _ => problems
                .push(format!("announce.routers: {router:?} must be a URL like https://host:port")),
        }
    }
    if announce.routers.len() > ROUTERS_MAX {
        problems.push(format!("announce.routers must be at most {ROUTERS_MAX}"));
    }
    if !is_set(&announce.key_file) {
        problems.push(
            "announce.key_file is needed: routers take announcements only with a key".to_owned(),
        );
    }
    if advertise.host.is_empty() && control_addr.ip().is_unspecified() {
        problems.push(format!(
            "advertise.host is needed to announce an agent that listens on {}",
            control_addr.ip()
        ));
    }
    // Routers keep an announcement for 5 minutes at most.
    if !(1_000..=100_000).contains(&announce.interval_ms) {
        problems.push("announce.interval_ms must be 1000 to 100000".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(advertise: &AdvertiseTable, announce: &AnnounceTable, control: &str) -> usize {
        let mut problems = vec![];
        check(advertise, announce, control.parse().unwrap(), &mut problems);
        problems.len()
    }

    #[test]
    fn an_announcement_needs_a_key_a_ca_and_an_address() {
        let host = |host: &str| AdvertiseTable { host: host.to_owned(), ..Default::default() };
        let broken = AnnounceTable {
            routers: vec!["https://r:1".into(), "r:1".into(), "http://r:1/v1".into()],
            interval_ms: 1,
            ..AnnounceTable::default()
        };
        assert_eq!(problems(&host(""), &broken, "0.0.0.0:1"), 6);
        let table = AnnounceTable {
            routers: vec!["http://r:1".into()],
            key_file: "/key".into(),
            ..AnnounceTable::default()
        };
        assert_eq!(problems(&host(""), &table, "10.0.0.1:1"), 0);
        assert_eq!(problems(&host("gpu-1"), &table, "0.0.0.0:1"), 0);
        assert_eq!(problems(&host("fd00::1"), &table, "[::]:1"), 0);
        assert_eq!(problems(&host(""), &AnnounceTable::default(), "0.0.0.0:1"), 0);
        for wrong in ["gpu-1:8", "http://gpu-1", "user@gpu-1", "a b"] {
            assert_eq!(problems(&host(wrong), &table, "0.0.0.0:1"), 1, "{wrong}");
        }
        let many = AnnounceTable { routers: vec!["http://r:1".into(); 65], ..table };
        assert_eq!(problems(&host("gpu-1"), &many, "0.0.0.0:1"), 1);
    }

    #[test]
    fn a_key_is_the_first_line_and_never_shown() {
        let key = parse_key(b"# of the fleet\n\n sk-1 \nsk-2\n").unwrap();
        assert_eq!(key.to_str().unwrap(), "Bearer sk-1");
        assert!(!format!("{key:?}").contains("sk-1"));
        for broken in [&b""[..], b"\n# sk-1\n", b"\xff", b"a\x07b"] {
            assert!(parse_key(broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn the_advertised_address_wins() {
        let (data, control) =
            ("10.0.0.1:31000".parse().unwrap(), "10.0.0.1:31001".parse().unwrap());
        let mut table = AdvertiseTable::default();
        assert_eq!(table.control_url(control, false), "http://10.0.0.1:31001");
        assert_eq!(
            table.resolve(data, control, false),
            Advertised { data_port: 31000, data_address: None, control_url: None }
        );
        (table.data_port, table.control_port) = (7, 8);
        assert_eq!(table.control_url(control, true), "https://10.0.0.1:8");
        let advertised = table.resolve(data, control, false);
        assert_eq!((advertised.data_port, advertised.data_address), (7, None));
        assert_eq!(advertised.control_url.unwrap(), "http://10.0.0.1:8");
        table.host = "fd00::1".to_owned();
        assert_eq!(table.control_url(control, false), "http://[fd00::1]:8");
        assert_eq!(table.data_address(data).unwrap(), "[fd00::1]:7");
    }
}

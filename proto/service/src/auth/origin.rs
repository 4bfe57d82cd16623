//! Finds requests that a page of another origin has caused in the browser of an operator.
//!
//! A browser names a page's origin in `Origin`, and no page can change that header. An attacker can
//! have a name of its own resolve to this host (DNS rebinding): then its page has the same origin
//! as the port, but the request still names the attacker's host in `Host`. Programs that are no
//! browsers send what they like; keys stop those.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// By which a browser tells a port of its own host whose page sends a request. Scripts of other
/// programs send none.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The names by which containers of Docker and Podman call their host. Others under `internal` may
/// be somebody's inside a company.
const CONTAINER_HOSTS: [&str; 2] = ["host.docker.internal", "host.containers.internal"];

/// What the settings let reach a port, besides its own pages and the names of its host.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// Origins of pages; `*` stands for all.
    pub origins: Vec<String>,
    /// Names of hosts, without a port.
    pub hosts: Vec<String>,
}

/// Checks that no page but the port's own, or one that is allowed, has sent a request.
/// `needs_own_name`: only names that no attacker can choose may reach the port, because neither
/// keys nor a network protect it. The error says why the request isn't served.
pub fn check(
    headers: &HeaderMap,
    needs_own_name: bool,
    allowed: &Allowed,
) -> Result<(), &'static str> {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    if needs_own_name && host.is_some_and(|host| !is_own_name(host, &allowed.hosts)) {
        return Err("without keys, this port answers only to localhost and to an IP address");
    }
    let Some(origin) = headers.get(header::ORIGIN).map(HeaderValue::as_bytes) else {
        return Ok(());
    };
    let authority = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
    let is_own_page = authority.is_some() && authority == host;
    let mut origins = allowed.origins.iter();
    if is_own_page || origins.any(|allowed| allowed == "*" || allowed.as_bytes() == origin) {
        return Ok(());
    }
    Err("a page of another origin can't use this port")
}

/// Whether a browser asks a port of its own host and names no page: for a link or a picture, say.
#[must_use]
pub fn is_of_unknown_page(headers: &HeaderMap) -> bool {
    headers.contains_key(SEC_FETCH_SITE) && !headers.contains_key(header::ORIGIN)
}

/// For a port that is for other programs of its host alone. `hosts` are names by which they may
/// call it, besides those of the host. The error says why the request isn't served.
pub fn check_no_browser(headers: &HeaderMap, hosts: &[String]) -> Result<(), &'static str> {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    // No attacker can have a name without a dot, such as a host's own in its network.
    let is_foreign = |host: &[u8]| host.contains(&b'.') && !is_own_name(host, hosts);
    if host.is_some_and(is_foreign) {
        return Err("it names this host by a foreign name, that advertise.host doesn't have");
    }
    if headers.contains_key(header::ORIGIN) || headers.contains_key(SEC_FETCH_SITE) {
        return Err("it is a page in a browser");
    }
    Ok(())
}

/// Whether `host` is an IP address, a name of the host itself, or an allowed one.
fn is_own_name(host: &[u8], allowed: &[String]) -> bool {
    let host = str::from_utf8(host).unwrap_or_default();
    if host.parse::<SocketAddr>().is_ok() {
        // The usual case, which costs little.
        return true;
    }
    let Ok(authority) = host.parse::<http::uri::Authority>() else { return false };
    let name = authority.host();
    let address = name.trim_start_matches('[').trim_end_matches(']');
    address.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || CONTAINER_HOSTS.iter().any(|host| name.eq_ignore_ascii_case(host))
        || allowed.iter().any(|allowed| name.eq_ignore_ascii_case(allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_let_pass(host: &str, origin: Option<&'static str>, is_open: bool) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, HeaderValue::from_static(origin));
        }
        check(&headers, is_open, &Allowed::default()).is_ok()
    }

    #[test]
    fn an_open_port_answers_only_to_names_that_nobody_else_can_choose() {
        for host in [
            "127.0.0.1:9100",
            "localhost",
            "[::1]:9100",
            "LOCALHOST:1",
            "a.localhost",
            "host.docker.internal:8080",
        ] {
            assert!(is_let_pass(host, None, true), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9100",
            "localhost.evil.example",
            "evil.internal",
            "",
            "a@b@c",
        ] {
            assert!(!is_let_pass(host, None, true), "{host}");
        }
        assert!(is_let_pass("berth.example", None, false), "with keys, any name may be used");
    }

    #[test]
    fn only_the_ports_own_page_may_use_it() {
        for is_open in [true, false] {
            let pass = |host, origin| is_let_pass(host, Some(origin), is_open);
            assert!(pass("127.0.0.1:9100", "http://127.0.0.1:9100"));
            for origin in ["http://127.0.0.1:9101", "https://evil.example", "null", "http://", ""] {
                assert!(!pass("127.0.0.1:9100", origin), "{origin}");
            }
        }
        assert!(is_let_pass("berth.example", Some("https://berth.example"), false));
    }

    #[test]
    fn a_port_for_programs_serves_no_browser() {
        let check = |entries: &[(HeaderName, &'static str)]| {
            let entries = entries.iter().cloned();
            let headers = entries.map(|(name, value)| (name, HeaderValue::from_static(value)));
            check_no_browser(&HeaderMap::from_iter(headers), &["gpu-1.example".to_owned()]).is_ok()
        };
        assert!(check(&[]) && check(&[(header::HOST, "127.0.0.1:1")]));
        assert!(check(&[(header::HOST, "gpu-1:30100")]));
        assert!(check(&[(header::HOST, "GPU-1.example:30100")]));
        assert!(!check(&[(header::HOST, "evil.example:30100")]));
        assert!(!check(&[(header::HOST, "localhost"), (header::ORIGIN, "http://localhost")]));
        assert!(!check(&[(header::HOST, "localhost"), (SEC_FETCH_SITE, "same-origin")]));
    }

    #[test]
    fn the_settings_allow_pages_and_names() {
        let headers = |host: &'static str, origin: &'static str| {
            HeaderMap::from_iter([
                (header::HOST, HeaderValue::from_static(host)),
                (header::ORIGIN, HeaderValue::from_static(origin)),
            ])
        };
        let allowed = Allowed {
            origins: vec!["https://chat.example".to_owned()],
            hosts: vec!["llm.example".to_owned()],
        };
        let pass = |host, origin| check(&headers(host, origin), true, &allowed).is_ok();
        assert!(pass("LLM.example:443", "https://chat.example"));
        assert!(!pass("llm.example.evil", "https://chat.example"));
        assert!(!pass("llm.example", "https://chat.example.evil"));
        assert!(!pass("llm.example", "http://chat.example"));
        let all = Allowed { origins: vec!["*".to_owned()], ..Allowed::default() };
        assert!(check(&headers("127.0.0.1:1", "null"), true, &all).is_ok());
    }
}

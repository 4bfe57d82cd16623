//! Refuses requests that a page of another origin has caused in the browser of an operator.
//!
//! A browser names a page's origin in `Origin`, and no page can change that header. An attacker can
//! have a name of its own resolve to this host (DNS rebinding): then its page has the same origin
//! as the port, but the request still names the attacker's host in `Host`. Programs that are no
//! browsers send what they like; keys stop those.

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue, header};

use super::admin_only_refusal;
use crate::refusal::Refusal;

/// Checks that no page but the port's own has sent a request. `is_open`: whether the port needs no
/// key. Then only names that no attacker can choose may reach it.
///
/// # Errors
/// The refusal, if the request names another origin, or a host by a name that isn't local.
pub fn check(headers: &HeaderMap, is_open: bool) -> Result<(), Refusal> {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    if is_open && host.is_some_and(|host| !is_local_name(host)) {
        let message = "without keys, this port answers only to localhost and to an IP address";
        return Err(admin_only_refusal(message));
    }
    let Some(origin) = headers.get(header::ORIGIN).map(HeaderValue::as_bytes) else {
        return Ok(());
    };
    let authority = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
    if authority.is_some() && authority == host {
        return Ok(());
    }
    Err(admin_only_refusal("a page of another origin can't use this port"))
}

/// Whether the value of a `Host` header is an IP address, or a name of the host itself.
fn is_local_name(host: &[u8]) -> bool {
    let Ok(authority) = str::from_utf8(host).unwrap_or_default().parse::<http::uri::Authority>()
    else {
        return false;
    };
    let name = authority.host();
    let address = name.trim_start_matches('[').trim_end_matches(']');
    address.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
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
        check(&headers, is_open).is_ok()
    }

    #[test]
    fn an_open_port_answers_only_to_names_that_nobody_else_can_choose() {
        for host in ["127.0.0.1:9100", "localhost", "[::1]:9100", "LOCALHOST:1", "a.localhost"] {
            assert!(is_let_pass(host, None, true), "{host}");
        }
        for host in ["evil.example", "evil.example:9100", "localhost.evil.example", "", "a@b@c"] {
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
}

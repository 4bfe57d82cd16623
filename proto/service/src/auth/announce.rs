//! Says which agents a key may announce, and under which addresses. Pure.
//!
//! An agent that announces itself to a router gets prompts. So its key names the ids and addresses
//! that it may announce: `announce = { agents = ["gpu-*"], addresses = ["10.0.0.0/8:9090"] }`.
//!
//! - An id is a text in which `*` stands for any characters.
//! - An address is a network (`10.0.0.0/8`, `fd00::/8`), an IP address, or a host name with `*`;
//!   after a network of IPv4, an address or a name, `:port` allows that port alone. A name never
//!   allows an IP address: `*` is any name, and `0.0.0.0/0` any of IPv4.

use std::net::IpAddr;

use serde::Deserialize;

/// The right to announce agents. The default allows none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Form")]
pub struct AnnounceRight {
    agents: Vec<String>,
    addresses: Vec<AddressRule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    agents: Vec<String>,
    addresses: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct AddressRule {
    hosts: Hosts,
    /// The only port; `None`: every port.
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Hosts {
    Network { ip: IpAddr, prefix_bits: u32 },
    Names(String),
}

impl TryFrom<Form> for AnnounceRight {
    type Error = String;

    fn try_from(form: Form) -> Result<Self, String> {
        if form.agents.is_empty() || form.addresses.is_empty() {
            return Err("announce needs agents and addresses".to_owned());
        }
        let rule = |text: &String| {
            let rule = AddressRule::parse(text);
            rule.ok_or("announce.addresses: write a network, an IP address or a name, then :port")
        };
        let addresses = form.addresses.iter().map(rule).collect::<Result<_, _>>()?;
        Ok(Self { agents: form.agents, addresses })
    }
}

impl AnnounceRight {
    #[must_use]
    pub fn is_some(&self) -> bool {
        !self.agents.is_empty()
    }

    /// An IPv6 host may be in brackets.
    #[must_use]
    pub fn allows(&self, agent_id: &str, host: &str, port: u16) -> bool {
        self.agents.iter().any(|pattern| matches_pattern(pattern, agent_id))
            && self.addresses.iter().any(|rule| rule.allows(host, port))
    }
}

impl AddressRule {
    fn parse(text: &str) -> Option<Self> {
        if let Some((ip, rest)) = text.split_once('/') {
            let (bits, port) = match rest.split_once(':') {
                Some((bits, port)) => (bits, Some(port.parse().ok()?)),
                None => (rest, None),
            };
            let (ip, prefix_bits): (IpAddr, u32) = (ip.parse().ok()?, bits.parse().ok()?);
            let bits_max = if ip.is_ipv4() { 32 } else { 128 };
            let hosts = Hosts::Network { ip, prefix_bits };
            return (prefix_bits <= bits_max).then_some(Self { hosts, port });
        }
        if let Some(ip) = parse_ip(text) {
            return Some(Self { hosts: one_address(ip), port: None });
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, Some(port.parse().ok()?)),
            None => (text, None),
        };
        let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"*.-_".contains(&byte);
        let hosts = match parse_ip(host) {
            Some(ip) => one_address(ip),
            None if !host.is_empty() && host.bytes().all(is_name_byte) => {
                Hosts::Names(host.to_ascii_lowercase())
            }
            None => return None,
        };
        Some(Self { hosts, port })
    }

    fn allows(&self, host: &str, port: u16) -> bool {
        let is_host = match (&self.hosts, parse_ip(host)) {
            (Hosts::Network { ip, prefix_bits }, Some(host)) => {
                leading_bits(*ip, *prefix_bits) == leading_bits(host, *prefix_bits)
            }
            (Hosts::Names(pattern), None) => matches_pattern(pattern, &host.to_ascii_lowercase()),
            _ => false,
        };
        is_host && self.port.is_none_or(|only| only == port)
    }
}

fn one_address(ip: IpAddr) -> Hosts {
    Hosts::Network { ip, prefix_bits: if ip.is_ipv4() { 32 } else { 128 } }
}

fn parse_ip(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

fn leading_bits(ip: IpAddr, count: u32) -> (bool, u128) {
    match ip {
        IpAddr::V4(ip) => {
            (true, u128::from(ip.to_bits()).checked_shr(32_u32.saturating_sub(count)).unwrap_or(0))
        }
        IpAddr::V6(ip) => {
            (false, ip.to_bits().checked_shr(128_u32.saturating_sub(count)).unwrap_or(0))
        }
    }
}

fn matches_pattern(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(head) else { return false };
    // The shortest match of each middle part leaves most for the parts after it.
    let (middle, tail) = rest.rsplit_once('*').unwrap_or(("", rest));
    let mut left = text;
    for part in middle.split('*') {
        let Some(at) = left.find(part) else { return false };
        left = &left[at + part.len()..];
    }
    left.len() >= tail.len() && left.ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn right(agents: &[&str], addresses: &[&str]) -> Result<AnnounceRight, String> {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Form { agents: owned(agents), addresses: owned(addresses) }.try_into()
    }

    #[test]
    fn only_named_ids_and_addresses_are_allowed() {
        let right =
            right(&["gpu-*", "x"], &["10.1.0.0/16:9", "127.0.0.1", "*.a.svc:7", "fd00::/8"]);
        let right = right.unwrap();
        for (id, host, port) in [
            ("gpu-1", "10.1.255.3", 9),
            ("x", "127.0.0.1", 80),
            ("gpu-", "pod.A.svc", 7),
            ("x", "[fd12::1]", 5),
        ] {
            assert!(right.allows(id, host, port), "{id} {host} {port}");
        }
        for (id, host, port) in [
            ("cpu-1", "10.1.0.1", 9),
            ("xx", "10.1.0.1", 9),
            ("gpu-1", "10.1.0.1", 8),
            ("gpu-1", "10.2.0.1", 9),
            ("gpu-1", "127.0.0.2", 9),
            ("gpu-1", "10.1.0.1.evil", 9),
            ("gpu-1", "a.svc.evil", 7),
            ("gpu-1", "fe00::1", 5),
        ] {
            assert!(!right.allows(id, host, port), "{id} {host} {port}");
        }
        assert!(!AnnounceRight::default().allows("x", "127.0.0.1", 80));
    }

    #[test]
    fn a_pattern_for_names_allows_no_address_and_a_network_no_name() {
        assert!(!right(&["*"], &["*"]).unwrap().allows("x", "10.0.0.1", 1));
        assert!(!right(&["*"], &["0.0.0.0/0"]).unwrap().allows("x", "a", 1));
        assert!(!right(&["*"], &["0.0.0.0/0"]).unwrap().allows("x", "fd00::1", 1));
        assert!(right(&["*"], &["0.0.0.0/0"]).unwrap().allows("x", "8.8.8.8", 1));
    }

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, text) in [("a*b*c", "abbc"), ("*", ""), ("a*", "a"), ("a*a", "aa")] {
            assert!(matches_pattern(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("a*b*c", "acb"), ("a*a", "a"), ("a", "ab"), ("*b", "ba")] {
            assert!(!matches_pattern(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn a_right_of_another_form_is_refused() {
        for bad in ["", "10.0.0.0/33", "10.0.0.0/8:x", "a b", "http://a", "a:99999"] {
            assert!(right(&["x"], &[bad]).is_err(), "{bad:?} was taken");
        }
        assert!(right(&[], &["*"]).is_err() && right(&["*"], &[]).is_err());
    }
}
